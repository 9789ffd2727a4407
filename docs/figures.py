"""Figures of the pages, drawn as SVG from the tables of the code: docs/figures/*.svg.

Colours are CSS variables of each file, with a light and a dark set. `python -m docs.build` writes
them; tests/test_tables.py fails while a file is stale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path

from fp8.formats.format import FORMATS, Format
from fp8.recipes.cast import Cast
from fp8.recipes.recipe import RECIPES, Recipe

FOLDER = Path(__file__).with_name("figures")

STYLE = """\
svg{--ink:#1f2430;--soft:#5b6472;--line:#9aa3b2;--page:#ffffff;--box:#eef1f6;--low:#c9dafc;
--mid:#dcebd3;--high:#f4dfc2;font:13px system-ui,sans-serif}
@media(prefers-color-scheme:dark){svg{--ink:#e6e9ef;--soft:#a9b1bf;--line:#6b7484;
--page:#1e2129;--box:#2b303b;--low:#2f4a80;--mid:#3a5a33;--high:#6b4f24}}
text{fill:var(--ink)}.soft{fill:var(--soft);font-size:11px}.head{font-weight:600}
.code{font-family:ui-monospace,monospace;font-size:11px;fill:var(--soft)}
.page{fill:var(--page)}.box{fill:var(--box);stroke:var(--line)}.low{fill:var(--low)}
.mid{fill:var(--mid)}.high{fill:var(--high)}.rule{stroke:var(--line);fill:none}
.faint{opacity:.45}.arrow{fill:var(--line)}"""

WIDTH = 760
"""The width of every figure, in pixels: a page's text is about as wide."""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text whose baseline begins, ends or is centred at (x, y)."""
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{style}>{escape(words)}</text>'


def box(
    x: float, y: float, width: float, height: float, kind: str = "box", bend: int = 4
) -> str:
    """A filled rectangle."""
    size = f'width="{width:g}" height="{height:g}" rx="{bend}"'
    return f'<rect x="{x:g}" y="{y:g}" {size} class="{kind}"/>'


def line(x1: float, y1: float, x2: float, y2: float, dashed: bool = False) -> str:
    """A thin line."""
    dash = ' stroke-dasharray="4 4"' if dashed else ""
    return f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" class="rule"{dash}/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """A line with a head at its end, down or to the right."""
    head = "l-4 -7h8z" if x1 == x2 else "l-7 -4v8z"
    return f'{line(x1, y1, x2, y2)}<path d="M{x2:g} {y2:g}{head}" class="arrow"/>'


def figure(title: str, height: float, parts: Iterable[str]) -> str:
    """The text of a file."""
    size = f'viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        box(0, 0, WIDTH, height, "page", 0),
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


# Formats on a number line

SHOWN = range(-26, 21)
"""The exponents of the number line; ranges that go on are cut off."""


def _at(exponent: float) -> float:
    """The place of 2**exponent on the line."""
    first, last = SHOWN[0], SHOWN[-1]
    return 140 + (min(max(exponent, first), last) - first) / (last - first) * (
        WIDTH - 160
    )


def _format_row(y: float, format: Format) -> list[str]:
    ends = (format.min_subnormal, format.min_normal, format.max)
    kind = "low" if format.bits <= 4 else "mid" if format.bits <= 8 else "high"
    left, middle, right = (_at(math.log2(end)) for end in ends)
    parts = [
        text(20, y + 14, format.name, "head"),
        text(132, y + 14, f"{format.bits} bit", "soft", "end"),
        box(left, y, middle - left, 20, f"{kind} faint", 2),
        box(middle, y, right - middle, 20, kind, 2),
    ]
    words = f"largest {_number(format.max)}"
    if right < WIDTH - 120:
        return [*parts, text(right + 6, y + 14, words, "soft")]
    return [*parts, text((left + right) / 2, y + 14, words, "soft", "middle")]


def _number(value: float) -> str:
    return f"{value:g}" if value < 1e6 else f"2^{math.log2(value):.0f}"


def formats() -> str:
    """Every signed format of FORMATS: from its smallest to its largest magnitude."""
    rows = sorted(FORMATS.values(), key=lambda f: (f.bits, f.bias))
    top, step = 40, 27
    bottom = top + step * len(rows)
    parts = [
        text(_at(0), 22, "RMS 1", "soft", "middle"),
        line(_at(0), 28, _at(0), bottom, True),
    ]
    for i, format in enumerate(rows):
        parts += _format_row(top + step * i, format)
    parts.append(line(_at(SHOWN[0]), bottom + 2, _at(SHOWN[-1]), bottom + 2))
    for exponent in range(-24, 21, 4):
        parts.append(
            text(_at(exponent), bottom + 18, f"2^{exponent}", "soft", "middle")
        )
    about = (
        "Magnitudes that a format holds. Pale: subnormal, with fewer digits the smaller "
        "they are."
    )
    parts.append(text(20, bottom + 42, about, "soft"))
    return figure("The formats on a number line", bottom + 56, parts)


# The three products and their operands

PRODUCTS = (
    ("forward", "y = Q(x) Q(w)ᵀ", ("input x", "weight w")),
    ("gradient of the input", "dx = Q(g) Q(w)", ("gradient g", "weight w")),
    ("gradient of the weight", "dw = Q(g)ᵀ Q(x)", ("gradient g", "input x")),
)
"""Name, formula, and operands of each product of a layer, in the order of `Recipe.products`."""

IN_THE_FIGURE = (
    "unit",
    "tensor",
    "row",
    "row_gw_hp",
    "block",
    "mxfp8",
    "nvfp4",
    "bf16",
)


def _operands(recipe: Recipe) -> tuple[tuple[Cast | None, Cast | None], ...]:
    """The casts of the six operands, by product."""
    return (recipe.input, recipe.weight), recipe.grad_input, recipe.grad_weight


def _cell(x: float, y: float, cast: Cast | None) -> list[str]:
    if cast is None:
        return [box(x, y, 96, 34), text(x + 48, y + 21, "as it is", "soft", "middle")]
    bits = FORMATS[cast.format].bits
    kind = "low" if bits <= 4 else "mid" if bits <= 8 else "high"
    scaling = "no scale" if cast.scaling == "unit" else f"scale: {cast.scaling}"
    return [
        box(x, y, 96, 34, kind),
        text(x + 48, y + 15, cast.format, "head", "middle"),
        text(x + 48, y + 28, scaling, "soft", "middle"),
    ]


def products() -> str:
    """The operands of the three products of a layer under some recipes."""
    parts, left, step = [], 104, 218
    for i, (name, formula, operands) in enumerate(PRODUCTS):
        x = left + step * i
        parts += [
            text(x + 98, 22, name, "head", "middle"),
            text(x + 98, 42, formula, "", "middle"),
        ]
        for j, operand in enumerate(operands):
            parts.append(text(x + 48 + 100 * j, 64, operand, "soft", "middle"))
    for row, name in enumerate(IN_THE_FIGURE):
        y = 74 + 42 * row
        parts.append(text(14, y + 21, name, "head"))
        for i, pair in enumerate(_operands(RECIPES[name])):
            for j, cast in enumerate(pair):
                parts += _cell(left + step * i + 100 * j, y, cast)
    bottom = 74 + 42 * len(IN_THE_FIGURE)
    about = (
        "x: input of the layer, w: its weight, g: gradient of its output. Q: the cast."
    )
    parts.append(text(14, bottom + 16, about, "soft"))
    return figure("The three products of a layer under recipes", bottom + 30, parts)


# Flows


@dataclass(frozen=True, kw_only=True)
class Step:
    """A box of a flow. where: the file. aside: what happens instead, or besides, to its right."""

    what: str
    where: str = ""
    about: str = ""
    aside: str = ""
    aside_where: str = ""


PRODUCT_FLOW = (
    Step(
        what="U.linear(x, w, b), nn.Linear, a converted layer",
        where="unit_scaling/ops/products.py",
        about="a rule of OPS: shapes give the factors s_y, s_dx, s_dw; 1 for nn.Linear",
    ),
    Step(
        what="linear(x, w, b, scales)",
        where="fp8/products/matmul.py",
        about="recipe and backend in force",
        aside="no recipe: nothing is cast",
    ),
    Step(
        what="a cast for each of six operands",
        where="fp8/casts/operands.py",
        aside="backend native: FP8 kernels",
        aside_where="fp8/kernels/product.py",
    ),
    Step(what="Q(x), Q(w): scale, then round", where="fp8/casts/casting.py"),
    Step(
        what="forward: y = s_y Q(x) Q(w)ᵀ + b",
        where="fp8/products/matmul.py",
        about="s_y is the alpha of addmm",
        aside="saves Q(x) and Q(w)",
        aside_where="fp8/casts/operands.py",
    ),
    Step(
        what="backward: dx = s_dx Q(g) Q(w), dw = s_dw Q(g)ᵀ Q(x)",
        where="fp8/products/matmul.py",
    ),
)

TRANSFORM_FLOW = (
    Step(
        what="unit_scale(model, batch=...): a copy",
        where="unit_scaling/transforms/unit_scale.py",
        aside="no batch: in the first call",
    ),
    Step(
        what="start: weights of RMS 1, biases zero",
        where="unit_scaling/transforms/values/parameters.py",
    ),
    Step(
        what="first pass: record each torch call",
        where="unit_scaling/transforms/record/calls.py",
        about="where its inputs came from: a list of CallNode",
    ),
    Step(
        what="classify parameters; find residual streams",
        where="unit_scaling/transforms/values/classify.py",
        about="by who reads them, and how",
    ),
    Step(
        what="second pass: a number for each weight",
        where="unit_scaling/transforms/values/set_values.py",
        about="its rule, over the RMS of its operand, when a product first reads it",
    ),
    Step(
        what="further passes: branches, tied tables",
        where="unit_scaling/transforms/values/sources.py",
        about="multiplied into the parameters that hold their scale",
    ),
    Step(
        what="set values and tags: a plain model, and a report",
        where="unit_scaling/transforms/values/set_values.py",
    ),
)

PREFLIGHT_FLOW = (
    Step(
        what="model and batches, or a function of a seed",
        where="fp8/lab/preflight/training.py",
        about="the same weights and batches for every run",
    ),
    Step(what="trace: the products of a forward pass", where="fp8/lab/trace.py"),
    Step(what="reference: a run with snapshots", where="fp8/lab/preflight/training.py"),
    Step(
        what="update errors of every recipe at the snapshots",
        where="fp8/lab/preflight/update_error.py",
    ),
    Step(what="search: which layers to keep", where="fp8/lab/preflight/search.py"),
    Step(
        what="estimates for each accelerator, forecasts of the best one",
        where="fp8/lab/preflight/forecasts.py",
    ),
    Step(
        what="training: finalists, paired seeds",
        where="fp8/lab/preflight/paired_runs.py",
    ),
    Step(
        what="policy, sentences, table, page, JSON",
        where="fp8/lab/preflight/preflight.py",
        about="read from Findings alone",
    ),
)


FLOWS = {
    "product-flow": ("The flow of one product", PRODUCT_FLOW),
    "transform-flow": ("How unit_scale sets values", TRANSFORM_FLOW),
    "preflight-flow": ("The flow of a preflight", PREFLIGHT_FLOW),
}
"""Name of the file -> title and steps."""


def flow(title: str, steps: tuple[Step, ...]) -> str:
    """Boxes from the top to the bottom."""
    parts, y, wide, gap = [], 14.0, 440, 22
    for i, step in enumerate(steps):
        lines = [(step.what, "head"), (step.about, "soft"), (step.where, "code")]
        shown = [(words, kind) for words, kind in lines if words]
        height = 12 + 17 * len(shown)
        parts.append(box(14, y, wide, height))
        for j, (words, kind) in enumerate(shown):
            parts.append(text(26, y + 20 + 17 * j, words, kind))
        if step.aside:
            middle = y + height / 2
            parts += [
                arrow(14 + wide, middle, 490, middle),
                box(490, middle - 22, 256, 44),
            ]
            parts.append(
                text(500, middle - (3 if step.aside_where else -4), step.aside)
            )
            parts.append(text(500, middle + 14, step.aside_where, "code"))
        y += height
        if i + 1 < len(steps):
            parts.append(arrow(14 + wide / 2, y, 14 + wide / 2, y + gap))
        y += gap
    return figure(title, y - gap + 14, parts)


FIGURES: dict[str, Callable[[], str]] = {
    "formats": formats,
    "products": products,
    **{name: partial(flow, *drawn) for name, drawn in FLOWS.items()},
}
"""Name of the file in docs/figures -> function that returns its text."""
