"""Kinds of calls: one name for all equivalent spellings of a torch call.

``torch.add(x, y)``, ``x.add(y)`` and ``x + y`` are one kind of call.
"""

from __future__ import annotations

from types import FunctionType

from torch.nn import functional as F

from fp8.common.step import is_in_place

from ... import functional as _rows  # noqa: F401 - fills OPS
from ...common.calls import Args, Function, Given, Kwargs
from ...ops.generated import spellings
from ...rules.table import OPS


def named(names: str) -> frozenset[str]:
    """The kinds in a text."""
    return frozenset(names.split())


TRANSPARENT = named(
    "select getitem narrow index_select chunk split unbind tensor_split hsplit vsplit dsplit "
    "bfloat16 clone contiguous double float half to type type_as dropout "
    "broadcast_to expand expand_as flatten moveaxis movedim permute ravel repeat "
    "repeat_interleave reshape squeeze swapaxes swapdims t tile transpose unflatten unsqueeze "
    "view view_as flip roll view_as_complex view_as_real diagonal rot90 unfold pixel_shuffle "
    "pixel_unshuffle channel_shuffle take take_along_dim masked_select atleast_1d atleast_2d "
    "atleast_3d real imag adjoint conj resolve_conj reshape_as as_strided"
)
"""Kinds that propagate values: they move, copy, select or convert them."""

CONSTANT = named(
    "detach zeros_like ones_like full_like empty_like rand_like randn_like randint_like "
    "new_zeros new_ones new_full new_empty new_tensor bernoulli multinomial argmax argmin sign "
    "sgn round floor ceil"
)
"""Kinds without a gradient."""

PRODUCTS = named(
    "linear linear_readout matmul mm bmm mv addmm baddbmm einsum tensordot bilinear conv1d "
    "conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "scaled_dot_product_attention grouped_mm"
)
"""Kinds that mix features; a residual branch contains at least one."""

CONVOLUTIONS = frozenset(kind for kind in PRODUCTS if kind.startswith("conv"))
"""Products that sum over positions."""

LAYERS = CONVOLUTIONS | named("linear linear_readout")
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


EMBEDDINGS = named("embedding embedding_bag")
"""Kinds that look up rows of a weight."""

NORMS = named("layer_norm rms_norm group_norm batch_norm instance_norm normalize")
"""Kinds whose result does not depend on the size of their input."""

GAINS = NORMS - {"normalize"} | {"mul"}
"""Kinds that multiply values by a gain."""

RECURRENT = named(
    "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"
)
"""Kinds that are whole layers with products inside."""

JOINS = named("add sub rsub cat concat concatenate stack where")
"""Kinds that put a parameter beside values, or add it to them, as a layer does its bias."""

ATTENTION = named("scaled_dot_product_attention")
"""Fused attention."""

_ALIASES = {
    **dict.fromkeys(("rtruediv", "truediv", "itruediv", "rdiv"), "div"),
    **dict.fromkeys(("rpow", "ipow"), "pow"),
    **dict.fromkeys(("H", "mH"), "adjoint"),
    "T": "t",
    "mT": "transpose",
}
"""Name of a function or attribute -> its kind, where they differ."""


def name_of(function: Function) -> str:
    """The name of a function; of an attribute (``x.real``), that of its property."""
    name: str = getattr(function, "__name__", str(function))
    return function.__self__.__name__ if name == "__get__" else name  # type: ignore[attr-defined]


def kind_of(function: Function) -> str:
    """The kind of the calls of a function."""
    if function in KINDS:
        return KINDS[function]
    name = name_of(function).strip("_")
    # torch names torch.linalg.norm "linalg_norm".
    for namespace in ("linalg_", "fft_", "special_"):
        name = name.removeprefix(namespace)
    return _ALIASES.get(name, name)


KINDS: dict[Function, str] = {}
"""Torch callable -> kind, for those with a rule. That of others is their name, see `kind_of`."""

for _kind in sorted(PRODUCTS | RECURRENT | EMBEDDINGS):
    KINDS.update(dict.fromkeys(spellings(_kind), _kind))
for _op in OPS.values():
    KINDS.update(dict.fromkeys(_op.replaces, _op.name))


def canonical(function: Function, args: Args, kwargs: Kwargs) -> Given:
    """Moves keyword arguments to positions where possible."""
    names = names_of(function)
    while len(args) < len(names) and names[len(args)] in kwargs:
        name = names[len(args)]
        args = (*args, kwargs[name])
        kwargs = {key: value for key, value in kwargs.items() if key != name}
    return args, kwargs


def names_of(function: Function) -> tuple[str, ...]:
    """The argument names of a function that is written in Python; () for others."""
    return _NAMES.get(function, ())


def writes(
    function: Function,
    name: str,
    args: Args,
    kwargs: Kwargs,
) -> bool:
    """Whether a call with `canonical` arguments writes its result into one of them."""
    names = names_of(function)
    place = names.index("inplace") if "inplace" in names else len(args)
    is_asked = place < len(args) and bool(args[place])
    return is_asked or is_in_place(name, kwargs)


_NAMES: dict[Function, tuple[str, ...]] = {}
"""The argument names of functions written in Python."""

for _function in (*KINDS, *vars(F).values()):
    if isinstance(_function, FunctionType):
        _code = _function.__code__
        _NAMES[_function] = _code.co_varnames[: _code.co_argcount]
