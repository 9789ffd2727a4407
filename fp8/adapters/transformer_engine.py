"""TransformerEngine: its layers in a model, under its recipes, and back.

Its kernels were never run: the tests run its Python on the CPU. Every field of a recipe is set
explicitly, because defaults differ between versions and devices and may come from the environment.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..casts.scaled_tensor import DTYPES
from ..common.libraries import need
from ..common.mixin import Args, Forward, Mixin, add_mixin, bare_class, remove_mixin
from ..common.validation import check_name
from ..layers.select import Where, checked_where
from ..layers.swap import Make, Padded, layers_for, swap, why_not_fit
from ..recipes.cast import Cast
from ..recipes.recipe import AUTO, RECIPES, Recipe, recipe_unless_auto
from ..recipes.rules import LEAST_OF_GROUP

__all__ = ["convert", "delayed_scaling", "revert", "te_recipe"]

# A recipe of TransformerEngine, and a layer: the library may not be installed.
TERecipe = Any
TELayer = Any

_NORMS = (nn.LayerNorm, nn.RMSNorm)
# Recipe -> the sizes of a weight and the number of tokens must be multiples of this; others: 16
# (utils.assert_dim_for_fp8_exec and the quantizers' is_quantizable, 2.20).
_MULTIPLES = {"MXFP8BlockScaling": 32, "Float8BlockScaling": 128}
_EPS = "fp8_eps"

# Fields that only some recipes or versions have, with values that disable them.
_NEUTRAL = {
    "fp8_dpa": False,
    "fp8_mha": False,
    "backward_override": None,
    "enable_2d_quantization": False,
    "row_scaled_activation": False,
    "nvfp4_4over6": "none",
    "nvfp4_4over6_e4m3_use_256": "all",
    "nvfp4_4over6_err_mode": "MAE",
}

# Formats (forward, gradients) -> the name in TransformerEngine.
_FORMATS = {("e4m3", "e4m3"): "E4M3", ("e4m3", "e5m2"): "HYBRID"}


def _library() -> ModuleType:
    need("transformer_engine")
    return importlib.import_module("transformer_engine.common.recipe")


def _make(kind: str, **options: object) -> TERecipe:
    """A recipe of that class. Raises ValueError for unknown fields."""
    cls = getattr(_library(), kind)
    names = {field.name for field in dataclasses.fields(cls)}
    # TransformerEngine ignores what it does not know.
    for name in options.keys() - names:
        raise ValueError(f"{kind} of this version of TransformerEngine has no {name!r}")
    neutral = {name: value for name, value in _NEUTRAL.items() if name in names}
    return cls(**options, **neutral)


def format_of(name: str) -> Any:
    """TransformerEngine's Format. Raises ValueError for "E5M2", with which it does not train."""
    check_name("fp8_format", name, _FORMATS.values())
    return getattr(_library().Format, name)


def delayed_scaling(
    *,
    margin: int = 0,
    fp8_format: str = "HYBRID",
    amax_history_len: int = 1024,
    amax_compute_algo: str = "max",
    interval: int = 1,
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False),
) -> TERecipe:
    """TransformerEngine's DelayedScaling, with the documented option names.

    Args:
        margin: the scale leaves headroom for that many doublings.
        fp8_format: "HYBRID" (e4m3 forward, e5m2 for gradients) or "E4M3".
        amax_history_len: the number of passes considered.
        amax_compute_algo: "max" or "most_recent" of them.
        interval: only 1, the number of steps after which scales are computed again.
        override_linear_precision: only (False, False, False). Current versions ignore both options;
            "row_gw_hp", ours or torchao's, computes the last product in high precision.

    Raises:
        ValueError: for other values and unknown names.
    """
    if interval != 1:
        raise ValueError(
            f"interval must be 1, got {interval}: TransformerEngine recomputes scales at each step"
        )
    if any(override_linear_precision):
        raise ValueError(
            "override_linear_precision must be (False, False, False), got "
            f"{tuple(override_linear_precision)}: TransformerEngine's DelayedScaling computes all "
            "three products in FP8"
        )
    check_name("amax_compute_algo", amax_compute_algo, ("max", "most_recent"))
    return _make(
        "DelayedScaling",
        margin=margin,
        fp8_format=format_of(fp8_format),
        amax_history_len=amax_history_len,
        amax_compute_algo=amax_compute_algo,
        scaling_factor_compute_algo=None,
        reduce_amax=True,
    )


def _scale_of_one(
    amax: Tensor, scale: Tensor, fp8_max: float, recipe: TERecipe
) -> Tensor:
    return torch.ones_like(scale)


def _delayed(cast: Cast, format: str) -> TERecipe:
    """A recipe with scales of earlier passes, or of 1 under "unit"."""
    history = cast.history or 1
    of_one = None
    if cast.rule is None:
        of_one = _scale_of_one
    return _make(
        "DelayedScaling",
        margin=cast.margin,
        fp8_format=format_of(format),
        amax_history_len=history,
        amax_compute_algo="max" if history > 1 else "most_recent",
        scaling_factor_compute_algo=of_one,
        reduce_amax=of_one is None,
    )


# Rule of an input -> its least magnitude; else it is "exact".
_LEAST: dict[str | None, float] = {"exact_block": LEAST_OF_GROUP}


def _dynamic(cast: Cast, format: str) -> TERecipe:
    """A recipe with scales of each pass."""
    library = _library()
    powers = cast.rule == "up"
    block = cast.scaling == "block"
    kind = "Float8CurrentScaling"
    options: dict[str, object] = {"use_power_2_scales": powers}
    if block:
        kind = "Float8BlockScaling"
        options = {"use_f32_scales": not powers}
        for operand, dimensions in (("x", 1), ("w", 2), ("grad", 1)):
            options[f"{operand}_block_scaling_dim"] = dimensions
    # The defaults of its recipes: fast accumulation in the forward product of Float8CurrentScaling
    # alone; Float8BlockScaling refuses it.
    for product, split in (("fprop", block), ("dgrad", True), ("wgrad", True)):
        options[f"fp8_gemm_{product}"] = library.MMParams(use_split_accumulator=split)
    recipe = _make(kind, fp8_format=format_of(format), **options)
    # The class has filled these from defaults.
    least = {"fwd_inp": _LEAST.get(cast.rule, 0.0), "fwd_weight": 0.0, "bwd_grad": 0.0}
    for operand, epsilon in least.items():
        params = library.QParams(power_2_scale=powers, amax_epsilon=epsilon)
        setattr(recipe, f"fp8_quant_{operand}", params)
    return recipe


def _mx(cast: Cast, format: str) -> TERecipe:
    return _make("MXFP8BlockScaling", margin=0, fp8_format=format_of(format))


# Scaling -> the supported rules, and a function of (cast of the input, format) for its recipe.
_MAKERS: dict[str, tuple[tuple[str | None, ...], Callable[[Cast, str], TERecipe]]] = {
    "unit": ((None,), _delayed),
    "delayed": (("up", "exact"), _delayed),
    "tensor": (("up", "exact"), _dynamic),
    "block": (("up", "exact", "exact_block"), _dynamic),
    "mx": (("up",), _mx),
}


def te_recipe(recipe: str | Recipe) -> TERecipe:
    """TransformerEngine's recipe object for one of ours (docs/adapters.md has the table); "auto" is
    "tensor". DelayedScaling scales by fp8_max / amax, which our default rule rounds to a power of
    two.

    Args:
        recipe: a name or a `Recipe`.

    Raises:
        ValueError: if TransformerEngine has no such recipe.
    """
    chosen = recipe_unless_auto(recipe) or RECIPES["tensor"]
    if dataclasses.replace(chosen, name="nvfp4_nvidia") == RECIPES["nvfp4_nvidia"]:
        formats = _library().Format
        return _make(
            "NVFP4BlockScaling",
            fp4_format=formats.E2M1,
            fp8_format=formats.E4M3,
            disable_rht=False,
            disable_stochastic_rounding=False,
            disable_2d_quantization=False,
        )
    cast = chosen.input
    grad = chosen.grad
    if cast and grad and chosen == _plain(chosen.name, cast, grad):
        rules, make = _MAKERS.get(cast.scaling, ((), _mx))
        format = _FORMATS.get((str(cast.format), str(grad.format)))
        if cast.rule in rules and format is not None:
            return make(cast, format)
    names = (
        "'unit', 'unit_e4m3', 'delayed', 'tensor', 'block', 'mxfp8' and 'nvfp4_nvidia'"
    )
    raise ValueError(
        f"TransformerEngine has no recipe for {chosen.name!r}; it has {names}"
    )


def _plain(name: str, cast: Cast, grad: Cast) -> Recipe:
    """A recipe of TransformerEngine's form, with what ``cast`` has of it for every operand."""
    rule = "exact" if cast.rule in _LEAST else cast.rule
    plain = Cast(format=cast.format, scaling=cast.scaling, rule=rule)
    if cast.scaling == "delayed":
        plain = dataclasses.replace(plain, margin=cast.margin, history=cast.history)
    tile = (128, 128) if cast.scaling == "block" else plain.tile
    weight = dataclasses.replace(plain, tile=tile)
    grad = dataclasses.replace(plain, format=grad.format)
    input = dataclasses.replace(plain, rule=cast.rule)
    return Recipe(name=name, input=input, weight=weight, grad=grad)


# The name by which `fp8.layers` asks every adapter for the library's recipe.
its_recipe = te_recipe


class _Autocast(Mixin):
    """A module that runs under TransformerEngine's autocast. fp8_te_recipe: None disables it."""

    fp8_te_recipe: TERecipe | None
    fp8_in_eval: bool
    training: bool

    def around(self, forward: Forward, args: Args, kwargs: dict[str, object]) -> object:
        recipe = self.fp8_te_recipe
        enabled = recipe is not None and (self.training or self.fp8_in_eval)
        with need("transformer_engine").autocast(enabled=enabled, recipe=recipe):
            return forward(*args, **kwargs)


def run_under(module: nn.Module, recipe: TERecipe | None, *, in_eval: bool) -> None:
    """Has ``module`` run under TransformerEngine's autocast; recipe None: with it disabled."""
    add_mixin(module, _Autocast)
    vars(module).update(fp8_te_recipe=recipe, fp8_in_eval=in_eval)


class _Layer(Mixin):
    """A layer of TransformerEngine with only its weights in checkpoints."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


class _Linear(Padded, _Layer):
    """A linear layer for any number of tokens."""


class _Fused(_Linear):
    """A layer that computes with parameters of other modules too; its own have torch's names."""

    #: TransformerEngine's name of a parameter -> the module that holds it, and its name there.
    fp8_parameters: dict[str, tuple[nn.Module, str]]

    def around(self, forward: Forward, args: Args, kwargs: dict[str, object]) -> object:
        for name, (module, parameter) in self.fp8_parameters.items():
            vars(self)[name] = getattr(module, parameter)
        return super().around(forward, args, kwargs)


class _Skipped(Mixin):
    """A module whose function a fused layer computes: it returns its input."""

    def around(self, forward: Forward, args: Args, kwargs: dict[str, object]) -> object:
        return next(iter((*args, *kwargs.values())))


def convert(
    model: nn.Module,
    recipe: str | Recipe | TERecipe = AUTO,
    *,
    where: Where | None = None,
    in_eval: bool = False,
    fuse: bool | Sequence[Sequence[str]] = False,
) -> nn.Module:
    """Replaces nn.Linear, nn.LayerNorm and nn.RMSNorm with TransformerEngine's layers, under its
    autocast; `fp8.convert` with backend="transformer_engine".

    Parameters, hooks, the training flag and keys of the state_dict stay, without `_extra_state`:
    the history of "delayed" restarts after a checkpoint is loaded. `fp8.report` lists every layer.

    Args:
        model: changed in place.
        recipe: a name, a `Recipe`, or a recipe of TransformerEngine's; see `te_recipe`. "auto" is
            "tensor", because the converted layers are torch's, which are not unit-scaled.
        where: (name, layer) -> whether to convert it; None converts every layer.
        in_eval: whether to use FP8 in evaluation too.
        fuse: groups of modules, each a sequence of names in the order of their calls: a norm and a
            linear layer become a te.LayerNormLinear; a norm, a linear layer, an activation and a
            linear layer a te.LayerNormMLP. The output of each must have no other use than as the
            input of the next, which is not checked. True selects what follows each other in an
            nn.Sequential.

    Returns:
        ``model``; if it is itself a layer, the layer that replaces it. Calls of the returned model
        run in FP8, direct calls of its submodules do not.

    Raises:
        ImportError: without TransformerEngine.
        ValueError: as `te_recipe`, and for a named group that has no such layer.
        AttributeError: for a name in ``fuse`` that the model does not have.
    """
    te = need("transformer_engine")
    where = checked_where(where)
    if isinstance(recipe, str | Recipe):
        recipe = te_recipe(recipe)
    kind = type(recipe).__name__
    multiple = _MULTIPLES.get(kind, 16)
    named = model.named_modules(remove_duplicate=False)
    uses = Counter(id(module) for _, module in named)
    # Its history has one entry for a layer and pass.
    once = kind == "DelayedScaling" and recipe.reduce_amax

    def make(module: nn.Module) -> nn.Module | str:
        if once and uses[id(module)] > 1:
            return "has two names, and DelayedScaling takes one call a pass"
        return _why_not(module, multiple) or _te_layer(te, module, multiple)

    other = "TransformerEngine has no such layer"
    single = layers_for(model, (nn.Linear, *_NORMS), where, make, other)
    fused: _Group = {}
    kinds: dict[str, str] = {}
    for group in _groups(model, fuse, single, uses):
        fused |= _fused(te, group, multiple)
        kinds |= dict.fromkeys(group, f", in te.{_FUSED[len(group)]}")
    model = swap(
        model,
        lambda name, module: fused.get(name) or single(name, module),
        adapter="transformer_engine",
        how=lambda name: f"TransformerEngine, {kind}{kinds.get(name, '')}",
    )
    run_under(model, recipe, in_eval=in_eval)
    return model


def _why_not(module: nn.Module, multiple: int) -> str:
    """Why TransformerEngine has no layer like one of torch; "" if it has one."""
    if isinstance(module, _NORMS) and not module.elementwise_affine:
        return f"te.{type(module).__name__} has no form without weight"
    if isinstance(module, nn.LayerNorm) and module.bias is None:
        return "te.LayerNorm has no form without bias"
    if why := why_not_fit(module, multiple):
        return why
    dtype = module.weight.dtype
    if dtype in DTYPES:
        return ""
    return f"TransformerEngine has no {dtype}"


def _te_layer(te: ModuleType, module: nn.Module, multiple: int) -> TELayer:
    """On the meta device, as it gets the parameters of the old layer."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    if isinstance(module, nn.Linear):
        sizes = module.in_features, module.out_features
        bias = module.bias is not None
        layer = te.Linear(*sizes, bias=bias, params_dtype=weight.dtype, device="meta")
        return _padded(layer, _Linear, module, ["bias"], multiple)
    norm = getattr(te, type(module).__name__)
    shape = tuple(weight.shape)
    layer = norm(shape, eps=_eps(module), device="meta", dtype=weight.dtype)
    vars(layer)[_EPS] = module.eps
    add_mixin(layer, _Layer)
    return layer


def _eps(norm: Any) -> float:
    # Without eps torch's RMSNorm takes the machine epsilon.
    if norm.eps is None:
        return torch.finfo(norm.weight.dtype).eps
    return norm.eps


def _padded(
    layer: TELayer,
    mixin: type[_Linear],
    linear: nn.Linear,
    biases: Sequence[str],
    multiple: int,
) -> TELayer:
    """``layer`` with the mixin. A bias that it lacks is an empty tensor that is no parameter."""
    if linear.bias is None:
        vars(layer).update(dict.fromkeys(biases, linear.weight.detach().new_empty(0)))
    add_mixin(layer, mixin)
    layer.fp8_multiple = multiple
    return layer


# Names and modules that one layer replaces.
_Group = dict[str, Any]

# Size of a group -> the layer.
_FUSED = {2: "LayerNormLinear", 4: "LayerNormMLP"}

# Activation -> TransformerEngine's name; its "gelu" is the approximation by tanh.
_ACTIVATIONS = {nn.GELU: "gelu", nn.ReLU: "relu", nn.SiLU: "silu"}


def _groups(
    model: nn.Module,
    fuse: bool | Sequence[Sequence[str]],
    single: Make,
    uses: Mapping[int, int],
) -> list[_Group]:
    groups: list[_Group] = []
    candidates: Iterable[Sequence[str]] = _neighbours(model)
    if not isinstance(fuse, bool):
        candidates = fuse
    for names in candidates if fuse else ():
        if isinstance(names, str):
            raise TypeError(
                f"fuse must be True or sequences of names, got the name {names!r}"
            )
        group = {name: model.get_submodule(name) for name in names}
        why = _why_not_fused(group, single, uses)
        for again in group.keys() & {name for other in groups for name in other}:
            why = f"{again} is in another group"
        if not why:
            groups.append(group)
        elif fuse is not True:
            raise ValueError(f"cannot fuse {', '.join(names)}: {why}")
    return groups


def _neighbours(model: nn.Module) -> Iterator[list[str]]:
    """Names of 4 and of 2 modules that follow each other in an nn.Sequential."""
    for path, module in model.named_modules():
        if type(module) is nn.Sequential:
            names = [f"{path}.{name}".lstrip(".") for name in module._modules]
            for i in range(len(names)):
                yield names[i : i + 4]
                yield names[i : i + 2]


def _why_not_fused(group: _Group, single: Make, uses: Mapping[int, int]) -> str:
    """Why TransformerEngine has no layer for a group; "" if it has one."""
    modules = list(group.values())
    kinds = [type(module) for module in modules]
    are_linear = set(kinds[1::2]) == {nn.Linear}
    if len(group) not in _FUSED or kinds[0] not in _NORMS or not are_linear:
        return "expected a norm and a linear layer, or these, an activation and a linear layer"
    for name, module in group.items():
        if isinstance(why := single(name, module), str):
            return f"{name}: {why}"
        if uses[id(module)] > 1:
            return f"{name} has two names"
        if any("hook" in key and value for key, value in vars(module).items()):
            return f"{name} has hooks, which would see other values"
    norm, linear, *rest = modules
    if norm.weight.shape != (linear.in_features,):
        return (
            f"the norm is over {tuple(norm.weight.shape)}, not ({linear.in_features},)"
        )
    if len({m.weight.dtype for m in (norm, linear, *rest[1:])}) > 1:
        return "the weights have several dtypes"
    if not rest:
        return ""
    activation, second = rest
    exact = getattr(activation, "approximate", "") == "none"
    if type(activation) not in _ACTIVATIONS or exact:
        return "its activations are nn.GELU('tanh'), nn.ReLU and nn.SiLU"
    if second.weight.shape != linear.weight.shape[::-1]:
        return "the second linear layer does not return to the size of the norm"
    if (linear.bias is None) == (second.bias is None):
        return ""
    return "one linear layer has a bias"


def _fused(te: ModuleType, group: _Group, multiple: int) -> _Group:
    """Name -> what replaces the module: the fused layer in the place of the first linear one, which
    registers the same parameters as that; the others stay, and return their input."""
    norm, linear, *rest = group.values()
    options = {}
    biases = ["bias"]
    holders = {"layer_norm": norm}
    if rest:
        options["activation"] = _ACTIVATIONS[type(rest[0])]
        biases = ["fc1_bias", "fc2_bias"]
    layer = getattr(te, _FUSED[len(group)])(
        linear.in_features,
        linear.out_features,
        normalization=type(norm).__name__,
        eps=_eps(norm),
        device="meta",
        bias=linear.bias is not None,
        params_dtype=linear.weight.dtype,
        **options,
    )
    _padded(layer, _Fused, linear, biases, multiple)
    if rest:
        holders |= {"fc1": layer, "fc2": rest[1]}
    layer.fp8_parameters = {}
    for name in list(layer._parameters):
        prefix, _, own = name.rpartition("_")
        # Other modules register them; `_Fused.around` reads them there.
        if prefix in holders:
            layer.fp8_parameters[name] = holders[prefix], own
            delattr(layer, name)
    for module in (norm, *rest):
        add_mixin(module, _Skipped)
    return dict(zip(group, (norm, layer, *rest), strict=True))


def revert(model: nn.Module) -> nn.Module:
    """Replaces TransformerEngine's layers, whatever created them, with torch's with the same
    parameters. Those without an equivalent (split parameters, zero-centered norms, fused layers
    that `convert` did not make) stay. Returns ``model``, changed in place, or the layer that
    replaces it. Raises ImportError without TransformerEngine."""
    te = need("transformer_engine")
    for module in model.modules():
        remove_mixin(module, _Skipped)
        if isinstance(module, _Autocast):
            remove_mixin(module, _Autocast)
            del module.fp8_te_recipe, module.fp8_in_eval
    return swap(model, lambda name, module: _torch_layer(te, module))


def _torch_layer(te: ModuleType, module: nn.Module) -> nn.Module | None:
    kind = bare_class(module)
    parameters = dict(module.named_parameters(recurse=False))
    weight = parameters.get("weight")
    if weight is None or getattr(module, "zero_centered_gamma", False):
        return None
    options: dict[str, Any] = {"device": "meta", "dtype": weight.dtype}
    if kind is te.Linear or isinstance(module, _Fused):
        outputs, inputs = weight.shape
        return nn.Linear(inputs, outputs, bias="bias" in parameters, **options)
    norm = {te.LayerNorm: nn.LayerNorm, te.RMSNorm: nn.RMSNorm}.get(kind)
    if norm is None:
        return None
    eps = vars(module).get(_EPS, module.eps)
    return norm(tuple(weight.shape), eps=eps, **options)
