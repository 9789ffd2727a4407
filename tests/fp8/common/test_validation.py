"""Argument checks: what is accepted, and the message for what is not."""

import torch

from fp8.common import validation as check
from tests.shared import parametrize, refuses

ACCEPTED = {
    "check_name": ("rounding", "up", ("up", "down")),
    "check_number": ("lr", torch.ones(1)),
    "check_whole": ("steps", 0, 0),
    "check_flag": ("compile", False),
    "check_between": ("bits", 31, 1, 31),
    "check_keys": ("Cast", {"format": 1, "rule": 2}, ("format", "rule"), ("format",)),
}
REFUSED = [
    (
        "check_name",
        ("rounding", "Upp", ("up", "down")),
        ValueError,
        r"of 'up', 'down'; did you mean 'up'\?",
    ),
    (
        "check_name",
        ("rounding", [], ("up",), "; see x"),
        ValueError,
        r"unknown rounding \[\]; .*'up'; see x$",
    ),
    (
        "check_choice",
        ("recipe", 3, ("row",)),
        TypeError,
        "recipe is a int; give a name",
    ),
    ("check_number", ("lr", True), TypeError, "lr must be a number, got True"),
    ("check_number", ("lr", torch.ones(2)), TypeError, "lr must be a number"),
    (
        "check_whole",
        ("steps", True),
        TypeError,
        "steps must be a whole number from 1, got True",
    ),
    (
        "check_whole",
        ("steps", 1.0),
        TypeError,
        r"steps must be a whole number from 1, got 1\.0",
    ),
    (
        "check_whole",
        ("steps", 0),
        ValueError,
        "steps must be a whole number from 1, got 0",
    ),
    ("check_flag", ("compile", 1), TypeError, "compile must be True or False, got 1"),
    ("check_between", ("bits", 32, 1, 31), ValueError, "bits must be 1 to 31, got 32"),
    (
        "check_keys",
        ("Cast", {"rules": 1}, ("rule",)),
        ValueError,
        "unknown key of a Cast 'rules'",
    ),
    (
        "check_keys",
        ("Cast", {}, ("a",), ("a",)),
        ValueError,
        "needs the keys 'a'; got none, without 'a'",
    ),
    (
        "check_keys",
        ("Cast", [], ()),
        TypeError,
        "a Cast is read from a dict, not from a list",
    ),
]


@parametrize("name", ACCEPTED)
def test_what_is_accepted(name):
    assert getattr(check, name)(*ACCEPTED[name]) is None


@parametrize("name, given, error, message", REFUSED)
def test_what_is_refused(name, given, error, message):
    with refuses(message, error):
        getattr(check, name)(*given)
