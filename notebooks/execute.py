"""`python -m notebooks.execute [NAME ...]`: runs the notebooks and keeps their outputs in them.

What the outputs depend on beside the cells, the versions and the default text, is written into the
metadata, so that a test can run the cells again and compare.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from .nanogpt.data import load_corpus

FOLDER = Path(__file__).parent
NAMES = ("nanogpt_fp8", "umup_transfer")


def conditions(notebook: Any) -> dict[str, str]:
    """What the outputs are made of: the cells, the text, Python and torch."""
    code = "\n\n".join(
        cell.source for cell in notebook.cells if cell.cell_type == "code"
    )
    return {
        "cells": hashlib.sha256(code.encode()).hexdigest(),
        "text": load_corpus(None, context=1).sha256,
        "python": platform.python_version(),
        "torch": torch.__version__.partition("+")[0],
    }


def execute(notebook: Any) -> None:
    """Runs the cells, on one thread, in the place of their outputs. Raises what a cell raises."""
    from nbclient import NotebookClient

    before = dict(os.environ)
    paths = [str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    try:
        resources = {"metadata": {"path": str(FOLDER)}}
        options = {
            "record_timing": False,
            "coalesce_streams": True,
            "resources": resources,
        }
        NotebookClient(
            notebook, timeout=600, kernel_name="python3", **options
        ).execute()
    finally:
        os.environ.clear()
        os.environ |= before


def main(names: list[str]) -> None:
    """Runs each and writes it."""
    import nbformat

    for name in names or NAMES:
        path = FOLDER / f"{name}.ipynb"
        notebook = nbformat.read(path, as_version=4)
        execute(notebook)
        notebook.metadata["language_info"] = {"name": "python"}
        notebook.metadata["conditions"] = conditions(notebook)
        nbformat.write(notebook, path)
        print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
