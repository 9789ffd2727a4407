"""Checkpoint files that are complete or absent, and verified before they are read."""

from __future__ import annotations

import hashlib
import io
import os
import re
import secrets
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch

try:
    import fcntl
except ImportError:  # Windows, which cannot delete or rename an open file
    fcntl = None  # type: ignore[assignment]

__all__ = ["CheckpointError", "load_checkpoint", "save_checkpoint", "write_atomically"]

MARK = b"sha256:"
"""Prefix of the last bytes of a file; the hex digest of all preceding bytes follows."""

_TAIL = len(MARK) + 2 * hashlib.sha256().digest_size
_CHUNK = 1 << 20


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. The message starts with the file name."""


def write_atomically(path: str | os.PathLike[str], write: Callable[[IO[bytes]], object]) -> None:
    """Writes a file through a temporary file next to ``path`` that is renamed into place.

    The file is synced to disk before the rename, and the rename before the function returns. A
    kill, a full disk or a power failure therefore leaves the old file or the new one, never a part.

    Each call has its own temporary file, ``NAME.<16 hex digits>.tmp``, with the permissions of the
    file that it replaces: any number of threads and processes may write the same path, and the last
    rename wins. That of a killed writer is removed by the next write to the path; on Windows and on
    file systems without locks (flock), which identify living writers, it stays and may be deleted.

    Args:
        path: the file to write.
        write: called with the temporary file; may also read back what it has written.

    Raises:
        OSError: if the file cannot be written. Errors of ``write`` propagate.
    """
    path = Path(path)
    _remove_abandoned(path)
    file, temporary = _create_beside(path)
    try:
        with file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            if fcntl is None:
                file.close()
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # only POSIX can open, and so sync, a directory
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _create_beside(path: Path) -> tuple[IO[bytes], Path]:
    """A new file in the folder of ``path``, locked until it is closed, and its name."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        mode = None

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, 0o666 if mode is None else mode)

    while True:
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
        file = open(temporary, "x+b", opener=opener)  # noqa: SIM115 - the caller closes it
        try:
            # Before it is locked, another writer may consider it abandoned and remove it.
            if _lock(file.fileno()) is not False and os.fstat(file.fileno()).st_nlink:
                if mode not in (None, stat.S_IMODE(os.fstat(file.fileno()).st_mode)):
                    os.chmod(temporary, mode)  # restore bits cleared by the umask
                return file, temporary
        except BaseException:
            file.close()
            temporary.unlink(missing_ok=True)
            raise
        file.close()


def _remove_abandoned(path: Path) -> None:
    """Removes the temporary files of killed writers of ``path``, which are not locked."""
    if fcntl is None:
        return
    pattern = re.compile(re.escape(path.name) + r"\.[0-9a-f]{16}\.tmp")
    for name in filter(pattern.fullmatch, os.listdir(path.parent)):
        other = path.with_name(name)
        try:
            descriptor = os.open(other, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # removed meanwhile, a link, or another user's
            continue
        try:
            if _lock(descriptor):
                other.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Whether this descriptor now has the lock; None if locks are not supported."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def save_checkpoint(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """`torch.save` into a file that is complete or absent, followed by its SHA-256.

    `torch.load` can read the file as well and ignores the digest, that of the bytes written.

    Args:
        state: a dict of values that ``torch.load(weights_only=True)`` supports: tensors, numbers,
            strings, None, and lists, tuples and dicts of these.
        path: the file to write.

    Raises:
        CheckpointError: for a state with an unsupported value, before the file at ``path`` is
            replaced. The message names the value's type and position in ``state``.
    """
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: a checkpoint is a dict, got a {_type_name(state)}")

    def write(file: IO[bytes]) -> None:
        hashed = _Hashed(file)
        try:
            torch.save(state, hashed)  # type: ignore[arg-type]
        except Exception as error:
            if hashed.error is not None:  # torch replaces it by another error
                raise hashed.error from None
            raise CheckpointError(f"{path}: {_refusal(state)}") from error
        if reason := _why_not_loaded(file):
            raise CheckpointError(f"{path}: {_refusal(state)}") from reason
        file.seek(0, os.SEEK_END)
        file.write(MARK + hashed.digest.hexdigest().encode())

    write_atomically(path, write)


class _Hashed:
    """A file wrapper that hashes what is written; torch.save writes sequentially."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        self.digest.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()


def _why_not_loaded(file: IO[bytes]) -> Exception | None:
    """The error that loading the file just written raises, without reading tensor data, or None."""
    file.seek(0)
    try:
        with torch.serialization.skip_data():
            torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # of pickle, or of a class that is being restored
        return error
    return None


def _refusal(state: dict[str, Any]) -> str:
    place, value = next(_not_loaded("state", state), ("state", state))
    return (
        f"{place} is of type {_type_name(value)}, which torch.load(weights_only=True) does not "
        "load; allowed are tensors, numbers, strings, None, and lists, tuples and dicts of these"
    )


def _not_loaded(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of ``value`` that cannot be saved and loaded, each with its position."""
    if type(value) in (dict, OrderedDict):
        for key, part in value.items():
            yield from _not_loaded(f"a key of {place}", key)
            yield from _not_loaded(f"{place}[{key!r}]", part)
    elif type(value) in (list, tuple):
        for index, part in enumerate(value):
            yield from _not_loaded(f"{place}[{index}]", part)
    elif type(value) not in (torch.Tensor, torch.nn.Parameter):
        file = io.BytesIO()
        try:
            torch.save(value, file)
        except Exception:  # of pickle, or of the class
            yield place, value
        else:
            if _why_not_loaded(file):
                yield place, value


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def load_checkpoint(
    path: str | os.PathLike[str], map_location: str | torch.device = "cpu"
) -> dict[str, Any]:
    """Loads a file of `save_checkpoint` after verifying its digest.

    Args:
        path: the file.
        map_location: the device of the loaded tensors.

    Returns:
        The saved dict.

    Raises:
        CheckpointError: if the file is corrupted, truncated, or not such a file, or if it does not
            contain a dict. The message names the file.
        FileNotFoundError: if it does not exist.
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
        except Exception as error:  # zipfile, pickle and torch raise different errors
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise CheckpointError(f"{path}: cannot be loaded: {reason}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, not a dict")
    return state


def _digest(file: IO[bytes], size: int) -> bytes:
    """The hex SHA-256 of the first ``size`` bytes."""
    file.seek(0)
    found = hashlib.sha256()
    while chunk := file.read(min(size, _CHUNK)):
        found.update(chunk)
        size -= len(chunk)
    return found.hexdigest().encode()
