"""Kinds of calls: one name for all equivalent spellings of a torch call.

``torch.add(x, y)``, ``x.add(y)`` and ``x + y`` are one kind of call.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional as F

from fp8.common.step import is_in_place

from ... import functional as _rows  # noqa: F401 - fills OPS
from ...rules.table import OPS


def _named(names: str) -> frozenset[str]:
    return frozenset(names.split())


SELECTIONS = _named("select __getitem__ narrow index_select")
"""Kinds that select a part of a tensor."""

PARTS = _named("chunk split unbind tensor_split hsplit vsplit dsplit")
"""Kinds that split a tensor."""

CASTS = _named("bfloat16 clone contiguous double float half to type type_as")
"""Kinds that keep every element but may change dtype, device or memory format."""

_MOVES = (SELECTIONS | PARTS | CASTS) | _named(
    "broadcast_to expand expand_as flatten moveaxis movedim permute ravel repeat "
    "repeat_interleave reshape squeeze swapaxes swapdims t tile transpose unflatten unsqueeze "
    "view view_as flip roll view_as_complex view_as_real diagonal rot90 unfold pixel_shuffle "
    "pixel_unshuffle channel_shuffle take take_along_dim masked_select atleast_1d atleast_2d "
    "atleast_3d real imag adjoint conj resolve_conj reshape_as as_strided"
)

MOVES = _MOVES | _named("cat stack pad")
"""Kinds that move elements without changing them."""

TRANSPARENT = _MOVES | frozenset(["dropout"])
"""Kinds that propagate values: they move, copy, select or convert them."""

CONSTANT = _named(
    "detach zeros_like ones_like full_like empty_like rand_like randn_like randint_like "
    "new_zeros new_ones new_full new_empty new_tensor bernoulli multinomial argmax argmin sign "
    "sgn round floor ceil"
)
"""Kinds without a gradient."""

PRODUCTS = _named(
    "linear linear_readout matmul mm bmm mv addmm baddbmm einsum tensordot bilinear conv1d "
    "conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "scaled_dot_product_attention grouped_mm"
)
"""Kinds that mix features; a residual branch contains at least one."""

LAYERS = frozenset(kind for kind in PRODUCTS if kind.startswith(("linear", "conv")))
"""Products of an input and a weight."""


ADDED = {
    **dict.fromkeys(LAYERS, (2, "bias")),
    "bilinear": (3, "bias"),
    "scaled_dot_product_attention": (3, "attn_mask"),
    **dict.fromkeys(("addmm", "baddbmm"), (0, "input")),
}
"""Product -> the position and the name of the argument that it adds to its sum. Others add none."""


def is_added(kind: str, slot: tuple[int | str, ...]) -> bool:
    """Whether the argument in a slot of a call is added (a bias or a mask), not multiplied."""
    return kind in ADDED and slot[0] in ADDED[kind]


EMBEDDINGS = frozenset(["embedding", "embedding_bag"])
"""Kinds that look up rows of a weight."""

GAINS = _named("mul layer_norm rms_norm group_norm batch_norm instance_norm")
"""Kinds that multiply values by a gain."""

RECURRENT = frozenset(
    name + cell for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for cell in ("", "_cell")
)
"""Kinds that are whole layers with products inside."""

ATTENTION = frozenset(["scaled_dot_product_attention"])
"""Fused attention."""

AVERAGES = _named(
    "mean avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d"
)
"""Kinds that average over positions."""

LOSSES = frozenset(name for name, op in OPS.items() if op.reduces) | _named(
    "triplet_margin_loss triplet_margin_with_distance_loss margin_ranking_loss "
    "soft_margin_loss hinge_embedding_loss poisson_nll_loss gaussian_nll_loss "
    "multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss"
)
"""All losses of torch."""

_OTHERS = (
    "masked_fill where gather __setitem__ copy_ neg abs arange zeros ones full empty tensor "
    "as_tensor maximum minimum clamp clip sin cos topk tril triu outer max min amax amin "
    "broadcast_tensors max_pool1d max_pool2d max_pool3d hstack vstack dstack column_stack "
    "block_diag diag diag_embed masked_scatter scatter index_copy index_put index_fill "
    "fill_diagonal sort msort kthvalue median cummax cummin aminmax nan_to_num clamp_min "
    "clamp_max fmax fmin max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices "
    "max_unpool1d max_unpool2d max_unpool3d add sub rsub mul div pow square sqrt rsqrt exp exp2 "
    "log log2 log10 log1p expm1 xlogy tanh sigmoid relu relu6 leaky_relu rrelu threshold elu selu "
    "celu gelu silu softplus mish hardswish hardsigmoid hardtanh logsigmoid softsign hardshrink "
    "softshrink tanhshrink erf erfc erfcx ndtr log_ndtr reciprocal sinc sinh cosh asinh norm sum "
    "std var cumsum softmax lerp addcmul alpha_dropout feature_alpha_dropout multi_dot logsumexp "
    "prod vector_norm index_add scatter_add scatter_reduce kl_div binary_cross_entropy "
    "binary_cross_entropy_with_logits acos acosh arccos arccosh arcsin arcsinh arctanh asin atanh "
    "tan atan atan2 arctan2 angle logit erfinv lgamma digamma logaddexp logaddexp2 hypot copysign "
    "fmod remainder frac ldexp float_power addcdiv addr complex polar kron cross cumprod "
    "logcumsumexp cumulative_trapezoid trapezoid trapz diff gradient trace nansum nanmean "
    "nanmedian quantile nanquantile var_mean std_mean cov corrcoef renorm stft istft grid_sample "
    "affine_grid fold pairwise_distance cartesian_prod combinations chain_matmul diagflat "
    "row_stack fliplr flipud index_reduce put meshgrid matrix_norm gumbel_softmax inv inv_ex "
    "inverse pinv pinverse solve solve_ex solve_triangular triangular_solve lstsq cholesky "
    "cholesky_ex cholesky_solve cholesky_inverse ldl_factor ldl_solve lu lu_factor lu_solve qr "
    "eig eigh eigvals eigvalsh svd svdvals matrix_exp matrix_power det logdet slogdet "
    "householder_product tensorinv tensorsolve cdist pdist fft fft2 fftn ifft ifft2 ifftn rfft "
    "rfft2 rfftn irfft irfft2 irfftn hfft hfft2 hfftn ihfft ihfft2 ihfftn"
).split()
"""Further kinds. Those with a row in OPS have the spellings of the row too."""

_OPERATORS = {
    "div": ("__rtruediv__",),
    "pow": ("__pow__", "__rpow__", "__ipow__", operator.pow, operator.ipow),
    "neg": ("__neg__", operator.neg),
    "abs": ("__abs__",),
    "__getitem__": (operator.getitem,),
    "__setitem__": (operator.setitem,),
}
"""Other spellings of a kind, besides those of rows in OPS: names in the same namespaces, or Python
operators."""


def _spellings(kind: str) -> list[Callable[..., Any]]:
    names = (kind, f"{kind}_", *_OPERATORS.get(kind, ()))
    namespaces = (torch, torch.Tensor, F, torch.linalg, torch.fft, torch.special)
    named = [getattr(n, name, None) for name in names if isinstance(name, str) for n in namespaces]
    return [function for function in (*names, *named) if callable(function)]


def _kinds() -> dict[Callable[..., Any], str]:
    sets = (MOVES, CONSTANT, PRODUCTS, RECURRENT, EMBEDDINGS, AVERAGES, LOSSES)
    names = dict.fromkeys([*_OTHERS, *itertools.chain(*map(sorted, sets)), *_OPERATORS, "dropout"])
    table = {function: kind for kind in names for function in _spellings(kind)}
    getters = {"T": "t", "mT": "transpose", "H": "adjoint", "mH": "adjoint"}
    getters |= {"real": "real", "imag": "imag"}
    table |= {getattr(torch.Tensor, name).__get__: kind for name, kind in getters.items()}
    return table | {function: op.name for op in OPS.values() for function in op.replaces}


def canonical(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Moves keyword arguments to positions where possible: eager code and the compiler pass
    arguments of torch functions differently."""
    names = _names(function)
    while len(args) < len(names) and names[len(args)] in kwargs:
        name = names[len(args)]
        args = (*args, kwargs[name])
        kwargs = {key: value for key, value in kwargs.items() if key != name}
    return args, kwargs


def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    for method, _, names in METHODS:
        if function is method:
            return names
    return _NAMES.get(function, ())


def writes(function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Any) -> bool:
    """Whether a call with `canonical` arguments writes its result into one of them."""
    names = _NAMES.get(function, ())
    place = names.index("inplace") if "inplace" in names else len(args)
    return is_in_place(name, kwargs) or (place < len(args) and bool(args[place]))


KINDS: dict[Callable[..., Any], str] = _kinds()
"""Torch callable -> kind. Calls not listed here return nothing that a plan could scale."""

_NAMES: dict[Callable[..., Any], tuple[str, ...]] = {
    function: function.__code__.co_varnames[: function.__code__.co_argcount]
    for function in KINDS
    if isinstance(function, FunctionType)
}
"""The argument names of functions written in Python."""

METHODS = tuple(
    (function, KINDS[function], names)
    for function, names in _NAMES.items()
    if function.__qualname__.startswith("Tensor")
)
"""Methods of Tensor that are written in Python (``**``, ``1 - x``, ``1 / x``, ``x.norm()``), their
kinds and the names of their arguments.

The compiler of torch 2.13 compares them by identity but does not find them in a dict.
"""


def is_torch_function(function: Any) -> bool:
    """Whether calls of ``function`` are visible to torch-function modes."""
    listed = torch.overrides.get_overridable_functions().values()
    return callable(function) and any(function in functions for functions in listed)
