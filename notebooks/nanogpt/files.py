"""Files of a run that are whole or absent: written under another name, then renamed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch


class BadInputError(ValueError):
    """What the user is to change, in one line."""


def write(path: Path, content: Callable[[IO[bytes]], object]) -> None:
    """Writes ``path`` and its folder. A kill or a full disk leaves the old file or the new one.

    content: writes into the temporary file, ``NAME.tmp``. One process at a time writes a path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "wb") as file:
        content(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def save_checkpoint(state: dict[str, Any], path: Path) -> None:
    """`torch.save` of what `torch.load` loads with ``weights_only=True``."""
    write(path, lambda file: torch.save(state, file))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state that was saved. Raises BadInputError, with the path, if the file is damaged."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # zipfile, pickle and torch raise different errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInputError(f"{path}: damaged, or no checkpoint: {reason}") from error
