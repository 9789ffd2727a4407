"""Checkpoint files that are whole or absent, and known to be whole before anything is read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

__all__ = ["CheckpointError", "load_checkpoint", "save_checkpoint", "write_atomically"]

MARK = b"sha256:"
"""What the last bytes of a file begin with; the digest of all before them follows, in hex."""

_TAIL = len(MARK) + 2 * hashlib.sha256().digest_size
_CHUNK = 1 << 20


class CheckpointError(ValueError):
    """A checkpoint that cannot be continued from. The message begins with the file's name."""


def write_atomically(path: str | os.PathLike[str], write: Callable[[IO[bytes]], None]) -> None:
    """Calls ``write`` on a temporary file beside ``path``, then renames it into place.

    The file reaches the disk before the rename and the rename before the return, so that a kill
    or a power cut leaves the old file or the new one, never a part. ``write`` may read back what it
    has written. A write that raises leaves the old file, and no temporary one.
    """
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # a directory can be opened, and so synced, on POSIX only
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def save_checkpoint(state: Any, path: str | os.PathLike[str]) -> None:
    """`torch.save` into a file that is whole or absent, with its SHA-256 at the end.

    state: what ``torch.load(weights_only=True)`` takes: tensors, numbers, strings, None, and lists,
    tuples and dicts of these. `torch.load` reads the file too, and ignores the digest.
    """

    def write(file: IO[bytes]) -> None:
        torch.save(state, file)
        file.seek(0, os.SEEK_END)
        digest = _digest(file, file.tell())
        file.write(MARK + digest)

    write_atomically(path, write)


def load_checkpoint(
    path: str | os.PathLike[str], map_location: str | torch.device = "cpu"
) -> dict[str, Any]:
    """The dict that `save_checkpoint` wrote, its tensors on ``map_location``.

    Raises CheckpointError, which names the file, if a bit of it has changed, if it is cut short or
    is not such a file, and if it holds no dict; FileNotFoundError if it is not there.
    """
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END) - _TAIL
        file.seek(max(size, 0))
        tail = file.read()
        if size < 0 or not tail.startswith(MARK):
            raise CheckpointError(f"{path}: cut short, or no checkpoint: it does not end in a hash")
        if MARK + _digest(file, size) != tail:
            raise CheckpointError(f"{path}: damaged: its content does not have the hash it ends in")
        file.seek(0)
        try:
            state = torch.load(file, map_location=map_location, weights_only=True)
        except Exception as error:  # zipfile, pickle and torch each have their own
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise CheckpointError(f"{path}: cannot be loaded: {reason}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, not a dict")
    return state


def _digest(file: IO[bytes], size: int) -> bytes:
    """The SHA-256, in hex, of the first ``size`` bytes; the file is left behind them."""
    file.seek(0)
    found = hashlib.sha256()
    while size > 0:
        chunk = file.read(min(size, _CHUNK))
        if not chunk:
            break
        found.update(chunk)
        size -= len(chunk)
    return found.hexdigest().encode()
