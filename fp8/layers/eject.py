"""`eject`: writes the FP8 layers of a converted model as one file that needs torch alone."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from importlib import resources
from itertools import groupby
from pathlib import Path
from string import Template
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from ..common.copies import deep_copy
from ..common.mixin import bare_class
from ..common.report import CHANGES
from ..common.step import unwrapped
from ..common.validation import check_module
from ..recipes.cast import Cast
from ..recipes.history import is_history
from ..recipes.recipe import SAME, Recipe
from ..torch_internals import Layer
from ..version import __version__
from .adapters import is_replacement
from .calibrate import calibration
from .override import check_not_overridden
from .select import is_unit_scaled
from .settings import converted, policy_of

#: The limits of the file that `eject` writes.
MAX_LINES, WIDTH = 150, 100

SCALINGS = {"unit": "fixed", "static": "fixed", "tensor": "tensor", "row": "row"}
"""Scaling of a cast -> the word of the file for it."""

#: A part of a dotted name that is a number.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class _Layer(NamedTuple):
    """pattern: the name, with "*" in place of its first number. exponents: of the fixed scales of
    input, weight and gradient; None: not set."""

    name: str
    pattern: str
    number: int
    layer: Layer
    recipe: Recipe
    exponents: tuple[int | None, ...]


def eject(model: nn.Module, path: str | Path) -> Path:
    """Writes the FP8 layers of a converted model as one Python file of at most 150 lines.

    The file needs torch alone. Its ``convert(model)`` gives the linear layers of a plain model of
    the same structure the products that they have here: the same operands, casts, scales and sums,
    bit for bit on a CPU. Recipes and static scales are literals of the file. On GPUs with FP8 it
    calls ``torch._scaled_mm``. Inf becomes NaN in both formats.

    Args:
        model: a converted model, calibrated if its scaling is "static". Its layers are linear
            layers in float32, bfloat16 or float16: `torch.nn.Linear`, and subclasses whose forward
            pass is that of nn.Linear, or with the parameters in the dtype of the input. Their casts
            are "e4m3" or "e5m2" with scaling "unit", "static", "tensor" or "row" (rule "up").
        path: the file to write: a name that can be imported, with the suffix ".py".

    Returns:
        The path.

    Raises:
        TypeError: if ``model`` is not a module.
        ValueError: if nothing is converted; inside of `fp8.override`; for what the file does not
            have, with the layers concerned; for static scales of more layers than fit; for a path
            that is no module.

    >>> import torch, fp8, tempfile, pathlib
    >>> model = fp8.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), "tensor")
    >>> path = fp8.eject(model, pathlib.Path(tempfile.mkdtemp()) / "my_fp8.py")
    >>> len(path.read_text().splitlines()) <= 150
    True
    """
    check_module("eject", model)
    path = Path(path)
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise ValueError(f"eject writes a module, such as my_fp8.py, got {str(path)!r}")
    model = unwrapped(model)
    check_not_overridden("eject", model)
    layers = list(_layers(model))
    whys: dict[str, list[str]] = {}
    for name, why in _refused(model, layers):
        whys.setdefault(why, []).append(name or "(model)")
    whys.pop("", None)
    if whys:
        listed = [f"\n  {', '.join(names)}: {why}" for why, names in whys.items()]
        what = "eject has no code for these parts of the model:"
        raise ValueError("".join([what, *listed]))
    if not layers:
        raise ValueError(
            "eject: no layer of the model is converted; call fp8.convert before"
        )
    text = _text(layers, path.stem)
    lines = text.count("\n")
    if lines > MAX_LINES:
        raise ValueError(
            f"the file would have {lines} lines, eject writes at most {MAX_LINES}: the scales of "
            f"{len(layers)} layers do not fit; use a recipe without static scales"
        )
    path.write_text(text, encoding="utf-8")
    return path


def _layers(model: nn.Module) -> Iterator[_Layer]:
    scales = calibration(model)
    for name, layer in converted(model).items():
        roles = (f"{name}.{role}".lstrip(".") for role in ("input", "weight", "grad"))
        exponents = tuple(scales.get(role, 0) for role in roles)
        pattern = _NUMBER.sub("*", name, count=1)
        found = _NUMBER.search(name)
        number = int(found.group()) if found else 0
        yield _Layer(name, pattern, number, layer, layer.fp8_recipe, exponents)


# What has no code


def _refused(model: nn.Module, layers: list[_Layer]) -> Iterator[tuple[str, str]]:
    """(name, why) of everything in the model that the file cannot express, and others with ""."""
    for change in CHANGES:
        for row in change.rows(model):
            yield row.path, "" if row.left_alone else row.done
    for name, module in model.named_modules():
        yield name, "its policy has a switch" if policy_of(module).switch else ""
        yield name, "a layer of another library" if is_replacement(module) else ""
    for each in layers:
        unset = _UNSET if None in each.exponents else ""
        yield each.name, _why_layer(each.layer) or _why_recipe(each.recipe) or unset


_UNSET = "static scales of it are not set: call fp8.calibrate, or train a step, as zeros set none"


def _why_layer(layer: nn.Module) -> str:
    kind = bare_class(layer)
    if is_unit_scaled(layer):
        return "unit-scaled"
    if parametrize.is_parametrized(layer):
        return "its weight is computed by a parametrization"
    if not issubclass(kind, nn.Linear):
        return f"a {kind.__name__}, not an nn.Linear"
    if kind.forward is not nn.Linear.forward and not _casts(layer, kind):
        return f"a {kind.__name__}, whose forward pass is its own"
    for weight in layer.parameters(recurse=False):
        if type(weight) is not nn.Parameter or type(weight.data) is not Tensor:
            return f"its weight is a {type(weight.data).__name__}"
        if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"its weight is {weight.dtype}"
    return ""


@torch.no_grad()
def _casts(layer: Layer, kind: type[nn.Linear]) -> bool:
    """Whether ``kind.forward`` is F.linear with the parameters in the dtype of the input."""
    others = [name for name, _ in layer.named_buffers() if not is_history(name)]
    if {*layer._parameters} != {"weight", "bias"} or others or layer._modules:
        return False
    generator = torch.Generator().manual_seed(0)
    random = {
        id(p): nn.Parameter(torch.randn(p.shape, generator=generator).to(p.dtype))
        for p in layer.parameters()
    }
    layer = deep_copy(layer, random)
    # A subclass with a forward of its own may still be a linear layer: its results decide.
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, layer.in_features, generator=generator).to(dtype)
        bias = None if layer.bias is None else layer.bias.to(dtype)
        try:
            if not torch.equal(
                kind.forward(layer, x), F.linear(x, layer.weight.to(dtype), bias)
            ):
                return False
        except RuntimeError:  # of unlike dtypes
            return False
    return True


def _why_recipe(recipe: Recipe) -> str:
    if recipe.accumulate is not None:
        return (
            f"recipe {recipe.name!r} has the sums of accumulate={recipe.accumulate!r}"
        )
    if recipe.fast_sums != ("forward",):
        return f"recipe {recipe.name!r} sums {recipe.fast_sums} fast"
    for cast in filter(None, recipe.casts):
        scaling = cast.scaling if cast.scaling in SCALINGS else "unit"
        if cast.format not in ("e4m3", "e5m2") or cast != Cast(
            format=cast.format, scaling=scaling
        ):
            return f"recipe {recipe.name!r} casts to {cast}"
    for first, second in (recipe.forward, recipe.grad_input, recipe.grad_weight):
        if first and second and first.format == second.format == "e5m2":
            return f"recipe {recipe.name!r} multiplies e5m2 by e5m2, for which there is no kernel"
    for field, other in recipe.overrides.items():
        main = getattr(recipe, field.rpartition("_")[2])
        if other and other.scaling == "unit" and main and main.scaling == "static":
            return f"recipe {recipe.name!r} has a scale for {main} and none for {field}"
    return ""


# The text


def _text(layers: list[_Layer], stem: str) -> str:
    """The file. stem: its name, for the docstring."""
    names: dict[str, str] = {}  # Recipe.text -> the name in the file
    entries = []
    for recipe in {layer.recipe.text: layer.recipe for layer in layers}.values():
        name = re.sub(r"\W+", "_", recipe.name).strip("_")
        # Names of recipes may differ in characters alone that are left out.
        while not name or name in names.values():
            name += "_"
        names[recipe.text] = name
        entries.append(_entry(name, recipe))
    template = (
        resources.files(__package__).joinpath("eject.txt").read_text(encoding="utf-8")
    )
    rows = "\n".join(_rows(layers, names))
    tables = {"recipes": "\n".join(entries), "layers": rows}
    return Template(template).substitute(version=__version__, stem=stem, **tables)


def _entry(name: str, recipe: Recipe) -> str:
    """An entry of RECIPES: the casts of each product in words."""
    x, w, g, again_w, again_g, again_x = recipe.casts
    shown = [
        f'("{_word(x)}", "{_word(w)}")',
        f'("{_word(g)}", "{_word(again_w, w)}")',
        f'("{_word(again_g, g)}", "{_word(again_x, x)}")',
    ]
    line = f'    "{name}": ({", ".join(shown)}),'
    if len(line) <= WIDTH:
        return line
    pairs = ",\n        ".join(shown)
    return f'    "{name}": (\n        {pairs},\n    ),'


def _word(cast: Cast | None, first: Cast | None = None) -> str:
    """first: of the first product of the operand, whose copy is used if the cast is the same."""
    if cast is None:
        return "none"
    reused = cast == first and cast.scaling != "row"
    if reused:
        return SAME
    return f"{cast.format} {SCALINGS[cast.scaling]}"


def _rows(layers: list[_Layer], names: dict[str, str]) -> Iterator[str]:
    """The rows of LAYERS. Layers of one recipe whose names differ by consecutive numbers, the first
    in the name, share a row."""
    groups: dict[tuple[str, str], list[_Layer]] = {}
    for layer in layers:
        groups.setdefault((layer.pattern, layer.recipe.text), []).append(layer)
    rows: list[tuple[str, list[_Layer]]] = []
    for members in groups.values():
        # Numbers that grow with their places have one difference to them.
        consecutive = groupby(enumerate(members), lambda item: item[1].number - item[0])
        for _, run in consecutive:
            of_run = [layer for _, layer in run]
            first = of_run[0]
            span = first.name or "(model)"
            if len(of_run) > 1:
                numbers = f"[{first.number}:{first.number + len(of_run)}]"
                span = first.pattern.replace("*", numbers)
            rows.append((span, of_run))
    width = max(len(span) for span, _ in rows)
    for span, of_run in rows:
        words = [span.ljust(width), names[of_run[0].recipe.text], *_exponents(of_run)]
        line = " ".join(words)
        yield from textwrap.wrap(
            line,
            WIDTH,
            subsequent_indent="    ",
            break_on_hyphens=False,
        )


def _exponents(layers: list[_Layer]) -> Iterator[str]:
    """Yields the static exponents of input, weight and gradient of layers with one recipe. Equal
    consecutive layers are counted; nothing is yielded if no scale is static."""
    if any(cast and cast.scaling == "static" for cast in layers[0].recipe.casts):
        for exponents, run in groupby(layer.exponents for layer in layers):
            count = len(list(run))
            yield "/".join(map(str, exponents)) + (f"*{count}" if count > 1 else "")
