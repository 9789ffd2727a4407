"""Findings of a preflight, made by hand: with every part, and interrupted."""

from __future__ import annotations

import dataclasses
import math
import random

from fp8.lab.forecast.forecast import Forecast, Variant
from fp8.lab.hardware import Estimate, LayerTime, Product
from fp8.lab.preflight.findings import (
    Candidate,
    Choice,
    Findings,
    Run,
    Verdict,
)

HOSTILE = "<b>&x"  # the name of a layer: markup, if not escaped

_WIDTH = {"qkv": (512, 1536), "out": (512, 512), "up": (512, 2048), "down": (2048, 512)}
_HIDDEN = [f"layers.{i}.{name}" for i in range(3) for name in _WIDTH]
LAYERS = [*_HIDDEN[:-1], HOSTILE, "lm_head"]
SNAPSHOTS = (50, 150, 300)
STEPS = 200
# name -> update error at the first snapshot, gap, half of its interval, outcome
_TRIED = {
    "row": (0.071, 0.0009, 0.0041, "as the reference"),
    "mxfp8 except lm_head": (0.028, -0.0012, 0.0038, "as the reference"),
    "mxfp8": (0.068, 0.0021, 0.0045, "as the reference"),
    "nvfp4": (0.33, 0.0674, 0.0102, "worse"),
    "mxfp4": (0.58, 0.187, 0.022, "worse"),
    "e4m3 without scales, every layer": (1.0, math.inf, None, "diverges"),
    "unit": (0.94, None, None, "not trained"),
}
POLICY = {"recipe": "mxfp8", "rules": [["lm_head", None, None]]}


def _products() -> list[Product]:
    hidden = [
        Product(layer, "linear", 4096, *size, weight_elements=math.prod(size))
        for layer, size in zip([*_HIDDEN[:-1], HOSTILE], [*_WIDTH.values()] * 3, strict=True)
    ]
    head = Product("lm_head", "linear", 4096, 512, 8000, weight_elements=4096000)
    why_not = "attention stays in the dtype of the model"
    attention = Product("attention 1", "matmul", 256, 64, 256, 96, why_not=why_not)
    return [*hidden, head, attention]


def _candidates() -> list[Candidate]:
    rows = []
    for name, (error, gap, half, outcome) in _TRIED.items():
        kept = ["lm_head"] if "except" in name else []
        rows.append(
            Candidate(
                name,
                name.split()[0],
                policy=POLICY if kept else {"recipe": name.split()[0]},
                kept=kept,
                share=0.72 if kept else 0.985,
                errors={step: error * (1 + 0.2 * i) for i, step in enumerate(SNAPSHOTS)},
                gap=gap,
                low=None if half is None else gap - half,
                high=None if half is None else gap + half,
                seeds=3 if gap is not None else 0,
                outcome=outcome,
            )
        )
    return sorted(rows, key=lambda row: row.errors[SNAPSHOTS[0]])


def _runs(names: list[str], seeds: int) -> list[Run]:
    """A loss that falls from 4.2 to 2.3; of the recipe without scales, one that leaves it."""
    runs = []
    for seed in range(seeds):
        draw = random.Random(seed)
        noise = [draw.gauss(0, 0.05) for _ in range(STEPS)]
        for name in ["reference", *names]:
            gap = _TRIED[name][1] if name != "reference" else 0.0
            curve = [1.9 * math.exp(-t / 60) + 2.3 + noise[t] for t in range(STEPS)]
            if math.isinf(gap):
                curve = [c + math.exp(0.1 * (t - 40)) for t, c in enumerate(curve[:120])]
                curve += [math.nan] * 80
            else:
                curve = [c + gap * t / STEPS for t, c in enumerate(curve)]
            runs.append(Run(name, seed, curve, curve[-1], 14.2 + seed))
    return runs


def _choices() -> list[Choice]:
    rows = []
    for recipe, scale in (("mxfp8", 0.07), ("nvfp4", 0.36)):
        for i in range(9):
            share, error = 0.985 - 0.265 * (i > 0) - 0.08 * max(i - 1, 0), scale * 0.8**i
            error *= 0.45 if i else 1
            kept = ["lm_head", *LAYERS[: i - 1]] if i else []
            measured = error * 1.04 if i in (0, 1, 4) else None
            chosen = (recipe, i) == ("mxfp8", 1)
            rows.append(Choice(f"keep {len(kept)}", recipe, kept, share, error, measured, chosen))
    return rows


def _forecasts() -> list[Forecast]:
    """Of one of two accelerators."""
    high = Variant(recipe="bf16", kernels=33, high=39, moved=1 << 30, saved=1 << 28, seconds=2e-3)
    low = dataclasses.replace(high, recipe="mxfp8 except lm_head", fp8=36, high=3, seconds=1.3e-3)
    return [Forecast("b200", "compiler", (high, low))]


def _estimates() -> list[Estimate]:
    name, times = "mxfp8 except lm_head", [1e-4 + 1e-5 * i for i in range(13)]
    rows = []
    for hardware, speedup in (("h100", 1.31), ("b200", 1.58)):
        layers = [
            LayerTime(layer, time, time / (0.92 if i % 4 == 1 else speedup))
            for i, (layer, time) in enumerate(zip(LAYERS, times, strict=True))
        ]
        low, slower = sum(x.low for x in layers), sum(x.low > x.bf16 for x in layers)
        saved = {"saved_bf16": 2 * 10**9, "saved": 10**9}
        rows.append(Estimate(hardware, name, sum(times), low, layers, slower, 13, **saved))
    return [*rows, Estimate("h200", name, 0.0, 0.0, why_not="it has no MX formats")]


def _verdict() -> Verdict:
    return Verdict(
        answer="Yes, but keep lm_head in bf16; all other layers with recipe mxfp8 (8-bit numbers).",
        savings=["On h100, the matrix products of a step are 1.24 times as fast (estimate)."],
        reasons=[
            "The loss ends 0.0012 below that of the model in bf16 (3 pairs of runs).",
            f"Slower than in bf16 is {HOSTILE}.",
        ],
        policy=POLICY,
        recommended=True,
        code={
            "fp8": 'policy = fp8.Policy("mxfp8", rules=[("lm_head", None, None)])\n'
            "model = fp8.convert(model, policy)\n",
            "torchao": 'def keep(module, name):\n    return name not in {"lm_head"}\n\n'
            "convert_to_float8_training(model, module_filter_fn=keep)\n",
        },
    )


def rich() -> Findings:
    """Every part, with a layer of a hostile name, an infinite gap, and losses that become NaN."""
    trained = [name for name, (_, gap, _, _) in _TRIED.items() if gap is not None]
    return Findings(
        model={
            "name": "GPT, 3 layers, 512 wide",
            "parameters": 13_533_696,
            "dtype": "bfloat16",
            "device": "cpu",
        },
        settings={
            "steps": STEPS,
            "seed": 1729,
            "target": 0.01,
            "budget": 240.0,
            "recipes": ["row", "mxfp8", "nvfp4", "mxfp4", "unit"],
            "batch": [8, 512],
            "threads": 2,
        },
        versions={
            "fp8": "0.5.0",
            "torch": "2.13.0",
            "python": "3.12.4",
            "platform": "Linux x86_64",
            "date": "2026-11-23",
        },
        seconds={
            "trace": 0.41,
            "reference": 38.2,
            "update error": 12.9,
            "search": 55.1,
            "training": 131.0,
        },
        verdict=_verdict(),
        products=_products(),
        runs=_runs(trained, 3),
        candidates=_candidates(),
        choices=_choices(),
        estimates=_estimates(),
        forecasts=_forecasts(),
        not_forecast="1 of 2 accelerators: compiling took longer than 20% of the budget",
        notes=[
            "unit was not trained: its update error is above 0.5.",
            "Memory of the optimizer is Adam's.",
        ],
    )


def interrupted() -> Findings:
    """Ended by Ctrl-C in the reference's second run: no candidate was trained, nothing searched."""
    whole = rich()
    candidates = [
        dataclasses.replace(row, errors={50: row.errors[50]}, gap=None, low=None)
        for row in whole.candidates[:2]
    ]
    for row in candidates:
        row.high, row.seeds, row.outcome = None, 0, "not trained"
    return Findings(
        model=whole.model,
        settings=whole.settings,
        versions=whole.versions,
        seconds={"trace": 0.41},
        products=whole.products,
        runs=_runs([], 1),
        candidates=candidates,
        notes=["Interrupted in the reference run."],
    )
