"""`Muon` with an 8-bit momentum, for hidden matrices; AdamW for all other parameters.

    optimizer = fp8.optim.Muon(fp8.optim.muon_groups(model), adjust_lr_fn="match_rms_adamw")

A group has ``algorithm``: "muon", the default, or "adamw".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from ..common.dtensor import is_dtensor, part_of
from ..common.mixin import bare_class, check_module
from ..common.pitfalls import OptimizerWarning, warn_once
from ..common.validation import check_between, check_flag, check_name, check_number
from ..formats.format import get_format
from ..formats.random_bits import bits_from_key, random_key
from ..products.matmul import matmul
from ..recipes.recipe import Recipe, get_recipe
from ..selection.layers import candidates
from ..selection.roles import roles
from ..tensors.scaled_tensor import plain
from . import state as states
from .adam import check_adam, step_units, units_of
from .base import LowPrecision, check_group, finite_everywhere
from .encodings import MOMENTA, decode
from .state import MASTER, MOMENTUM, Group, State, parameters_of

aten = torch.ops.aten  # which no mode casts, if a step is made inside of `fp8.autocast`

ALGORITHMS = {"muon": "int8_block", "adamw": "e4m3"}
"""Algorithm of a group -> its default ``first_moment``."""

RATES: dict[str | None, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""``adjust_lr_fn`` -> (shape of the matrix) -> factor of the learning rate: Jordan's, and that of
arXiv:2502.16982, section 2.2, under which the RMS of an update is that of AdamW's."""
RATES[None] = RATES["original"]


_INITIAL = {"algorithm": "muon", "stochastic_weights": False, "maximize": False, "skipped_steps": 0}
"""Settings of a group that are no arguments."""


class Muon(LowPrecision):
    """`torch.optim.Muon` with states in low precision, and AdamW for what is no hidden matrix.

    Newton-Schulz iterations run in bfloat16, as in torch; the momentum and the weight are computed
    in float32. With ``first_moment="float32"`` and no recipe the weights are those of
    `torch.optim.Muon`, bit for bit. Embeddings, readouts, vectors and convolutions belong into
    groups with ``algorithm="adamw"``, updated as by `fp8.optim.AdamW`: `muon_groups` makes both.
    Gradients that are not finite are handled as there, for all groups together.

    Args:
        params: as in `fp8.optim.AdamW`. The parameters of a "muon" group are matrices. A stack of
            matrices (query, key and value in one weight) is one matrix.
        lr, weight_decay, momentum, nesterov, ns_coefficients, ns_steps, adjust_lr_fn: as in
            `torch.optim.Muon`.
        eps: the lowest norm that a matrix is divided by, and AdamW's eps.
        betas: of AdamW; by default those of arXiv:2502.16982, section 3.
        recipe: a name in `fp8.RECIPES`, without histories: the operands of the Newton-Schulz
            products are cast as its input. None: bfloat16. The default coefficients amplify the
            errors of 8 bits or fewer, which is warned of.
        first_moment: of a "muon" group, a name in `MOMENTA`. None: "int8_block", integers with a
            scale for each 128 elements, max / 127 (linear 8-bit Muon, arXiv:2509.23106). Of an
            "adamw" group as in `fp8.optim.AdamW`; None: "e4m3".
        second_moment, compile: of AdamW, as in `fp8.optim.AdamW`.
        master_weights, min_size, seed: as in `fp8.optim.AdamW`.

    Raises:
        ValueError: for values out of range.
        TypeError: for a parameter of a "muon" group that is no matrix or is divided among
            processes, whose parts cannot be orthogonalized alone; and for another dtype.
    """

    options = (
        "algorithm",
        "first_moment",
        "second_moment",
        "master_weights",
        "stochastic_weights",
        "min_size",
        "compile",
        "recipe",
    )
    optional = (*LowPrecision.optional, "betas")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        recipe: str | None = None,
        first_moment: str | None = None,
        second_moment: str = "float16",
        master_weights: str | None = None,
        min_size: int = 4096,
        seed: int = 0,
        compile: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "recipe": recipe,
            "first_moment": first_moment,
            "second_moment": second_moment,
            "master_weights": master_weights,
            "min_size": min_size,
            "seed": seed,
            "compile": compile,
        }
        super().__init__(params, defaults | _INITIAL)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        algorithm = param_group.get("algorithm", self.defaults["algorithm"])
        check_name("algorithm", algorithm, ALGORITHMS)
        first = param_group.get("first_moment", self.defaults["first_moment"])
        first = ALGORITHMS[algorithm] if first is None else first
        super().add_param_group({**param_group, "algorithm": algorithm, "first_moment": first})

    @staticmethod
    def check(group: Group) -> None:
        check_name("algorithm", group["algorithm"], ALGORITHMS)
        (check_adam if group["algorithm"] == "adamw" else _check)(group)

    def step_all(self) -> bool:
        matrices, units, index = [], [], 0
        for group in self.param_groups:
            if group["algorithm"] == "adamw":
                units += units_of(group, self.state, index, decoupled=True)
            else:
                numbered = enumerate(group["params"], index)
                matrices += [(i, p, group) for i, p in numbered if p.grad is not None]
            index += len(group["params"])
        if not finite_everywhere(self, [p for _, p, _ in matrices]):
            return False
        if not step_units(units, parameters_of(self)):
            return False
        for i, parameter, group in matrices:
            _step(parameter, self.state[parameter], group, i)
        return True


def _check(group: Group) -> None:
    """Raises ValueError or TypeError for invalid settings of a "muon" group."""
    check_group(group, "lr", "momentum", "weight_decay", "eps", "min_size")
    check_name("first_moment", group["first_moment"], MOMENTA)
    check_name("adjust_lr_fn", group["adjust_lr_fn"], RATES)
    check_flag("nesterov", group["nesterov"])
    for option in ("stochastic_weights", "error_feedback"):
        if group.get(option):
            raise ValueError(f"{option} is not supported by algorithm 'muon'")
    if group["momentum"] >= 1:
        raise ValueError(f"momentum must be less than 1, got {group['momentum']}")
    coefficients: Any = group["ns_coefficients"]
    if not isinstance(coefficients, tuple | list) or len(coefficients) != 3:
        raise ValueError(f"ns_coefficients are three numbers, got {coefficients}")
    for number in coefficients:
        check_number("ns_coefficients", number)
    check_between("ns_steps", group["ns_steps"], 0, 99)
    if group["recipe"] is not None:
        if isinstance(group["recipe"], Recipe):
            raise TypeError("recipe is a name in fp8.RECIPES, which a state_dict can hold")
        _check_recipe(get_recipe(group["recipe"]), coefficients)
    for parameter in group["params"]:
        shape = tuple(parameter.shape)
        if len(shape) != 2:
            raise TypeError(
                f"Muon needs matrices, got a parameter of shape {shape}: give it in a group with "
                'algorithm="adamw", as muon_groups does'
            )
        if is_dtensor(parameter):
            raise TypeError(
                f"Muon orthogonalizes whole matrices, got a DTensor of shape {shape}, which "
                "processes divide: use fp8.optim.AdamW there"
            )


def _check_recipe(recipe: Recipe, coefficients: Sequence[float]) -> None:
    if recipe.keeps_history:
        raise ValueError(f"recipe {recipe.name!r} needs a history, which Muon does not keep")
    low = recipe.input is not None and get_format(recipe.input.format).bits <= 8
    if low and amplifies(*coefficients):
        warn_once(
            OptimizerWarning,
            f"the Newton-Schulz coefficients {tuple(coefficients)} amplify what recipe "
            f"{recipe.name!r} rounds off, so that an update may get too long. "
            "ns_coefficients=(2, -1.5, 0.5) do not, but need more ns_steps",
            key=recipe.name,
        )


def amplifies(a: float, b: float, c: float) -> bool:
    """Whether an iteration of p(s) = a s + b s^3 + c s^5 moves singular values apart at the point
    where it rests.

    That is the smallest positive s with p(s) = s, and the question is whether |p'(s)| > 1. Jordan's
    coefficients, the default of torch, have p' = -1.6 there, and diverge from 1.26 on, the next
    such s. (2, -1.5, 0.5) have p' = 0 at 1. docs/optimizers.md has what either does under "mxfp8".
    """
    roots = [-(a - 1) / b] if not c and b else []
    if c and (square := b * b - 4 * c * (a - 1)) >= 0:
        roots = [(-b - math.sqrt(square)) / (2 * c), (-b + math.sqrt(square)) / (2 * c)]
    rests = min((root for root in roots if root > 0), default=math.nan)  # s^2
    return not abs(a + 3 * b * rests + 5 * c * rests**2) <= 1


def _step(parameter: Any, state: State, group: Group, index: int) -> None:
    """Jordan's Muon with decoupled weight decay (arXiv:2502.16982, section 2), as in torch."""
    encodings = states.prepare(state, parameter, group)
    state["step"] += 1
    lr, momentum = float(group["lr"]), float(group["momentum"])
    gradient = plain(part_of(parameter.grad), torch.float32)
    if group["maximize"]:
        gradient = -gradient
    buffer = decode(states.read(state, MOMENTUM)).view(parameter.shape)
    buffer.lerp_(gradient, 1 - momentum)
    update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
    recipe = None if group["recipe"] is None else get_recipe(group["recipe"])
    update = orthogonalized(
        update, group["ns_coefficients"], group["ns_steps"], group["eps"], recipe
    )
    encoding, bits = encodings[MOMENTUM], None
    if encoding.rounds_stochastically(momentum):
        key = random_key((group["seed"], int(state["step"]), index))
        bits = bits_from_key((buffer.numel(),), key, device=buffer.device)
    states.keep(state, MOMENTUM, parameter, encoding, buffer.flatten(), bits)
    weight = states.weight_of(parameter, state, MASTER in encodings)
    weight.mul_(1 - lr * group["weight_decay"])
    weight.add_(update, alpha=-lr * RATES[group["adjust_lr_fn"]](*parameter.shape))
    states.put_weight(parameter, state, weight, encodings.get(MASTER))


def orthogonalized(
    x: Tensor,
    coefficients: tuple[float, float, float],
    steps: int,
    eps: float,
    recipe: Recipe | None = None,
) -> Tensor:
    """The matrix ``x`` with singular values near 1, bfloat16, by iterations of the odd polynomial
    a y + b y^3 + c y^5 of them (Jordan et al. 2024, Muon). A zero matrix stays zero."""
    a, b, c = coefficients
    tall = x.shape[0] > x.shape[1]
    y = x.bfloat16()
    y = y.T if tall else y
    y = y / y.norm().clamp(min=eps)
    for _ in range(steps):
        gram = aten.mm(y, y.T) if recipe is None else matmul(y, y.T, recipe=recipe)
        y = _added(y, a, _added(gram, b, gram, gram, c, recipe), y, 1.0, recipe)
    return y.T if tall else y


def _added(
    x: Tensor, beta: float, left: Tensor, right: Tensor, alpha: float, recipe: Recipe | None
) -> Tensor:
    """``beta * x + alpha * left @ right``."""
    if recipe is None:
        return aten.addmm(x, left, right, beta=beta, alpha=alpha)
    return beta * x + alpha * matmul(left, right, recipe=recipe)


def muon_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The parameters of a model in two groups for `Muon`.

    The first are the matrices of linear layers, except the readout, layers that write the residual
    stream from outside of the blocks, and weights that an embedding shares: what
    `fp8.Policy(keep=["readout", "embedding"])` finds. The second are all others, with
    ``algorithm="adamw"``. Of a unit-scaled model, give each to
    `unit_scaling.optim.scaled_parameters`, with the rules "muon" and "adam".

    Args:
        model: not changed.

    Returns:
        [{"params", "algorithm": "muon"}, {"params", "algorithm": "adamw"}].

    Raises:
        TypeError: if ``model`` is not a module.
        ValueError: if it has no hidden matrix.
    """
    check_module("muon_groups", model)
    layers = candidates(model)
    kinds = roles(model, layers)
    embeddings = nn.Embedding | nn.EmbeddingBag
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, embeddings)}
    hidden = {
        id(parameter): parameter
        for name, layer in layers.items()
        if kinds[name] not in ("readout", "embedding")
        for parameter in layer.parameters()
        if parameter.dim() == 2 and id(parameter) not in looked_up
    }
    if not hidden:
        raise ValueError(f"this {bare_class(model).__name__} has no hidden matrix: use AdamW")
    others = [p for p in model.parameters() if id(p) not in hidden]
    return [
        {"params": list(hidden.values()), "algorithm": "muon"},
        {"params": others, "algorithm": "adamw"},
    ]
