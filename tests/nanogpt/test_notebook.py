"""The notebooks have the outputs of their cells: they are run again, and compared.

Texts must be equal and numbers near: other processors sum in another order. Figures are drawn from
numbers that are printed, so it is enough that they are there.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from notebooks.execute import NAMES, conditions, execute

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")
NEAR = 0.02
"""Of losses, shares in percent and exponents of rates, or relative: less than what another seed
changes. CPUs also differ in the last digit that is printed of a fraction."""


def read(name: str) -> Any:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def differences(cells: list[Any], others: list[Any], part: bool = False) -> list[str]:
    """The ids of the cells whose outputs differ. part: the others may lack lines of the first."""
    code = [[c for c in each if c.cell_type == "code"] for each in (cells, others)]
    assert [c.id for c in code[0]] == [c.id for c in code[1]]
    return [a.id for a, b in zip(*code, strict=True) if not _alike(a, b, part)]


def _label(line: str) -> str:
    """A line without the number that it ends with."""
    return line.rstrip("0123456789.%")


def _alike(cell: Any, other: Any, part: bool) -> bool:
    kinds, other_kinds = ([sorted(o.get("data", [])) for o in c.outputs] for c in (cell, other))
    texts = ["".join(o.get("text", "") for o in c.outputs) for c in (cell, other)]
    if "sampled" in cell.metadata.get("tags", []):
        return kinds == other_kinds and all(texts)
    if part and texts[1].strip():
        labels = {_label(line) for line in texts[1].splitlines()}
        texts[0] = "\n".join(line for line in texts[0].splitlines() if _label(line) in labels)
    words = [NUMBER.sub("#", text).split() for text in texts]
    same = kinds == other_kinds and words[0] == words[1]
    return same and all(map(_near, *map(NUMBER.findall, texts)))


def _near(number: str, other: str) -> bool:
    digits = len(number.partition(".")[2])
    limit = max(NEAR, 1.5 * 10**-digits if digits else 0.0)
    expected, value = (float(n.replace(",", "")) for n in (number, other))
    return value == pytest.approx(expected, rel=NEAR, abs=limit)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_kept_with_what_made_them(name: str) -> None:
    notebook = read(name)
    made = notebook.metadata["conditions"]
    assert made["cells"] == conditions(notebook)["cells"], "run `make notebooks`"
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]


def run_again(name: str, last_model_alone: bool = False) -> list[str]:
    """The ids of the cells whose outputs are others when they are run; last_model_alone: where only
    the last of the models is trained, which is unit-scaled and in FP8, and no preflight is run."""
    notebook = read(name)
    here, there = conditions(notebook), notebook.metadata["conditions"]
    if here["text"] != there["text"]:
        pytest.skip(f"trained on the sources of Python {there['python']}, here {here['python']}")
    again = copy.deepcopy(notebook)
    if last_model_alone:
        every = "in models.items():"
        (cell,) = [c for c in again.cells if every in c.source and "train(" in c.source]
        cell.source = cell.source.replace(every, "in list(models.items())[-1:]:")
        for each in (notebook, again):
            each.cells = [c for c in each.cells if "fp8.preflight(" not in c.source]
    execute(again)
    return differences(notebook.cells, again.cells, part=last_model_alone)


@pytest.mark.proves("unit-scaling", "nanoGPT, plain, in FP8 and unit-scaled in FP8", how="own")
def test_outputs_are_those_of_the_code() -> None:
    assert not run_again(NAMES[0], last_model_alone=True), "run `make notebooks`"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_all_outputs_are_those_of_the_code(name: str) -> None:
    assert not run_again(name), "run `make notebooks`"


def test_what_differs_is_found() -> None:
    def cell(text: str) -> Any:
        output = nbformat.v4.new_output("stream", text=text)
        return nbformat.v4.new_code_cell("...", id="a", outputs=[output])

    for part, left_out in ((False, ""), (True, "FP8 2.510\n")):
        kept = [cell(f"FP32 2.429\n{left_out}")]
        assert not differences(kept, [cell("FP32 2.431\n")], part)
        for other in ("FP32 2.5\n", "FP32 2\n", "FP16 2.429\n", "\n"):
            assert differences(kept, [cell(other)], part) == ["a"]
