"""Scaling "delayed" in converted layers: what the buffers hold; it is what autocast does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fp8
from fp8 import AmaxHistory
from tests.fp8.products.test_matmul import randn
from tests.fp8.recipes.test_history import SHORT

NAMES = ("fp8_amax_input", "fp8_amax_weight", "fp8_amax_grad")


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(8, 16, 3), nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 4))


def train(model: nn.Module, steps: range, forward=None, optimizer=None) -> list[Tensor]:
    """The losses of some steps of two micro-batches, each forward before either backward."""
    forward = forward or model
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for i in steps:
        parts = [
            F.mse_loss(
                forward(2.0**i * randn(6, 8, 6, seed=2 * i + half).detach()), randn(6, 4, seed=i)
            )
            for half in (0, 1)
        ]
        for loss in parts:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.detach() for loss in parts]
    return losses


def test_it_is_autocast_with_a_history():
    model, twin, history = fp8.convert(make(), SHORT), make(), AmaxHistory()

    def forward(x: Tensor) -> Tensor:
        with fp8.autocast(SHORT, history=history):
            return twin(x)

    assert train(model, range(4)) == train(twin, range(4), forward)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    kinds = {"0": "001.conv", "2": "002.linear", "3": "003.linear"}
    for layer, product in kinds.items():
        for name, operand in zip(NAMES, ("0", "1", "grad"), strict=True):
            kept = history.tensors[f"{product}.{operand}"]
            assert torch.equal(model.state_dict()[f"{layer}.{name}"], kept)


def test_names_and_what_revert_leaves():
    plain = make()
    before = list(plain.state_dict())
    model = fp8.convert(plain, "delayed")
    extra = {f"{layer}.{name}" for layer in "023" for name in NAMES}
    assert set(model.state_dict()) - set(before) == extra
    assert all(b.shape == (16,) and b.dtype == torch.float32 for b in model.buffers())
    with torch.no_grad():
        model(randn(6, 8, 6))
    assert not any(b.any() for b in model.buffers())  # what does not train does not write
    assert list(fp8.revert(model).state_dict()) == before
    assert not list(model.buffers())


@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_of_the_plain_model_loads_and_histories_begin_anew(assign):
    """Strictly. Some of them missing is an error, as of any buffer."""
    plain = make()
    model = fp8.convert(make(), SHORT)
    train(model, range(2))
    assert all(buffer.any() for buffer in model.buffers())
    saved = model.state_dict()
    given = plain.state_dict()
    model.load_state_dict(given, assign=assign)
    assert len(given) == len(list(plain.parameters()))
    assert not any(buffer.any() for buffer in model.buffers())
    expected = train(fp8.convert(copy.deepcopy(plain), SHORT), range(3))
    assert train(model, range(3)) == expected
    del saved["2.fp8_amax_grad"]
    with pytest.raises(RuntimeError, match=r"Missing key.*2.fp8_amax_grad"):
        model.load_state_dict(saved)


def test_a_checkpoint_of_the_plain_model_loads_from_the_meta_device():
    with torch.device("meta"):
        model = fp8.convert(make(), SHORT)
    model.load_state_dict(make().state_dict(), assign=True)
    assert train(model, range(2)) == train(fp8.convert(make(), SHORT), range(2))


def test_resumed_training_is_the_same(tmp_path):
    whole = fp8.convert(make(), SHORT)
    losses = train(whole, range(6))
    half = fp8.convert(make(), SHORT)
    train(half, range(3))
    torch.save(half.state_dict(), tmp_path / "half.pt")
    resumed = fp8.convert(make(), SHORT)
    resumed.load_state_dict(torch.load(tmp_path / "half.pt", weights_only=True))
    assert train(resumed, range(3, 6)) == losses[6:]
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_compiled_from_the_first_pass_on():
    torch._dynamo.reset()
    model, twin = fp8.convert(make(), SHORT), fp8.convert(make(), SHORT)
    compiled = torch.compile(twin, fullgraph=True, backend="eager")
    for one, other in zip(train(model, range(3)), train(twin, range(3), compiled), strict=True):
        torch.testing.assert_close(other, one)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(twin.state_dict()[name], tensor)
    torch._dynamo.reset()


def test_copies_and_casts():
    model = fp8.convert(make(), SHORT)
    train(model, range(2))
    twin = copy.deepcopy(model)
    assert train(twin, range(2, 4)) == train(model, range(2, 4))
    half = copy.deepcopy(model).to(torch.bfloat16)
    y = half(randn(6, 8, 6).bfloat16())
    y.sum().backward()
    assert y.isfinite().all()
    for p, q in zip(half.parameters(), model.parameters(), strict=True):
        assert p.grad.dtype == torch.bfloat16
        assert q.dtype == torch.float32


@pytest.mark.parametrize("recipe", ["static", "delayed"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [2.0**20, 2.0**-30])
def test_the_state_of_scales_keeps_its_dtype(recipe, dtype, size):
    """2**20 is Inf in float16 and 2**-30 zero: the state of operands of such sizes is neither."""
    torch.manual_seed(0)
    model, x = fp8.convert(nn.Linear(16, 16), recipe), size * randn(6, 16).detach()
    model(x).sum().backward()
    known = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to(dtype)
    assert model.weight.dtype == dtype
    for name, buffer in model.named_buffers():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, known[name])
    y = model.to(torch.float32)(x)
    assert y.isfinite().all()


@pytest.mark.parametrize("recipe", ["static", "delayed"])
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


SEVERAL = {
    "bilinear": (lambda: nn.Bilinear(8, 8, 4), lambda m, x: m(x, x + 1), 4),
    "attention": (lambda: nn.MultiheadAttention(8, 2), lambda m, x: m(x, x, x)[0], 12),
}


@pytest.mark.parametrize("kind", SEVERAL)
@pytest.mark.parametrize("recipe", ["delayed", "static"])
def test_a_layer_of_several_products_has_histories_of_each(kind, recipe):
    make, call, count = SEVERAL[kind]
    layer, x = fp8.convert(make(), recipe), randn(6, 3, 8)
    for _ in range(2):
        call(layer, x).square().sum().backward()
    state = layer.state_dict()
    assert len([name for name in state if name.startswith("fp8_")]) == count
    assert all(state[name].any() for name in state if name.startswith("fp8_"))
    other = fp8.convert(make(), recipe)
    other.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(call(other, x), call(layer, x))
    assert not any(name.startswith("fp8_") for name in fp8.revert(other).state_dict())


def test_native():
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 16), randn(8, 32)
    simulated = fp8.convert(copy.deepcopy(layer), "delayed", backend="simulate")
    auto = fp8.convert(layer, "delayed", backend="auto")
    assert torch.equal(auto(x), simulated(x))


@pytest.mark.parametrize("of_layer", [True, False])
def test_a_checkpoint_is_refused_by_name(of_layer):
    layer, history = nn.Linear(8, 8), fp8.AmaxHistory()
    block = fp8.autocast("delayed", history=history)
    call = fp8.convert(layer, "delayed") if of_layer else block(layer.forward)
    loss = checkpoint(call, randn(4, 8), use_reentrant=False).sum()
    with pytest.raises(NotImplementedError, match="recipe 'delayed' cannot be checkpointed"):
        loss.backward()


def test_a_reentrant_checkpoint_records_once():
    """Its forward pass records no gradients, so it only reads; what is recomputed records."""
    plain, model = (fp8.convert(nn.Linear(8, 8), SHORT) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    for i in range(3):
        x = (2.0**i * randn(4, 8, seed=i)).detach().requires_grad_()
        y, z = plain(x), checkpoint(model, x, use_reentrant=True)
        assert torch.equal(y, z)
        y.sum().backward()
        z.sum().backward()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    assert torch.equal(plain.weight.grad, model.weight.grad)
