"""Markdown of tables and of docstrings.

A docstring is plain text: it has doctests without a fence, powers as ``2**-9``, products of vectors
as ``<x, y>``. Markdown reads these as quotations, bold type and tags of HTML.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_CODE = re.compile(r"(``.+?``|`[^`]+`)", re.DOTALL)
_POWER = re.compile(r"(?<=[\w)\]])\*\*(?=[\w(-])")
_TAG = re.compile(r"<(?=[A-Za-z/])")
_DOCTEST = re.compile(r"^([ ]*)>>> .*\n?(?:\1.*\S.*\n?)*", re.MULTILINE)


def table(headings: str, rows: Iterable[list[str]]) -> str:
    """A Markdown table. headings: with | between them."""
    columns = [heading.strip() for heading in headings.split("|")]
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def as_markdown(docstring: str) -> str:
    """The docstring as Markdown that shows it as it is written."""
    parts, end = [], 0
    for doctest in _DOCTEST.finditer(docstring):
        indent, text = doctest[1], doctest[0].rstrip("\n")
        parts += [_escaped(docstring[end : doctest.start()])]
        parts += [f"{indent}```pycon\n{text}\n{indent}```\n"]
        end = doctest.end()
    return "".join([*parts, _escaped(docstring[end:])])


def _escaped(text: str) -> str:
    pieces = _CODE.split(text)
    for i in range(0, len(pieces), 2):  # the others are code
        pieces[i] = _TAG.sub("&lt;", _POWER.sub(r"\\*\\*", pieces[i]))
    return "".join(pieces)
