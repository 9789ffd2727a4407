"""An optimizer of unit_scaling resumes: in any order of the model's first call and of what is
loaded, in other processes, forms of checkpoints and levels, and for models without tags.
"""

import itertools
from copy import deepcopy

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import fp8
import unit_scaling as uu
from fp8.training.levels import LEVELS
from tests.shared import (
    Net,
    assert_close,
    assert_same,
    descend,
    filterwarnings,
    linears,
    parametrize,
    pickled,
    refuses,
    saved,
    seeded,
)
from tests.unit_scaling.test_groups import by_rate, momentum, train
from tests.unit_scaling.test_optim import each_optimizer, lrs, parameters
from unit_scaling.optim import Adam, AdamW
from unit_scaling.parameter import tag
from unit_scaling.transforms import unit_scale


def made():
    first, norm = uu.Linear(8, 16, bias=True), uu.LayerNorm(16)
    forward = lambda m, x: m.last(torch.relu(m.norm(m.first(x))))  # noqa: E731
    return Net(forward, first=first, norm=norm, last=uu.LinearReadout(16, 4))


def steps(model, opt, seeds):
    inputs = (torch.randn(8, 8, generator=seeded(seed)) for seed in seeds)
    descend(opt, (model(x).square().sum() for x in inputs))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def plain_net():
    torch.manual_seed(0)
    norm = nn.LayerNorm(16), nn.ReLU()
    return nn.Sequential(nn.Linear(8, 16), *norm, *linears(16, 16, 4))


def resume(model, cls, states, order, **settings):
    """The parameters after two more steps. order: of the model's first call, the loading of its
    values, the making of the optimizer and the loading of its state."""
    opt = None
    for event in order:
        if event == "call":
            with torch.no_grad():
                model(torch.randn(8, 8, generator=seeded(9)))
        elif event == "model":
            model.load_state_dict(states[0])
        elif event == "make":
            opt = cls(model.parameters(), 0.3, **settings)
        else:
            opt.load_state_dict(states[1])
    return steps(model, opt, range(3, 5))


EVENTS = ("call", "model", "make", "optimizer")
ORDERS = [
    order
    for order in itertools.permutations(EVENTS)
    if order.index("make") < order.index(EVENTS[3])
]


@parametrize("order", ORDERS, ids="-".join)
@each_optimizer
def test_resumed_in_any_order(cls, order):
    settings = {"weight_decay": 1e-3, **momentum(cls)}
    model = unit_scale(plain_net())
    opt = cls(model.parameters(), 0.1, **settings)
    steps(model, opt, range(3))
    states = saved((model.state_dict(), opt.state_dict()))
    expected = steps(model, opt, range(3, 5))
    torch.manual_seed(5)
    fresh = unit_scale(plain_net())
    assert_close(resume(fresh, cls, states, order, **settings), expected)


def test_loaded_rates_are_not_judged_by_the_tags_of_a_pending_model():
    """Whose first call takes the values of a checkpoint for those before unit_scale."""
    given = [torch.randn(8, 8, generator=seeded(i)) / 2 for i in range(3)]
    tagged = [
        tag(uu.Parameter(x, "weight"), "weight", mup_divisor=0.5, mup_scale=0.1)
        for x in given
    ]
    opt = AdamW(tagged, 0.1)
    opt.load_state_dict(opt.state_dict())
    train(opt)


@each_optimizer
def test_a_state_dict_from_before_the_first_call_fixes_no_rates(cls):
    """As accelerate loads one when it moves an optimizer to a device."""
    results = []
    for is_loaded in (True, False):
        model = unit_scale(plain_net())
        opt = cls(model.parameters(), 0.1)
        if is_loaded:
            opt.load_state_dict(deepcopy(opt.state_dict()))
            assert "set by the first call" in repr(opt)
        results.append(steps(model, opt, range(3)))
    assert_same(*results)


@each_optimizer
def test_a_plain_model_resumes_at_the_saved_rates(cls):
    """Without tags, as in a process without the transform, or with others, until these change."""
    given = parameters()
    tag(given[0], "weight", mup_divisor=0.5)
    settings = {"weight_decay": 1e-3, **momentum(cls)}
    opt = cls(given, 0.1, **settings)
    train(opt)
    values, state = saved(([p.data for p in given], opt.state_dict()))
    plain = [nn.Parameter(x.clone()) for x in values]
    other = cls(plain, 0.5, allow_non_unit_scaling_params=True, **settings)
    other.load_state_dict(state)
    assert lrs(other) == lrs(opt)
    for _ in range(2):
        train(opt)
        train(other)
        assert_same(plain, given)
        other = pickled(other)  # the record is in the groups
        plain = other.param_groups[0]["params"]
    tagged = [uu.Parameter(x.clone(), "bias") for x in values]
    another = cls(tagged, 0.5, **settings)
    another.load_state_dict(state)
    assert lrs(another) == lrs(opt)
    assert another.state_dict()["param_groups"] == opt.state_dict()["param_groups"]
    tag(tagged[0], "output", 3)
    assert lrs(another)[0] != lrs(opt)[0]
    assert lrs(another)[1:] == lrs(opt)[1:]


@filterwarnings("ignore:torch.distributed is disabled")
@parametrize("flat", [False, True])
def test_distributed_checkpoints(flat, tmp_path):
    model = made()
    opt = AdamW(model.parameters(), 0.1, weight_decay=1e-3)
    steps(model, opt, range(3))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    values, state = deepcopy((model.state_dict(), opt.state_dict()))
    dcp.save(
        get_optimizer_state_dict(model, opt, options=options), checkpoint_id=tmp_path
    )
    expected = steps(model, opt, range(3, 5))
    model.load_state_dict(values)
    model.zero_grad()
    fresh = AdamW(model.parameters(), 0.3, weight_decay=1e-3)
    loaded = get_optimizer_state_dict(model, fresh, options=options)
    dcp.load(loaded, checkpoint_id=tmp_path)
    set_optimizer_state_dict(model, fresh, loaded, options=options)
    assert fresh.state_dict()["param_groups"] == state["param_groups"]
    assert_close(steps(model, fresh, range(3, 5)), expected)


@parametrize("made", [torch.optim.AdamW, fp8.optim.AdamW], ids=lambda c: c.__module__)
def test_an_optimizer_that_reads_no_factors_refuses_to_step(made):
    opt = AdamW(parameters(), 0.1)
    other = made([nn.Parameter(p.detach().clone()) for p in parameters()])
    other.load_state_dict(opt.state_dict())
    with refuses(r"has loaded a state_dict of unit_scaling\.optim"):
        train(other)


# Levels


@parametrize("level", LEVELS)
@parametrize("cls", [Adam, AdamW])
def test_rates_hold_at_a_level(cls, level):
    """The steps of fp8.optim in groups by rate; tags that change; copies; skipped steps."""
    results = []
    for make in (cls, lambda *args, **settings: by_rate(cls, *args, **settings)):
        torch.manual_seed(0)
        model = made()
        tag(model.last.weight, "weight")
        if make is not cls:
            tag(model.last.weight, "output")
        opt = make(model.parameters(), 0.1, weight_decay=1e-3)
        _, opt = fp8.initialize(model, opt, level, recipe=None)
        tag(model.last.weight, "output")
        steps(model, opt, range(3))
        model.first.bias.grad = torch.full_like(model.first.bias, torch.inf)
        opt.step()
        model, opt = deepcopy((model, opt))
        for group in opt.param_groups:
            group["lr"] /= 2
        results.append(steps(model, opt, range(3, 6)))
        assert opt.skipped_steps == 1
        assert (len(opt.param_groups) == 1) == (make is cls)
    ours, theirs = (
        {n: p.to(torch.float32) for n, p in each.items()} for each in results
    )
    assert_same(ours, theirs)
