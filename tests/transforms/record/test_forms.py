"""Models in the forms that people write them: what they are called with, return and share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import fp8
import unit_scaling as uu
from tests.transforms.gradients import check_slopes, check_true
from tests.transforms.models import Net
from unit_scaling.transforms import unit_scale

WIDTH = 32


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def rms(x: Tensor) -> float:
    return x.detach().double().square().mean().sqrt().item()


def loud(model: nn.Module) -> nn.Module:
    """Makes every weight large, so that a call that is left out is seen."""
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=10)
    return model


def layer(kind: type[nn.Module]) -> nn.Module:
    return kind(WIDTH, 4, 2 * WIDTH, batch_first=True, dropout=0.0)


TORCH: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "Linear": (linear, 1),
    "Sequential": (lambda: nn.Sequential(linear(), nn.ReLU(), linear()), 1),
    "TransformerEncoderLayer": (lambda: layer(nn.TransformerEncoderLayer), 1),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(layer(nn.TransformerEncoderLayer), 2, nn.LayerNorm(WIDTH)),
        1,
    ),
    "TransformerDecoder": (lambda: nn.TransformerDecoder(layer(nn.TransformerDecoderLayer), 2), 2),
    "Transformer": (
        lambda: nn.Transformer(WIDTH, 4, 1, 1, 2 * WIDTH, dropout=0.0, batch_first=True),
        2,
    ),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(WIDTH, 4, batch_first=True), 3),
    "LSTM": (lambda: nn.LSTM(WIDTH, WIDTH), 1),
    "GRU": (lambda: nn.GRU(WIDTH, WIDTH), 1),
}
"""torch.nn's own models, and how many inputs they take."""


@pytest.mark.proves("unit-scaling", "any PyTorch model", how="own")
@pytest.mark.parametrize("name", TORCH)
def test_models_of_torch(name: str) -> None:
    build, inputs = TORCH[name]
    torch.manual_seed(0)
    model = unit_scale(loud(build()))
    xs = [torch.randn(4, 16, WIDTH, requires_grad=True) for _ in range(inputs)]
    found = model(*xs)
    y = found[0] if isinstance(found, tuple) else found
    assert 1 / 8 < rms(y) < 4  # a readout is small
    y.backward(torch.randn(y.shape))
    sizes = [rms(p.grad) for p in model.parameters() if p.dim() > 1]
    assert all(1 / 8 < size < 8 for size in sizes if size), sizes
    assert not uu.report(model).left_alone
    assert y.shape == (model.eval()(*xs)[0] if isinstance(found, tuple) else model(*xs)).shape


@dataclass
class Output:
    loss: Tensor
    hidden: dict[str, Tensor]


class Structured(nn.Module):
    """Several inputs, keywords, a dict in, a dataclass out, a layer used twice, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(16, WIDTH), linear()
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, extra: dict[str, Tensor], *, flip: bool = False) -> Output:
        x = self.embed(ids)
        x += torch.matmul(extra["a"], other=extra["b"].transpose(0, 1))
        x = x.add(self.layer(input=F.gelu(self.layer(x)))).flip(0) if flip else self.layer(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, -2), target=ids.flatten())
        return Output(loss, {"last": x, "logits": logits})


def structured() -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    extra = {"a": torch.randn(8, WIDTH), "b": torch.randn(WIDTH, WIDTH)}
    return unit_scale(loud(Structured())), torch.randint(16, (4, 8)), extra


def test_structured_arguments_and_results() -> None:
    model, ids, extra = structured()
    for flip in (True, False, True):
        out = model(ids, extra, flip=flip)
        assert isinstance(out, Output)
        assert 1 / 4 < rms(out.hidden["last"]) < 4
        assert 1 / 4 < rms(out.hidden["logits"]) < 4
        out.loss.backward()
    assert model.head.weight is model.embed.weight
    assert not uu.report(model).left_alone


def test_shapes_may_change() -> None:
    model, ids, extra = structured()
    for batch in (4, 2, 1, 5):
        out = model(ids[:1].repeat(batch, 1), extra)
        assert out.hidden["last"].shape == (batch, 8, WIDTH)
        assert 1 / 4 < rms(out.hidden["last"]) < 4


# Gradient checkpointing


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(nn.TransformerEncoderLayer) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for part in self.layers:
            if self.reentrant is None:
                x = part(x)
            else:
                x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_modules_are_scaled_when_they_are_computed_again(reentrant: bool) -> None:
    torch.manual_seed(0)
    plain = Checkpointed(None)
    models = [unit_scale(plain), unit_scale(plain)]
    models[1].reentrant = reentrant
    x = torch.randn(4, 8, WIDTH, requires_grad=True)
    cotangent = torch.randn(4, 8, WIDTH)
    found = []
    for model in models:
        y = model(x)
        found.append([y, *torch.autograd.grad(y, [x], cotangent)] if not reentrant else [y])
        model(x).backward(cotangent)
        found[-1] += [p.grad for p in model.parameters()]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_model_within_a_checkpoint_is_looked_at_once_for_each_step(before: int) -> None:
    """Looks in the forward pass alone, whose tensors the checkpoint does not count."""
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv1d(4, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(48, 4))
    models = [fp8.convert(unit_scale(conv), "unit") for _ in range(2)]
    x = torch.randn(6, 4, 8, requires_grad=True)
    for step in range(before + 3):
        found = []
        for model, inside in zip(models, (False, step >= before), strict=True):
            y = checkpoint(model, x, use_reentrant=False) if inside else model(x)
            y.square().mean().backward()
            found.append([y, *(p.grad for p in model.parameters())])
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("init", ["unit", "preserve"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_gradients_of_what_is_computed_again_are_true(init: str, reentrant: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Checkpointed(None), nn.Linear(WIDTH, 4)).double()
    model = unit_scale(plain, init=init)
    model[0].reentrant = reentrant
    x = torch.randn(4, 8, WIDTH, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        model.zero_grad()
        model(x).square().mean().backward()
    powers = check_true(model, lambda m: m(x).square().mean())
    assert check_slopes(model, lambda m: m(x).square().mean()) == powers
    assert init == "unit" or set(powers.values()) == {0}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_plans_made_in_reentrant_checkpoints_are_those_without() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), Checkpointed(None), nn.Linear(WIDTH, 4)).double()
    found = []
    for reentrant in (None, True):
        torch.manual_seed(0)
        model = unit_scale(plain)
        for model[1].reentrant, batch in ((None, 4), (reentrant, 1)):  # two forms, two plans
            x = torch.randn(batch, 8, WIDTH, dtype=torch.float64)
            found.append(check_slopes(model, lambda m: m(x).square().mean() * 1e-3))  # noqa: B023
    assert found[0] == found[1] == found[3]


def test_reentrant_checkpoints_are_refused_where_calls_depend_on_values() -> None:
    class Repeated(Checkpointed):
        steps = 1

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.steps):
                x = F.gelu(super().forward(x))
            return self.layers[0](x)

    def train() -> None:
        for model.steps in (1, 2, 1, 2, 1, 2):
            model(x).sum().backward()

    model, x = unit_scale(Repeated(True)), torch.randn(4, 8, WIDTH, requires_grad=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        train()


def test_checkpointed_functions_are_refused_by_line() -> None:
    model = unit_scale(
        Net(
            lambda m, x: checkpoint(lambda y: m.a(x).tanh() * y, x, use_reentrant=False), a=linear()
        )
    )
    with pytest.raises(ValueError, match=r"test_forms.py:\d+ runs under torch.utils.checkpoint"):
        model(torch.randn(4, WIDTH))


# Weights that are computed


def test_parametrized_weights_are_scaled_where_they_are_used() -> None:
    torch.manual_seed(0)
    parts = parametrizations.weight_norm(linear()), parametrizations.spectral_norm(linear())
    plain = nn.Sequential(*parts, linear(), linear())
    before = {n: p.clone() for n, p in plain.named_parameters() if "parametrizations" in n}
    model = unit_scale(plain)
    x = torch.randn(256, WIDTH, requires_grad=True)
    y = model[1](model[0](x))
    assert 0.8 < rms(y) < 1.25
    model(x).backward(torch.randn(256, WIDTH))
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert parametrize.is_parametrized(model[0])
    assert not uu.report(model).left_alone


def test_weights_computed_from_parameters_by_hand() -> None:
    """A weight that is standardised in the forward pass, and one that is exponentiated."""
    torch.manual_seed(0)

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        weight = m.a.weight - m.a.weight.mean(1, keepdim=True)
        return F.linear(x, 100 * weight) @ (m.b.weight.exp() - 1)

    net = Net(forward, a=linear(), b=linear())
    weight = net.b.weight.detach().clone()
    model = unit_scale(net)
    y = model(torch.randn(256, WIDTH))
    assert 0.8 < rms(y) < 1.25
    x = torch.eye(WIDTH)
    expected = F.linear(x, model.a.weight - model.a.weight.mean(1, keepdim=True)) @ (
        weight.exp() - 1
    )
    y = model(x)
    torch.testing.assert_close(y / rms(y), expected / rms(expected), rtol=1e-4, atol=1e-4)


def test_weights_that_hooks_compute_are_refused() -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        model = nn.Sequential(nn.utils.weight_norm(linear()))
    with pytest.raises(ValueError, match=r"0 has its weight computed by a hook \(WeightNorm\)"):
        unit_scale(model)


# What nothing is known about


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


def test_autograd_functions_are_left_alone_by_name_and_line() -> None:
    torch.manual_seed(0)
    model = unit_scale(Net(lambda m, x: m.b(Square.apply(m.a(x))), a=linear(), b=linear()))
    x = torch.randn(8, WIDTH, dtype=torch.float64, requires_grad=True)
    model.double()
    model(x).sum().backward()
    (row,) = uu.report(model).left_alone
    assert "inside the autograd function Square" in row.why
    assert "test_forms.py:" in row.why
    h = model.a(x)
    torch.testing.assert_close(model(x), model.b(h * h))


def test_frozen_models_are_scaled_too() -> None:
    torch.manual_seed(0)
    plain = loud(nn.Sequential(linear(), nn.Tanh(), linear())).requires_grad_(False)
    model = unit_scale(plain)
    x = torch.randn(256, WIDTH)
    assert rms(model[1](model[0](x))) == pytest.approx(1, rel=0.1)
    assert not any(p.requires_grad for p in model.parameters())


# Context length


class Attention(nn.Module):
    """Causal attention with a cache, by one call or written out, perhaps masked once more."""

    def __init__(self, written: str) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), linear()
        self.written = written

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        q, k, v = self.qkv(x).split(WIDTH, -1)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        if self.written:
            mask = torch.full((x.shape[1], k.shape[1]), -torch.inf).triu(
                1 + k.shape[1] - x.shape[1]
            )
            weights = (q @ k.transpose(-1, -2) / WIDTH**0.5 + mask).softmax(-1)
            if self.written == "masked":
                weights = weights.masked_fill(mask < 0, 0.0)
            y = weights @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        return x + self.out(y), [k, v]


@pytest.mark.parametrize("length", [None, 64])
@pytest.mark.parametrize("written", ["", "written", "masked"])
def test_a_cache_computes_what_the_whole_sequence_does(written: str, length: int | None) -> None:
    torch.manual_seed(0)
    model = unit_scale(Attention(written).double(), context_length=length)
    x = torch.randn(2, 12, WIDTH, dtype=torch.float64)
    whole, _ = model(x)
    prefix, cache = model(x[:, :7])
    torch.testing.assert_close(prefix, whole[:, :7])
    for t in range(7, 12):
        y, cache = model(x[:, t : t + 1], cache)
        torch.testing.assert_close(y, whole[:, t : t + 1])
    said = [row.why for row in uu.report(model) if "keys" in row.why]
    assert said
    assert all(f" {length or 12} keys" in why for why in said)


@pytest.mark.parametrize("length", [0, 2.5, "long", True])
def test_bad_context_length(length: object) -> None:
    with pytest.raises(ValueError, match="context_length is a positive number of keys"):
        unit_scale(linear(), context_length=length)


def test_operators_compile() -> None:
    """Those of Tensor that are written in Python, and attention that is written out."""
    torch.manual_seed(0)

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        y = m.a(x) ** 2 + (1 - x) / 2**0.5 + 1 / (x.detach() + 9) + 2.0 ** x.detach()
        return m.b(y * torch.tensor(0.5))[0]

    model = unit_scale(Net(forward, a=linear(), b=Attention("written")))
    x = torch.randn(2, 8, WIDTH)
    expected = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), expected)


class Graph(nn.Module):
    """A graph network whose neighbours are a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, neighbours: Tensor) -> Tensor:
        h = torch.relu(torch.mm(neighbours, self.first(x)))
        return F.cross_entropy(torch.spmm(neighbours, self.second(h)), torch.arange(len(x)) % 4)


def test_sparse_products_are_left_alone_by_name() -> None:
    torch.manual_seed(0)
    model, batch = Graph(), (torch.randn(8, 8), torch.eye(8).to_sparse())
    ours = unit_scale(model)
    ours(*batch).backward()
    alone = [(row.call, row.why.partition(" (")[0]) for row in uu.report(ours).left_alone]
    assert alone == [("mm", "no rule for mm of a sparse tensor")]  # the last keeps its values
    assert uu.verify(ours, batch).share("gradient") == 1


class Force(nn.Module):
    """Of an energy, the force is compared: its gradient by the positions, as in force fields."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor, truth: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        (self.force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return F.mse_loss(self.force, truth)


def test_a_gradient_within_the_forward_is_that_of_what_is_computed() -> None:
    torch.manual_seed(0)
    x, truth = torch.randn(8, 3), torch.randn(8, 3)
    ours = unit_scale(Force())
    ours(x, truth).backward()
    assert not uu.report(ours).left_alone
    assert all(p.grad.isfinite().all() for p in ours.parameters() if p.grad is not None)
    force, step = ours.force, 1e-2
    wanted = torch.zeros_like(x)
    for i in range(3):  # of a part, which runs under the plan of the whole
        d = step * torch.eye(3)[i]
        wanted[:, i] = ((ours.energy(x + d) - ours.energy(x - d)) / (2 * step)).squeeze(1)
    torch.testing.assert_close(force, wanted, rtol=1e-2, atol=1e-3)
