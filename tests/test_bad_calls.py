"""Arguments of a wrong type are refused where they come in: the error is ours, and names them."""

import traceback
from pathlib import Path
from typing import get_type_hints

import torch
from torch import nn

import fp8
import unit_scaling as uu
import unit_scaling.functional as U
from fp8.common.validation import check_name
from fp8.recipes.recipe import get_recipe
from tests.shared import parametrize, refuses
from tests.unit_scaling.ops.test_ops import op_kwargs
from unit_scaling.formats import FPFormat
from unit_scaling.parameter import set_depth, tag
from unit_scaling.rules.table import OPS
from unit_scaling.transforms import simulate_format, simulate_fp8, unit_scale

OURS = tuple(str(Path(__file__).parents[1] / name) for name in ("fp8", "unit_scaling"))


def model():
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))


def parameters():
    return list(uu.Linear(4, 4).parameters())


X = torch.ones(4, 8)

AdamW = fp8.optim.AdamW

#: A call, what its error says.
CALLS = (
    (lambda: fp8.scaled([1.0], "e4m3"), "x must be a Tensor, got list"),
    (lambda: fp8.scaled(X, 5), "format is a int"),
    (lambda: FPFormat(4.5, 3), "exponent_bits must be 1 to 8, got 4.5"),
    (lambda: FPFormat(4, 3, srbits="a"), "srbits .* must be 0 to 20, got 'a'"),
    (lambda: AdamW(parameters(), lr="a"), "lr must be a number, got 'a'"),
    (
        lambda: AdamW(parameters(), betas=("a", 0.9)),
        r"betas\[0\] must be a number, got 'a'",
    ),
    (
        lambda: AdamW(parameters(), stochastic_weights="yes"),
        "stochastic_weights must be True or False, got 'yes'",
    ),
    (
        lambda: uu.optim.scaled_parameters(parameters(), "adam", lr="a"),
        "lr must be a number",
    ),
    (
        lambda: uu.optim.scaled_parameters(
            nn.Sequential(uu.Linear(4, 4)), "adam", lr=1.0
        ),
        "params must be parameters or groups of them, got a Linear",
    ),
    (lambda: unit_scale(model(), replace=[1]), r"replace: a dict .*\[1\]"),
    (lambda: U.rms_norm(X, 8), "normalized_shape must be .*, got int 8"),
    (lambda: fp8.reduce_amax(5), "reduce_amax needs an nn.Module, got int"),
    (
        lambda: uu.batch_multiplier("a").__enter__(),
        "n must be a whole number from 1, got 'a'",
    ),
    (lambda: uu.verify(model(), X, loss=5), "loss must be a function .*, got 5"),
    (lambda: uu.verify(model(), X, seed="a"), "seed must be a whole number"),
    (lambda: tag(5, "weight"), "a parameter must be a Tensor, got int"),
    (lambda: tag(parameters()[0], "weight", True), "must be a whole number from 1"),
    (lambda: set_depth(5, 2), "set_depth needs an nn.Module, got int"),
    (
        lambda: uu.transformer_residual_scaling_rule("a"),
        "residual_mult must be a number, got 'a'",
    ),
    (lambda: simulate_fp8(5), "needs an nn.Module, got int"),
    (
        lambda: simulate_format(model(), 5, "e5m2"),
        "fwd_format is an FPFormat, an fp8.Format or the name of one, got int",
    ),
    (lambda: simulate_format(model(), "e4m3", "e5m3"), "'e5m3'.*did you mean 'e5m2'"),
    (
        lambda: simulate_format(model(), FPFormat(4, 3, srbits=4), "e5m2"),
        "fwd_format has srbits=4; casts of products draw all random bits: use srbits=0",
    ),
    (
        lambda: U.linear(X, X, 5),
        r"^U.linear: bias must be torch.Tensor \| None, got int 5$",
    ),
    (lambda: U.cat(5), r"tensors must be .*Sequence.*, got int 5"),
    (lambda: U.residual_split(5), "^U.residual_split: input must be Tensor"),
    (lambda: fp8.strict("a"), "enabled must be True or False, got 'a'"),
)


@parametrize("call, message", CALLS, ids=[message for _, message in CALLS])
def test_a_bad_call_is_refused_by_name(call, message):
    with refuses(message, (TypeError, ValueError)) as caught:
        call()
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert last.filename.startswith(OURS)
    assert last.line.startswith("raise ")


@parametrize("name", OPS)
def test_every_tensor_of_an_op_is_refused_by_name_if_it_is_none(name):
    kwargs = op_kwargs(OPS[name], torch.float32)
    hints = get_type_hints(OPS[name].fn)
    tensors = [key for key in kwargs if hints.get(key) is torch.Tensor]
    assert tensors or name in (
        "add",
        "sub",
        "mul",
        "cat",
        "stack",
    )  # numbers, lists of tensors
    for key in tensors:
        error = f"^U.{name}: {key} must be Tensor, got str 'a'$"
        with refuses(error, TypeError) as caught:
            OPS[name].fn(**{**kwargs, key: "a"})
        assert caught.value.__suppress_context__  # torch's own is not shown


def test_an_error_that_is_not_of_a_type_stays():
    with refuses("input of shape"):
        U.linear(X, torch.ones(3, 5))
    with refuses("missing 1 required positional argument: 'weight'", TypeError):
        U.linear(X)


def test_an_unknown_name_comes_with_the_nearest():
    for use, near in (
        (lambda: get_recipe("MXFP8"), "mxfp8"),
        (lambda: get_recipe("tens"), "tensor"),
        (lambda: get_recipe("tensr"), "tensor"),
        (lambda: check_name("level", "o2", fp8.LEVELS), "O2"),
    ):
        with refuses(f"did you mean '{near}'"):
            use()
    with refuses("choose one of") as caught:
        get_recipe("qqq")
    assert "did you mean" not in str(caught.value)
