"""`calibrate`: measures the static scales of a model in one forward and backward pass."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..casts.measuring import Measurement, Moment
from ..casts.watch import watches_of
from ..common.ranks import Group, is_started
from ..common.step import (
    Batch,
    Loss,
    call,
    differentiate,
    restored,
    untouched,
    unwrapped,
)
from ..common.validation import check_flag, check_module
from ..frame import framed
from ..recipes.history import histories, note_scales, share_scales, static_scales
from ..recipes.rules import LARGEST, SMALLEST
from ..recipes.scaling import nearest_power
from ..torch_internals.stance import outside_compiler
from .settings import choose_static, converted


def calibrate(
    model: nn.Module,
    batch: Batch = None,
    loss: Loss | None = None,
    *,
    scales: Mapping[str, int | None] | None = None,
    group: Group = None,
    freeze: bool = False,
) -> dict[str, int | None]:
    """Sets the scales of recipe "static" from one forward and backward pass.

    The scale factor of every operand of every product (input, weight, gradient of the output)
    becomes ``2**round(log2(RMS))``, the power of two nearest to the operand's RMS; in e5m2, the
    format of gradients, a 16th of it (`fp8.recipes.scaling.static_rms`). An operand that is all
    zeros or contains Inf or NaN keeps its scale factor: 1 at first, until a training step in which
    the operand is neither sets it.

    The pass runs in the precision of the model. Layers converted under "auto" that are not
    unit-scaled use "static" afterwards. Nothing else changes, but that the pass is the first call
    of a model of ``unit_scale`` without a batch, which sets its values. With FSDP, calibrate before
    sharding, or let the first step set the scales. ``torch.utils.checkpoint`` needs
    ``use_reentrant=False``.

    Later passes measure again, in the 1st, 2nd, 4th, ... 128th training pass and then in each
    128th, and set a scale anew if its operand saturates or has moved by more than 6 octaves.

    Args:
        model: a model converted with a recipe with scaling "static", or "auto". It may be wrapped
            by torch.compile and DistributedDataParallel.
        batch: a tensor, or the arguments of the model: a tuple or list, or a mapping of keywords.
        loss: a function of the model's output that returns a scalar, with the loss scale of the
            training. None: the output's ``loss`` or its first 0-dim tensor that requires a
            gradient; without one, the gradient of the output is standard normal, with seed 0.
        scales: values to set instead of measuring, as returned by `calibration`.
        freeze: whether later passes leave the scales as they are, until the next call. They warn of
            what the scales lose. Not part of the state_dict.
        group: the processes over which second moments are summed (None: all), if
            torch.distributed is initialized. All of them call this.

    Returns:
        Operand -> exponent of its scale factor, as `calibration` returns.

    Raises:
        TypeError: if ``model`` is not a module.
        ValueError: if nothing has static scales; unless one of ``batch`` and ``scales`` is given;
            if the loss is not a scalar; if ``scales`` names other operands, or has values other
            than whole numbers from -126 to 126.

    >>> import torch, fp8
    >>> model = fp8.convert(torch.nn.Linear(64, 64), "static")
    >>> x = 0.01 * torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    >>> fp8.calibrate(model, x)
    {'input': -7, 'weight': -4, 'grad': -4}
    """
    if (batch is None) == (scales is None):
        raise ValueError(
            "calibrate needs either a batch, to measure, or scales, to set"
        )
    check_module("calibrate", model)
    check_flag("freeze", freeze)
    model = unwrapped(model)
    for layer in converted(model).values():
        choose_static(layer)
    if scales is None:
        measurement = Measurement()
        outside_compiler(lambda: _measure(model, batch, loss, measurement))
    states = _states(model)
    if not states:
        raise ValueError(
            f"calibrate: no product of {type(model).__name__} has static scales. "
            "fp8.convert(model, 'static') gives them to the layers that fp8.report(model) lists as "
            "converted"
        )
    if scales is None:
        _write(list(states.values()), measurement, group)
    else:
        _set(states, scales)
    for module in model.modules():
        note_scales(module)
    for watch in watches_of(model):
        watch.frozen = freeze
    if scales is None:
        share_scales(model, measurement.leaders)
    return calibration(model)


def calibration(model: nn.Module) -> dict[str, int | None]:
    """The static scales of a converted model, which ``fp8.calibrate(model, scales=...)`` restores.

    Args:
        model: a converted model.

    Returns:
        Operand -> the exponent e of its scale factor ``2**e``, by which the operand is divided
        before its cast; None if the scale is not set yet. The operands of a layer are named after
        it, as in "0.input", "0.weight" and "0.grad"; operands of a group end with its number.
    """
    scales = {name: float(state) for name, state in _states(model).items()}
    return {
        name: round(math.log2(scale)) if scale else None
        for name, scale in scales.items()
    }


def _states(model: nn.Module) -> dict[str, Tensor]:
    """Operand -> its static scale, 0-dim, of converted layers."""
    check_module("calibrate", model)
    scales = static_scales(histories(unwrapped(model)))
    return {name.replace("fp8_scale_", ""): state for name, state in scales.items()}


@torch.no_grad()
def _set(states: dict[str, Tensor], scales: Mapping[str, int | None]) -> None:
    if different := sorted(states.keys() ^ scales.keys()):
        what = "is missing" if different[0] in states else "is not in the model"
        raise ValueError(f"scales: {different[0]!r} {what}, one of {len(different)}")
    # All are checked before one is written.
    for name, e in scales.items():
        whole = isinstance(e, int) and not isinstance(e, bool)
        if e is not None and not (whole and SMALLEST <= e <= LARGEST):
            raise ValueError(
                f"scales: {name!r} is a whole number from -126 to 126, got {e!r}"
            )
    for name, e in scales.items():
        states[name].fill_(0.0 if e is None else 2.0**e)


@torch.no_grad()
def _write(states: list[Tensor], measurement: Measurement, group: Group) -> None:
    """Sets the scales from the second moments of all processes."""
    measured = [
        measurement.moments.get(state.data_ptr(), Moment(state)) for state in states
    ]
    sums = [[float(moment.total), float(moment.elements)] for moment in measured]
    device = states[0].device
    # Processes add sums of millions of squares. MPS has no float64.
    dtype = torch.float32 if device.type == "mps" else torch.float64
    moments = torch.tensor(sums, dtype=dtype, device=device)
    if is_started():
        torch.distributed.all_reduce(moments, torch.distributed.ReduceOp.SUM, group)
    powers = nearest_power(moments[:, 0] / moments[:, 1])
    for state, power in zip(states, powers.tolist(), strict=True):
        if power:
            state.fill_(power)


def _measure(
    model: nn.Module,
    batch: Batch,
    loss: Loss | None,
    measurement: Measurement,
) -> None:
    """One forward and backward pass of ``model`` without side effects."""
    with (
        untouched(model),
        restored(model.parameters()),
        torch.inference_mode(False),
        torch.enable_grad(),
        framed(measurement=measurement),
    ):
        differentiate(model, call(model, batch), loss)
