"""State that layers keep between passes, scaling "delayed" and "static": what the buffers hold."""

import math
from copy import deepcopy
from itertools import product

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8
from fp8 import FORMATS, RECIPES, Cast, Recipe
from fp8.recipes.history import histories
from fp8.recipes.scaling import ROWS, _delayed_on_gpu, _delayed_scale
from tests.shared import (
    assert_close,
    assert_same,
    filterwarnings,
    in_one_graph,
    linears,
    normal,
    pairs,
    parametrize,
    proves,
    randn,
    refuses,
    warns,
)

DELAYED = RECIPES["delayed"]
SHORT = Recipe(
    name="short",
    input=Cast(format="e4m3", scaling="delayed", history=3),
    weight=Cast(format="e4m3", scaling="delayed", history=1),
    grad=Cast(format="e5m2", scaling="delayed", history=2, margin=1),
)
NAMES = ("fp8_amax_input", "fp8_amax_weight", "fp8_amax_grad")


def short(**options):
    return fp8.convert(nn.Linear(8, 4, **options), SHORT)


def step(layer, x=None, scale=1.0):
    y = layer(randn(5, 8) if x is None else x)
    (y * scale).sum().backward()
    return y.detach()


@proves("the field", "delayed scaling")
def test_the_scale_is_that_of_the_passes_before():
    """Written out: input of history 3, weight of 1, gradient of 2 and a margin of 2."""
    layer = short(bias=False)
    factors, sizes = (
        [1.0, 64.0, 2.0, 0.5, 1.0, 1.0],
        {"input": [], "weight": [], "grad": []},
    )
    for factor in factors:
        x = factor * normal(5, 8)
        x.requires_grad_()
        layer.weight.grad = None
        y = step(layer, x, scale=factor)
        g = torch.full((5, 4), factor)
        scales = {}
        for key, length, t, max_ in (
            ("input", 3, x.detach(), 448.0),
            ("weight", 1, layer.weight.detach(), 448.0),
            ("grad", 2, g, 57344.0),
        ):
            past = sizes[key][-length:] or [float(t.abs().max())]
            scales[key] = 2.0 ** math.ceil(math.log2(max(past) / max_))
            sizes[key].append(float(t.abs().max()))
        qx = fp8.quantize(x, "e4m3", scale=scales["input"])
        qw = fp8.quantize(layer.weight, "e4m3", scale=scales["weight"])
        qg = fp8.quantize(g, "e5m2", scale=2 * scales["grad"])
        assert_close(y, (qx @ qw.mT).detach())
        assert_close(x.grad, qg @ qw)
        assert_close(layer.weight.grad, qg.mT @ qx)
        layer.weight.data.mul_(1.5)
    for key, length in pairs(sizes, (3, 1, 2)):
        assert (
            layer.get_buffer(f"fp8_amax_{key}").tolist()
            == sizes[key][: -length - 1 : -1]
        )


def test_what_does_not_train_reads_and_does_not_write():
    layer = short()
    step(layer)
    before = deepcopy(layer.state_dict())
    with torch.no_grad():
        y = layer(100 * randn(5, 8))
    with torch.inference_mode():
        assert_same(layer(100 * randn(5, 8)), y)
    assert_same(layer.state_dict(), before)
    assert y.abs().max() < 30 * step(layer).abs().max()  # it saturated


@parametrize("bad", [math.inf, math.nan])
def test_inf_and_nan_are_not_recorded(bad):
    layer = short(bias=False)
    fresh = deepcopy(layer)
    x = normal(5, 8)
    step(layer)
    step(fresh)
    x[0, 0] = bad
    step(layer, x)
    assert all(b.isfinite().all() for b in layer.buffers())
    assert layer.fp8_amax_input[0] == x[x.isfinite()].abs().max()
    assert_same(step(layer), step(fresh))


def test_zeros_displace_no_entry():
    """A history with an entry has one from then on, so that no cast waits for a largest
    magnitude."""
    layer = short()
    step(layer)
    entries = layer.fp8_amax_input.clone()
    for _ in range(4):
        step(layer, torch.zeros(5, 8))
    assert_same(layer.fp8_amax_input, entries)
    assert vars(layer.fp8_measured) == dict.fromkeys(NAMES, True)


@parametrize("refused", ["delayed", "static", SHORT])
def test_a_scale_belongs_to_a_layer(refused):
    """Products of a block and of a function have no place for one."""
    with refuses(r"belongs to a layer: fp8\.convert\(model, "):
        fp8.autocast(refused)
    with refuses(r"fp8\.convert\(model, 'delayed'\)"):
        fp8.products.matmul.linear(randn(5, 8), randn(4, 8), recipe=DELAYED)


def test_a_buffer_of_another_length_is_refused():
    layer = short()
    layer.fp8_amax_input = torch.zeros(5)
    with refuses(r"fp8_amax_input has the shape \(5,\), and the recipe"):
        layer(randn(5, 8))


def plain_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(8, 16, 3), nn.Flatten(), *linears(64, 8, 4))


def make():
    return fp8.convert(plain_net(), SHORT)


def train(model, steps, forward=None, optimizer=None):
    """The losses of some steps of two micro-batches, each forward before either backward."""
    forward = forward or model
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for i in steps:
        parts = [
            nn.functional.mse_loss(
                forward(2.0**i * normal(6, 8, 6, seed=2 * i + half)),
                randn(6, 4, seed=i),
            )
            for half in (0, 1)
        ]
        for loss in parts:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.detach() for loss in parts]
    return losses


@parametrize("device, assign", [("cpu", False), ("cpu", True), ("meta", True)])
def test_a_checkpoint_of_the_plain_model_loads_and_histories_begin_anew(device, assign):
    """Strictly. Some of them missing is an error, as of any buffer."""
    plain = plain_net()
    with torch.device(device):
        model = make()
    if device != "meta":
        train(model, range(2))
        assert all(buffer.any() for buffer in model.buffers())
    saved = model.state_dict()
    state = plain.state_dict()
    model.load_state_dict(state, assign=assign)
    assert len(state) == len(list(plain.parameters()))
    assert not any(buffer.any() for buffer in model.buffers())
    expected = train(fp8.convert(deepcopy(plain), SHORT), range(3))
    assert train(model, range(3)) == expected
    del saved["2.fp8_amax_grad"]
    with refuses(r"Missing key.*2.fp8_amax_grad", RuntimeError):
        model.load_state_dict(saved)


def test_resumed_training_is_the_same(tmp_path):
    whole = make()
    losses = train(whole, range(4))
    half = make()
    train(half, range(2))
    torch.save(half.state_dict(), tmp_path / "half.pt")
    resumed = make()
    resumed.load_state_dict(torch.load(tmp_path / "half.pt", weights_only=True))
    assert train(deepcopy(resumed), range(2, 4)) == losses[4:]
    assert train(resumed, range(2, 4)) == losses[4:]
    assert_same(resumed.state_dict(), whole.state_dict())


@parametrize("length, is_set", [(1, True), (3, False), (16, True), (40, False)])
@parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_graph_for_gpus_updates_a_history_by_other_operations(dtype, length, is_set):
    """Of which the results are equal, also for operands that a history does not record."""
    entries = normal(length).abs() if is_set else torch.zeros(1, length)
    large = 1e300 if dtype == torch.float64 else 1.0
    operands = randn(7), randn(3, 4, 5), randn(ROWS + 1, 2)
    for record, size, x in product(
        (True, False), (large, 0.0, math.inf, math.nan), operands
    ):
        x = x.detach().to(dtype)
        x.view(-1)[::2] *= size
        found = []
        for function in (_delayed_scale, _delayed_on_gpu):
            history = entries.clone()
            scale = function(x, history, FORMATS["e4m3"], "up", record)
            found.append((scale, history))
        assert_same(*found)


def test_compiled_from_the_first_pass_on():
    model, twin = make(), make()
    compiled = in_one_graph(twin, "eager")
    expected = train(model, range(3))
    assert_close(train(twin, range(3), compiled), expected)
    assert_close(twin.state_dict(), model.state_dict())


@filterwarnings("ignore:the RMS of:fp8.warnings.ScaleWarning")
@parametrize("recipe", ["static", "delayed"])
@parametrize("size", [2.0**20, 2.0**-30])
def test_the_state_of_scales_keeps_its_dtype(recipe, size):
    """2**20 is Inf in float16 and 2**-30 zero: the state of operands of such sizes is neither."""
    dtype = torch.float16
    model, x = fp8.convert(nn.Linear(16, 16), recipe), size * normal(6, 16)
    model(x).sum().backward()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to(dtype)
    assert_same(dict(model.named_buffers()), before)
    assert {state.dtype for state in histories(model).values()} == {torch.float32}
    model.zero_grad()
    model(x.clamp(-1, 1).to(dtype)).sum().backward()
    assert model.weight.grad.dtype == model.weight.dtype == dtype
    assert model.to(torch.float32)(x).isfinite().all()


@parametrize("recipe", ["delayed", "static"])
def test_a_layer_of_several_products_has_histories_of_each(recipe):
    layer, other = (fp8.convert(nn.MultiheadAttention(8, 2), recipe) for _ in range(2))
    x = randn(6, 3, 8)
    for _ in range(2):
        layer(x, x, x)[0].square().sum().backward()
    state = layer.state_dict()
    states = histories(layer)
    assert len(states) == 12
    assert states.keys() < state.keys()
    assert all(history.any() for history in states.values())
    other.load_state_dict(state)
    with torch.no_grad():
        assert_same(other(x, x, x)[0], layer(x, x, x)[0])
    assert not any(name.startswith("fp8_") for name in fp8.revert(other).state_dict())


def test_a_layer_of_several_products_that_is_compiled_before_its_first_pass_warns():
    model = fp8.convert(
        nn.Sequential(nn.MultiheadAttention(16, 2, batch_first=True)), "delayed"
    )
    layer, x = model[0], randn(2, 4, 16)
    fast = torch.compile(lambda x: layer(x, x, x)[0], backend="eager")
    with warns("runs in eager mode, now and later", fp8.PitfallWarning):
        y = fast(x)
    assert_same(y, layer(x, x, x)[0])


def test_a_checkpoint_is_refused_by_name():
    layer = fp8.convert(nn.Linear(8, 8), "delayed")
    loss = checkpoint(layer, randn(4, 8), use_reentrant=False).sum()
    with refuses("recipe 'delayed' cannot be checkpointed", NotImplementedError):
        loss.backward()


@parametrize("recipe", ["static", "delayed"])
def test_a_model_from_the_meta_device_has_no_scales_yet(recipe):
    """`to_empty` leaves what the memory holds."""
    with torch.device("meta"):
        model = fp8.convert(nn.Linear(16, 16), recipe)
    torch.use_deterministic_algorithms(True)  # fills memory with NaN
    try:
        model.to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    assert model.weight.isnan().all()
    assert all(not buffer.any() for buffer in model.buffers())
    model.load_state_dict(nn.Linear(16, 16).state_dict())
    assert model(randn(6, 16)).isfinite().all()
