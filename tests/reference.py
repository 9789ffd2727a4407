"""Slow, obvious float64 oracles of the matrix products and of what happens to their operands."""

import dataclasses
import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fp8 import Cast, Recipe
from fp8.formats.format import get_format
from fp8.recipes.recipe import get_recipe
from tests.shared import pairs

Product = Callable[..., Tensor]

NONE = Recipe(name="none")


def rounded(x, format):
    """x to the nearest value of the format, ties to even, in float64, by definition: what is finite
    saturates, Inf stays Inf where the format has it, and is NaN elsewhere."""
    magnitude = x.double().abs()
    exponent = torch.where(magnitude > 0, magnitude, 1.0).log2().floor()
    exponent = exponent.clamp(min=format.min_exponent)
    step = 2.0 ** (exponent - format.mantissa_bits)
    # Rounds half to even.
    value = (torch.round(magnitude / step) * step).clamp(max=format.max)
    value = torch.where(magnitude.isinf(), format.nonfinite or math.nan, value)
    return torch.copysign(value, x.double())


def rounded_number(x, format):
    """`rounded` of a positive number."""
    exponent = max(math.frexp(x)[1] - 1, format.min_exponent)
    step = 2.0 ** (exponent - format.mantissa_bits)
    return min(round(x / step) * step, format.max)  # rounds half to even


def scale_of(amax, format, rule, whole=0.0, real=np.float32, least=-126):
    """The scale of a tile by its definition. whole: the largest magnitude of the tensor; real: the
    type that is calculated in; least: the exponent of the smallest power of two; that of the
    largest is -least."""
    if not 0 < amax < math.inf:
        return 1.0
    exponent, top = math.frexp(amax)[1] - 1, math.frexp(format.max)[1] - 1
    if rule == "up":
        near = math.frexp(amax / format.max)[1]  # of the quotient, which is rounded
        fitting = (
            2.0**e for e in range(near - 2, near + 2) if amax <= format.max * 2.0**e
        )
        return min(max(next(fitting), 2.0**least), 2.0**-least)
    if rule.startswith("exact"):
        if rule in ("exact_block", "exact_group"):
            amax = max(real(amax), real(1e-10))
        scale = real(amax) / real(format.max)
        if rule == "exact_group":
            scale = real(amax) * (real(1) / real(format.max))
        bottom = float(real(1 / (448 * 512))) if rule == "exact_token" else 2.0**-126
        return min(max(float(scale), bottom), 2.0**126)
    if rule == "e4m3_eden":
        share = real(17 / 16 * 0.93)
        amax, whole = float(real(amax) * share), float(real(whole) * share)
    if rule.startswith("e4m3"):
        guard = 17 / 16 if rule == "e4m3_guarded" else 1.0
        unit, largest = 1.0, 448 if rule in ("e4m3", "e4m3_up") else 256
        if 0 < whole < math.inf:
            unit = real(whole) / real(largest / guard * format.max)
            unit = min(max(unit, 2.0**-126), 2.0**126)
        steps = real(guard) * (real(amax) / real(format.max) / real(unit))
        e4m3 = rounded_number(float(steps), get_format("e4m3"))
        if rule.endswith("_up"):
            codes = (
                torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist()
            )
            # With errors of float32.
            steps = real(steps) * real(1 - 4 * np.finfo(real).eps)
            e4m3 = min((code for code in codes if code >= steps), default=448.0)
        return min(
            max(float(real(max(e4m3, 2.0**-9)) * real(unit)), 2.0**-126), 2.0**126
        )
    if rule == "ceil":
        exponent += math.frexp(amax)[0] != 0.5
    if rule == "even":
        mantissa = math.floor(amax / 2.0**exponent * 2.0**format.mantissa_bits + 0.5)
        exponent += mantissa >= 2.0 ** (format.mantissa_bits + 1)
    return 2.0 ** min(max(exponent - top, least), -least)


def scale_by_error(x, format, rule, whole, real=np.float32, least=-126):
    """`scale_of` of a tile; under "e4m3_4_6" and "e4m3_4_6_up" the better one of it and of that for
    1.5 * amax."""
    largest = _largest(x)
    scale = scale_of(largest, format, rule, whole, real, least)
    if not rule.startswith("e4m3_4_6"):
        return scale
    most = float(np.finfo(real).max)
    other = scale_of(min(1.5 * largest, most), format, rule, whole, real, least)
    errors = [(_tile(x, format, s) - x.double()).square().sum() for s in (scale, other)]
    return other if errors[1] < errors[0] else scale


def rotation(size):
    """Sylvester's matrix by its recursion, with the signs that the package documents."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat(
            [torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)]
        )
    pi = f"{0x243F6A8885A308D3:064b}"[1:]
    signs = torch.tensor([-1.0 if pi[j % 63] == "1" else 1.0 for j in range(size)])
    return matrix * signs.double() / size**0.5


def cast(x, how, axis=-1, scale=None):
    """What a cast (nearest, saturating) makes of an operand (..., rows, columns), in float64.

    Scales are those of what is finite; one that is stored in eight bits (MX, NV) is NaN where its
    tile has anything else, and such a tile does not count in the scale of the tensor.
    axis: the one that is summed over. A rotated operand stays so, filled up with zeros. scale: of a
    tile, in place of that of the rule.
    """
    x = x.detach()
    if how is None:
        return x.double()
    if axis == -2:
        return cast(x.mT, how).mT
    if how.hadamard:
        padded = torch.nn.functional.pad(x.double(), (0, -x.shape[-1] % how.hadamard))
        turned = padded.unflatten(-1, (-1, how.hadamard)) @ rotation(how.hadamard).mT
        x = turned.flatten(-2).to(x.dtype)
    format = get_format(how.format)
    if x.numel() == 0:
        return x.double()
    if how.scaling == "unit":
        return rounded(x, format)
    real = np.float64 if x.dtype == torch.float64 else np.float32
    if how.scaling == "tensor" and scale is None:
        return _tile(x, format, scale_of(_largest(x), format, how.rule, real=real))
    invalid = how.scaling in ("mx", "nv")
    scales = torch.full(x.shape, math.nan, dtype=torch.float64)
    sizes = pairs(how.tile, x.shape[-2:])
    across, along = (by or size for by, size in sizes)
    tiles = [
        (*batch, slice(i, i + across), slice(j, j + along))
        for batch in itertools.product(*map(range, x.shape[:-2]))
        for i in range(0, x.shape[-2], across)
        for j in range(0, x.shape[-1], along)
    ]
    there, magnitudes = x.isfinite().numpy(), _finite(x).abs().numpy()
    kept = [at for at in tiles if not invalid or there[at].all()]
    largest = [float(magnitudes[at].max()) for at in kept]
    whole = max(largest, default=0.0)
    least = -127 if how.scaling == "mx" else -126
    full = [min(by, max(n, 2)) for by, n in pairs((across, along), x.shape[-2:])]
    for at, amax in pairs(kept, largest):
        if scale is None and not how.rule.startswith("e4m3_4_6"):
            scales[at] = scale_of(amax, format, how.rule, whole, real, least)
            continue
        missing = [by - n for by, n in pairs(full, x[at].shape)]
        # At the end.
        tile = torch.nn.functional.pad(x[at], (0, missing[1], 0, missing[0]))
        if scale is None:
            scales[at] = scale_by_error(tile, format, how.rule, whole, real, least)
        else:
            scales[at] = scale(tile)[..., : x[at].shape[-1]]
    return _tile(x, format, scales)


def _largest(x):
    """The largest magnitude of what is finite."""
    return _finite(x).abs().max().item()


def _finite(x):
    """x with zeros for what is not finite, in float64."""
    return torch.where(x.double().abs() < math.inf, x.double(), 0.0)


def _tile(x, format, scale):
    """x under a scale: the quotient that is rounded is that of float32, or float64 for float64."""
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (
        rounded((x.to(work) / torch.as_tensor(scale, dtype=work)).double(), format)
        * scale
    )


def _changed(recipe, change):
    """The recipe with the fields of each of its casts that ``change`` returns."""
    casts = {}
    for field in dataclasses.fields(recipe):
        cast = getattr(recipe, field.name)
        if isinstance(cast, Cast):
            casts[field.name] = dataclasses.replace(cast, **change(cast))
    return dataclasses.replace(recipe, **casts)


def unrotated(recipe):
    return _changed(recipe, lambda cast: {"hadamard": 0, "signs": "fixed"})


def nearest(recipe):
    """The recipe with casts rounding to nearest, fixed rotations and torch's sums: what has one
    right answer."""

    def fixed(cast):
        rule = "e4m3" if cast.rule == "e4m3_eden" else cast.rule
        return {"rounding": "nearest", "signs": "fixed", "rule": rule}

    return _changed(dataclasses.replace(recipe, accumulate=None, promote=0), fixed)


def product(function, operands, grad, scales=(1.0, 1.0, 1.0), recipe=NONE, layer=True):
    """[y, da, db] of ``y = s * function(a, b)`` and the same sums of magnitudes, in float64.

    The second list bounds the rounding errors of any order of summation. layer: whether function is
    F.linear or a convolution and b is cast as a weight; else it is torch.matmul.
    """
    recipe = get_recipe(recipe)
    a, b = operands
    values = []
    magnitudes = []
    convolution = layer and b.dim() > 2
    if convolution:
        six = _maps(function, a, b, grad, recipe)
    else:
        six = _matrices(a, b, grad, recipe, layer)
    shapes = (grad.shape, a.shape, b.shape)
    for scale, shape, compute, pair in pairs(scales, shapes, *six):
        values.append(scale * compute(*pair).sum_to_size(shape))
        sizes = [t.abs() for t in pair]
        magnitudes.append(abs(scale) * compute(*sizes).sum_to_size(shape))
    return values, magnitudes


def _matrices(a, b, g, recipe, layer):
    """How to compute the three results of a product of matrices, and from which operands."""
    batch = (
        ()
        if layer or b.dim() < 3
        else torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    )
    transposed = b  # (..., n, k)
    if not layer:
        transposed = b.mT if b.dim() > 1 else b[None]
    inner, outputs = transposed.shape[-1], transposed.shape[-2]
    rows = (
        (1 if a.dim() == 1 else a.shape[-2],)
        if batch
        else (a.numel() // max(inner, 1),)
    )
    if not inner and not batch:
        rows = (math.prod(a.shape[:-1]),)
    left = a.expand(*batch, *a.shape[-2:]) if batch and a.dim() > 1 else a
    left = (
        left.expand(*batch, a.shape[-1]).unsqueeze(-2)
        if batch and a.dim() == 1
        else left
    )
    left = left.reshape(*batch, *rows, inner)
    right = transposed.expand(*batch, outputs, inner)
    grad = g.reshape(*batch, *rows, outputs)
    forward = recipe.forward if layer else (recipe.input, recipe.input)
    grad_input = (
        recipe.grad_input
        if layer
        else (recipe.grad, _turned(recipe.input, recipe.grad))
    )
    pairs = [
        (cast(left, forward[0]), cast(right, forward[1])),
        (cast(grad, grad_input[0]), cast(right, grad_input[1], -2)),
        (cast(grad, recipe.grad_weight[0], -2), cast(left, recipe.grad_weight[1], -2)),
    ]

    def to(shape):
        # before a sum over broadcast dimensions there may be more of them
        return lambda y: y.reshape(shape) if y.numel() == shape.numel() else y

    computes = [
        lambda x, w: to(g.shape)(x @ w.mT),
        lambda g, w: to(a.shape)(g @ w),
        lambda g, x: to(b.shape)(g.mT @ x if layer else (g.mT @ x).mT),
    ]
    return computes, pairs


def _turned(how, like):
    """A cast with the rotation of another one, which casts the other operand."""
    return how and dataclasses.replace(how, hadamard=like.hadamard if like else 0)


def _maps(function, x, w, g, recipe):
    """As `_matrices`, of a convolution. Operands are matrices with the channels last."""
    recipe = unrotated(recipe)
    batched = x.dim() == w.dim()
    transposed = function(x.double(), w.double()).shape[-w.dim() + 1] != w.shape[0]

    def maps(t, how, axis):
        t = t if batched else t[None]
        last = t.detach().movedim(1, -1)
        y = cast(last.flatten(0, -2), how, axis).reshape(last.shape).movedim(-1, 1)
        return y if batched else y[0]

    def kernel(t, how, axis):
        last = t.detach().movedim(1, -1)
        return cast(last.flatten(1), how, axis).reshape(last.shape).movedim(-1, 1)

    def vjp(of):
        def compute(g, other):
            one = torch.zeros((x, w)[of].shape, dtype=torch.float64, requires_grad=True)
            y = function(one, other) if of == 0 else function(other, one)
            return torch.autograd.grad(y, one, g)[0]

        return compute

    forward, back = (-2, -1) if transposed else (-1, -2)
    pairs = [
        (maps(x, recipe.forward[0], -1), kernel(w, recipe.forward[1], forward)),
        (maps(g, recipe.grad_input[0], -1), kernel(w, recipe.grad_input[1], back)),
        (maps(g, recipe.grad_weight[0], -2), maps(x, recipe.grad_weight[1], -2)),
    ]
    return [function, vjp(0), vjp(1)], pairs


def unit(dtype):
    """Half a unit in the last place of 1: the relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def assert_within(got, value, magnitude, dtype, roundings=3):
    """``got`` is ``value`` up to a sum in float32 and ``roundings`` in ``dtype``.

    A sum of n terms in precision u is off by at most n u times the sum of magnitudes, in any order
    (Higham, Accuracy and Stability of Numerical Algorithms, 3.1); no test here sums more than 300.
    """
    summed = torch.float64 if dtype == torch.float64 else torch.float32
    relative = 300 * unit(summed) + roundings * unit(dtype)
    absolute = roundings * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    error = (got.double() - value).abs()
    assert got.shape == value.shape
    assert bool((error <= relative * magnitude + absolute).all()), float(error.max())
