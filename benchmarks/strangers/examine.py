"""Everything that is measured of one stranger, phase by phase."""

from __future__ import annotations

import copy
import math
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import fp8
import unit_scaling as uu
from benchmarks.common import Row
from fp8.casts.counts import OPEN, CastRecorder, Observed
from fp8.common.step import evaluating
from fp8.selection.layers import candidates
from unit_scaling.transforms import simulate_fp8, unit_scale

from .case import Case, Stranger
from .operands import HIGH, JUDGED, KINDS, LOW, Operands, run_backward, tensors

__all__ = ["SHARE", "Options", "described", "examine", "is_inside", "on_grid", "step_read"]

SHARE = 0.95
"""A model is inside where so much of its activations and of its gradients is."""

FORMATS = {"activation": "e4m3", "weight": "e4m3", "gradient": "e5m2"}

STEPS = 20

SAMPLED = 4096
"""So many values of an operand tell whether it was cast."""

OURS = tuple(str(Path(package.__file__ or "").parent) for package in (fp8, uu))


@dataclass(frozen=True)
class Options:
    """What is done beside the measurements."""

    train: bool = False
    compiled: bool = False


def examine(stranger: Stranger, options: Options, send: Callable[[Row], None]) -> None:
    """Measures a stranger; sends its row after every phase, each time with more of it."""
    row: Row = {"name": stranger.name, "library": stranger.package}
    torch.manual_seed(0)
    case = stranger.build()
    case.model.train()
    row["parameters"] = sum(p.numel() for p in case.model.parameters())
    plain = step_read(case, case.model)
    row |= {"products": plain.products, "zeros": plain.zeros, "result": "not finished"}
    row |= {f"plain_{kind}": _rounded(plain.share(kind)) for kind in KINDS}
    send(row)
    model = _unit_scaled(case, row)
    send(row)
    for phase in (_simulated, _calibrated, _preserved):
        phase(case, row)
        send(row)
    if model is not None:
        _verified(case, model, row)
        _cast_products(case, lambda: simulate_fp8(model), row, "unit_cast")
        send(row)
    if options.train:
        _trained(stranger, row)
        send(row)
    if options.compiled and model is not None:
        _compiled(stranger, row)
        send(row)


def _step(case: Case, model: nn.Module) -> Tensor | None:
    """One forward and backward pass."""
    model.zero_grad()
    torch.manual_seed(1)
    output, loss = case.run(model)
    run_backward(output, loss)
    return loss


def step_read(
    case: Case, model: nn.Module, on_grid: Callable[[Tensor, str], bool] | None = None
) -> Operands:
    """The operands of one forward and backward pass."""
    model.zero_grad()
    torch.manual_seed(1)
    args, kwargs = copy.deepcopy(case.args), copy.deepcopy(dict(case.kwargs))
    twin = Case(model, args, kwargs, case.loss)
    mode = Operands(model, (args, kwargs), on_grid)
    with mode.running():
        output = model(*args, **kwargs)
        loss = twin.loss_of(output)
        run_backward(output, loss, mode.gradient)
    return mode


def _unit_scaled(case: Case, row: Row) -> nn.Module | None:
    """Transforms the model, makes three training steps, and reads the last: the first shows a loss
    outside of the model, the second looks at the model once more."""
    try:
        model = unit_scale(case.model)
        _step(case, model)
        _step(case, model)
    except Exception as error:
        row["result"] = f"{'refused' if refused(error) else 'failed'}: {described(error)}"
        return None
    try:
        found = step_read(case, model)
    except Exception as error:
        row["result"] = f"failed in the third step: {described(error)}"
        return None
    row["result"] = "runs"
    row |= {kind: _rounded(found.share(kind)) for kind in KINDS}
    row["inside"] = is_inside({kind: found.share(kind) for kind in KINDS})
    worst = found.worst(5)
    row["worst"] = str(worst[0]) if worst else ""
    row["details"] = {"worst": [str(operand) for operand in worst], "zeros": found.zeros}
    return model


def _verified(case: Case, model: nn.Module, row: Row) -> None:
    """What `uu.verify` says, and whether it judges as the operands do."""
    try:
        torch.manual_seed(1)
        found = uu.verify(model, case.batch, loss=case.loss)
    except Exception as error:
        row["verify"] = described(error)
        return
    shares = {kind: None if math.isnan(s := found.share(kind)) else s for kind in KINDS}
    row["verify"] = [_rounded(share) for share in shares.values()]
    row["agrees"] = is_inside(shares) == row["inside"]


def is_inside(shares: Mapping[str, float | None]) -> bool:
    """Whether 95 % of the activations and of the gradients are, where there are any."""
    judged = [shares[kind] for kind in JUDGED]
    return all(share is None or share >= SHARE for share in judged)


def _simulated(case: Case, row: Row) -> None:
    _cast_products(case, lambda: simulate_fp8(case.model), row, "cast")


def _cast_products(case: Case, transformed: Callable[[], nn.Module], row: Row, key: str) -> None:
    """How many of the products that ATen runs have operands on the grids of the formats."""
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", UserWarning)
            found = step_read(case, transformed(), on_grid)
    except Exception as error:
        row[key] = f"failed: {described(error)}"
        return
    row[key] = f"{found.cast()}/{found.products}"
    said = dict.fromkeys(str(w.message).partition("\n")[0][:200] for w in warned)
    row.setdefault("details", {})[f"{key}_warned"] = list(said)[:4]
    if found.uncast():
        names = dict.fromkeys(map(str, found.uncast()))
        row.setdefault("details", {})[f"not_{key}"] = list(names)[:8]


def _calibrated(case: Case, row: Row) -> None:
    """The share of the cast operands of the layers of the plain model that recipe "static" casts
    within [1/4, 4], in a step on the batch of the calibration; None without layers."""
    if not candidates(case.model):
        row["static"] = None
        return
    recorder = Ratios(case.model)
    try:
        fp8.convert(case.model, "static")
        torch.manual_seed(1)
        fp8.calibrate(case.model, case.batch, case.loss)
        case.model.zero_grad()
        torch.manual_seed(1)
        OPEN.recorders.append((recorder, Counter()))
        try:
            output, loss = case.run(case.model)
            run_backward(output, loss)
        finally:
            OPEN.recorders.pop()
    except Exception as error:
        row["static"] = f"failed: {described(error)}"
        return
    finally:
        fp8.revert(case.model)
    ratios = {name: ratio for name, ratio in recorder.ratios if ratio != 0}
    outside = {name: ratio for name, ratio in ratios.items() if not LOW <= ratio <= HIGH}
    row["static"] = _rounded(1 - len(outside) / len(ratios)) if ratios else None
    if outside:
        named = [f"{name}: {ratio:.2g}" for name, ratio in outside.items()]
        row.setdefault("details", {})["not_static"] = named[:8]


class Ratios(CastRecorder):
    """Records (operand, RMS of what is rounded) of each cast: the operand's RMS over its scale."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, SAMPLED)
        self.ratios: list[tuple[str, float]] = []

    def count(self, layer: str, operand: str, seen: Observed) -> None:
        """Records the ratio of one cast."""
        scale = 1.0 if seen.scale is None else float(seen.scale)
        rms = float(seen.x.detach().double().square().mean().sqrt())
        self.ratios.append((f"{len(self.ratios)} {operand} of {layer}", rms / scale))


def on_grid(tensor: Tensor, kind: str) -> bool:
    """Whether every value is one of the format's, up to one factor for all: a factor rides in an
    operand of the kernels that have no place for it."""
    if not tensor.is_floating_point():
        return False
    values = tensor.detach().float().flatten()
    values = values[:: 1 + len(values) // SAMPLED]
    values = values[values.isfinite() & (values != 0)].abs()
    if not len(values) or bool((fp8.quantize(values, FORMATS[kind]) == values).all()):
        return True
    bits = fp8.FORMATS[FORMATS[kind]].mantissa_bits + 1
    largest = float(values.max())
    return any(_short(values.double() * (m / largest), bits) for m in _significands(bits))


def _significands(bits: int) -> range:
    return range(2 ** (bits - 1), 2**bits)


def _short(values: Tensor, bits: int) -> bool:
    """Whether every significand has so many bits, to what float32 rounds."""
    scaled = torch.frexp(values).mantissa * 2**bits
    return bool(((scaled - scaled.round()).abs() < 1e-5 * 2**bits).all())


def _preserved(case: Case, row: Row) -> None:
    """Whether init="preserve" keeps the outputs, in evaluation mode."""
    try:
        with evaluating(case.model):
            plain = _outputs(case, case.model)
        model = unit_scale(case.model, init="preserve").eval()
        errors = [_error(ours, plain) for ours in (_outputs(case, model), _outputs(case, model))]
    except Exception as error:
        row["preserve"] = described(error)
        return
    row["preserve"] = "exact" if max(errors) == 0 else f"{max(errors):.1e}"


def _outputs(case: Case, model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    output, _ = case.run(model)
    return [t.detach().clone() for t in tensors(output)]


def _error(ours: list[Tensor], plain: list[Tensor]) -> float:
    """The largest difference relative to the largest value of its tensor."""
    if len(ours) != len(plain):
        return math.inf
    pairs = [(a, b) for a, b in zip(ours, plain, strict=True) if b.is_floating_point()]
    found = [
        0.0 if torch.equal(a, b) else float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
        for a, b in pairs
    ]
    return max(found, default=0.0)


def _trained(stranger: Stranger, row: Row) -> None:
    """The last loss of 20 steps over the first: plain, and unit-scaled in FP8."""
    row["fp32_fall"] = _fall(stranger, lambda m: m, lambda ps: torch.optim.AdamW(ps, lr=2e-3))
    if row["result"] == "runs":
        row["fp8_fall"] = _fall(
            stranger, lambda m: simulate_fp8(unit_scale(m)), lambda ps: uu.optim.AdamW(ps, lr=0.25)
        )


def _fall(
    stranger: Stranger,
    transform: Callable[[nn.Module], nn.Module],
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
) -> float | str:
    torch.manual_seed(0)
    case = stranger.build()
    losses: list[float] = []
    try:
        model = transform(case.model).train()
        steps = optimizer(model.parameters())
        for _ in range(STEPS):
            torch.manual_seed(1)
            output, loss = case.run(model)
            loss = _distance(output) if loss is None else loss
            steps.zero_grad()
            loss.backward()
            steps.step()
            losses.append(float(loss.detach()))
    except Exception as error:
        return described(error)
    return round(losses[-1] / losses[0], 4)


def _distance(output: Any) -> Tensor:
    """The mean squared distance of the outputs from random numbers, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    outputs = [t for t in tensors(output) if t.requires_grad]
    targets = [torch.randn(t.shape, generator=generator) for t in outputs]
    pairs = zip(outputs, targets, strict=True)
    return torch.stack([(t - target).abs().square().mean() for t, target in pairs]).sum()


NOISE = 1e-9
"""Gradients whose largest value is below this share of that of all are zero but for rounding: those
of a bias of keys, or in front of a batch norm.
"""

OUTPUT = "output "
"""Starts the names of outputs among the results of a step."""


def _compiled(stranger: Stranger, row: Row) -> None:
    """The largest error of the outputs and gradients of the compiled model in float64, where a
    difference is one of the program, not of rounding; that of the plain model is in the details.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        case = in_float64(stranger.build())
        row["details"]["compiled_plain"] = _compile_error(case, case.model.train())
        model = unit_scale(case.model)
        _step(case, model)
        _step(case, model)
        row["compiled"] = _compile_error(case, model)
    except Exception as error:
        row["compiled"] = f"failed: {described(error)}"
    finally:
        torch.set_default_dtype(dtype)


def in_float64(case: Case) -> Case:
    """The case with a model and arguments in float64."""
    args, kwargs = tree_map_only(
        Tensor, lambda t: t.double() if t.is_floating_point() else t, (case.args, case.kwargs)
    )
    return Case(case.model.double(), args, kwargs, case.loss)


def _compile_error(case: Case, model: nn.Module) -> str:
    """The largest difference of a step under torch.compile, with the random numbers of eager
    mode, relative to the largest value of the tensor."""
    transformed = torch.compile(model, options={"fallback_random": True})
    try:
        eager, compiled = (_results(case, model, each) for each in (model, transformed))
    except Exception as error:
        return f"failed: {described(error)}"
    sizes = {n: t.abs().max().item() for n, t in eager.items() if not n.startswith(OUTPUT)}
    least = NOISE * max(sizes.values(), default=0.0)
    names = [name for name in eager if sizes.get(name, math.inf) >= least]
    whole = eager.keys() == compiled.keys()
    errors = [_error([compiled[name]], [eager[name]]) for name in names] if whole else [math.inf]
    return f"{max(errors):.1e}"


def _results(case: Case, model: nn.Module, call: nn.Module) -> dict[str, Tensor]:
    """The outputs of a step, and the gradients of parameters by name."""
    call.zero_grad()
    torch.manual_seed(1)
    output, loss = case.run(call)
    run_backward(output, loss)
    results = {f"{OUTPUT}{i}": t.detach().clone() for i, t in enumerate(tensors(output))}
    return results | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def described(error: BaseException) -> str:
    """Its class and first line."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:160]}"


def refused(error: BaseException) -> bool:
    """Whether the error is raised by a statement of `fp8` or `unit_scaling` that names what they do
    not take, and not one that has gone wrong in them."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    ours = last is not None and last.filename.startswith(OURS)
    raised = ours and (last.line or "").lstrip().startswith("raise")
    return raised and type(error).__name__ != "PlanMissError"


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 3)
