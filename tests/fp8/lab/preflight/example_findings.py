"""Findings of a preflight, made by hand: with every part, and interrupted."""

import dataclasses
import math

from fp8.lab.forecast.result import Forecast, Variant
from fp8.lab.preflight.findings import Candidate, Findings, Run, Verdict
from fp8.lab.trace import Product

HOSTILE = "<b>&x"  # the name of a layer: markup, if not escaped
LAYERS = [HOSTILE, "lm_head"]
SNAPSHOTS = (50, 150, 300)
# name -> update error at the first snapshot, gap, half of its interval, outcome
_TRIED = {
    "row": (0.071, 0.0009, 0.0041, "as the reference"),
    "mxfp8 except lm_head": (0.028, -0.0012, 0.0038, "as the reference"),
    "mxfp4": (0.58, 0.187, 0.022, "worse"),
    "e4m3 without scales, every layer": (1.0, math.inf, None, "diverges"),
    "unit": (0.94, None, None, "not trained"),
}
POLICY = {"recipe": "mxfp8", "rules": [["lm_head", None, None]]}


def _candidates():
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
                errors={
                    step: error * (1 + 0.2 * i) for i, step in enumerate(SNAPSHOTS)
                },
                gap=gap,
                low=None if half is None else gap - half,
                high=None if half is None else gap + half,
                seeds=3 if gap is not None else 0,
                outcome=outcome,
            )
        )
    return sorted(rows, key=lambda row: row.errors[SNAPSHOTS[0]])


def _forecasts():
    """Estimates, one of them of a policy without units, and a forecast of one accelerator."""
    name, rows = "mxfp8 except lm_head", []
    for hardware, source, speedup, why_not in (
        ("h100", "estimate", 1.31, ""),
        ("h200", "estimate", 1.31, "it has no MX formats"),
        ("b200", "estimate", 1.58, ""),
        ("b200", "compiler", 1.4, ""),
    ):
        high = dict.fromkeys(LAYERS, 1e-3)
        low = {HOSTILE: 1.1e-3, "lm_head": 2e-3 / speedup - 1.1e-3}
        slow = Variant(recipe="bf16", seconds=2e-3, layers=high, saved=2 * 10**9)
        fast = Variant(recipe=name, seconds=2e-3 / speedup, layers=low, saved=10**9)
        fast = dataclasses.replace(fast, simulated=why_not)
        rows.append(Forecast(hardware, source, (slow, fast)))
    return rows


def _verdict():
    return Verdict(
        answer="Yes, but keep lm_head in bf16; all other layers with recipe mxfp8 (8-bit numbers).",
        savings=[
            "On h100, the matrix products of a step are 1.24 times as fast (estimate)."
        ],
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


def rich():
    """Every part, with a layer of a hostile name, an infinite gap, and losses that become NaN."""
    return Findings(
        model={
            "name": "GPT",
            "parameters": 13_533_696,
            "dtype": "bfloat16",
            "device": "cpu",
        },
        settings={
            "steps": 200,
            "target": 0.01,
            "budget": 240.0,
            "recipes": ["row", "mxfp8"],
        },
        versions={"fp8": "0.5.0", "platform": "Linux x86_64", "date": "2026-11-23"},
        seconds={"trace": 0.41, "reference": 38.2},
        verdict=_verdict(),
        products=[Product(name, "linear", 4096, 512, 512) for name in LAYERS],
        runs=[
            Run("reference", 0, [4.2, 2.3], 2.3),
            Run("row", 0, [4.2, math.nan], math.nan),
        ],
        candidates=_candidates(),
        forecasts=_forecasts(),
        not_forecast="1 of 2 accelerators: compiling took longer than 20% of the budget",
        notes=["unit was not trained: its update error is above 0.5."],
    )


def interrupted():
    """Ended by Ctrl-C in the reference's second run: no candidate was trained, nothing searched."""
    whole = rich()
    for row in whole.candidates:
        row.errors, row.gap, row.low, row.high = {50: row.errors[50]}, None, None, None
        row.seeds, row.outcome = 0, "not trained"
    return Findings(
        model=whole.model,
        settings=whole.settings,
        seconds={"trace": 0.41},
        products=whole.products,
        runs=whole.runs[:1],
        candidates=whole.candidates[:2],
        notes=["Interrupted in the reference run."],
    )
