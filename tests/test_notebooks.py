"""The notebooks have the outputs of their cells.

`make test` runs the cells with fewer steps and compares what they print but for its numbers,
`make test-all` runs them as they are: numbers must be near, as other processors sum in another
order. Figures are drawn from numbers that are printed, so it is enough that they are there.
"""

import contextlib
import copy
import io
import re

import matplotlib as mpl
import nbformat
import pytest

from notebooks.execute import FOLDER, NAMES, conditions, execute
from tests.shared import parametrize, proves

NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")
NEAR = 0.02
"""Of losses, shares in percent and exponents of rates, or relative: less than what another seed
changes. CPUs also differ in the last digit that is printed of a fraction."""

#: Notebook -> what its cells have, and what `make test` runs in its place.
FEWER = {
    "nanogpt_fp8": {"64, 16, 150": "64, 16, 10", "[2**-10, 2**-9, 2**-8]": "[2**-9]"},
    "umup_transfer": {
        "STEPS = 60": "STEPS = 2",
        "range(-10, -4)": "range(-8, -7)",
        "range(-2, 2)": "range(-1, 0)",
    },
}


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


def words(text):
    """What a text says but for its numbers."""
    return NUMBER.sub("#", text).split()


def differ(cell, other):
    """Whether the outputs of two runs of a cell do."""
    texts = [printed(cell), printed(other)]
    if words(texts[0]) != words(texts[1]):
        return True
    return not all(map(_near, *map(NUMBER.findall, texts)))


def _near(number, other):
    digits = len(number.partition(".")[2])
    limit = max(NEAR, 1.5 * 10**-digits if digits else 0.0)
    expected, value = (float(n.replace(",", "")) for n in (number, other))
    return value == pytest.approx(expected, rel=NEAR, abs=limit)


@parametrize("name", NAMES)
def test_outputs_are_kept_with_what_made_them(name):
    notebook = read(name)
    made = notebook.metadata["conditions"]
    assert made["cells"] == conditions(notebook)["cells"], "run `make notebooks`"
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    assert not [
        o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"
    ]


@proves("unit-scaling", "nanoGPT, plain, in FP8 and unit-scaled in FP8")
@pytest.mark.usefixtures("one_thread")
@parametrize("name", NAMES)
def test_cells_run_and_print_what_they_do_there(name, monkeypatch, tmp_path):
    """In this process; a preflight, which trains for minutes, is left out."""
    monkeypatch.chdir(FOLDER)
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    namespace = {}
    changes = dict(FEWER[name])
    with mpl.rc_context({"backend": "agg"}):
        for cell in code(read(name)):
            if "fp8.preflight(" in cell.source:
                continue
            source = cell.source.removeprefix("%matplotlib inline\n")
            for old in [old for old in changes if old in source]:
                source = source.replace(old, changes.pop(old))
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(source, f"{name}.ipynb", "exec"), namespace)
            shown = re.sub(r"<IPython\S+ object>", "", out.getvalue())
            assert words(shown) == words(printed(cell))
    assert not changes


@pytest.mark.exhaustive
@parametrize("name", NAMES)
def test_outputs_are_those_of_the_code(name):
    notebook = read(name)
    here, there = conditions(notebook), notebook.metadata["conditions"]
    if here["text"] != there["text"]:
        pytest.skip(
            f"trained on the sources of Python {there['python']}, here {here['python']}"
        )
    again = copy.deepcopy(notebook)
    execute(again)
    pairs = zip(code(notebook), code(again), strict=True)
    assert not [a.id for a, b in pairs if differ(a, b)], "run `make notebooks`"
