"""The optimizer state of a parameter: initialization, reading, and conversion between encodings."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ..common.dtensor import as_shard, is_dtensor, part_of
from ..tensors.scaled_tensor import plain, store
from .encodings import ENCODINGS, Encoded, Encoding, decode, scale_for, write, zeros

FIRST, SECOND, MASTER = "exp_avg", "exp_avg_sq", "master"
MOMENTUM = "momentum_buffer"
"""Names of the tensors in a state. All but the master are those of torch."""

PURPOSES = {
    SECOND: "second_moment",
    FIRST: "first_moment",
    MOMENTUM: "first_moment",
    MASTER: "master",
}
"""How a name in a state begins -> what the tensor is for; the first match counts."""

PARTS = ("_values", "_scale", "_amax")
"""Suffixes of these names for a tensor that is stored with a scale."""

Group = dict[str, Any]
State = dict[str, Any]


def parameters_of(optimizer: Optimizer) -> list[Any]:
    """The parameters of all groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def everywhere(true: bool, parameters: Iterable[Tensor]) -> bool:
    """Whether ``true`` holds on all processes that have a shard of one of the parameters."""
    meshes = dict.fromkeys(getattr(p, "device_mesh", None) for p in parameters)
    for mesh in filter(None, meshes):  # in the same order on all processes
        flag = torch.tensor(float(true), device=mesh.device_type)
        for group in mesh.get_all_groups():
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
        true = bool(flag)
    return true


def is_plain(tensor: Tensor) -> bool:
    """Whether its storage holds its values in row-major order."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_contiguous()


def names(parameter: Tensor, group: Group) -> dict[str, Encoding]:
    """The tensors to store for a parameter, and their encodings. float32 weights have no master,
    unless they are of a tensor subclass (ScaledTensor), which may be coarser."""
    small = parameter.numel() < group.get("min_size", 0)
    if group.get("algorithm") == "muon" or "second_moment" not in group:
        moments = {MOMENTUM: group.get("first_moment", "float32")}
    else:
        moments = {FIRST: group["first_moment"], SECOND: group["second_moment"]}
    subclass = type(part_of(parameter)) not in (Tensor, torch.nn.Parameter)
    coarse = parameter.dtype != torch.float32 or subclass
    if group["master_weights"] is not None and coarse:
        moments[MASTER] = group["master_weights"]
    return {name: ENCODINGS["float32" if small else kept] for name, kept in moments.items()}


def prepare(state: State, parameter: Tensor, group: Group) -> dict[str, Encoding]:
    """Initializes an empty state, else adds or removes the master as the current dtype of the
    weight requires. Returns `names`."""
    kept = names(parameter, group)
    if not state:
        state["step"] = torch.zeros(())
        for name, encoding in kept.items():
            weights = numbers_of(parameter).flatten() if name == MASTER else None
            keep(state, name, parameter, encoding, weights)
    elif (MASTER in kept) != has(state, MASTER):
        for name in [name for name in state if name.startswith(MASTER)]:
            del state[name]
        if MASTER in kept:
            keep(state, MASTER, parameter, kept[MASTER], numbers_of(parameter).flatten())
    return kept


def numbers_of(parameter: Tensor) -> Tensor:
    """The values of a weight, float32, of its local shape."""
    return plain(part_of(parameter).detach(), torch.float32)


def weight_of(parameter: Any, state: State, master: bool) -> Tensor:
    """The values to update, float32: those of the master, or of a weight itself."""
    if master and has(state, MASTER):
        return decode(read(state, MASTER)).view(part_of(parameter).shape)
    return numbers_of(parameter)


def put_weight(parameter: Any, state: State, weight: Tensor, master: Encoding | None) -> None:
    """Writes updated values to a weight, through its master, if it has one, in this encoding."""
    if master is not None:
        keep(state, MASTER, parameter, master, weight.flatten())
        weight = decode(read(state, MASTER)).view(part_of(parameter).shape)
    store(part_of(parameter), weight)


def rounds_to(numbers: Tensor, parameter: Tensor) -> bool:
    """Whether storing ``numbers``, of the local shape, would leave the weight unchanged."""
    here = part_of(parameter.detach())
    store(there := here.clone(), numbers)
    return torch.equal(there, here)


def keep(
    state: State,
    name: str,
    parameter: Tensor,
    encoding: Encoding,
    numbers: Tensor | None,
    bits: Tensor | None = None,
) -> None:
    """Encodes float32 ``numbers`` (None: zeros) into ``state``. bits: as in `write`."""
    here = part_of(parameter)
    stored = zeros(here.numel(), encoding, here.device)
    if numbers is not None and len(numbers):
        amax = numbers.abs().amax()
        scale = scale_for(float(amax), encoding)
        if stored.scale is not None and stored.amax is not None and scale is not None:
            stored.scale.fill_(scale)
            stored.amax.copy_(amax)
        unit = None if scale is None else 1 / scale
        write(numbers, stored, encoding, unit, away=name == SECOND, bits=bits)
    _put(state, name, stored, here.shape)


def _put(state: State, name: str, stored: Encoded, shape: torch.Size) -> None:
    values = stored.values.view(shape)
    if stored.scale is None:
        state[name] = values
        return
    parts = (values, stored.scale, stored.amax)
    state.update({name + part: x for part, x in zip(PARTS, parts, strict=True) if x is not None})


def read(state: State, name: str) -> Encoded:
    """The tensor stored under a name, flat; shares memory with the state."""
    if name in state:
        return Encoded(part_of(state[name]).reshape(-1))
    values = part_of(state[name + PARTS[0]]).reshape(-1)
    return Encoded(values, state[name + PARTS[1]], state.get(name + PARTS[2]))


def portable(parameter: Tensor, state: State) -> State:
    """``state`` with what has a scale, which belongs to one shard, decoded to float32. What has the
    shape of the shard is a DTensor if the parameter is."""
    found: State = {}
    shape = part_of(parameter).shape
    for key, value in state.items():
        name, suffix = next(((key.removesuffix(p), p) for p in PARTS if key.endswith(p)), (key, ""))
        if suffix == PARTS[0]:
            value = decode(read(state, name)).view(shape)
        if suffix in ("", PARTS[0]):
            is_part = isinstance(value, Tensor) and value.shape == shape
            divided = is_part and is_dtensor(parameter) and not is_dtensor(value)
            found[name] = as_shard(parameter, value) if divided else value
    return found


def convert(parameter: Tensor, saved: State, group: Group) -> State:
    """Converts ``saved``, the state of an Adam, Muon or SGD of torch or of `fp8.optim`, to the
    encodings of ``group``.

    A master without a counterpart in ``group`` is written to the parameter. Raises ValueError for
    other states, missing parts, an invalid step count, and moments that no optimizer can produce.
    """
    saved = {name: value for name, value in saved.items() if value is not None}
    kept = names(parameter, group)
    adam, sgd = SECOND in kept, "second_moment" not in group
    moments = (FIRST, SECOND) if adam else (MOMENTUM,)
    known = {n + part for n in (*moments, MASTER) for part in ("", *PARTS)}
    if unknown := sorted(saved.keys() - known - (set() if sgd else {"step"})):
        advice = "; amsgrad is not supported" if "max_exp_avg_sq" in unknown else ""
        kind = "Adam" if adam else "SGD" if sgd else "Muon"
        raise ValueError(f"{', '.join(unknown)} is not part of the state of {kind}{advice}")
    state: State = {}
    if not sgd:
        counts = adam or "step" in saved  # torch's Muon counts no steps
        state["step"] = _step_of(saved) if counts else torch.zeros(())
    for name in moments if not sgd or has(saved, MOMENTUM) else ():
        _convert(state, name, parameter, kept[name], saved)
    if MASTER in kept:
        if has(saved, MASTER):
            _convert(state, MASTER, parameter, kept[MASTER], saved)
        else:
            keep(state, MASTER, parameter, kept[MASTER], numbers_of(parameter).flatten())
    elif has(saved, MASTER):
        with torch.no_grad():
            here = part_of(parameter)
            here.copy_(decode(read(saved, MASTER)).view(here.shape))
    return state


def _step_of(saved: State) -> Tensor:
    """The step count of a saved state: float32, 0-dim. Raises ValueError if missing or invalid."""
    if "step" not in saved:
        raise ValueError("the state of a parameter has no step: it is not that of Adam")
    step = torch.as_tensor(saved["step"], dtype=torch.float32).cpu().clone()
    if step.numel() != 1 or not float(step) >= 0 or float(step) % 1 != 0:
        raise ValueError(f"step must be a whole number from 0 on, got {step.tolist()}")
    return step.reshape(())


def check_numbers(name: str, numbers: Tensor, *, low: float = -math.inf) -> None:
    """Raises ValueError if ``numbers`` of a saved state are not finite or below ``low``."""
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


def _convert(state: State, name: str, parameter: Tensor, encoding: Encoding, saved: State) -> None:
    """Converts one tensor of ``saved``: a copy if the encoding is the same, else encoded again."""
    _check_parts(saved, name)
    here = part_of(parameter)
    shape = part_of(saved[name] if name in saved else saved[name + PARTS[0]]).shape
    if shape != here.shape:
        raise ValueError(
            f"{name} has shape {tuple(shape)}, its parameter {tuple(here.shape)}: this is the "
            "state of another model"
        )
    parts = (x if x is None else x.to(here.device, copy=True) for x in read(saved, name))
    given = Encoded(*parts)  # type: ignore[arg-type]
    if given.scale is not None:
        check_numbers(name + PARTS[1], given.scale)
    if name != MASTER:
        check_numbers(name, decode(given), low=0.0 if name == SECOND else -math.inf)
    like = zeros(0, encoding, here.device)
    dims = [x.scale if x.scale is None else x.scale.dim() for x in (given, like)]
    if given.values.dtype == like.values.dtype and dims[0] == dims[1]:
        _put(state, name, given, here.shape)
    else:
        keep(state, name, parameter, encoding, decode(given))


def _check_parts(saved: State, name: str) -> None:
    """Raises ValueError if a tensor, or a part that its encoding needs, is not in ``saved``."""
    needed = [name]
    if name not in saved and has(saved, name):
        scale = saved.get(name + PARTS[1])
        needed = [name + part for part in PARTS[1:] if scale is None or not scale.dim()]
    if missing := [part for part in needed if part not in saved]:
        raise ValueError(
            f"the state of a parameter has no {', '.join(missing)}: it is that of another optimizer"
        )


def state_bytes(optimizer: Optimizer) -> dict[str, int]:
    """Bytes of the parameters of an optimizer, their gradients and their states, as they are now.

    Args:
        optimizer: an optimizer of `fp8.optim`.

    Returns:
        "weight", "gradient", "first_moment", "second_moment", "master" and "step" -> bytes on this
        process. Gradients count while they exist: before ``zero_grad``.
    """
    names = ("weight", "gradient", "first_moment", "second_moment", "master", "step")
    found = dict.fromkeys(names, 0)
    for parameter in parameters_of(optimizer):
        found["weight"] += part_of(parameter).nbytes
        found["gradient"] += 0 if parameter.grad is None else part_of(parameter.grad).nbytes
        for name, value in optimizer.state.get(parameter, {}).items():
            found[purpose_of(name)] += part_of(value).nbytes
    return found


def purpose_of(name: str) -> str:
    """What a tensor of a state is for, by `PURPOSES`."""
    return next((p for start, p in PURPOSES.items() if name.startswith(start)), "step")
