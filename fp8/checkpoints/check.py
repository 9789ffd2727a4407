"""`check_layout`: whether tensors are as an engine has them, or the first one that is not.

Shapes and dtypes are compared; of tensors with values also their order in memory, and scales for
what no weight has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..common.validation import check_choice
from .fusing import Target, targets
from .layouts import E8M0, FORMS, LAYOUTS, ORDERS, Config, Entry, Layout

__all__ = ["Checked", "check_layout", "engines"]

_LOW = (torch.float8_e4m3fn, torch.float8_e5m2)

_OCTAVES = 64
"""The octaves from 1 beyond which a scale in E8M0 is no scale of weights. A pack of scales that are
no powers of two leaves bits of one in the exponent of another."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What `check_layout` has found.

    Attributes:
        layout: the name of the layout that was compared.
        weights: the number of weights in low precision that are right.
        why: the first mismatch, in words; "" if there is none.
    """

    layout: str
    weights: int
    why: str

    def __str__(self) -> str:
        if self.why:
            return f"layout {self.layout!r}: {self.why}"
        return f"layout {self.layout!r}: {self.weights} weights pass"


def engines() -> dict[str, list[Layout]]:
    """Name of an engine -> the layouts of its files; name of a layout -> that layout."""
    found: dict[str, list[Layout]] = {}
    for row in LAYOUTS.values():
        for source in row.sources:
            if row.place == "file" and row not in found.setdefault(source.engine, []):
                found[source.engine].append(row)
    return {name: rows for name, rows in found.items() if rows} | {
        name: [row] for name, row in LAYOUTS.items()
    }


def check_layout(
    tensors: Mapping[str, Tensor],
    engine: str,
    *,
    config: Config | None = None,
    same_as: Mapping[str, Tensor] | None = None,
) -> Checked:
    """Compares tensors with the layouts of an engine, of any model.

    Weights are found by their names and dtypes; those in high precision pass. Neither shape nor
    value tells whether bytes are in another order, but ``same_as`` does. Of several layouts of
    an engine the one is taken that ``config`` names, or without it the one that most of the tensors
    have.

    Args:
        tensors: a state_dict, or tensors on the meta device, whose values are not compared.
        engine: "vllm", "sglang", "transformers", "compressed-tensors" or "model-optimizer", for
            files; or the name of a layout in `fp8.checkpoints.layouts.LAYOUTS`, for the parameters
            of an engine.
        config: the quantization_config of the files.
        same_as: tensors that these are to be equal to, such as those that were sent to an engine.
            An engine that orders its memory once more after an update changes no shape.

    Returns:
        The first mismatch in the order of ``tensors``, or that there is none.

    Raises:
        ValueError: for an unknown engine.

    >>> import torch
    >>> from fp8.checkpoints.check import check_layout
    >>> weight = torch.empty(256, 128, dtype=torch.float8_e4m3fn, device="meta")
    >>> scale = torch.empty(1, 2, device="meta")
    >>> state = {"up.weight": weight, "up.weight_scale_inv": scale}
    >>> print(check_layout(state, "block").why)
    scale of up is 1 x 2, this engine wants 2 x 1
    """
    known = engines()
    check_choice("engine", engine, known)
    rows = known[engine]
    if config and len(rows) > 1:
        named = [row for row in rows if _is_named(row, config)]
        if not named:
            method, style = config.get("quant_method"), config.get("format")
            what = f"quant_method {method!r}, format {style!r}"
            has = ", ".join(sorted({row.style or row.method for row in rows}))
            why = f"the files say {what}, which this engine does not have: {has}"
            return Checked(layout=engine, weights=0, why=why)
        rows = named
    # Without a configuration the layout is the one in which most weights are right.
    found = [_compared(tensors, row, same_as or {}) for row in rows]
    return max(found, key=lambda each: (not each[0].why, each[1]))[0]


def _is_named(row: Layout, config: Config) -> bool:
    if row.method == "compressed-tensors":
        return row.style == config.get("format")
    by_powers = row.in_powers == (config.get("scale_fmt") == "ue8m0")
    return row.method == config.get("quant_method") and (
        by_powers or row.method != "fp8"
    )


def _compared(
    tensors: Mapping[str, Tensor],
    layout: Layout,
    same_as: Mapping[str, Tensor],
) -> tuple[Checked, tuple[int, int]]:
    """What is found for a layout; the number of weights that pass, and the `_likeness` of
    the next one."""
    stems = _stems(tensors)
    why, right, alike = "", 0, 0
    if not stems:
        why = "no weight is in low precision"
    fused = targets({stem.removesuffix(".weight"): None for stem in stems}, layout)
    for stem in stems:
        why = next(filter(None, _mismatches(tensors, stem, fused, layout)), "")
        if why:
            alike = _likeness(tensors, stem, layout)
            break
        right += 1
    why = why or _orphan(tensors, stems)
    for name, x in same_as.items():
        why = why or _unlike(name, tensors.get(name), x)
    return Checked(layout=layout.name, weights=right, why=why), (right, alike)


def _likeness(tensors: Mapping[str, Tensor], stem: str, layout: Layout) -> int:
    """How many parts of a weight have the names of a layout, and, which counts twice, how many have
    the shapes and dtypes, under any name."""
    named: set[tuple[str, str]] = set()
    shapes: dict[str, Entry] = {}
    for part, forms in FORMS.items():
        for form in forms:
            x = tensors.get(_named(stem, form))
            if x is not None:
                named.add((part, form))
                shapes[part] = Entry(tuple(x.shape), x.dtype)
    found = len(named & layout.forms.items())
    whole = layout.shape_of(shapes["values"].shape)
    if len(whole) > 1:
        found += 2 * len(set(layout.entries(whole).items()) & shapes.items())
    return found


def _unlike(name: str, got: Tensor | None, want: Tensor) -> str:
    """How a tensor differs from the one that it is to be equal to."""
    if got is None:
        return f"{name} is missing"
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{name} is {tuple(got.shape)} {got.dtype}, not {tuple(want.shape)} {want.dtype}"
    if got.is_meta or want.is_meta:
        return ""
    one, other = (x.flatten().view(torch.uint8) for x in (got, want.to(got.device)))
    if torch.equal(one, other):
        return ""
    if torch.equal(one.sort().values, other.sort().values):
        return f"{name} has the same bytes in another order: it was shuffled"
    return f"{name} has other values"


# Weights


def _stem_of(name: str, form: str) -> str:
    """The weight of a part with this name; "" if the name has another form."""
    before, after = form.split("{}")
    path, dot, last = name.rpartition(".")
    if not last.startswith(before) or not last.endswith(after):
        return ""
    last = last[len(before) : len(last) - len(after)]
    return f"{path}{dot}{last}" if last else ""


def _named(stem: str, form: str) -> str:
    path, dot, last = stem.rpartition(".")
    return path + dot + form.format(last)


def _stems(tensors: Mapping[str, Tensor]) -> list[str]:
    """The weights in low precision, or with a scale."""
    others = [form for part in ("scale", "divisor", "factor") for form in FORMS[part]]
    # A weight is what has a scale, or a dtype or name of low precision. A scale is no weight,
    # although its name may look like one.
    of_parts = {_stem_of(name, form) for name in tensors for form in others} - {""}
    found: dict[str, None] = {}
    for name, x in tensors.items():
        forms = sorted(FORMS["values"], key=len)
        stem = next(s for form in reversed(forms) if (s := _stem_of(name, form)))
        is_part = any(_is_there(_stem_of(name, form), tensors) for form in others)
        is_low = x.dtype in _LOW or stem != name
        if not is_part and (is_low or stem in of_parts):
            found[stem] = None
    return list(found)


def _is_there(stem: str, tensors: Mapping[str, Tensor]) -> bool:
    return bool(stem) and any(_named(stem, form) in tensors for form in FORMS["values"])


def _orphan(tensors: Mapping[str, Tensor], stems: Sequence[str]) -> str:
    for name in tensors:
        for form in FORMS["scale"]:
            stem = _stem_of(name, form)
            if stem.endswith("weight") and not _is_there(stem, tensors):
                return f"{name} is a scale without a weight"
    return ""


# Mismatches


def _mismatches(
    tensors: Mapping[str, Tensor],
    stem: str,
    fused: Mapping[str, Target],
    layout: Layout,
) -> Iterator[str]:
    """For each thing that is compared, what is wrong with it, or ""."""
    yield _unfused(stem, fused, layout)
    of = stem.removesuffix(".weight")
    yield _name_mismatch(tensors, stem, "values", layout)
    values = tensors[_named(stem, layout.values)]
    low = layout.entries((2, 256))["values"].dtype
    yield _dtype_mismatch(f"values of {of} are", values, low)
    wrong_dims = "values of {} are {}, this engine wants {} dimensions"
    dims = (3, 4) if layout.grouped else (2, 3)
    shape = " x ".join(map(str, values.shape))
    yield "" if values.dim() in dims else wrong_dims.format(of, shape, dims[0])
    whole = layout.shape_of(values.shape)
    entries = layout.entries(whole)
    for part, entry in entries.items():
        yield _name_mismatch(tensors, stem, part, layout)
        x = tensors[_named(stem, layout.forms[part])]
        yield _shape_mismatch(f"{part} of {of}", part, x, entry, whole)
        yield _dtype_mismatch(f"{part} of {of} is", x, entry.dtype)
        yield _stride_mismatch(f"{part} of {of}", x, layout, part)
        if part != "values" and not x.is_meta:
            yield _value_mismatch(f"{part} of {of}", x, layout, whole, part)
    for other in set(FORMS["divisor"] + FORMS["factor"]) - {*layout.forms.values()}:
        extra = _named(stem, other)
        yield f"{extra} is not a part of this layout" if extra in tensors else ""
    yield _unlike_units(tensors, stem, layout)


def _unfused(stem: str, fused: Mapping[str, Target], layout: Layout) -> str:
    path, _, last = stem.rpartition(".")
    if layout.place == "file" and re.fullmatch(r"w(13|2)_weight", last):
        return f"{stem} is of all experts: files have a weight for each expert"
    target = fused.get(path)
    if target is None:
        return ""
    parts = ", ".join(target.all[:3])
    return f"{parts} are apart: this engine has them as {target.path}.{target.stem}"


def _name_mismatch(
    tensors: Mapping[str, Tensor], stem: str, part: str, layout: Layout
) -> str:
    wanted = _named(stem, layout.forms[part])
    if wanted in tensors:
        return ""
    others = [name for form in FORMS[part] if (name := _named(stem, form)) in tensors]
    of, last = stem.removesuffix(".weight"), wanted.rpartition(".")[2]
    if others:
        other = others[0].rpartition(".")[2]
        return f"{of} has its {part} as {other}, this engine wants {last}"
    return f"{of} has no {part}: {last} is missing"


def _dtype_mismatch(what: str, x: Tensor, wanted: torch.dtype) -> str:
    if x.dtype in (wanted, *_SAME.get(wanted, ())):
        return ""
    got, want = (str(dtype).removeprefix("torch.") for dtype in (x.dtype, wanted))
    return f"{what} {got}, this engine wants {want}"


_SAME = {torch.uint8: (E8M0, torch.float4_e2m1fn_x2), E8M0: (torch.uint8,)}
"""Dtypes of the same bytes."""


def _shape_mismatch(
    what: str,
    part: str,
    x: Tensor,
    entry: Entry,
    weight: Sequence[int],
) -> str:
    scalars = {(), (1,)}
    if tuple(x.shape) == entry.shape or {tuple(x.shape), entry.shape} <= scalars:
        return ""
    got, want = (" x ".join(map(str, shape)) for shape in (x.shape, entry.shape))
    return (
        f"{what} is {got or 'one'}, this engine wants {want}{_alike(part, x, weight)}"
    )


def _alike(part: str, x: Tensor, weight: Sequence[int]) -> str:
    """Which layouts have a part as it is, for the end of a sentence."""
    if part != "scale":
        return ""
    entry = Entry(tuple(x.shape), x.dtype)
    rows = [row for row in LAYOUTS.values() if len(weight) > 1]
    alike = [row.name for row in rows if row.entries(weight).get(part) == entry]
    if alike:
        return f": it is as in layout {alike[0]!r}"
    for row in rows:
        order = ORDERS[row.order]
        # The shape may be that of scales that were ordered twice.
        if row.order != "rows":
            once = row.entries(weight)["scale"]
            twice = order.shape(once.shape, weight[-2])
            if entry == Entry(tuple(twice), row.dtype):
                return f": it is {row.order} twice"
    return ""


def _stride_mismatch(what: str, x: Tensor, layout: Layout, part: str) -> str:
    stride = ORDERS[layout.order].stride
    if x.is_meta or part != "scale":
        return ""
    if stride is None:
        if x.is_contiguous():
            return ""
        return f"{what} has strides {x.stride()}, this engine wants it contiguous"
    wanted = stride(x.shape)
    # A dimension of size 1 has any stride, but for the kernel's check.
    if x.stride()[-2:] == wanted:
        return ""
    return f"{what} has strides {x.stride()}, this engine wants {wanted}"


def _value_mismatch(
    what: str,
    x: Tensor,
    layout: Layout,
    weight: Sequence[int],
    part: str,
) -> str:
    if part == "scale" and layout.dtype == torch.int32:
        return _pack_mismatch(what, x, weight)
    if part == "scale" and layout.in_powers:
        return _byte_mismatch(what, x.contiguous().view(torch.uint8))
    numbers = x.float()
    if not bool(numbers.isfinite().all()):
        return f"{what} has NaN or Inf"
    if bool((numbers < 0).any()):
        return f"{what} has negative numbers"
    return ""


def _byte_mismatch(what: str, bytes: Tensor) -> str:
    if bool((bytes == 255).any()):
        return f"{what} has NaN (byte 255 of E8M0)"
    far = (bytes.int() - 127).abs() > _OCTAVES
    if bool(far.any()):
        exponent = int(bytes[far][0]) - 127
        return (
            f"{what} has 2**{exponent}: it was packed twice, or from scales that are no powers of "
            "two"
        )
    return ""


def _pack_mismatch(what: str, x: Tensor, weight: Sequence[int]) -> str:
    # A single column has a stride of its own, contiguous or not.
    bytes = x.flatten().view(torch.uint8).view(*x.shape[:-1], -1)
    blocks = -(-weight[-1] // 128)
    used, padding = bytes[..., :blocks], bytes[..., blocks:]
    if bool(padding.any()):
        return f"{what} has bytes other than 0 in its padding: it was packed twice"
    # All 128 rows of a block have its scale.
    rows = torch.arange(weight[-2], device=x.device) // 128 * 128
    if not torch.equal(used, used[..., rows, :]):
        return f"{what} has unlike bytes for the rows of one block of 128"
    return _byte_mismatch(what, used)


def _unlike_units(tensors: Mapping[str, Tensor], stem: str, layout: Layout) -> str:
    """Whether layers that the engine fuses have unlike units."""
    path, _, last = stem.rpartition(".")
    parent, dot, name = path.rpartition(".")
    form = layout.divisor or layout.factor
    for rule in layout.shared:
        if name != rule.parts[0] or last != "weight":
            continue
        names = [_named(f"{parent}{dot}{part}.weight", form) for part in rule.parts]
        units = [tensors[each] for each in names if each in tensors]
        if any(x.is_meta for x in units):
            continue
        if len({x.float().item() for x in units}) > 1:
            parts, kind = ", ".join(rule.parts), form.format("weight")
            return (
                f"{parts} of {parent} have unlike {kind}: this engine fuses them and takes the "
                "largest"
            )
    return ""


def in_natural_order(names: Iterable[str]) -> list[str]:
    """Names by their parts, with numbers as numbers."""

    def key(name: str) -> list[Any]:
        return [
            (part.isdigit(), int(part) if part.isdigit() else part)
            for part in name.split(".")
        ]

    return sorted(names, key=key)
