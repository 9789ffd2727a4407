"""The optimizer state of a parameter: initialization, reading, and conversion between encodings."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ..casts.scaled_tensor import ScaledTensor, dequantized, store
from ..common.dtensor import as_shard, is_dtensor, part_of
from ..common.step import parameters_of
from ..formats.format import FORMATS, Format
from ..formats.quantize import quantize
from ..formats.random_bits import Seed
from ..recipes.scaling import scale_of, scale_of_number
from .encodings import ENCODINGS, WEIGHTS, WIDE, Encoded, Encoding, decode, write, zeros

FIRST, SECOND, MASTER = "exp_avg", "exp_avg_sq", "master"
"""Names of the tensors in a state. torch has all but the master."""

PARTS = ("_values", "_scale", "_amax")
"""Suffixes of these names for a tensor that is stored with a scale."""

PURPOSES: dict[str, str] = {}
"""Entry of a state, except its step -> what the tensor is for."""
for _part in ("", *PARTS):
    PURPOSES[FIRST + _part] = "first_moment"
    PURPOSES[SECOND + _part] = "second_moment"
    PURPOSES[MASTER + _part] = "master"

Group = dict[str, Any]
State = dict[str, Any]


def everywhere(true: bool, parameters: Iterable[Tensor]) -> bool:
    """Whether ``true`` holds on all processes that have a shard of one of the parameters."""
    meshes = dict.fromkeys(getattr(p, "device_mesh", None) for p in parameters)
    for mesh in filter(None, meshes):  # in the same order on all processes
        flag = torch.tensor(float(true), device=mesh.device_type)
        for group in mesh.get_all_groups():
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
        true = bool(flag)
    return true


def in_dtype(tensor: Tensor) -> bool:
    """Whether it is stored in its dtype: no tensor subclass, such as a ScaledTensor."""
    return type(tensor) in (Tensor, torch.nn.Parameter)


def is_plain(tensor: Tensor) -> bool:
    """Whether its storage holds its values in row-major order."""
    return in_dtype(tensor) and tensor.is_contiguous()


def format_of(weight: Tensor) -> Format:
    """The format in which a weight is stored."""
    if isinstance(weight, ScaledTensor):
        return FORMATS[weight.format]
    return WEIGHTS[weight.dtype].format


def rounded_stochastically(
    x: Tensor,
    weight: Tensor,
    seed: Seed,
) -> Tensor:
    """``x``, float32, in values that copying it to ``weight`` does not change: a power of two is
    its scale, if it has one, as the largest magnitude of ``x`` requires."""
    format = format_of(weight)
    scale = None
    if isinstance(weight, ScaledTensor) and x.numel():
        scale = scale_of(x, None, format, "up")
    return quantize(x, format, scale=scale, rounding="stochastic", seed=seed)


def names(parameter: Tensor, group: Group) -> dict[str, Encoding]:
    """The tensors to store for a parameter, and their encodings. float32 weights have no master,
    unless they are of a tensor subclass (ScaledTensor), which may be coarser."""
    if parameter.dtype in WIDE:
        return dict.fromkeys((FIRST, SECOND), WIDE[parameter.dtype])
    encodings = {FIRST: group["first_moment"], SECOND: group["second_moment"]}
    coarse = parameter.dtype != torch.float32 or not in_dtype(part_of(parameter))
    if group["master_weights"] is not None and coarse:
        encodings[MASTER] = group["master_weights"]
    # Small ones are updated as one concatenated tensor, which cannot have a scale of each.
    if parameter.numel() < group["min_size"]:
        encodings = dict.fromkeys(encodings, "float32")
    return {name: ENCODINGS[how] for name, how in encodings.items()}


def prepare(
    state: State,
    parameter: Tensor,
    group: Group,
) -> dict[str, Encoding]:
    """Initializes an empty state, and adds or removes the master as the current dtype of the weight
    requires. Returns `names`."""
    encodings = names(parameter, group)
    if not state:
        state["step"] = torch.zeros(())
        for name in (FIRST, SECOND):
            keep(state, name, parameter, encodings[name])
    if (MASTER in encodings) != has(state, MASTER):
        for name in [name for name in state if name.startswith(MASTER)]:
            del state[name]
        if MASTER in encodings:
            numbers = numbers_of(parameter).flatten()
            keep(state, MASTER, parameter, encodings[MASTER], numbers)
    return encodings


def numbers_of(parameter: Tensor) -> Tensor:
    """The values of a weight, float32, of its local shape."""
    return dequantized(part_of(parameter).detach(), torch.float32)


def was_written(state: State, parameter: Tensor) -> Tensor:
    """Whether a weight is not its master, rounded: 0-dim, bool."""
    here = part_of(parameter.detach())
    rounded = here.clone()
    store(rounded, decode(read(state, MASTER)).view(here.shape))
    return (rounded != here).any()


def keep(
    state: State,
    name: str,
    parameter: Tensor,
    encoding: Encoding,
    numbers: Tensor | None = None,
) -> None:
    """Encodes float32 ``numbers`` (None: zeros) into ``state``."""
    here = part_of(parameter)
    stored = zeros(here.numel(), encoding, here.device)
    if numbers is not None and len(numbers):
        unit = None
        if stored.amax is not None and stored.scale is not None:
            amax = numbers.abs().amax()
            scale = scale_of_number(float(amax), encoding.format)
            stored.amax.copy_(amax)
            stored.scale.fill_(scale)
            unit = 1 / scale
        write(numbers, stored, encoding, unit, away=name == SECOND)
    _put(state, name, stored, here.shape)


def _put(
    state: State,
    name: str,
    stored: Encoded,
    shape: torch.Size,
) -> None:
    values = stored.values.view(shape)
    if stored.scale is None:
        state[name] = values
        return
    parts = (values, stored.scale, stored.amax)
    for suffix, part in zip(PARTS, parts, strict=True):
        if part is not None:
            state[name + suffix] = part


def read(state: State, name: str) -> Encoded:
    """The tensor stored under a name, flat; shares memory with the state. Raises KeyError."""
    if name in state:
        return Encoded(part_of(state[name]).reshape(-1))
    values, scale = (part_of(state[name + part]) for part in PARTS[:2])
    amax = None
    if not scale.dim():
        amax = state[name + PARTS[2]]
    return Encoded(values.reshape(-1), scale, amax)


def portable(parameter: Tensor, state: State) -> State:
    """The state of a DTensor as DTensors. Tensors with a scale become float32: a scale covers one
    shard."""
    decoded = {key: value for key, value in state.items() if key not in PURPOSES}
    for name in filter(partial(has, state), (FIRST, SECOND, MASTER)):
        value = state.get(name)
        if value is None:
            value = decode(read(state, name)).view(part_of(parameter).shape)
        if not is_dtensor(value):
            value = as_shard(parameter, value)
        decoded[name] = value
    return decoded


def convert(
    parameter: Tensor,
    saved: State,
    group: Group,
) -> State:
    """Converts ``saved``, a state of Adam of torch or `fp8.optim`, to the encodings of ``group``.

    A master without a counterpart in ``group`` is written to the parameter. Raises ValueError for
    other states, missing parts, an invalid step count, and moments that no optimizer can produce.
    """
    saved = {name: value for name, value in saved.items() if value is not None}
    encodings = names(parameter, group)
    if unknown := sorted(saved.keys() - PURPOSES.keys() - {"step"}):
        raise ValueError(
            f"{', '.join(unknown)} is not part of the state of Adam without amsgrad"
        )
    state: State = {}
    try:
        step = torch.as_tensor(saved["step"], dtype=torch.float32).cpu().clone()
        _check_numbers("step", step, 0.0)
        state["step"] = step.reshape(())
        for name, encoding in encodings.items():
            if name != MASTER or has(saved, name):
                _convert(state, name, parameter, encoding, saved)
    except KeyError as error:
        missing = error.args[0].removesuffix(PARTS[0])
        raise ValueError(
            f"the state of a parameter has no {missing}: it is that of another optimizer"
        ) from None
    if has(saved, MASTER) and MASTER not in encodings:
        with torch.no_grad():
            here = part_of(parameter)
            store(here, decode(read(saved, MASTER)).view(here.shape))
    prepare(state, parameter, group)
    return state


def _check_numbers(
    name: str,
    numbers: Tensor,
    low: float = -math.inf,
) -> None:
    bad = numbers[~((numbers >= low) & (numbers.abs() < math.inf))]
    if bad.numel():
        allowed = "finite" if low < 0 else "finite and not negative"
        raise ValueError(
            f"{name} must be {allowed}, got {float(bad[0])} in {bad.numel()} of {numbers.numel()} "
            "elements: the state is damaged, or that of another optimizer"
        )


def has(saved: State, name: str) -> bool:
    """Whether a tensor is stored under a name, in any encoding."""
    return name in saved or name + PARTS[0] in saved


def _convert(
    state: State,
    name: str,
    parameter: Tensor,
    encoding: Encoding,
    saved: State,
) -> None:
    """Converts one tensor of ``saved``: a copy if the encoding is the same, else encoded again."""
    source = read(saved, name)
    here = part_of(parameter)
    shape = part_of(saved.get(name, saved.get(name + PARTS[0]))).shape
    if shape != here.shape:
        raise ValueError(
            f"{name} has shape {tuple(shape)}, its parameter {tuple(here.shape)}: this is the "
            "state of another model"
        )
    if source.values.is_complex() != here.is_complex():
        raise ValueError(
            f"{name} is {source.values.dtype}, its parameter {here.dtype}: this is the state of "
            "another model"
        )
    source = source.copied(here.device)
    if source.scale is not None:
        _check_numbers(name + PARTS[1], source.scale)
    wide = encoding.dtype in WIDE
    numbers = source.values
    if not wide or source.scale is not None:
        numbers = decode(source)
    parts = numbers
    low = -math.inf
    if numbers.is_complex():
        parts = torch.view_as_real(numbers)
    if name == SECOND:
        low = 0.0
    if name != MASTER:  # a weight may be Inf or NaN
        _check_numbers(name, parts, low)
    if (source.values.dtype, source.kind) == (encoding.dtype, encoding.scale):
        _put(state, name, source, here.shape)
    elif wide:
        _put(state, name, Encoded(numbers.to(encoding.dtype)), here.shape)
    else:
        keep(state, name, parameter, encoding, numbers)


def state_bytes(optimizer: Optimizer) -> dict[str, int]:
    """Bytes of the parameters of an optimizer, their gradients and their states, as they are now.

    Args:
        optimizer: an optimizer of `fp8.optim`.

    Returns:
        "weight", "gradient", "first_moment", "second_moment", "master" and "step" -> bytes on this
        process. Gradients count while they exist: before ``zero_grad``.
    """
    nbytes = dict.fromkeys(("weight", "gradient", *PURPOSES.values(), "step"), 0)
    for parameter in parameters_of(optimizer):
        nbytes["weight"] += part_of(parameter).nbytes
        if parameter.grad is not None:
            nbytes["gradient"] += part_of(parameter.grad).nbytes
        for name, value in optimizer.state.get(parameter, {}).items():
            nbytes[PURPOSES.get(name, "step")] += part_of(value).nbytes
    return nbytes
