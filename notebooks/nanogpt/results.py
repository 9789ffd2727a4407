"""What a run found, as JSON and as a table."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from .train import Training
from .variants import VARIANTS

BASELINE = "fp32"  # the variant that gaps and ratios refer to


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


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Standard JSON: raises ValueError for NaN and infinity, so turn those into None first."""
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    write(path, lambda file: file.write(text.encode()))


def machine(device: torch.device, threads: int) -> dict[str, Any]:
    """Where the numbers come from: hardware and versions."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else device.type,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def run_result(
    training: Training,
    variant: str,
    *,
    lr: float,
    flushed: dict[str, float],
    sample: str,
) -> dict[str, Any]:
    """One row of results.json. Numbers that are not finite (a run that diverged) are None."""
    seconds = statistics.median(training.seconds_per_step)
    settings, curves = training.settings, training.curves
    return {
        "variant": variant,
        "seed": training.seed,
        "lr": lr,
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "train_loss": finite(curves["train"][-1]),
        "val_loss": finite(curves["val"][-1]),
        "best_val_loss": min(
            (v for v in curves["val"] if math.isfinite(v)), default=None
        ),
        "ms_per_step": 1000 * seconds,
        "tokens_per_second": settings.batch_size * settings.context / seconds,
        "flushed_gradients": {when: finite(share) for when, share in flushed.items()},
        "curves": {
            name: [finite(value) for value in values] for name, values in curves.items()
        },
        "batch_loss": [finite(value) for value in training.batch_loss.tolist()],
        "sample": sample,
    }


def finite(value: float) -> float | None:
    """`value`, or None for NaN and infinity, which JSON cannot hold."""
    return value if math.isfinite(value) else None


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per variant, over its seeds: means, and gap and time against the baseline.

    The gap is the mean over seeds of the difference from the baseline with the same seed (same
    initial weights, same examples), `gap_std` its spread. None where there is nothing to compare.
    """
    by_variant: dict[str, dict[int, dict[str, Any]]] = {}
    for run in runs:
        by_variant.setdefault(run["variant"], {})[run["seed"]] = run
    baseline = by_variant.get(BASELINE, {})
    rows = []
    for variant, seeds in by_variant.items():
        paired = [
            (run, baseline[seed]) for seed, run in seeds.items() if seed in baseline
        ]
        gaps = [_difference(run["val_loss"], base["val_loss"]) for run, base in paired]
        ratios = [run["ms_per_step"] / base["ms_per_step"] for run, base in paired]
        rows.append(
            {
                "variant": variant,
                "seeds": len(seeds),
                "train_loss": _mean([run["train_loss"] for run in seeds.values()]),
                "val_loss": _mean([run["val_loss"] for run in seeds.values()]),
                "gap": _mean(gaps),
                "gap_std": _spread(gaps),
                "ms_per_step": _mean([run["ms_per_step"] for run in seeds.values()]),
                "ratio": _mean(ratios),
                "flushed_gradients": _mean(
                    [r["flushed_gradients"]["start"] for r in seeds.values()]
                ),
            }
        )
    return rows


COLUMNS = (  # heading, key, format
    ("train loss", "train_loss", "{:.4f}"),
    ("val loss", "val_loss", "{:.4f}"),
    ("gap to FP32", "gap", "{:+.4f}"),
    ("ms/step", "ms_per_step", "{:.1f}"),
    ("ratio to FP32", "ratio", "{:.2f}x"),
    ("gradients lost to e5m2", "flushed_gradients", "{:.1%}"),
)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The summary as text with aligned columns; '-' where there is no number."""
    cells = [["variant", *(heading for heading, _, _ in COLUMNS)]]
    for row in rows:
        values = (
            "-" if row[key] is None else form.format(row[key])
            for _, key, form in COLUMNS
        )
        cells.append([VARIANTS[row["variant"]].label, *values])
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def _spread(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.stdev(known) if len(known) > 1 else None


def _cpu_name() -> str:
    """The processor's name where the system tells it, else its architecture."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
