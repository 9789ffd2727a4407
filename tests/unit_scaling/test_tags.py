"""Tags of parameters: what they are, and that they stay when parameters are copied or replaced."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import parametrize as computed

import unit_scaling as uu
from tests.fp8.adapters import hub_models
from tests.shared import Net, parametrize, pickled, refuses, seeded
from unit_scaling.parameter import (
    Parameter,
    Tags,
    has_parameter_data,
    remember_tags,
    restore_tags,
    set_depth,
    tag,
    tags_of,
)
from unit_scaling.transforms import unit_scale


def own():
    """A module of anyone's with a tagged parameter of its own."""
    gain = Parameter(torch.ones(4), "norm", 3)
    return Net(gain=gain, inner=uu.Linear(4, 4, bias=True))


def plain():
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))


#: Name -> a tagged model. Modules of `uu` restore tags; other modules have to be asked.
MODELS = {
    "uu": lambda: uu.TransformerDecoder(8, 5, layers=2, heads=2),
    "unit_scale": lambda: unit_scale(plain(), batch=torch.randn(8, 4)),
    "own": own,
}


def tags(model):
    """Fails for a parameter without tags."""
    assert all(map(has_parameter_data, model.parameters()))
    return {n: tags_of(p) for n, p in model.named_parameters()}


def load(model, **settings):
    model.load_state_dict(
        {k: v.clone() for k, v in model.state_dict().items()}, **settings
    )


def assign(model):
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))


#: Name -> what happens to a model, in place.
EVENTS = {
    "assign": assign,
    "dtype": lambda model: model.to(torch.bfloat16),
    "load": load,
    "load_assigned": lambda model: load(model, assign=True),
    "meta": lambda model: model.to("meta").to_empty(device="cpu"),
}
COPIES = {
    "itself": lambda model: model,
    "deepcopy": copy.deepcopy,
    "average": lambda model: torch.optim.swa_utils.AveragedModel(model).module,
}


@pytest.fixture
def swaps(request):
    """Whether conversions swap a parameter for another one, and put no new data into it."""
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield request.param
    torch.__future__.set_swap_module_params_on_conversion(False)


#: (model, event, copy, swapped): every event of every model, and each copy and swap of each once.
CASES = [(name, event, "itself", False) for name in MODELS for event in EVENTS]
CASES += [
    (name, "load_assigned", copied, False)
    for name in MODELS
    for copied in list(COPIES)[1:]
]
CASES += [(name, "dtype", "itself", True) for name in MODELS]


@parametrize("name, event, copied, swaps", CASES, indirect=["swaps"])
def test_tags_survive(name, event, copied, swaps):
    model = MODELS[name]()
    before = tags(model)
    if swaps and name == "own":
        # Not silent: torch cannot swap a parameter that has a weak reference.
        with refuses(r"Couldn't swap Net\.gain", RuntimeError):
            model.to(torch.bfloat16)
        return
    if name == "own":
        remember_tags(model)
    model = COPIES[copied](model)
    EVENTS[event](model)
    if name != "uu":
        restore_tags(model)
    assert tags(model) == before
    assert tags(pickled(model)) == before


def test_what_was_tagged_by_hand_stays():
    layer = uu.Linear(4, 4)
    tag(layer.weight, "output", 7)
    layer.to("meta").to_empty(device="cpu")
    assert tags(layer) == {"weight": Tags("output", 7)}


@parametrize("layer", [lambda: uu.Linear(4, 3), lambda: MODELS["unit_scale"]()[0]])
def test_weight_norm(layer):
    """The direction is the weight, the length a gain; a parametrization without parts is itself."""
    layer = layer()
    before = tags_of(layer.weight)
    parametrizations.weight_norm(layer)
    restore_tags(layer)
    split = before._replace(mup_divisor=None)
    parts = {"original0": split._replace(mup_type="norm"), "original1": split}
    assert tags(layer.parametrizations.weight) == parts
    computed.remove_parametrizations(layer, "weight")
    restore_tags(layer)
    assert tags_of(layer.weight) == before
    layer = uu.Linear(4, 3)
    tag(layer.weight, "weight", mup_stacked=True)
    remember_tags(layer)
    restore_tags(parametrizations.spectral_norm(layer))
    own = {"parametrizations.weight.original": Tags("weight", mup_stacked=True)}
    assert tags(layer) == own


def test_depth_of_a_stack_of_anyones():
    """Also before the first call."""
    model = unit_scale(nn.Sequential(nn.Linear(4, 4), plain(), nn.Linear(3, 4)))
    set_depth(model[1], 9)
    model(torch.randn(8, 4))
    load(model, assign=True)
    restore_tags(model)
    ends = [None] * 2
    assert [p.mup_scaling_depth for p in model.parameters()] == [*ends, *[9] * 6, *ends]
    assert model[1][0].weight.mup_type == "weight"
    with refuses(r"parameter '0\.weight' has no mup_type"):
        set_depth(plain(), 2)
    with refuses("must be a whole number from 1, got 0"):
        set_depth(model[1], 0)


def test_a_module_that_replaces_another_has_its_tags():
    """As transformers' resize_token_embeddings does with a head of its own."""
    ids = torch.randint(32, (4, 16), generator=seeded(0))
    for tied in (True, False):
        settings = {"num_hidden_layers": 1, "tie_word_embeddings": tied}
        plain_model = hub_models.llama(vocab_size=32, **settings)
        model = unit_scale(plain_model, batch={"input_ids": ids})
        before = tags(model)
        model.resize_token_embeddings(48)
        if not tied:
            with refuses(r"has no mup_type.*restore_tags\(model\)"):
                uu.optim.AdamW(model.parameters())
        restore_tags(model)
        assert tags(model) == before
        uu.optim.AdamW(model.parameters())


def test_restoring_leaves_others_alone():
    model = plain()
    remember_tags(model)
    restore_tags(model)
    assert not any(has_parameter_data(p) for p in model.parameters())
    assert not any("mup_tags" in vars(module) for module in model.modules())


# One parameter


def test_tags_of_a_parameter():
    p = Parameter(torch.ones(2, 3), "weight", 4)
    assert (p.mup_type, p.mup_scaling_depth, p.requires_grad) == ("weight", 4, True)
    bare = nn.Parameter(torch.ones(2))
    assert not has_parameter_data(bare)
    assert tag(bare, "norm", mup_scale=0.25, mup_divisor=3.0) is bare
    assert tags_of(tag(bare, "norm", 2)) == Tags("norm", 2, 0.25, 3.0)


REFUSED = [  # a call, its error
    (
        lambda: Parameter(torch.ones(2), "wieght"),
        "unknown mup_type 'wieght'; choose one of 'weig",
    ),
    (
        lambda: Parameter(torch.ones(2), "weight", 0),
        "mup_scaling_depth must be .* from 1, got 0",
    ),
    (
        lambda: tag(nn.Parameter(torch.ones(2)), "bias", mup_scale=0.0),
        "positive and finite: got 0.0",
    ),
]


@parametrize("call, message", REFUSED)
def test_bad_tags(call, message):
    with refuses(message, (TypeError, ValueError)):
        call()


@parametrize("requires_grad", [True, False])
def test_copies_of_tied_parameters(requires_grad):
    """In modules of anyone's: the tags are the parameter's own. A copy of a copy, too."""
    p = Parameter(torch.randn(2, 2), "output", 4, requires_grad)
    module = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "ab"})
    module["a"].weight = module["b"].weight = p
    for again in (copy.deepcopy, pickled) * 2:
        module = again(module)
        w = module["a"].weight
        assert w is module["b"].weight is not p
        assert (tags_of(w), w.requires_grad) == (Tags("output", 4), requires_grad)


def test_tags_keep_nothing_alive():
    """No reference cycle: memory is free as soon as the parameter is, without the collector."""
    gc.disable()
    try:
        p = Parameter(torch.ones(2), "weight")
        gone = weakref.ref(p)
        del p
        assert gone() is None
    finally:
        gc.enable()
