"""Groups are the user's; rates are read from the tags in each step: loops and schedules that set
one rate, closures, hooks, errors, other implementations of a step."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import unit_scaling as uu
from tests.launch import needs_gloo, run_ranks
from tests.shared import (
    assert_close,
    assert_same,
    filterwarnings,
    pairs,
    parametrize,
    pickled,
    refuses,
    sampled,
)
from tests.unit_scaling.test_optim import each_optimizer, lrs, parameters
from unit_scaling.optim import SGD, Adam, AdamW, scaled_parameters
from unit_scaling.parameter import tag

STEPS = 6


def by_rate(cls, given, lr=0.1, **settings):
    """torch's optimizer with a group for each rate: what a step has to be."""
    options = {name: settings.pop(name) for name in {"weight_decay"} & settings.keys()}
    rule = "sgd" if cls is SGD else "adam"
    groups = scaled_parameters(given, rule, lr=lr, **options)
    return getattr(torch.optim, cls.__name__)(groups, **settings)


def fill(given, step):
    for p in given:
        p.grad = torch.linspace(-1, 1 + step, p.numel()).reshape(p.shape)


def momentum(cls):
    return {"momentum": 0.9} if cls is SGD else {}


def train(opt, schedule=None, steps=range(STEPS)):
    given = [p for group in opt.param_groups for p in group["params"]]
    for step in steps:
        fill(given, step)
        opt.step()
        if schedule is not None:
            schedule.step()
    return given


def both(cls, groups=list, lr=0.1, **settings):
    """Parameters, twice, our optimizer of them, and torch's with a group for each rate."""
    settings = momentum(cls) | settings
    ours, theirs = parameters(), parameters()
    reference = by_rate(cls, groups(theirs), lr, **settings)
    return (ours, theirs), (cls(groups(ours), lr, **settings), reference)


# One rate for all


class Loop:
    """Anneals as CleanRL's PPO and nanoGPT do: each step sets the rate of a group."""

    def __init__(self, opt, peak):
        self.opt, self.peak, self.count = opt, peak, 0

    def step(self):
        self.count += 1
        peaks = self.peak if isinstance(self.peak, list) else [self.peak]
        for group, peak in pairs(self.opt.param_groups, peaks):
            group["lr"] = (1 - self.count / 10) * peak


#: Name -> schedule of (optimizer, a rate or a list of one per group).
SCHEDULES = {
    "a loop": Loop,
    "OneCycleLR": lambda opt, peak: lr_scheduler.OneCycleLR(
        opt, peak, total_steps=10, cycle_momentum=False
    ),
    "warm-up from 0": lambda opt, peak: lr_scheduler.LambdaLR(
        opt, lambda step: step / 4
    ),
}


@parametrize("name", SCHEDULES)
@each_optimizer
def test_a_schedule_anneals_everything(cls, name):
    """As torch's optimizer under a schedule with a list: weight decay too."""
    given, (opt, reference) = both(cls, weight_decay=1e-3)
    peaks = [4 * group["lr"] for group in reference.param_groups]
    train(opt, SCHEDULES[name](opt, 0.4))
    train(reference, SCHEDULES[name](reference, peaks))
    assert_close(*given)
    assert len(opt.param_groups) == 1
    assert not torch.equal(given[0][0], parameters()[0])


@each_optimizer
def test_states_are_those_of_torch(cls):
    """And come with copies, to which groups are added."""
    given, (opt, reference) = both(cls)
    train(opt)
    train(reference)
    for a, b in pairs(*given):
        assert_same(opt.state[a], reference.state[b])
    copied = pickled(opt)
    assert lrs(copied) == lrs(opt)
    copied.add_param_group({"params": parameters()[0], "lr": 1.0})
    assert lrs(copied)[-1] == copied.param_groups[0]["mup_lr_scales"][0]


@each_optimizer
def test_groups_and_their_settings_are_those_given(cls):
    """Each with its own rate and decay, changed between steps."""

    def groups(ps):
        return [{"params": ps[:3], "lr": 0.3}, {"params": ps[3:], "weight_decay": 0.0}]

    given, optimizers = both(cls, groups, weight_decay=1e-3)
    changed = {"momentum": 0.5} if cls is SGD else {"betas": (0.5, 0.9)}
    for each in optimizers:
        train(each, steps=range(3))
        for group in each.param_groups:
            group.update(changed)
        train(each, steps=range(3, 6))
    assert_close(*given)
    assert [len(group["params"]) for group in optimizers[0].param_groups] == [3, 4]


# The step


def test_the_groups_are_the_users_after_an_error_and_in_closures_and_hooks():
    given = parameters()
    opt = AdamW(given, 0.1)
    groups = opt.param_groups
    seen = []
    opt.register_step_pre_hook(lambda opt, args, kwargs: seen.append(opt.param_groups))
    opt.register_step_post_hook(lambda opt, args, kwargs: seen.append(opt.param_groups))

    def closure():
        seen.append(opt.param_groups)
        opt.zero_grad()
        loss = sum(p.square().sum() for p in given)
        loss.backward()
        return loss

    with torch.no_grad():
        assert opt.step(closure) == sum(p.numel() for p in given)
    assert all(each is groups for each in seen)
    assert len(seen) == 3
    given[0].grad = torch.ones(8, 16).to_sparse()
    with refuses("does not support sparse gradients", RuntimeError):
        opt.step()
    assert opt.param_groups is groups
    assert [len(group["params"]) for group in groups] == [7]


@each_optimizer
def test_a_closure_that_is_called_is_a_step(cls):
    given, optimizers = both(cls)
    for ps, opt in pairs(given, optimizers):

        def closure(ps=ps, opt=opt):
            opt.zero_grad()
            loss = sum((p - 0.5).pow(4).sum() for p in ps)
            loss.backward()
            return loss

        losses = [opt.step(closure).item() for _ in range(4)]
        assert losses == sorted(losses, reverse=True)
    assert_close(*given)


def check_hooks(*order):
    """Of all optimizers and of one; torch has put its own into no class of this process yet."""
    calls = []
    hooks = [lambda *_, i=i: calls.append(i) for i in range(4)]
    register_optimizer_step_pre_hook(hooks[0])
    register_optimizer_step_post_hook(hooks[1])
    for name in ("SGD", "AdamW", "Adam"):
        ours = getattr(uu.optim, name)
        classes = [getattr(module, name) for module in order]
        for cls in (*classes, *classes, type("Sub", (ours,), {}), ours):
            opt = cls(parameters()[:1], lr=0.1)
            opt.register_step_pre_hook(hooks[2])
            opt.register_step_post_hook(hooks[3])
            calls.clear()
            opt.step()
            assert sorted(calls) == [0, 1, 2, 3], cls


def ours_first(rank, store):
    check_hooks(uu.optim, torch.optim)


def theirs_first(rank, store):
    check_hooks(torch.optim, uu.optim)


@needs_gloo
@parametrize("order", [ours_first, theirs_first])
def test_hooks_are_called_once(order, tmp_path):
    """Whichever class torch has put its hooks into before."""
    run_ranks(order, 1, tmp_path / "store")


IMPLEMENTATIONS = {
    "fused": {"fused": True},
    "for loop": {"foreach": False},
    "maximize": {"maximize": True},
    "tensor": {"lr": torch.tensor(0.1), "foreach": False},
    "differentiable": {"differentiable": True},
}


@parametrize("name", IMPLEMENTATIONS)
@each_optimizer
def test_implementations(cls, name):
    given, optimizers = both(cls, weight_decay=1e-3, **IMPLEMENTATIONS[name])
    for p in [*given[0], *given[1]] if name == "differentiable" else []:
        p.requires_grad_(False)
    for opt in optimizers:
        train(opt)
    bound = 1e-6 if name == "tensor" else 0.0  # rates are rounded to float32
    assert_close(*given, rtol=bound, atol=bound)


@each_optimizer
def test_grad_scaler(cls):
    """A step with an overflow is skipped; gradients are unscaled, here by the step itself."""
    given, optimizers = both(cls, fused=True)
    for ps, opt in pairs(given, optimizers):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
        for step in range(4):
            fill(ps, step)
            for p in ps:
                p.grad *= torch.inf if step == 1 else scaler.get_scale()
            scaler.scale(torch.ones(()))
            scaler.step(opt)
            scaler.update()
        assert scaler.get_scale() == 2.0**3
    assert_same(*given)


@sampled(3)
@parametrize("cls", [AdamW, Adam, SGD])
def test_compiled_once_under_a_schedule(cls):
    """A rate that is a tensor changes in its memory, as in torch's compiled optimizers."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    (ours, theirs), (opt, reference) = both(cls, lr=torch.tensor(0.1))
    schedules = [lr_scheduler.ExponentialLR(each, 0.5) for each in (opt, reference)]
    step = torch.compile(opt.step, backend=backend)
    counts = []
    for i in range(4):
        fill((*ours, *theirs), i)
        step()
        reference.step()
        for schedule in schedules:
            schedule.step()
        counts.append(len(graphs))
    assert counts[3] == counts[1] > 0
    assert_close(ours, theirs)
    ours[4].mup_scaling_depth *= 4  # read in compiled code too
    step()
    of = lambda group: group["params"][0] is theirs[4]  # noqa: E731
    (group,) = filter(of, reference.param_groups)
    group["lr"] = group["lr"] / 2
    reference.step()
    assert_close(ours, theirs)


def test_a_rate_that_is_a_tensor_keeps_its_memory():
    """Those of its parts are constants of a compiled step, and of a CUDA graph."""
    lr = torch.tensor(0.5)
    opt = SGD(parameters(), lr=lr)
    assert opt.param_groups[0]["lr"] is lr  # as in torch
    before, rates = lrs(opt), [part["lr"] for part in opt._splits[0].parts]
    lr.mul_(2)
    assert lrs(opt) == [2 * rate for rate in before]
    assert all(a is part["lr"] for a, part in pairs(rates, opt._splits[0].parts))


# Tags that change


@each_optimizer
@parametrize("how", ["as made", "pickled", "loaded"])
def test_an_optimizer_reads_the_tags_of_its_step(cls, how):
    """As one that is made now: rate, eps and weight decay, also of kinds with a factor of 0."""
    settings = {"weight_decay": 1e-3, "lr_mult": {"bias": 0.0}, **momentum(cls)}
    early, late = (nn.ParameterList(parameters()) for _ in range(2))
    model, opt = early, cls(early.parameters(), 0.1, **settings)
    if how == "pickled":
        model, opt = pickled((model, opt))
    for each in (model, late):
        tag(each[0], "output", mup_divisor=0.5)
        tag(each[1], "weight", 4, mup_divisor=0.1)
        tag(each[3], "bias")
    fresh = cls(late.parameters(), 0.1, **settings)
    if how == "loaded":
        opt.load_state_dict(opt.state_dict())
    train(opt)
    train(fresh)
    assert_same(list(model), list(late))
    assert_same(model[3], parameters()[3])


@filterwarnings("ignore:.*its eps of 1e-06")
@parametrize("cls", [Adam, AdamW])
@parametrize(
    "divisor, given, used", [(0.5, 1e-8, 1e-16), (None, 1e-8, 1e-8), (0.5, 1e-6, 1e-6)]
)
def test_eps(cls, divisor, given, used):
    """1e-16 in the place of torch's default for weights of unit_scale."""
    p = tag(uu.Parameter(torch.ones(4, 4), "output"), "output", mup_divisor=divisor)
    opt = cls([p], 0.1, eps=given, lr_mult=uu.optim.UMUP)
    p.grad = torch.full_like(p, 1e-9)
    opt.step()
    assert 1 - p[0, 0].item() == pytest.approx(0.1 * 1e-9 / (1e-9 + used), rel=1e-3)
    assert opt.param_groups[0]["eps"] == given


def test_a_tag_that_no_rule_is_for_is_an_error_of_the_step():
    p = uu.Parameter(torch.ones(4, 4), "weight")
    opt = SGD([p], 0.1)
    p.mup_type = "gain"
    with refuses("got 'gain', of shape"):
        train(opt)
    assert opt.param_groups[0]["params"] == [p]
    p.mup_type = "norm"
    train(opt)


def test_what_replaces_a_parameter_is_stepped():
    """As by `fp8.initialize` and preflight, which write into the groups of an optimizer."""
    opt = AdamW(parameters()[:2], 0.1)
    train(opt)
    new = uu.Parameter(torch.ones(8, 16), "bias")
    opt.param_groups[0]["params"][0] = new
    opt.param_groups[0]["params"].append(parameters()[2])
    train(opt)
    assert opt.param_groups[0]["mup_lr_scales"] == [1 / 32, 1 / 64, 1 / 32]
    del opt.param_groups[0]["params"][0]
    train(opt)
    assert opt.param_groups[0]["mup_lr_scales"] == [1 / 64, 1 / 32]
    train(opt, steps=range(1))
    assert opt.state[new]["step"] == STEPS


@parametrize("allowed", [False, True])
def test_what_an_engine_has_flattened_has_no_rate(allowed):
    """As ZeRO of DeepSpeed does: one tensor for all parameters of a group."""
    given = parameters()[:3]
    opt = AdamW(given, 0.1, allow_non_unit_scaling_params=allowed)
    train(opt)
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in given]))
    opt.param_groups[0]["params"] = [flat]
    with refuses(r"parameter number 0 of shape \(160,\) has no mup_type"):
        train(opt)


def test_groups_of_scaled_parameters_are_not_scaled_again():
    with refuses("scaled_parameters are for optimizers of other packages"):
        AdamW(scaled_parameters(parameters(), "adam", lr=0.1))


# What a user sees


def test_the_factors_are_shown():
    opt = AdamW(
        [{"params": parameters()[:3]}, {"params": parameters()[3:4], "lr": 0.1}], lr=0.5
    )
    scales = [group["mup_lr_scales"] for group in opt.param_groups]
    assert scales == [[1 / 4, 1 / 64, 1 / 32], [2.0]]
    text = repr(opt)
    assert "mup_lr_scales: 0.01562 to 0.25" in text
    assert "mup_lr_scales: 2 to 2" in text
    assert "lr: 0.1\n" in text
