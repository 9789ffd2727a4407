"""The table of `fp8.checkpoints.layouts` in docs/export.md."""

from __future__ import annotations

from docs.markdown import table
from fp8.checkpoints.layouts import LAYOUTS, ORDERS, Layout
from fp8.checkpoints.writing import unfit
from fp8.recipes.recipe import RECIPES


def layouts() -> str:
    """A row for each layout, with links to the sources."""
    headings = "layout | in | tensors of a weight of N x K | order of scales | recipes | defined by"
    return table(headings, [_row(row) for row in LAYOUTS.values()])


def _row(row: Layout) -> list[str]:
    # Sizes that no other product gives, to write shapes in letters.
    outputs, inputs = 128 * 1009, 1024 * 2003
    tensors = []
    for part, entry in row.entries((outputs, inputs)).items():
        sizes = [_in_letters(n, outputs, inputs) for n in entry.shape]
        dtype = str(entry.dtype).removeprefix("torch.")
        name = row.forms[part].format("weight")
        tensors.append(f"`{name}` {dtype} ({', '.join(sizes)})")
    order = ORDERS[row.order].about
    fit = [f"`{recipe.name}`" for recipe in RECIPES.values() if not unfit(recipe, row)]
    fused = ", ".join(f"`{each.name}`" for each in row.fused)
    if row.experts:
        fused += ", `w13`, `w2` of experts"
    if fused:
        tensors.append(f"fused: {fused}")
    if row.stacked:
        tensors.append("each of all experts, the first dimension")
    return [
        f"`{row.name}`",
        row.place,
        "<br>".join(tensors),
        order,
        ", ".join(fit),
        "<br>".join(map(_link, row.sources)),
    ]


def _in_letters(n: int, outputs: int, inputs: int) -> str:
    for size, letter in ((outputs, "N"), (inputs, "K")):
        if n == size:
            return letter
        if size % n == 0 and n > 1000:
            return f"{letter} / {size // n}"
    return str(n)


def _link(source: tuple[str, str, str, str]) -> str:
    engine, repository, path, version = source
    tag = f"v{version}" if engine == "transformers" else version
    name = path.rpartition("/")[2]
    url = f"https://github.com/{repository}/blob/{tag}/{path}"
    return f"{engine} {version}: [`{name}`]({url})"
