"""All-to-all of tokens in one byte per element, as mixtures of experts dispatch and combine them.

A message has the values of each token in the format, followed by the token's scale factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ..casts.casting import Spec, codes, format_of, spec_of, widened
from ..casts.saved_operands import restored
from ..common.dtensor import is_dtensor
from ..formats.format import dtype_name
from ..recipes.cast import Cast
from ..recipes.recipe import Recipe, get_recipe
from ..recipes.rules import scale_format
from ..tensors.scaled_tensor import DTYPES, plain

__all__ = ["DTYPES", "TokenBytes", "all_to_all", "token_bytes"]


class TokenBytes(NamedTuple):
    """The bytes of a token with its scales, of its gradient, and of either without a cast."""

    forward: int
    backward: int
    uncast: int


class _Splits(NamedTuple):
    """The numbers of tokens that a process sends to each process of the group, and receives."""

    sent: tuple[int, ...]
    received: tuple[int, ...]


def token_bytes(
    features: int, recipe: str | Recipe = "mxfp8", dtype: torch.dtype = torch.bfloat16
) -> TokenBytes:
    """The bytes that `all_to_all` sends for a token.

    Args:
        features: the length of a token.
        recipe: as in `all_to_all`.
        dtype: of the tokens.

    Returns:
        The bytes in each pass.

    Raises:
        ValueError, TypeError: as `all_to_all`, for a recipe or a dtype.

    >>> token_bytes(4096)
    TokenBytes(forward=4224, backward=4224, uncast=8192)
    """
    _check_dtype(dtype)
    uncast = features * dtype.itemsize
    forward, backward = (
        uncast if spec is None else _encoded(torch.zeros(1, features, dtype=dtype), spec).numel()
        for spec in _specs_of(recipe)
    )
    return TokenBytes(forward, backward, uncast)


def all_to_all(
    tokens: Tensor,
    recipe: str | Recipe = "mxfp8",
    *,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """`torch.distributed.all_to_all_single` of tokens in FP8, forward and backward.

    Tokens are rounded on their sender, by the recipe's cast of inputs; their gradients, which take
    the way back, by its cast of gradients. A cast of None sends them in high precision. A token has
    the scales of its own values; under "tensor" that of all tokens that its process sends at once.
    The cast is straight-through, and the received values are the sender's, bit for bit.

    NaN and Inf are those of the cast: NaN stays NaN, and Inf stays Inf if the format has Inf and
    becomes NaN otherwise; an MX block with either is NaN.

    All processes of the group call it, with the same recipe and features, and with split sizes
    that fit each other, which is not checked.

    Args:
        tokens: (tokens, features); float32, bfloat16 or float16.
        recipe: a name in `fp8.RECIPES`, or a Recipe.
        output_split_sizes: the number of tokens from each process. None, for both: equal numbers.
        input_split_sizes: the number of tokens for each process.
        group: None is the default group.

    Returns:
        (sum of output_split_sizes, features), in the dtype of the tokens.

    Raises:
        TypeError: for tokens of another dtype, DTensors, and split sizes that are not ints.
        ValueError: for tokens of other than two dimensions, split sizes that do not match the
            tokens or the group, and a cast with a format of more than a byte or without a torch
            dtype, with a state (scaling "delayed" or "static", whose scale belongs to a layer), a
            rotation, a mean, or tiles of more than one token.
    """
    sent, back = _specs_of(recipe)
    if not isinstance(tokens, Tensor) or is_dtensor(tokens):
        raise TypeError(f"all_to_all needs a plain tensor, got a {type(tokens).__name__}")
    _check_dtype(tokens.dtype)
    if tokens.dim() != 2 or not tokens.shape[1]:
        raise ValueError(f"tokens must be (tokens, features), got shape {tuple(tokens.shape)}")
    splits = _splits_of(tokens, output_split_sizes, input_split_sizes, group)
    return _AllToAll.apply(plain(tokens), sent, back, splits, group)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        allowed = ", ".join(map(dtype_name, DTYPES))
        raise TypeError(f"cannot send tokens of {dtype} in FP8; allowed are {allowed}")


def _specs_of(recipe: str | Recipe) -> tuple[Spec | None, Spec | None]:
    """The casts of tokens and of their gradients, checked."""
    recipe = get_recipe(recipe)
    return _checked(recipe, "inputs", recipe.input), _checked(recipe, "gradients", recipe.grad)


def _checked(recipe: Recipe, operand: str, cast: Cast | None) -> Spec | None:
    if cast is None:
        return None
    spec = spec_of(cast)
    dtype, why_not = format_of(spec).dtype, ""
    if dtype is None or dtype.itemsize > 1:
        why_not = "a format without a torch dtype of one byte"
    elif cast.keeps_history:
        why_not = f"scaling {cast.scaling!r}, whose scale is the state of a layer"
    elif cast.hadamard:
        why_not = "a rotation, which only the other operand of a product undoes"
    elif cast.tile[0] > 1:  # type: ignore[index]
        why_not = "scales that several tokens share, which go to different processes"
    if why_not:
        raise ValueError(
            f"all_to_all cannot send {operand} under recipe {recipe.name!r}: {cast} has {why_not}"
        )
    return spec


def _splits_of(
    tokens: Tensor,
    output: Sequence[int] | None,
    input: Sequence[int] | None,
    group: dist.ProcessGroup | None,
) -> _Splits:
    world, count = dist.get_world_size(group), len(tokens)
    if (output is None) != (input is None):
        raise ValueError("give output_split_sizes and input_split_sizes, or neither")
    if output is None or input is None:
        if count % world:
            raise ValueError(f"{count} tokens have no equal parts for {world} processes")
        output = input = [count // world] * world
    for name, sizes in (("output_split_sizes", output), ("input_split_sizes", input)):
        if not all(isinstance(n, int | torch.SymInt) for n in sizes):
            raise TypeError(f"{name} must be ints (tensor.tolist()), got {sizes!r}")
        if len(sizes) != world or any(n < 0 for n in sizes):
            raise ValueError(f"{name} needs {world} sizes of at least 0, got {list(sizes)}")
    if sum(input) != count:
        raise ValueError(f"input_split_sizes {list(input)} do not add up to {count} tokens")
    return _Splits(tuple(input), tuple(output))


class _AllToAll(Function):
    """sent, back: the specs of tokens and of their gradients."""

    @staticmethod
    def forward(
        tokens: Tensor,
        sent: Spec | None,
        back: Spec | None,
        splits: _Splits,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        if sent is None:
            return _exchanged(tokens, splits, group)
        message = _exchanged(_encoded(tokens, sent), splits, group)
        return _decoded(message, sent, tokens.shape[1], tokens.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.sent, ctx.back, ctx.splits, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        returned = _Splits(ctx.splits.received, ctx.splits.sent)
        tokens = _AllToAll.apply(grad, ctx.back, ctx.sent, returned, ctx.group)
        return tokens, None, None, None, None


def _exchanged(x: Tensor, splits: _Splits, group: dist.ProcessGroup | None) -> Tensor:
    received = x.new_empty(sum(splits.received), x.shape[1])
    sizes = (list(splits.received), list(splits.sent))
    dist.all_to_all_single(received, x.contiguous(), *sizes, group=group)
    return received


def _scale_dtype(spec: Spec) -> torch.dtype:
    """The dtype of the scale factors in a message."""
    return torch.float8_e8m0fnu if scale_format(spec.rule) == "e8m0" else torch.float32


def _encoded(tokens: Tensor, spec: Spec) -> Tensor:
    """uint8 (tokens, bytes): of each token the values, then the scales, or that of all tokens."""
    count, features = tokens.shape
    found = codes(tokens if count else tokens.new_zeros(1, features), spec)
    parts = [found.values.to(format_of(spec).dtype).view(torch.uint8)]
    if spec.rule is not None:
        scale = found.scale.to(_scale_dtype(spec))
        columns = scale.shape[-1] if scale.dim() else 1
        of_each = scale.new_empty(len(parts[0]), columns).copy_(scale)
        parts.append(of_each.view(torch.uint8))
    return torch.cat(parts, 1)[:count]


def _decoded(message: Tensor, spec: Spec, features: int, dtype: torch.dtype) -> Tensor:
    """The tokens of a message of `_encoded`."""
    data, scales = message.split([features, message.shape[1] - features], 1)
    scale = None
    if spec.rule is not None:
        scale = scales.clone(memory_format=torch.contiguous_format).view(_scale_dtype(spec)).float()
        scale = widened(scale, data.shape, (1, spec.tile[1]))
    return restored(data.view(format_of(spec).dtype), scale, dtype)
