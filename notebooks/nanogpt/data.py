"""Text to tokens: any file, or the source of Python's own standard library.

The default text is on every machine that can run this, so the demo downloads nothing.
"""

from __future__ import annotations

import hashlib
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

STDLIB_LIMIT = (
    2_000_000  # characters of the standard library to use: several passes in a demo
)
HELD_OUT = (
    10  # one part in so many is kept for evaluation: the end of the text, as in nanoGPT
)
TOKENS = ("char", "byte")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A text as tokens: `train` and `val` are 1-D int64, `symbols[i]` is what token i means."""

    name: str
    sha256: str
    symbols: tuple[str, ...] | tuple[bytes, ...]
    train: Tensor
    val: Tensor

    def decode(self, tokens: Tensor) -> str:
        """The text of a 1-D tensor of tokens; bytes that are not UTF-8 show as U+FFFD."""
        parts = [self.symbols[i] for i in tokens.tolist()]
        if parts and isinstance(parts[0], bytes):
            return b"".join(parts).decode("utf-8", errors="replace")
        return "".join(parts)


def load_corpus(path: str | None, *, tokens: str = "char", context: int) -> Corpus:
    """The text at `path` (None: the standard library) as tokens, its last tenth held out.

    A token is a character or a byte; the vocabulary is those that occur, sorted. Raises
    ValueError if the file is missing, is not UTF-8 (for characters), or if either part is too
    short for one example of `context` tokens and its successor.
    """
    if tokens not in TOKENS:
        raise ValueError(
            f"unknown tokens {tokens!r}; choose one of {', '.join(TOKENS)}"
        )
    name = "Python standard library" if path is None else Path(path).name
    raw = _standard_library() if path is None else _read(Path(path))
    text = (
        list(_decode(raw, name))
        if tokens == "char"
        else [bytes([byte]) for byte in raw]
    )
    symbols = tuple(sorted(set(text)))
    index = {symbol: i for i, symbol in enumerate(symbols)}
    ids = torch.tensor([index[symbol] for symbol in text], dtype=torch.int64)
    held_out = len(ids) // HELD_OUT
    if held_out < context + 1:
        need = HELD_OUT * (context + 1)
        raise ValueError(
            f"{name} is too short: {len(ids):,} tokens, a context of {context} needs {need:,}"
        )
    return Corpus(
        name=name,
        sha256=hashlib.sha256(raw).hexdigest(),
        symbols=symbols,
        train=ids[:-held_out],
        val=ids[-held_out:],
    )


def window_starts(
    tokens: Tensor, shape: tuple[int, ...], *, context: int, seed: int
) -> Tensor:
    """Random starts of examples of `context` tokens and their successors, int64 of `shape`.

    Drawn from a generator of its own: the same for every variant, whatever else draws numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(tokens) - context, shape, generator=generator)


def windows(tokens: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (len(starts), context): targets are the inputs one token on."""
    at = starts[:, None] + torch.arange(context + 1, device=starts.device)
    rows = tokens[at]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error


def _decode(raw: bytes, name: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8 text (at byte {error.start}); --tokens byte trains on its bytes"
        ) from error


def _standard_library() -> bytes:
    """The pure-ASCII top-level modules, in the order of a hash of their names, up to the limit.

    ASCII keeps the vocabulary to about 100 characters; the hash mixes subjects, so that the
    held-out end is like the rest. The same bytes on every run of one Python installation.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        folder.glob("*.py"),
        key=lambda path: (zlib.crc32(path.name.encode()), path.name),
    )
    sources, size = [], 0
    for path in paths:
        source = path.read_bytes()
        if source.isascii() and size < STDLIB_LIMIT:
            sources.append(source)
            size += len(source)
    return b"\n".join(sources)[:STDLIB_LIMIT]
