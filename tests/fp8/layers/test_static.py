"""Recipe "static": what `fp8.calibrate` sets, what the casts then do, and where scales are kept."""

import json
import math
import random
from copy import deepcopy

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import fp8
from fp8.casts.watch import watches_of
from tests.launch import needs_gloo, run_ranks
from tests.shared import (
    Net,
    assert_close,
    assert_same,
    filterwarnings,
    in_one_graph,
    linears,
    normal,
    parametrize,
    pickled,
    randn,
    refuses,
    rms,
    settle,
    warns,
)
from unit_scaling.transforms import unit_scale

STATIC = fp8.RECIPES["static"]
ROLES = ("input", "weight", "grad")


def far(m, x):
    y = F.dropout(F.gelu(m.norm(m.conv(x))), 0.1, m.training)
    return m.second(0.01 * m.first(y.flatten(1)))


def net(seed=0):
    """A convolution, a norm with buffers, dropout, two linear layers; operands far from RMS 1."""
    torch.manual_seed(seed)
    conv, norm = nn.Conv1d(4, 16, 3), nn.BatchNorm1d(16)
    first, second = nn.Linear(64, 32), nn.Linear(32, 16)
    return Net(far, conv=conv, norm=norm, first=first, second=second)


def static(seed=0):
    return fp8.convert(net(seed), "static")


def batch(seed=0):
    return 30 * normal(64, 4, 6, seed=seed)


def loss_of(y):
    return F.cross_entropy(y, torch.arange(len(y)) % 16)


def numpy_state():
    return np.random.get_state()[1].tolist()  # noqa: NPY002


def step(model, x, loss=loss_of):
    model.zero_grad()
    loss(model(x)).backward()
    return [p.grad.clone() for p in model.parameters()]


def test_the_step_is_that_of_scaled_casts_by_hand():
    """To the bit: powers of two do not round."""
    layer, x = nn.Linear(48, 24), (1e-3 * randn(40, 48)).detach().requires_grad_()
    g = 1e-5 * normal(40, 24)
    fp8.convert(layer, "static")
    scales = fp8.calibrate(layer, x, lambda y: (y * g).sum())
    size = {role: 2.0 ** scales[role] for role in ROLES}
    for t, role, under in ((x, "input", 0), (g, "grad", 4)):
        assert abs(math.log2(rms(t)) - under - scales[role]) <= 0.5
    y = layer(x)
    y.backward(g)
    qx = fp8.quantize(x.detach(), "e4m3", scale=size["input"])
    qw = fp8.quantize(layer.weight.detach(), "e4m3", scale=size["weight"])
    qg = fp8.quantize(g, "e5m2", scale=size["grad"])
    assert_same(y.detach(), torch.addmm(layer.bias.detach(), qx, qw.mT))
    assert_same(x.grad, qg @ qw)
    assert_same(layer.weight.grad, qg.mT @ qx)
    assert_same(layer.bias.grad, g.sum(0))


def test_calibration_leaves_nothing_behind():
    model = static()
    model.conv.weight.grad = grad = torch.ones_like(model.conv.weight)
    model.first.weight.requires_grad_(False)
    before = {n: t.clone() for n, t in model.state_dict().items() if "fp8_" not in n}
    stepped = []
    model.second.weight.register_post_accumulate_grad_hook(stepped.append)
    states = torch.get_rng_state(), random.getstate(), numpy_state()
    drawn = []

    def draw(*_):
        drawn.append(random.random() + np.random.rand())  # noqa: NPY002

    model.norm.register_forward_hook(draw)
    with torch.no_grad():
        fp8.calibrate(model, batch(), loss_of)
    assert drawn
    assert_same(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), numpy_state())
    assert_same({name: model.state_dict()[name] for name in before}, before)
    assert model.conv.weight.grad is grad
    assert_same(grad, torch.ones_like(grad))
    assert model.second.weight.grad is None
    assert not stepped
    assert model.training
    assert None not in fp8.calibration(model).values()


def test_forms_of_a_batch_and_of_a_loss():
    layer, x = fp8.convert(nn.Linear(8, 8), "static"), normal(64, 8)

    class Model(nn.Module):
        def __init__(self, output):
            super().__init__()
            self.layer, self.output = layer, output

        def forward(self, x, factor=1.0):
            return self.output(factor * self.layer(x))

    mean = fp8.calibrate(Model(lambda y: {"loss": y.square().mean(), "logits": y}), x)
    assert mean["layer.grad"] == round(math.log2(2 * rms(layer(x).detach()) / 512)) - 4
    plain = Model(lambda y: [y])
    assert fp8.calibrate(plain, (x,), lambda y: y[0].square().mean()) == mean
    for batch, exponent in ((x, -4), ({"x": x, "factor": 4.0}, -2)):
        assert fp8.calibrate(plain, batch)["layer.grad"] == exponent


def test_refusals():
    model, x = fp8.convert(nn.Linear(8, 8), "static"), normal(4, 8)
    for call in (
        lambda: fp8.calibrate(model),
        lambda: fp8.calibrate(model, x, scales={}),
    ):
        with refuses("either a batch, to measure, or scales, to set"):
            call()
    with refuses(r"loss must return a tensor of one element, got a tensor of shape"):
        fp8.calibrate(model, x, lambda y: y)
    with refuses(r"no product of Linear has static scales\. fp8\.convert"):
        fp8.calibrate(nn.Linear(8, 8), x)
    with refuses(r"calibrate needs an nn\.Module, got int", TypeError):
        fp8.calibrate(5, x)
    good = dict.fromkeys(ROLES, 0)
    with refuses("'input' is missing, one of 1"):
        fp8.calibrate(model, scales={"weight": 0, "grad": 0})
    with refuses("'other' is not in the model, one of 1"):
        fp8.calibrate(model, scales=good | {"other": 1})
    with refuses(r"'weight' is a whole number from -126 to 126, got 0\.5"):
        fp8.calibrate(model, scales=good | {"weight": 0.5})
    assert fp8.calibration(model) == dict.fromkeys(ROLES)


@filterwarnings("ignore:11% of the input of 'first'")
def test_the_first_step_measures_by_itself():
    model, twin = static(), static()
    for module in (model, twin):
        module.eval()  # no dropout
    with torch.no_grad():
        model(batch())
    # What does not train does not set.
    assert set(fp8.calibration(model).values()) == {None}
    step(model, batch())
    fp8.calibrate(twin, batch(), loss_of)
    known, other = fp8.calibration(model), fp8.calibration(twin)
    # From operands that were cast before.
    assert all(abs(e - other[name]) <= 1 for name, e in known.items())
    with warns(
        "RMS of the input of '(first|conv|second)' is", fp8.warnings.ScaleWarning
    ):
        step(model, 100 * batch(1))
    assert fp8.calibration(model)["conv.input"] == known["conv.input"] + 7


@parametrize("bad", [0.0, math.inf, math.nan])
def test_zeros_inf_and_nan_set_nothing_until_they_are_numbers(bad):
    head = nn.Linear(16, 16, bias=False)
    model = fp8.convert(nn.Sequential(nn.Linear(8, 16), head), "static")
    x = normal(32, 8)
    with torch.no_grad():
        head.weight.fill_(bad)
    scales = fp8.calibrate(model, x)
    assert scales["1.weight"] is None
    assert (scales["0.grad"], scales["1.grad"]) == (None, -4)
    with torch.no_grad():
        head.weight.normal_(std=2.0**-9)
    step(model, x, torch.sum)
    assert fp8.calibration(model)["1.weight"] == -9
    assert fp8.calibration(model)["0.grad"] is not None
    with torch.no_grad():
        head.weight.zero_()
    assert fp8.calibrate(model, x)["1.weight"] == -9  # zeros do not unset what is known


def test_state_dict_json_copies_and_pickles(tmp_path):
    model, x = static(), batch()
    scales = fp8.calibrate(model, x, loss_of)
    assert set(scales) == {
        f"{layer}.{r}" for layer in ("conv", "first", "second") for r in ROLES
    }
    expected = step(model.eval(), x)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    loaded = static(1)
    loaded.load_state_dict(
        torch.load(tmp_path / "model.pt", weights_only=True), strict=True
    )
    written = static()
    assert fp8.calibrate(written, scales=json.loads(json.dumps(scales))) == scales
    written.load_state_dict(model.state_dict())
    for other in (loaded, written, deepcopy(model), pickled(model)):
        assert fp8.calibration(other) == scales
        assert_same(step(other.eval(), x), expected)
    plain = fp8.revert(deepcopy(model))
    assert list(plain.state_dict()) == list(net().state_dict())
    model.load_state_dict(net().state_dict())  # of the plain model: they begin anew
    assert set(fp8.calibration(model).values()) == {None}
    assert not any(vars(model.conv.fp8_measured).values())


def test_auto_is_static_where_it_was_calibrated():
    """A checkpoint of such a model loads into one that was converted alike."""
    x = batch()
    model = fp8.convert(net())
    assert model.conv.fp8_recipe.name == "tensor"
    scales = fp8.calibrate(model, x, loss_of)
    named = static()
    assert fp8.calibrate(named, x, loss_of) == scales
    assert fp8.report(model)[0].why.startswith("static (auto: calibrated)")
    fresh = fp8.convert(net(1))
    fresh.load_state_dict(model.state_dict())
    written = fp8.convert(net())
    assert fp8.calibrate(written, scales=scales) == scales
    expected = step(named.eval(), x)
    for other in (model, written, pickled(model)):
        assert_same(step(other.eval(), x), expected)
    assert fp8.calibration(fresh) == scales
    assert fresh.first.fp8_recipe == STATIC


def test_calibration_may_be_the_first_call_of_a_model_of_unit_scale():
    """It sets the values, and measures what is cast afterwards; here of a part of the model."""

    def made(batch):
        torch.manual_seed(0)
        inner = unit_scale(linears(16, 16, nn.GELU, 8), batch=batch)
        return fp8.convert(nn.Sequential(nn.Flatten(), inner))

    x = 2.0**-8 * normal(64, 16)
    model, known = made(None), made(x)
    want = fp8.calibrate(known, x)
    assert fp8.calibrate(model, x) == want
    assert want != fp8.calibrate(fp8.convert(linears(16, 16, 8)), x)
    assert_same([*model.parameters()], [*known.parameters()])
    assert not any(p.mup_pending for p in model.parameters())
    y = model(x)
    assert_same(y, known(x))
    y.sum().backward()
    assert fp8.calibration(model) == want


@filterwarnings("ignore:the RMS of:fp8.warnings.ScaleWarning")
def test_compiled_code_reads_the_scales_that_are_set():
    """No graph is made again when scales change their values; none measures when they are known."""
    model = fp8.convert(linears(16, 16, 8), "static")
    x = normal(32, 16)
    fp8.calibrate(model, x)
    compiled = in_one_graph(model, "eager")
    settle(model)

    def check(x):
        y = compiled(x)
        assert_close(y, model(x))
        y.sum().backward()

    check(x)
    with torch._dynamo.config.patch(error_on_recompile=True):
        before = fp8.calibration(model)
        check(2**-5 * x)
        assert fp8.calibration(model) == before
        after = fp8.calibrate(compiled, 2**-5 * x)
        assert after["0.input"] == before["0.input"] - 5
        check(2**-5 * x)
        fp8.calibrate(model, scales={name: e + 1 for name, e in after.items()})
        check(x)


@filterwarnings("ignore:the RMS of:fp8.warnings.ScaleWarning")
def test_layers_that_read_one_tensor_share_its_scale():
    """Two that read the input, and not one that reads their sum."""
    layers = {name: nn.Linear(16, 16) for name in "qko"}
    model = fp8.convert(Net(lambda m, x: m.o(m.q(x) + m.k(x)), **layers), "static")
    x = normal(3, 8, 16)
    want = deepcopy(model)(x)
    fp8.calibrate(model, x)
    for each in (model, deepcopy(model)):
        read = [
            vars(layer.fp8_measured)["fp8_scale_input"]
            for layer in (each.q, each.k, each.o)
        ]
        assert [read[0], read[2]] == [True, True]
        assert read[1] is each.q.fp8_scale_input
    assert_same(model(x), want)
    model.k.fp8_scale_input.mul_(2.0**20)  # eager code reads the buffer
    assert not torch.equal(model(x), want)


def test_the_watch_follows_recipes_and_parts():
    """fp8.calibrate makes "auto" static; parts that were converted apart are read together."""
    one, two = fp8.convert(nn.Linear(64, 64)), fp8.convert(nn.Linear(64, 64), "static")
    model, x = nn.Sequential(one, two), normal(64, 64)
    fp8.calibrate(model, x)
    assert one.fp8_watch.is_static
    assert one.fp8_watch.recipe == "static"
    with fp8.override(model, ("*", None, "tensor")):
        (watch,) = watches_of(model)
        rows = []
        watch.listeners.append(rows.extend)
        model(x).sum().backward()
        watch.read()
    assert [row.operand for row in rows] == ["input", "weight", "grad"] * 2


def one_of_two_processes(rank, store):
    """Under DDP, and of a group of its own."""

    def make():
        torch.manual_seed(0)
        return fp8.convert(linears(16, 32, nn.GELU, 8), "static")

    def square(y):
        return y.square().sum()

    x = normal(64, 16) * torch.tensor([1.0, 64.0]).repeat_interleave(32)[:, None]
    model = DistributedDataParallel(make())
    group = dist.new_group([rank], use_local_synchronization=True)
    whole = fp8.calibrate(make(), x, square, group=group)
    assert fp8.calibrate(make(), x.chunk(2)[rank], square, group=group) != whole
    assert fp8.calibrate(model, x.chunk(2)[rank], square) == whole
    model(x.chunk(2)[rank]).sum().backward()
    assert fp8.calibration(model) == whole


@needs_gloo
def test_two_processes_have_the_scales_of_the_whole_batch(tmp_path):
    run_ranks(one_of_two_processes, 2, tmp_path / "store")
