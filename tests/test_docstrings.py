"""Docstrings as Markdown: pages show them as they are written."""

from __future__ import annotations

import pytest

from docs.docstrings import as_markdown


@pytest.mark.parametrize(
    ("docstring", "markdown"),
    [
        ("2**-9, and 2**-6 there", r"2\*\*-9, and 2\*\*-6 there"),
        ("(1 + m)**2 * 2**(e - b)", r"(1 + m)\*\*2 * 2\*\*(e - b)"),
        ("`2**-4 * x` and ``a<b``", "`2**-4 * x` and ``a<b``"),
        ("<x, y> / <x, x>; 1 < 2", "&lt;x, y> / &lt;x, x>; 1 < 2"),
        ("**named: an option. A *sum*.", "**named: an option. A *sum*."),
    ],
)
def test_signs_stay_signs(docstring, markdown):
    assert as_markdown(docstring) == markdown


def test_doctests_are_code():
    docstring = "About 2**3.\n\n>>> f(\n...     2**3)\n<g>\n\nMore.\n\n    >>> 1\n    1"
    assert as_markdown(docstring) == (
        "About 2\\*\\*3.\n\n```pycon\n>>> f(\n...     2**3)\n<g>\n```\n\nMore.\n\n"
        "    ```pycon\n    >>> 1\n    1\n    ```\n"
    )
