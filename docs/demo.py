"""`python -m docs.demo FOLDER`: records the results of ``make demo`` in FOLDER.

Writes benchmarks/results/demo.json and docs/demo.png. `PARTS` are what `python -m docs.build`
writes between ``<!-- NAME -->`` and ``<!-- /NAME -->``: of all results into README.md,
docs/codebases.md, docs/demo-results.md, docs/forecast.md and docs/learning-rates.md, of tables of
the code into docs/from-nn-to-uu.md and docs/export.md.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import machine, write
from docs import codebases, forecasts, layouts
from docs.markdown import table
from docs.questions import RESULTS
from notebooks.nanogpt.session import PLOT
from notebooks.nanogpt.session import RESULTS as RUN
from notebooks.nanogpt.variants import VARIANTS
from unit_scaling.common.missing import MISSING, names

README = Path(__file__).parents[1] / "README.md"
PAGE = Path(__file__).with_name("demo-results.md")
RATES = Path(__file__).with_name("learning-rates.md")
PORTING = Path(__file__).with_name("from-nn-to-uu.md")
EXPORT = Path(__file__).with_name("export.md")
FORECAST = Path(__file__).with_name("forecast.md")
CODEBASES = Path(__file__).with_name("codebases.md")
PICTURE = Path(__file__).with_name("demo.png")

COLUMNS = {  # heading: key of a row of results/demo.json, format
    "variant": ("label", "{}"),
    "learning rate": ("lr", "{:g}"),
    "held-out loss": ("val_loss", "{:.3f}"),
    "gap to FP32": ("gap", "{:+.3f}"),
    "gradients lost to e5m2": ("gradients_lost", "{:.1%}"),
}


def rows(run: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each variant of a run's results.json."""
    found = []
    for row in run["summary"]:
        about = {
            "name": row["variant"],
            "label": VARIANTS[row["variant"]].label,
            "lr": run["lr"][row["variant"]],
            "val_loss": row["val_loss"],
            "gap": row["gap"],
            "gradients_lost": row["flushed_gradients"],
        }
        found.append(
            {k: round(v, 4) if isinstance(v, float) else v for k, v in about.items()}
        )
    return found


def main(folder: Path) -> None:
    """Writes results/demo.json and the picture from a finished run."""
    run = json.loads((folder / RUN).read_text(encoding="utf-8"))
    settings, seeds = run["settings"], len(run["seeds"])
    question = (
        f"make demo: {settings['iters']} steps from the same weights on {run['data']['name']}, "
        f"{seeds} seed{'s' if seeds > 1 else ''}, {'compiled' if run['compile'] else 'eager'}"
    )
    path = write("demo", question, rows(run))
    content = json.loads(path.read_text(encoding="utf-8"))
    about = {**machine(), **{k: run["machine"][k] for k in ("cpu", "cores", "threads")}}
    content |= {"machine": about, "iters": settings["iters"]}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(folder / PLOT, PICTURE)


def results(name: str) -> dict[str, Any]:
    """A file of benchmarks/results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def demo() -> str:
    """The table of the demo, and what it was measured on."""
    found = results("demo")
    lines = [
        [
            "-" if row.get(key) is None else form.format(row[key])
            for key, form in COLUMNS.values()
        ]
        for row in found["rows"]
    ]
    where = found["machine"]
    torch = where["torch"].partition("+")[0]
    threads = f"{where['threads']} thread{'s' if where['threads'] > 1 else ''}"
    about = (
        f"{found['iters']} steps from the same weights, one seed, eager; {threads} of an "
        f"{where['cpu']}, torch {torch}, commit {where['commit'][:7]}."
    )
    return f"{table(' | '.join(COLUMNS), lines)}\n\n{about}"


def summary() -> str:
    """One sentence: the loss of each variant of the demo."""
    found = results("demo")
    losses = [f"{row['label']} {row['val_loss']:.3f}" for row in found["rows"]]
    return f"Held-out loss after {found['iters']} steps, one seed: {'; '.join(losses)}."


def training() -> str:
    """The differences of the longer runs of benchmarks.training."""
    found = results("training")
    pairs = [row for row in found["rows"] if "gap" in row]
    lines = [
        [row["name"], f"{row['gap']:+.3f}", f"{row['gap_std']:.3f}"] for row in pairs
    ]
    made = table(
        "difference of held-out losses | mean | standard deviation over seeds", lines
    )
    question = found["question"]
    return f"{made}\n\n{question[:1].upper()}{question[1:]}."


WAYS = ("unit_scale", "unit_scale, FP8")


def one_line() -> str:
    """The models of benchmarks.one_line: the plain loss, and the gaps of unit_scale to it."""
    found: dict[str, dict[str, Any]] = {}
    for row in results("one_line")["rows"]:
        found.setdefault(row["name"], {})[row["way"]] = row
    lines = []
    for name, ways in found.items():
        plain = ways["plain AdamW"]
        names = [f"gap{end}" for end in ("", "_low", "_high")]
        gaps = [[r[n] for n in names] for r in map(ways.get, WAYS) if r]
        gaps.append([ways[WAYS[1]][f"cost_{end}"] for end in ("of_fp8", "low", "high")])
        cells = [f"{mean:+.3f} ({low:+.3f} to {high:+.3f})" for mean, low, high in gaps]
        lines.append(
            [name, f"{plain['lr']:g}", f"{plain['held_out_loss']:.3f}", *cells]
        )
    return table(
        "model | best rate of plain AdamW | its loss | gap of `unit_scale` | in FP8 | cost of FP8",
        lines,
    )


def one_line_summary() -> str:
    """One sentence: the gaps of unit_scale in FP8."""
    rows = [row for row in results("one_line")["rows"] if row["way"] == WAYS[1]]
    gaps = ", ".join(f"{row['name']} {row['gap']:+.2f}" for row in rows)
    return (
        "One line and no learning rate: the held-out loss of `simulate_fp8(unit_scale(model))` "
        "under `uu.optim.AdamW(model.parameters())`, minus the loss of the plain model under "
        "torch's AdamW at its best rate ([how](docs/learning-rates.md#without-a-rate)): "
        f"{gaps}."
    )


TIMED = ("unit_scale", "simulate_fp8", "simulate_fp8(unit_scale)")


def times() -> str:
    """One sentence: the time of a step after each transform, eager and compiled."""
    recorded = results("transforms")
    found = {row["name"]: row["ratio"] for row in recorded["rows"]}
    instructions = recorded["machine"]["instructions"]
    plain = found["eager plain"]

    def ratios(how: str, baseline: float) -> str:
        return ", ".join(
            f"`{name}` {found[f'{how} {name}'] / baseline:.2f}" for name in TIMED
        )

    return (
        f"Time of a training step on a CPU with {instructions}, relative to the plain model, for a "
        f"GPT of 4 layers, 128 wide: in eager mode {ratios('eager', plain)}; compiled "
        f"{ratios('compiled', 1.0)} "
        "([table](docs/benchmarks.md#transforms)). Wider models are slowed less: products grow "
        "faster than casts."
    )


def every_row(name: str, columns: str = "") -> str:
    """All rows of a benchmark. columns: the heading of the first one."""
    rows = results(name)["rows"]
    keys = [key for key in rows[0] if key != "name"]
    lines = [[row["name"], *(_cell(row.get(key)) for key in keys)] for row in rows]
    return table(" | ".join([columns, *keys]), lines)


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def missing() -> str:
    """Names of torch.nn that `unit_scaling` lacks, and what to use."""
    lines = []
    for what, row in MISSING.items():
        advice = what.format(torch="torch's", base="NAME", function="name")
        advice = re.sub(r"\b(uu|U|F|torch|fp8)\.[\w.]+(\(.*\))?", r"`\g<0>`", advice)
        lines.append([", ".join(f"`{name}`" for name in names(row)), advice])
    return table("names | what to use", lines)


PARTS: dict[Path, dict[str, Callable[[], str]]] = {
    README: {"demo": summary, "times": times, "one_line": one_line_summary},
    PAGE: {"demo": demo, "training": training},
    PORTING: {"missing": missing},
    EXPORT: {"layouts": layouts.layouts},
    CODEBASES: {"losses": codebases.losses, "lines": codebases.lines},
    FORECAST: {
        "today": forecasts.today,
        "run": forecasts.run,
        "peaks": forecasts.peaks,
        "published": forecasts.published,
    },
    RATES: {
        "one_line": one_line,
        "defaults": partial(every_row, "defaults", "changed"),
        "sizes": partial(every_row, "sizes", "size"),
    },
}
"""File -> name of a generated part -> function that returns its text."""


def with_parts(path: Path, text: str | None = None) -> str:
    """``text``, by default the content of ``path``, with its generated parts replaced.

    Raises ValueError if a part is missing or there more than once.
    """
    text = path.read_text(encoding="utf-8") if text is None else text
    for name, made in PARTS[path].items():
        part = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if len(part.findall(text)) != 1:
            where = f"{path.name} must have one part"
            raise ValueError(f"{where} <!-- {name} --> ... <!-- /{name} -->")
        body = made()
        text = part.sub(lambda found, body=body: f"{found[1]}{body}\n{found[2]}", text)
    return text


if __name__ == "__main__":
    main(Path(sys.argv[1]))
