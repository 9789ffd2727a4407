"""The notebook runs from its first cell to its last, at reduced size."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "nanogpt_fp8.ipynb"
REDUCED = """
PRESET = "small"
CHANGES = dict(layers=1, heads=2, width=16, context=16, batch_size=4, iters=20, warmup=2,
               eval_interval=10, eval_batches=2)
DATA = {data!r}
"""


@pytest.mark.proves("unit-scaling", "nanoGPT, plain, in FP8 and unit-scaled in FP8", how="own")
def test_notebook(text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    parameters = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    assert len(parameters) == 1
    parameters[0].source = REDUCED.format(data=str(text_file))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    NotebookClient(notebook, timeout=120, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    text = "".join(output.get("text", "") for output in outputs)
    assert all(name in text for name in ("fp32 ", "fp8 ", "unit_scaled_fp8 "))


def test_notebook_is_stored_without_outputs() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
