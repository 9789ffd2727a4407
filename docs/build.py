"""`python -m docs.build`: writes the generated pages of docs/ and parts of the README.

docs/tables.md comes from the tables in the code, docs/benchmarks.md (questions and answers) and
docs/benchmarks-all.md (full tables) from benchmarks/results, docs/parity.md (docs/parity.py) from
marks of tests, docs/papers-numbers.md from docs/papers.py, the results in the README from
docs/demo.py, docs/figures from docs/figures.py. tests/test_tables.py fails while a file is stale.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fp8.training.layer_norm2d
import unit_scaling.functional  # noqa: F401 - fills OPS
from docs import demo, figures, papers, parity
from docs.markdown import as_markdown, table
from docs.questions import QUESTIONS, answer, named, record
from fp8.formats.format import FORMATS, Format
from fp8.kernels.kernel import Kernel
from fp8.kernels.product import kernels_of, why_not_recipe
from fp8.kernels.table import KERNELS
from fp8.lab.hardware import ACHIEVED, HARDWARE, UNITS, Hardware
from fp8.lab.parity.engines import ENGINES, Engine
from fp8.modes.dispatch import COMPOSED, LEFT, PRODUCTS
from fp8.optim.encodings import ENCODINGS, MASTERS, MOMENTS, Encoding
from fp8.recipes.cast import Cast
from fp8.recipes.policy import ROLES
from fp8.recipes.recipe import RECIPES, Recipe
from fp8.recipes.rules import RULES
from fp8.recipes.scaling import SCALINGS, Scaling
from fp8.training.levels import LEVELS, Level
from unit_scaling.constraints import CONSTRAINTS
from unit_scaling.optim import LR_MULT, LR_RULES, RATES
from unit_scaling.rules.table import OPS, Op

TABLES = Path(__file__).with_name("tables.md")
BENCHMARKS = Path(__file__).with_name("benchmarks.md")
FULL_TABLES = Path(__file__).with_name("benchmarks-all.md")

PREAMBLE = """\
# Tables

Written by `make docs` from the tables in the code: change them there.
`F` is `torch.nn.functional`."""

# The widths that the learning-rate rules are shown for: one, and four times as much.
WIDTHS = (256, 1024)


# Where to look for the name of a torch function, in this order.
NAMESPACES = {
    "F": torch.nn.functional,
    "torch": torch,
    "Tensor": torch.Tensor,
    "torch.linalg": torch.linalg,
    "torch.special": torch.special,
    "torch.sparse": torch.sparse,
    "operator": operator,
    "fp8.training.layer_norm2d": fp8.training.layer_norm2d,
    "torch.ops.higher_order": torch.ops.higher_order,
}


def first_paragraph(documented: object) -> str:
    """The first paragraph of a docstring, on one line."""
    text = (inspect.getdoc(documented) or "").partition("\n\n")[0]
    return as_markdown(" ".join(text.split()))


def torch_name(function: Callable[..., Any]) -> str:
    """What a torch function is called in code: F.linear, torch.mm, Tensor.add_, operator.matmul."""
    # Torch.linalg.multi_dot is called linalg_multi_dot.
    parts = function.__name__.split("_")
    names = ["_".join(parts[i:]) for i in range(len(parts))]
    for owner, space in NAMESPACES.items():
        for name in names:
            if getattr(space, name, None) is function:
                return f"{owner}.{name}"
    raise ValueError(
        f"no public name of {function} is known: add its module to NAMESPACES"
    )


def code(names: Iterable[object]) -> str:
    """The names as code, with commas."""
    return ", ".join(f"`{name}`" for name in names)


def number(value: float) -> str:
    """Exact where six digits are enough; a power of two that is very small or large as 2^n."""
    fraction, exponent = math.frexp(value)
    if fraction == 0.5 and (value < 1 or value > 1e6):
        return f"2^{exponent - 1}"
    return f"{value:.6g}"


def formats(format: Format) -> list[str]:
    overflow = "refused" if format.nonfinite is None else number(format.nonfinite)
    return [
        f"`{format.name}`",
        f"1 + {format.exponent_bits} + {format.mantissa_bits}",
        str(format.bias),
        number(format.max),
        number(format.min_normal),
        number(format.min_subnormal),
        "yes" if format.infinity else "no",
        "yes" if format.nan else "no",
        "yes" if format.negative_zero else "no",
        overflow,
        "none" if format.dtype is None else f"`{format.dtype}`",
    ]


def cast(cast: Cast | None) -> str:
    if cast is None:
        return "not cast"
    return f"`{cast}`"


def ops(op: Op) -> list[str]:
    constraint = "yes" if "constraint" in op.takes else "no"
    replaced = code(torch_name(function) for function in op.replaces)
    return [
        f"`U.{op.name}`",
        replaced or "nothing",
        constraint,
        first_paragraph(op.rule),
    ]


def accelerator(row: Hardware) -> list[str]:
    peaks = (
        f"{row.peak[unit] / 1e12:.4g} ({100 * row.rate(unit) / row.peak[unit]:.0f} %)"
        if unit in row.peak
        else "-"
        for unit in UNITS
    )
    return [
        f"`{row.name}`",
        row.device,
        *peaks,
        f"{row.bandwidth / 1e12:.4g}",
        row.source,
    ]


def learning_rates(rule: str, mup_type: str) -> list[str]:
    factor = LR_RULES[rule][mup_type]
    matrix = mup_type in ("weight", "output")
    shapes = [torch.Size([width] * 2 if matrix else [width]) for width in WIDTHS]
    mult = LR_MULT.get(rule, {})
    kinds = (mup_type, "kernel") if mup_type == "weight" else (mup_type,)
    factors = " or ".join(
        f"{each:g}" for each in dict.fromkeys(mult.get(k, 1.0) for k in kinds)
    )
    return [
        f"`{rule}`",
        f"`{mup_type}`",
        *(f"{factor(shape):.6g}" for shape in shapes),
        factors,
    ]


def products() -> Iterable[list[str]]:
    yield [
        code(dict.fromkeys(map(torch_name, PRODUCTS))),
        "operands and gradients are cast",
    ]
    yield [
        f"{code(map(torch_name, COMPOSED))}, `torch.einsum` of three operands or more",
        "decomposed into products of the first row",
    ]
    for why in dict.fromkeys(LEFT.values()):
        names = dict.fromkeys(torch_name(f) for f in LEFT if LEFT[f] == why)
        yield [code(names), f"left in high precision, with a warning: {why}"]


def recipe(recipe: Recipe) -> list[str]:
    others = [f"`{field}`: {cast(other)}" for field, other in recipe.overrides.items()]
    if recipe.accumulate is not None:
        others.append(f'`accumulate="{recipe.accumulate}"`, `promote={recipe.promote}`')
    engines = [row.name for row in ENGINES.values() if row.twin == recipe.name]
    if engines:
        others.append(f"the same forward product as {code(engines)}")
    casts = map(cast, (recipe.input, recipe.weight, recipe.grad))
    row = named(record("cast_bias")["rows"])[recipe.name]
    bias = [
        f"{row[f'{kind}_bias']:.3f} ± {row[f'{kind}_se']:.3f}"
        for kind in ("normal", "heavy")
    ]
    return [f"`{recipe.name}`", *casts, "; ".join(others), *bias]


def engine(row: Engine) -> list[str]:
    twin = f"`{row.twin}`" if row.twin else ""
    norms = f"{row.norms}, {row.residual}"
    casts = map(cast, row.recipe.forward)
    return [f"`{row.name}`", row.version, twin, *casts, norms, row.source]


def scaling(name: str, row: Scaling) -> list[str]:
    sides = [str(side) if side else "all" for side in row.tile]
    return [f"`{name}`", row.about, " x ".join(sides), code(row.rules) or "none"]


def kernel(row: Kernel) -> list[str]:
    last = "and up" if row.below is None else "to below {}.{}".format(*row.below)
    devices = "CUDA {}.{} ".format(*row.least) + last
    if row.cpu:
        devices = f"CPU, {devices}"
    recipes = [name for name, recipe in RECIPES.items() if not why_not_recipe(recipe)]
    served = [name for name in recipes if row in kernels_of(RECIPES[name])]
    return [f"`{row.name}`", row.about, devices, str(row.multiple), code(served)]


def encoding(name: str, row: Encoding) -> list[str]:
    places = {**MOMENTS, "master_weights": MASTERS}
    shares = {"none": "none", "tensor": "the tensor", "block": "each 128 elements"}[
        row.scale
    ]
    return [
        f"`{name}`",
        f"`{row.dtype}`",
        shares,
        code(p for p, n in places.items() if name in n),
    ]


def level(row: Level) -> list[str]:
    master = "-" if row.master is None else f"{row.master} + scale"
    moments = f"{row.first_moment} + {row.second_moment}"
    weight = f"{row.weight} + scale"
    return [f"`{row.name}`", "FP8", "FP8", weight, master, row.grad, moments]


def documented(rows: Mapping[str, Callable[..., Any]]) -> list[list[str]]:
    """Name and documentation of the functions of a table."""
    return [[f"`{name}`", first_paragraph(function)] for name, function in rows.items()]


#: Title, what the section is about, the headings, the rows.
SECTIONS: list[tuple[str, str, str, Iterable[list[str]]]] = [
    (
        "Formats",
        "`fp8.FORMATS`. Bits: sign + exponent + mantissa. Overflow saturates at the largest value. "
        'Nonfinite: its result with `overflow="nonfinite"`.',
        "name | bits | bias | max | min normal | min subnormal | Inf | NaN | -0 | nonfinite "
        "| torch dtype",
        [formats(row) for row in FORMATS.values()],
    ),
    (
        "Scalings",
        "`fp8.recipes.scaling.SCALINGS`: what shares a scale. Tile: elements across x along the "
        "axis that the product sums over. An operand is cast along the axis of each of its two "
        "products, from high precision again for the second one unless the tile is square.",
        "name | scale | tile | rules, the usual first",
        [scaling(name, row) for name, row in SCALINGS.items()],
    ),
    (
        "Rules",
        "`fp8.recipes.rules.RULES`: how a scale follows from the largest magnitude (amax), and "
        "from the error where there are two candidates.",
        "name | scale",
        [[f"`{name}`", as_markdown(row.about)] for name, row in RULES.items()],
    ),
    (
        "Recipes",
        "`fp8.RECIPES`: what happens to each operand of the three products of a layer: format, "
        "scaling (with its tile and rule where they are not the usual ones), rounding where it is "
        "not to nearest. Overflow saturates. Bias: the mean error of the gradient's cast over many "
        "draws, in percent of the gradient, with its standard error, for normal data and for "
        "Student's t with three degrees of freedom (`python -m benchmarks.cast_bias`).",
        "name | input | weight | gradient of the output | otherwise | bias, normal "
        "| bias, heavy tails",
        [recipe(row) for row in RECIPES.values()],
    ),
    (
        "Engines",
        "`fp8.lab.parity.engines.ENGINES`: inference engines, whose casts `fp8.parity` and "
        "`fp8 parity certify` compare with a trainer's. Recipe: the row of `fp8.RECIPES` with the "
        "same casts of the forward product; without one, the engine's row has them. Norms: "
        "`fp8.lab.parity.norms.ORDERS`, and whether the residual stream is rounded before.",
        "name | engine | recipe | inputs | weights | norms | source",
        [engine(row) for row in ENGINES.values()],
    ),
    (
        "Kernels",
        "`fp8.kernels.table.KERNELS`: torch's kernels of FP8 products, and what they need. "
        "Recipes: recipes of which every product has a kernel.",
        "scales by | operands | devices | weights, multiples of | recipes",
        [kernel(row) for row in KERNELS.values()],
    ),
    (
        "Roles of layers",
        "`fp8.recipes.policy.ROLES`: what `fp8.Policy(keep=...)` takes by name. A block is an item "
        "of a list of modules of one class, its part an attention or an MLP.",
        "name | layers",
        [[f"`{name}`", layers] for name, layers in ROLES.items()],
    ),
    (
        "Levels",
        "`fp8.LEVELS`: what `fp8.initialize` keeps for a weight, and in which format. Every scale "
        "is a power of two.",
        "level | product | communication | weight | master | weight gradient | Adam states",
        [level(row) for row in LEVELS.values()],
    ),
    (
        "Hardware",
        "`fp8.lab.hardware.HARDWARE`: dense TFLOP/s of the matrix units by format, and the "
        "share of it that large products reach; TB/s of the memory. Large casts reach "
        f"{100 * ACHIEVED['memory']:.0f} % of its bandwidth. The sources of the shares are in the "
        "code. [Estimates of time](slower.md#estimates-from-sizes) use them.",
        f"name | device | {' | '.join(UNITS)} | TB/s | source",
        [accelerator(row) for row in HARDWARE.values()],
    ),
    (
        "Optimizer states",
        "`fp8.optim.encodings.ENCODINGS`: how `fp8.optim` stores a tensor. Every scale is a power "
        "of two.",
        "name | stored as | one scale for | used for",
        [encoding(name, row) for name, row in ENCODINGS.items()],
    ),
    (
        "Products",
        "What runs under the recipe inside `fp8.autocast`.",
        "torch function | under a recipe",
        [*products()],
    ),
    (
        "Operations",
        "`unit_scaling.rules.table.OPS`: the functions of `unit_scaling.functional` (`U`), and the "
        "functions of torch that they replace.",
        "operation | replaces | constraint= | the rule",
        [ops(row) for row in OPS.values()],
    ),
    (
        "Constraints",
        "`unit_scaling.constraints.CONSTRAINTS`: how the scales of an operation are tied. `None` "
        "leaves them independent.",
        "name | the common scale",
        documented(CONSTRAINTS),
    ),
    (
        "Learning rates",
        "`unit_scaling.optim.LR_RULES`: the factor of a parameter's learning rate, before "
        "1/sqrt(depth). A matrix is square here, a vector as long as the model is wide. The second "
        "default for a weight is for kernels of convolutions. Without `lr` the rate is "
        + ", ".join(f"{rate:g} (`{rule}`)" for rule, rate in RATES.items())
        + ".",
        f"optimizer | mup_type | width {WIDTHS[0]} | width {WIDTHS[1]} | default of lr_mult",
        [
            learning_rates(rule, mup_type)
            for rule in LR_RULES
            for mup_type in LR_RULES[rule]
        ],
    ),
]


def render() -> str:
    """The text of docs/tables.md."""
    parts = [PREAMBLE]
    for title, about, headings, rows in SECTIONS:
        parts.append(f"## {title}\n\n{about}\n\n{table(headings, rows)}")
    return "\n\n".join(parts) + "\n"


BENCHMARKS_PREAMBLE = """\
# Benchmarks

Each row answers one question and links to the table behind it. Unless the row says otherwise,
results are from CPUs and FP8 is simulated: times are the cost of simulation, not of FP8 hardware.
A loss is a mean over seeds, with its standard deviation after ±. A time is relative to the time of
the baseline, which is 1.

`make docs` writes this page from benchmarks/results. `python -m benchmarks NAME` measures again."""

FULL_TABLES_PREAMBLE = """\
# Benchmarks, full tables

[Benchmarks](benchmarks.md) has the answers in short. A ratio is the median of paired runs,
candidate over baseline, with a 95 % confidence interval. A target that is missed is shown as
missed, with the reason as far as it is known.

`make docs` writes this page from benchmarks/results. `python -m benchmarks NAME` measures again;
NAME stands below each heading."""

# Keys of a row that are not shown: what the others are made of.
_NOT_SHOWN = (
    *("ms", "baseline_ms", "rounds", "ratio_low", "ratio_high", "losses"),
    *("details", "ended", "parameters", "seconds"),
)


def _cell(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if key == "ratio" and "ratio_low" in row:
        return f"{value:.3f} ({row['ratio_low']:.3f} to {row['ratio_high']:.3f})"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def benchmark(study: str) -> str:
    """The section of one file of results."""
    found = record(study)
    rows, machine = found["rows"], found["machine"]
    keys = [
        key
        for key in dict.fromkeys(k for row in rows for k in row)
        if key not in _NOT_SHOWN
    ]
    lines = [[_cell(row, key) for key in keys] for row in rows]
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    commit = machine["commit"][:7]
    where = f"{machine['cpu']}, {threads}, torch {machine['torch']}, commit {commit}"
    headings = " | ".join(key.replace("_", " ") for key in keys)
    # An anchor in HTML: GitHub does not read {#name}.
    heading = f'<a id="{study}"></a>\n\n## {QUESTIONS[study].text}'
    about = f"`{study}`: {found['question']} ({where})"
    return f"{heading}\n\n{about}\n\n{table(headings, lines)}"


def render_full_tables() -> str:
    """The text of docs/benchmarks-all.md."""
    sections = [benchmark(study) for study in QUESTIONS]
    return "\n\n".join([FULL_TABLES_PREAMBLE, *sections]) + "\n"


def render_benchmarks() -> str:
    """The text of docs/benchmarks.md."""
    lines = [
        [
            f'<a id="{study}"></a>{question.text}',
            answer(study),
            f"[table]({FULL_TABLES.name}#{study})",
        ]
        for study, question in QUESTIONS.items()
    ]
    return (
        f"{BENCHMARKS_PREAMBLE}\n\n{table('question | answer | all numbers', lines)}\n"
    )


GENERATED: dict[Path, Callable[[], str]] = {
    TABLES: render,
    BENCHMARKS: render_benchmarks,
    FULL_TABLES: render_full_tables,
    parity.PARITY: parity.render,
    papers.NUMBERS_PAGE: papers.render,
    **{path: partial(demo.with_parts, path) for path in demo.PARTS},
    **{figures.FOLDER / f"{name}.svg": made for name, made in figures.FIGURES.items()},
}
"""File -> function that returns its text."""


if __name__ == "__main__":
    for path, made in GENERATED.items():
        path.write_text(made(), encoding="utf-8")
        print(f"wrote {path}")
