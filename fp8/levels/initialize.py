"""`initialize`: sets a model and its optimizer to one of MS-AMP's levels, in place.

The levels are those of FP8-LM (arXiv:2310.18313, section 2) and of its library MS-AMP 0.4: the
formats of the tensors of each covered weight. Scales are powers of two.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TypeVar, cast, overload

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from ..common.dtensor import is_dtensor
from ..common.mixin import check_module
from ..common.validation import check_name
from ..optim import AdamW
from ..recipes.policy import Policy, as_policy
from ..recipes.recipe import AUTO, Recipe
from ..selection.layers import LAYERS, why_quantized
from ..surgery.convert import check_ready, convert
from ..tensors.scaled_tensor import DTYPES, ScaledTensor
from .optimizer import settings_of, take_over
from .weights import SHARDED, scale_weights

M = TypeVar("M", bound=nn.Module)
Opt = TypeVar("Opt", bound=Optimizer)


@dataclass(frozen=True, kw_only=True)
class Level:
    """A row of LEVELS: the formats of the tensors of a weight. None: the tensor does not exist."""

    name: str
    product: str = "FP8"
    """The format of operands; the recipe decides which FP8 format."""
    communication: str = "FP8"
    """The format of gradients between processes: see `fp8.distributed.gradient_hook`."""
    weight: str
    master: str | None
    """The format of the copy that the optimizer updates, if the weight itself is too coarse."""
    grad: str = "e4m3"
    first_moment: str
    second_moment: str

    @property
    def formats(self) -> dict[str, str | None]:
        """The arguments for the optimizers of `fp8.optim`."""
        return {
            "first_moment": self.first_moment,
            "second_moment": self.second_moment,
            "master_weights": self.master,
        }


LEVELS: dict[str, Level] = {
    level.name: level
    for level in (
        Level(
            name="O1", weight="fp16", master=None, first_moment="float32", second_moment="float32"
        ),
        Level(name="O2", weight="fp16", master=None, first_moment="e4m3", second_moment="float16"),
        Level(
            name="O3", weight="e4m3", master="float16", first_moment="e4m3", second_moment="float16"
        ),
    )
}
"""Name -> formats of a level."""


@overload
def initialize(
    model: M,
    optimizer: None = None,
    opt_level: str = "O2",
    recipe: str | Recipe | Policy | None = AUTO,
) -> tuple[M, AdamW]: ...
@overload
def initialize(
    model: M,
    optimizer: Opt,
    opt_level: str = "O2",
    recipe: str | Recipe | Policy | None = AUTO,
) -> tuple[M, Opt]: ...
def initialize(
    model: M,
    optimizer: Optimizer | None = None,
    opt_level: str = "O2",
    recipe: str | Recipe | Policy | None = AUTO,
) -> tuple[M, Optimizer]:
    """Sets ``model`` and ``optimizer`` to a level in place; equivalent to MS-AMP's function.

    The weights of linear layers and convolutions that the optimizer trains become ScaledTensors,
    and so do their gradients. The optimizer stores its states, and masters if the level has them,
    in the formats of the level. Names, ties, dtypes, devices, requires_grad, hooks, tags,
    gradients, parameter groups, schedulers and existing states stay the same, as do all other
    parameters. The weights are new objects: whatever else refers to the old ones (a list of
    parameters, averaged weights) must be updated.

    Wrap the model in DistributedDataParallel and compile it afterwards. At O3 all processes need
    equal weights before, because the weights that are broadcast then are in e4m3. state_dicts
    contain plain tensors under the same names: see `export_weights`.

    Args:
        model: changed in place.
        optimizer: `torch.optim.Adam`, `AdamW`, `SGD` or `Muon`, or one of `unit_scaling.optim` or
            `fp8.optim`. None: an `fp8.optim.AdamW` with defaults. It becomes an instance of the
            class of `fp8.optim` with the same arithmetic, which computes in float32, and skips and
            counts (``skipped_steps``) steps with a gradient that is not finite.
        opt_level: a name in `LEVELS`.
        recipe: of the products, for `fp8.convert`. "auto" is "unit" for unit-scaled layers and
            "tensor" for all others. A `fp8.Policy` is possible too. None leaves the products
            unchanged.

    Returns:
        (``model``, optimizer).

    Raises:
        ValueError: for an unknown level or recipe; for a model that has a level, is wrapped or is
            on the meta device; for an optimizer of other parameters or with an unsupported option.
        TypeError: for another optimizer, and for one of float64 parameters. If an error is raised,
            nothing has changed.

    >>> import torch, fp8
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model, optimizer = fp8.initialize(model, optimizer, opt_level="O3")
    >>> model[0].weight.format, model[0].bias.dtype
    ('e4m3', torch.float32)
    """
    check_name("opt_level", opt_level, LEVELS)
    level = LEVELS[opt_level]
    if recipe is not None:
        as_policy(recipe)
    _check_model(model)
    if optimizer is None:
        optimizer = AdamW(model.parameters())
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"initialize needs a torch optimizer, got {type(optimizer).__name__}")
    trained = _trained(model, optimizer)
    weights = [p for p in _covered(model) if p in trained]
    settings_of(optimizer, level.formats)
    if recipe is not None:
        convert(model, recipe)  # raises before anything changes
    replaced = scale_weights(model, weights, level.weight, level.grad)
    take_over(optimizer, level.formats, replaced)
    return model, optimizer


_FIRST = "initialize the model that it wraps, then wrap it"

#: Class name of a wrapper, whose library may not be installed -> what to do instead.
_WRAPPERS = {
    "DistributedDataParallel": _FIRST,
    "DataParallel": _FIRST,
    "OptimizedModule": "initialize the model, then compile it",
    "FSDPModule": SHARDED,
    "FullyShardedDataParallel": f"use torch's fully_shard (FSDP2); {SHARDED}",
    "DeepSpeedEngine": f"use torch's fully_shard (FSDP2) in the place of ZeRO; {SHARDED}",
}


def _check_model(model: nn.Module) -> None:
    check_module("initialize", model)
    check_ready(model)
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _WRAPPERS:
                where = f" ({name})" if name else ""
                raise ValueError(
                    f"a {kind.__name__}{where} has no level: {_WRAPPERS[kind.__name__]}"
                )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, ScaledTensor):
            raise ValueError(f"the model has a level already: {name} is a ScaledTensor")
        if is_dtensor(parameter):
            raise ValueError(
                f"{name} has no level, because processes divide it: step it with fp8.optim.AdamW, "
                "which keeps states in FP8"
            )
        if parameter.is_meta:
            raise ValueError(
                f"{name} is on the meta device: give the model memory and weights, and then a "
                "level and an optimizer, which would go on to hold what is there now"
            )
    if dist.is_available() and dist.is_initialized():
        _check_accumulators(model)


def _check_accumulators(model: nn.Module) -> None:
    """Raises ValueError if gradients of the old weights are still in use: by a wrapper such as
    DistributedDataParallel, or by the graph of a forward pass."""

    def in_use(parameter: Tensor) -> bool:
        """A mark in the node that accumulates the gradient lasts while something holds it."""
        cast(dict[str, bool], get_gradient_edge(parameter).node.metadata)["fp8.levels"] = True
        return "fp8.levels" in cast(dict[str, bool], get_gradient_edge(parameter).node.metadata)

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if any(map(in_use, trained.values())):
        gc.collect()  # a discarded wrapper may not be collected yet
        for name, parameter in trained.items():
            if in_use(parameter):
                raise ValueError(
                    f"the gradient of the present {name} is still in use: a "
                    f"DistributedDataParallel goes on to average it ({_FIRST}), or the result of "
                    "an earlier forward pass is kept (delete it)"
                )


def _trained(model: nn.Module, optimizer: Optimizer) -> set[Tensor]:
    """The parameters of the optimizer. Raises ValueError for one that is not the model's."""
    own = set(model.parameters())
    trained = [(i, p) for i, group in enumerate(optimizer.param_groups) for p in group["params"]]
    for i, parameter in trained:
        if parameter not in own:
            raise ValueError(
                f"the optimizer's group {i} has a parameter of shape {tuple(parameter.shape)} that "
                "is not the model's: make the optimizer from this model's parameters"
            )
    return {parameter for _, parameter in trained}


def _covered(model: nn.Module) -> list[nn.Parameter]:
    """The weights that a level covers, those of linear layers and convolutions, each once."""
    return [
        parameter
        for module in model.modules()
        if isinstance(module, LAYERS) and not why_quantized(module)
        for name, parameter in module.named_parameters(recurse=False)
        if name.endswith("weight") and parameter.dim() >= 2 and parameter.dtype in DTYPES
    ]
