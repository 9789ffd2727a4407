"""Files that are whole or absent, whatever moment the process is killed at."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch


class CheckpointError(ValueError):
    """A checkpoint that cannot be continued from."""


def write_atomically(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Calls `write` on a temporary file beside `path`, then renames it into place.

    The file reaches the disk before the rename and the rename before the return, so that a kill
    or a power cut leaves the old file or the new one, never a part.
    """
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    if os.name == "posix":  # a directory can be opened, and so synced, on POSIX only
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Standard JSON: raises ValueError for NaN and infinity, so turn those into None first."""
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """`state` may hold tensors, numbers, strings, lists and dicts: what `weights_only` loads."""
    write_atomically(path, lambda file: torch.save(state, file))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """What save_checkpoint wrote, on the CPU. Raises CheckpointError if it is not whole."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zipfile, pickle and torch each have their own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"corrupt checkpoint {path}: {reason}") from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"corrupt checkpoint {path}: holds a {type(state).__name__}, not a dict"
        )
    return state
