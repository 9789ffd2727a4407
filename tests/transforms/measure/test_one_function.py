"""All processes of a job compute one function, whatever the batches that they plan with."""

from __future__ import annotations

from pathlib import Path

from tests.launch import run_ranks


def test_processes_with_other_batches_compute_one_function(tmp_path: Path) -> None:
    run_ranks(Path(__file__).with_name("one_function_worker.py"), 2, tmp_path / "store")
