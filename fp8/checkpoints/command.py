"""``fp8 layout``: the layouts of engines, and whether files have one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common.libraries import need
from .check import check_layout, engines, in_natural_order
from .layouts import LAYOUTS, Config, Layout
from .load import description, files_of

ABOUT = "whether the tensors of a checkpoint are as an inference engine has them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fp8 layout``."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    checked = commands.add_parser("check", help="names the first mismatch")
    checked.add_argument("path", help="a folder, a safetensors file or a state_dict")
    checked.add_argument(
        "--engine",
        required=True,
        metavar="NAME",
        help=f"an engine or a layout: {', '.join(engines())}",
    )
    checked.add_argument(
        "--shapes",
        action="store_true",
        help="compares shapes and dtypes alone, without loading values",
    )
    checked.add_argument(
        "--same-as",
        metavar="PATH",
        help="a checkpoint that the tensors are to be equal to",
    )
    commands.add_parser("list", help="all layouts, and where engines define them")


def run(options: argparse.Namespace) -> tuple[str, int]:
    """What to print, and the exit code: 1 for a mismatch. Raises ValueError for what is no
    checkpoint and for an unknown engine."""
    if options.action == "list":
        return "\n\n".join(map(text_of, LAYOUTS.values())), 0
    tensors, config = _read(Path(options.path), options.shapes)
    wanted = None
    if options.same_as:
        wanted, _ = _read(Path(options.same_as), options.shapes)
    found = check_layout(tensors, options.engine, config=config, same_as=wanted)
    return str(found), int(bool(found.why))


def text_of(row: Layout) -> str:
    """A layout in words."""
    lines = [f"{row.name} ({row.place})"]
    shapes = row.entries((256, 512))
    for part, form in row.forms.items():
        entry = shapes[part]
        dtype = str(entry.dtype).removeprefix("torch.")
        shape = " x ".join(map(str, entry.shape))
        lines.append(f"  {form.format('weight')}: {dtype}, {shape} for 256 x 512")
    lines += [f"  {s.engine}: {s.repository} {s.path} {s.version}" for s in row.sources]
    return "\n".join(lines)


def _read(path: Path, shapes: bool) -> tuple[dict[str, Tensor], Config]:
    """The tensors of a checkpoint, in the order of layers, and its quantization_config. shapes:
    without values."""
    if path.is_file() and path.suffix != ".safetensors":
        device = "meta" if shapes else "cpu"
        state: Any = torch.load(path, map_location=device, weights_only=True)
        if not isinstance(state, dict):
            kind = type(state).__name__
            raise ValueError(f"{path} has a {kind}, not a state_dict")
        tensors = {name: x for name, x in state.items() if isinstance(x, Tensor)}
        return tensors, {}
    found: dict[str, Tensor] = {}
    # As engines, which read what is there.
    files = sorted(path.glob("*.safetensors"))
    for file in files if len(files) == 1 else files_of(path):
        if shapes:
            found |= _headers(file)
        else:
            found |= need("safetensors").load_file(file)
    config = description(path).get("quantization_config") or {}
    return {name: found[name] for name in in_natural_order(found)}, config


# The names of dtypes in the header of a safetensors file.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def _headers(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the meta device."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    return {
        name: torch.empty(about["shape"], dtype=_DTYPES[about["dtype"]], device="meta")
        for name, about in header.items()
    }
