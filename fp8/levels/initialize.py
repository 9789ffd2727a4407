"""`initialize`: a model and its optimizer at one of MS-AMP's levels, in one call, in place.

The levels are those of FP8-LM (arXiv:2310.18313, section 2) and of its library MS-AMP 0.4: what
each tensor of a covered weight is kept in. Scales are powers of two.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TypeVar, overload

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..common.mixin import check_module
from ..common.validation import check_name
from ..optim import AdamW
from ..recipes.recipe import AUTO, Recipe, given_recipe
from ..surgery.convert import LAYERS, check_ready, convert
from ..surgery.swap import why_quantized
from ..tensors.scaled_tensor import DTYPES, ScaledTensor
from .optimizer import settings_of, take_over
from .weights import SHARDED, scale_weights

__all__ = ["LEVELS", "Level", "initialize"]

M = TypeVar("M", bound=nn.Module)
Opt = TypeVar("Opt", bound=Optimizer)


@dataclass(frozen=True, kw_only=True)
class Level:
    """A row of LEVELS: formats of the tensors of a weight. None: there is no such tensor."""

    name: str
    product: str = "FP8"
    """Of the operands; which FP8, the recipe says."""
    communication: str = "FP8"
    """Of gradients between processes: see `fp8.distributed.gradient_hook`."""
    weight: str
    master: str | None
    """Of the copy that the optimizer steps, where the weight itself is too coarse for a step."""
    grad: str = "e4m3"
    first_moment: str
    second_moment: str

    @property
    def formats(self) -> dict[str, str | None]:
        """The arguments of the optimizers of `fp8.optim`."""
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
"""Name -> what is kept in which format."""


@overload
def initialize(
    model: M, optimizer: None = None, opt_level: str = "O2", recipe: str | Recipe | None = AUTO
) -> tuple[M, AdamW]: ...
@overload
def initialize(
    model: M, optimizer: Opt, opt_level: str = "O2", recipe: str | Recipe | None = AUTO
) -> tuple[M, Opt]: ...
def initialize(
    model: M,
    optimizer: Optimizer | None = None,
    opt_level: str = "O2",
    recipe: str | Recipe | None = AUTO,
) -> tuple[M, Optimizer]:
    """``model`` and ``optimizer`` at a level: MS-AMP's call. Both are changed in place.

    The weights of linear layers and convolutions that the optimizer trains become ScaledTensors,
    and so do their gradients; the optimizer keeps its states, and where the level has one the
    master of each weight, in the level's formats. Names, ties, dtypes, devices, requires_grad,
    hooks, tags, gradients, parameter groups, schedulers and states that are there already stay. All
    other parameters stay as they are. Weights are new objects in the place of the old: what else
    holds the old ones (a list of parameters, an average of weights) takes them anew.

    optimizer: `torch.optim.Adam`, `AdamW` or `SGD`, those of `unit_scaling.optim` or of
    `fp8.optim`; None: an `fp8.optim.AdamW` with its defaults. It becomes the class of
    `fp8.optim` with its arithmetic, which steps in float32, and skips and counts
    (``skipped_steps``) a step with a gradient that is not finite.
    opt_level: a name in `LEVELS`.
    recipe: of the products, for `fp8.convert`: "auto" is "unit" for layers that are unit-scaled and
    "tensor" for all others. None leaves them as they are.

    Wrap the model in DistributedDataParallel, and compile it, afterwards; at O3 with the same
    weights in all processes, since those that are sent then are in e4m3. state_dicts hold plain
    tensors under the names they had: see `export_weights`.
    Raises ValueError for an unknown level or recipe, a model that has a level already, is wrapped
    or on the meta device, and an optimizer of other parameters or with an option that it cannot
    have here;
    TypeError for another optimizer, and one of parameters in float64. Then nothing has changed.

    >>> import torch, fp8
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model, optimizer = fp8.initialize(model, optimizer, opt_level="O3")
    >>> model[0].weight.format, model[0].bias.dtype
    ('e4m3', torch.float32)
    """
    level = _level(opt_level)
    if recipe is not None:
        given_recipe(recipe)
    _check_model(model)
    if optimizer is None:
        optimizer = AdamW(model.parameters())
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"initialize needs a torch optimizer, got {type(optimizer).__name__}")
    trained = _trained(model, optimizer)
    weights = [p for p in _covered(model) if p in trained]
    settings_of(optimizer, level.formats)
    if recipe is not None:
        convert(model, recipe)  # refuses what it cannot do before it changes anything
    replaced = scale_weights(model, weights, level.weight, level.grad)
    take_over(optimizer, level.formats, replaced)
    return model, optimizer


def _level(name: str) -> Level:
    check_name("opt_level", name, LEVELS)
    return LEVELS[name]


_FIRST = "initialize the model that it wraps, then wrap it"

#: Class of a wrapper, by name, as its library need not be there -> what to do instead.
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
        if parameter.is_meta:
            raise ValueError(
                f"{name} is on the meta device: give the model memory and weights, and then a "
                "level and an optimizer, which would go on to hold what is there now"
            )
    if _in_ddp(model):
        raise ValueError(
            "the model is inside of a DistributedDataParallel, which goes on to average the "
            f"gradients of its old weights: {_FIRST}"
        )


def _in_ddp(model: nn.Module) -> bool:
    """Whether a DistributedDataParallel that is in use wraps the model, or a part of it."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    modules = set(model.modules())

    def found() -> bool:
        wraps = (x for x in gc.get_objects() if issubclass(type(x), DistributedDataParallel))
        return any(not modules.isdisjoint(ddp.modules()) for ddp in wraps)

    return found() and gc.collect() >= 0 and found()  # one that nobody has any more may linger


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
    """The weights that a level is about, of linear layers and convolutions, each once."""
    return [
        parameter
        for module in model.modules()
        if isinstance(module, LAYERS) and not why_quantized(module)
        for name, parameter in module.named_parameters(recurse=False)
        if name.endswith("weight") and parameter.dim() >= 2 and parameter.dtype in DTYPES
    ]
