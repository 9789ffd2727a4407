"""The questions that docs/benchmarks.md answers: one for each file of benchmarks/results."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STRANGERS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "benchmarks/strangers/models.json").read_text()
)["models"]

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question that a user asks, and the answer as a function of the recorded rows."""

    text: str
    answer: Callable[[list[Row]], str]


@functools.cache
def record(study: str) -> Row:
    """Returns the content of a file of results."""
    return json.loads((RESULTS / f"{study}.json").read_text(encoding="utf-8"))


def studies() -> list[str]:
    """Returns the names of all studies with recorded results."""
    return sorted(path.stem for path in RESULTS.glob("*.json"))


def answer(study: str) -> str:
    """Returns the answer to the question of a study."""
    return QUESTIONS[study].answer(record(study)["rows"])


def named(rows: Iterable[Row]) -> dict[str, Row]:
    """Returns the rows by name."""
    return {row["name"]: row for row in rows}


def ratios(*names: str, digits: int = 2) -> Callable[[list[Row]], str]:
    """Returns an answer that lists the ratios of some rows."""

    def listed(rows: list[Row]) -> str:
        found = named(rows)
        return "; ".join(f"{name}: {found[name]['ratio']:.{digits}f}" for name in names)

    return listed


def _demo(rows: list[Row]) -> str:
    return "; ".join(f"{row['label']}: {row['val_loss']:.3f}" for row in rows)


def _training(rows: list[Row]) -> str:
    pairs = [row for row in rows if "gap" in row]
    return "; ".join(
        f"{r['name']}: {r['gap']:+.3f} ± {r['gap_std']:.3f}" for r in pairs
    )


def _one_line(rows: list[Row]) -> str:
    parts = []
    for way in ("unit_scale", "unit_scale, FP8"):
        found = [row for row in rows if row["way"] == way]
        gaps = ", ".join(f"{row['name']} {row['gap']:+.3f}" for row in found)
        met = sum(row["met"] for row in found)
        parts.append(
            f"{way}: {met} of {len(found)} at most 0.02 above plain training ({gaps})"
        )
    found = [row for row in rows if row["way"] == "unit_scale, FP8"]
    met = sum(row["cost_met"] for row in found)
    return "; ".join([*parts, f"FP8 costs at most 0.01 in {met} of {len(found)}"])


def _codebases(rows: list[Row]) -> str:
    trained = [row for row in rows if "best rate" in row]
    gaps = [row["FP8"][0] - row["float32"][0] for row in trained]
    best = [row["unit_scale, FP8"][0] < row["float32, best rate"][0] for row in trained]
    return (
        f"FP8 changes the losses of {len(trained)} by {min(gaps):+.3f} to {max(gaps):+.3f}; with "
        f"unit_scale in FP8, {sum(best)} end below plain training at the best of three rates"
    )


def _recipe_loss(rows: list[Row]) -> str:
    found = named(rows)
    names = ("static", "tensor", "block", "mxfp8", "nvfp4_nvidia", "mxfp4")
    gaps = (f'"{n}": {found[n]["gap"]:+.3f} ± {found[n]["half"]:.3f}' for n in names)
    return "Gap to FP32 ± half its 95 % interval: " + "; ".join(gaps)


def _cast_bias(rows: list[Row]) -> str:
    pairs = [(f"{kind}_bias", f"{kind}_se") for kind in ("normal", "heavy")]
    unbiased = [
        r["name"] for r in rows if all(abs(r[b]) <= 3 * r[se] for b, se in pairs)
    ]
    worst = min(rows, key=lambda row: row["heavy_bias"])
    return (
        f"Yes, within three standard errors, for {', '.join(unbiased)}; other casts shrink the "
        f"gradient, at most by {-worst['heavy_bias']:.1f} % ({worst['name']}, heavy-tailed data)"
    )


def _moved(rows: list[Row]) -> str:
    rates: dict[str, list[float]] = {}
    for row in rows:
        rates.setdefault(row["name"], []).append(row["log2_best"])
    return "Range of the best rate in octaves: " + "; ".join(
        f"{kind}: {max(found) - min(found):.1f}" for kind, found in rates.items()
    )


def _optimizers(rows: list[Row]) -> str:
    ours = [row for row in rows if row["name"].startswith("fp8 compiled, ")]
    ours = [row for row in ours if "blocks" not in row["name"]]
    low, high = (pick(row["ratio"] for row in ours) for pick in (min, max))
    return (
        f"Compiled, {low:.1f} to {high:.1f} times as long as with torch's fused AdamW"
    )


def _preflight(rows: list[Row]) -> str:
    every = named(rows)["all"]
    parts = [
        f"It recommends a policy for {every['recommended']} models; its loss is at most 0.01 above "
        f"the best, or within the interval of the difference, in {every['within']}",
        f"Kendall's tau between update error and gap: {every['tau']} over all pairs of recipes, "
        f"{every['tau_of_these']} over pairs that differ by more than their interval, "
        f"{every['tau_of_those']} over pairs that are also more than 0.01 apart",
    ]
    return "; ".join(parts)


def _defaults(rows: list[Row]) -> str:
    changed = {
        row["name"]: [v for k, v in row.items() if k != "name"] for row in rows[1:]
    }
    return "Largest and smallest change of the loss: " + "; ".join(
        f"{name} {max(gaps):+.3f}, {min(gaps):+.3f}" for name, gaps in changed.items()
    )


def _sizes(rows: list[Row]) -> str:
    return "Best rate, relative to the default: " + ", ".join(
        f"{row['name']} {row['best']}" for row in rows
    )


def _strangers(rows: list[Row]) -> str:
    models, run, unit, trained = (
        sum(row[key] for row in rows) for key in ("models", "run", "unit", "trained")
    )
    return (
        f"{run} of {models} models run; in {unit}, at least 97 % of the casts of a step keep the "
        f"precision of their format, in {trained} after 20 steps of training too. The "
        f"collection of this repository has {len(STRANGERS)} of them"
    )


def _zoo(rows: list[Row]) -> str:
    verified = sum(row["result"] == "verified" for row in rows)
    return (
        f"In {verified} of {len(rows)} architectures, at least 97 % of the casts keep the "
        "precision of their format, in the second step and after 20"
    )


def _stats(rows: list[Row]) -> str:
    looks = [row for row in rows if "cost" in row]
    return "; ".join(
        f"{row['name'].removesuffix(', looks')}, 1 step in {row['every']}: {row['cost']:.1%}"
        for row in looks
    )


def _sums(rows: list[Row]) -> str:
    long = [
        row
        for row in rows
        if row.get("operands") == "positive" and row["format"] == "e4m3"
    ]
    errors = ", ".join(f"{row['name']} {float(row['error_16384']):.1g}" for row in long)
    gaps = "; ".join(f"{row['name']}: {row['gap']}" for row in rows if "gap" in row)
    times = ", ".join(
        f"{row['name']} {row['ratio']:.0f}" for row in rows if "ratio" in row
    )
    return (
        f"Relative error of sums of 16384 positive products: {errors}; "
        + (f"gap to FP32 in training: {gaps}; " if gaps else "")
        + f"time of the simulation, relative to a product in FP32: {times}"
    )


def _faults(rows: list[Row]) -> str:
    before = sum(row["before"] for row in rows)
    return f"Yes, in {before} of {len(rows)} faults before the loss shows it"


def _forecast(rows: list[Row]) -> str:
    cases = {"linear": "layer", "head": "head", "block": "Llama block"}
    listed = "; ".join(_ratios(text, case, rows) for case, text in cases.items())
    off = next(row["off"] for row in rows if row["case"].startswith("median"))
    return (
        f"On an H200, relative to bf16's time: {listed}. Forecasts of published times on an H100 "
        f"are {off:.0%} off in the median"
    )


def _gpu(rows: list[Row]) -> str:
    cases = {
        "linear": "layer",
        "head": "head",
        "block": "Llama block",
        "model": "model",
    }
    timed = [row for row in rows if "ratio" in row and "ms" in row and "rounds" in row]
    listed = "; ".join(_ratios(text, case, timed) for case, text in cases.items())
    return f"On one H200, relative to bf16's time: {listed}"


def _ratios(text: str, case: str, rows: list[Row]) -> str:
    """The ratios of a case to bf16's time, by recipe."""
    ratios = (
        f"{row['recipe']} {row.get('gpu_ratio', row['ratio']):.2f}"
        for row in rows
        if row["case"] == case and row["recipe"] != "bf16"
    )
    return f"{text} {', '.join(ratios)}"


QUESTIONS: dict[str, Question] = {
    "forecast": Question(
        text="How long would a training step take on an H200?", answer=_forecast
    ),
    "demo": Question(
        text="Which loss does a small GPT reach in FP32, BF16 and FP8 in `make demo`?",
        answer=_demo,
    ),
    "training": Question(
        text="How much held-out loss does FP8 cost over several seeds?",
        answer=_training,
    ),
    "one_line": Question(
        text="Does one line, without a learning rate, end where plain training ends?",
        answer=_one_line,
    ),
    "codebases": Question(
        text="What do FP8 and unit scaling change in codebases that people train with?",
        answer=_codebases,
    ),
    "cast_bias": Question(
        text="Is the cast gradient of a recipe unbiased?",
        answer=_cast_bias,
    ),
    "recipe_loss": Question(
        text="How much held-out loss does each recipe cost?", answer=_recipe_loss
    ),
    "recipe_loss_large": Question(
        text="How much held-out loss do recipes cost in a larger GPT?",
        answer=_recipe_loss,
    ),
    "sums": Question(text="What do the sums of tensor cores cost?", answer=_sums),
    "faults": Question(
        text="Does a warning name the layer where training in FP8 goes wrong?",
        answer=_faults,
    ),
    "preflight": Question(
        text="Does `fp8.preflight` recommend the best policy?", answer=_preflight
    ),
    "recipes": Question(
        text="How long does a compiled training step take under a simulated recipe, relative to "
        "FP32?",
        answer=ratios("unit", "tensor", "row", "block", "mxfp8", "nvfp4"),
    ),
    "transforms": Question(
        text="How long does a training step take after a transform, relative to the compiled plain "
        "model?",
        answer=ratios(
            "compiled unit_scale",
            "compiled simulate_fp8",
            "eager unit_scale",
            "eager plain",
        ),
    ),
    "zoo": Question(
        text="Does `unit_scale` work on models of Hugging Face?", answer=_zoo
    ),
    "strangers": Question(
        text="Does `unit_scale` work on models of other libraries?", answer=_strangers
    ),
    "transfer": Question(
        text="How far does the best learning rate move with the size of a model?",
        answer=_moved,
    ),
    "transfer_depth": Question(
        text="Do other rules for depth keep the best learning rate in place?",
        answer=_moved,
    ),
    "defaults": Question(
        text="What does each default of `unit_scale` and `uu.optim.AdamW` contribute?",
        answer=_defaults,
    ),
    "sizes": Question(
        text="Does the default learning rate suit any depth and width?", answer=_sizes
    ),
    "optimizers": Question(
        text="How long does a step with 8-bit optimizer states take?",
        answer=_optimizers,
    ),
    "stats": Question(
        text="How much time do `fp8.stats` and `fp8.record` cost?", answer=_stats
    ),
}
"""Study -> question, in the order of the page."""

if "gpu" in studies():  # where there was a GPU
    QUESTIONS["gpu"] = Question(text="What does FP8 gain on a GPU?", answer=_gpu)


if __name__ == "__main__":
    for name in QUESTIONS:
        print(name, "|", QUESTIONS[name].text, "|", answer(name))
