"""Tags stay with a model whose parameters are replaced."""

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import unit_scaling as uu
from unit_scaling.parameter import (
    Parameter,
    Tags,
    has_parameter_data,
    remember_tags,
    restore_tags,
    set_depth,
    tags_of,
)
from unit_scaling.transforms import unit_scale


class Own(nn.Module):
    """A module of anyone's with a tagged parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = Parameter(torch.ones(4), "norm", 3)
        self.inner = uu.Linear(4, 4, bias=True)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))


#: Name -> a tagged model. Only `own` has to be told to remember.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "uu": lambda: uu.TransformerDecoder(8, 5, layers=2, heads=2),
    "norm": lambda: uu.DepthSequential(uu.LayerNorm(4, elementwise_affine=True)),
    "unit_scale": lambda: unit_scale(plain()),
    "preserved": lambda: unit_scale(plain(), init="preserve"),
    "unit_scale of uu": lambda: unit_scale(uu.DepthSequential(uu.Linear(4, 4), uu.Linear(4, 4))),
    "own": Own,
}

each_model = pytest.mark.parametrize("name", MODELS)


def tags(model: nn.Module) -> dict[str, Tags]:
    """Fails for a parameter without tags."""
    assert all(map(has_parameter_data, model.parameters()))
    return {n: tags_of(p) for n, p in model.named_parameters()}


def load_assigned(model: nn.Module) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def load(model: nn.Module) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})


def assign(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))


def meta(model: nn.Module) -> None:
    model.to("meta")
    model.to_empty(device="cpu")


#: Name -> what happens to a model, in place.
EVENTS: dict[str, Callable[[nn.Module], object]] = {
    "assign": assign,
    "dtype": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "load": load,
    "load_assigned": load_assigned,
    "meta": meta,
}


@pytest.fixture
def _swap() -> Iterator[None]:
    """Conversions swap a parameter for another one, instead of putting new data into it."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("_swap")
@pytest.mark.parametrize("name", [name for name in MODELS if name != "own"])
@pytest.mark.parametrize("event", EVENTS)
def test_tags_survive_swaps(name: str, event: str):
    test_tags_survive(name, event, lambda model: model)


@each_model
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy], ids=["itself", "deepcopy"])
def test_tags_survive(name: str, event: str, copied: Callable[[nn.Module], nn.Module]):
    model = MODELS[name]()
    before = tags(model)
    if name == "own":
        remember_tags(model)
    model = copied(model)
    EVENTS[event](model)
    if name == "own":
        restore_tags(model)
    assert tags(model) == before
    assert tags(pickle.loads(pickle.dumps(model))) == before


@pytest.mark.usefixtures("_swap")
def test_swap_of_anyones_module():
    """Not silent: torch cannot swap a parameter that has a weak reference."""
    with pytest.raises(RuntimeError, match=r"Couldn't swap Own\.gain"):
        Own().to(torch.bfloat16)


def test_what_was_tagged_by_hand_stays():
    layer = uu.Linear(4, 4)
    uu.parameter.tag(layer.weight, "output", 7)
    layer.to("meta").to_empty(device="cpu")
    assert tags(layer) == {"weight": Tags("output", 7)}


@pytest.mark.parametrize("name", ["uu", "unit_scale", "preserved"])
def test_weight_norm(name: str):
    """The direction is the weight, the length a gain; a parametrization without parts is itself."""
    model = MODELS[name]()
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    known = {n: tags_of(model.get_submodule(n).weight) for n in linears}
    for path in linears:
        parametrizations.weight_norm(model.get_submodule(path))
    restore_tags(model)
    for path in linears:
        parts = model.get_submodule(path).parametrizations.weight
        split = known[path]._replace(mup_divisor=None)
        assert tags(parts) == {"original0": split._replace(mup_type="norm"), "original1": split}
        parametrize.remove_parametrizations(model.get_submodule(path), "weight")
        assert tags_of(model.get_submodule(path).weight) == known[path]
    layer = parametrizations.spectral_norm(uu.Linear(4, 3))
    assert tags(layer) == {"parametrizations.weight.original": Tags("weight")}
    uu.optim.AdamW(model.parameters(), lr=0.1)


def test_transformed_model_that_is_parametrized_can_be_copied():
    model = unit_scale(plain())
    parametrizations.weight_norm(model[0])
    restore_tags(model)
    x = torch.ones(2, 4)
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_depth_of_a_stack_of_anyones():
    model = unit_scale(nn.Sequential(nn.Linear(4, 4), plain(), nn.Linear(4, 4)))
    set_depth(model[1], 9)
    load_assigned(model)
    assert [p.mup_scaling_depth for p in model.parameters()] == [None] * 2 + [9] * 6 + [None] * 2
    assert model[1][0].weight.mup_type == "weight"
    with pytest.raises(ValueError, match=r"parameter '0\.weight' has no mup_type"):
        set_depth(plain(), 2)
    with pytest.raises(ValueError, match="must be a whole number from 1, got 0"):
        set_depth(model[1], 0)


def test_restoring_leaves_others_alone():
    model = plain()
    remember_tags(model)
    restore_tags(model)
    assert not any(has_parameter_data(p) for p in model.parameters())
    assert not any("mup_tags" in vars(module) for module in model.modules())
