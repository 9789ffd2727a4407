"""Reports what this machine can run: torch, devices, recipes and the libraries used by adapters."""

from __future__ import annotations

import argparse
import json
import platform

import torch

from ..common.libraries import LIBRARIES, probe
from ..common.report import as_table
from ..kernels.kernel import why_not_device
from ..kernels.product import why_not_here
from ..recipes.recipe import RECIPES

ABOUT = "what this machine can run"

Section = list[dict[str, str]]


def examine() -> dict[str, Section]:
    """Rows for "system", "devices", "recipes" and "libraries", all of which are imported.

    recipes: how products run by default on each device: "native", if it is a GPU whose kernels pass
    the self-test (`fp8.kernels.selftest`, with results in bfloat16), or "simulated", and why.
    """
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    devices = _devices()
    recipes = []
    for device in devices:
        recipes += [_recipe(name, device) for name in RECIPES]
    return {
        "system": [{"what": name, "version": versions[name]} for name in versions],
        "devices": list(map(_device, devices)),
        "recipes": recipes,
        "libraries": list(map(_library, LIBRARIES)),
    }


def _devices() -> list[torch.device]:
    cuda = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    return [torch.device("cpu"), *cuda]


def _device(device: torch.device) -> dict[str, str]:
    name = platform.machine()
    capability = ""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
    fp8 = "yes"
    why_not = why_not_device(device)
    if why_not:
        fp8 = f"no: {why_not}"
    return {
        "device": str(device),
        "name": name,
        "capability": capability,
        "FP8 product": fp8,
    }


def _recipe(name: str, device: torch.device) -> dict[str, str]:
    why = why_not_here(RECIPES[name], device, torch.bfloat16)
    if not why and device.type != "cuda":
        why = f'native if backend="native" requests it: "auto" simulates on {device.type.upper()}s'
    runs = "simulated" if why else "native"
    return {"recipe": name, "device": str(device), "runs": runs, "why": why}


def _library(name: str) -> dict[str, str]:
    probed = probe(name)
    return {
        "library": name,
        "status": probed.status,
        "version": probed.version,
        "why": probed.why,
        "to get it": LIBRARIES[name].get if probed.error else "",
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fp8 doctor``."""
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(options: argparse.Namespace) -> tuple[str, int]:
    """The findings as text; 1 if a library is installed and broken."""
    findings = examine()
    text = as_text(findings)
    if options.json:
        text = json.dumps(findings, indent=2)
    return text, int(any(row["status"] == "broken" for row in findings["libraries"]))


def as_text(findings: dict[str, Section]) -> str:
    """Formats the findings as one table per section."""
    tables = []
    for rows in findings.values():
        cells = [list(row.values()) for row in rows]
        tables.append(as_table([list(rows[0]), *cells]))
    return "\n\n".join(tables)
