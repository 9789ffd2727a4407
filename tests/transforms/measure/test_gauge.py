"""Gradients are the true ones of the forward function times a power of two for each parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
from tests.transforms.gradients import check_slopes, check_true, exponent, gradients
from tests.transforms.models import GPT, Block
from unit_scaling.transforms import unit_scale

WIDTH, BATCH, LENGTH, VOCAB = 32, 16, 12, 24


class Model(nn.Module):
    """A function of the parts of a model and of its batch, that returns its loss."""

    def __init__(self, fn: Callable[..., Tensor], *batch: Tensor, **parts: nn.Module) -> None:
        super().__init__()
        self.fn, self.batch = fn, batch
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *batch: Tensor) -> Tensor:
        return self.fn(self, *batch)


def linear(out: int = WIDTH, bias: bool = True) -> nn.Linear:
    return nn.Linear(WIDTH, out, bias=bias)


def rows() -> Tensor:
    return torch.randn(BATCH, WIDTH, dtype=torch.float64)


def classes(*shape: int) -> Tensor:
    return torch.randint(VOCAB, shape or (BATCH,))


def mlp() -> Model:
    def fn(m: Model, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m.c(F.gelu(m.b(F.relu(m.a(x))))), y)

    return Model(fn, rows(), classes(), a=linear(), b=linear(), c=linear(VOCAB))


def residual() -> Model:
    def fn(m: Model, x: Tensor, y: Tensor) -> Tensor:
        h = m.a(x)
        h = h + m.b(F.silu(m.norm(h)))
        h = h + m.c(F.silu(m.norm(h)))
        return F.mse_loss(m.head(h), x)

    parts = {name: linear() for name in ("a", "b", "c", "head")}
    return Model(fn, rows(), classes(), norm=nn.LayerNorm(WIDTH), **parts)


def transformer() -> Model:
    def fn(m: Model, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
        h = m.layer(m.embed(ids), src_mask=mask, is_causal=True)
        return F.cross_entropy(m.head(h)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
    parts = {"embed": nn.Embedding(VOCAB, WIDTH), "layer": layer, "head": linear(VOCAB)}
    return Model(fn, classes(BATCH, LENGTH), **parts)


def convolutions() -> Model:
    def fn(m: Model, x: Tensor, y: Tensor) -> Tensor:
        h = F.relu(m.norm1(m.a(x)))
        h = F.max_pool2d(F.relu(m.norm2(m.b(h))), 2)
        return F.cross_entropy(m.head(h.mean((2, 3))), y)

    images = torch.randn(BATCH, 3, 8, 8, dtype=torch.float64)
    convs = {"a": nn.Conv2d(3, 16, 3, padding=1, bias=False), "b": nn.Conv2d(16, 32, 3, bias=False)}
    norms = {"norm1": nn.BatchNorm2d(16), "norm2": nn.BatchNorm2d(32)}
    return Model(fn, images, classes(), **convs, **norms, head=nn.Linear(32, VOCAB))


def lstm() -> Model:
    def fn(m: Model, ids: Tensor) -> Tensor:
        h, _ = m.lstm(m.embed(ids))
        return F.cross_entropy(m.head(h)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    parts = {"embed": nn.Embedding(VOCAB, WIDTH), "lstm": nn.LSTM(WIDTH, WIDTH, batch_first=True)}
    return Model(fn, classes(BATCH, LENGTH), **parts, head=linear(VOCAB))


def tied() -> Model:
    def fn(m: Model, ids: Tensor, targets: Tensor) -> Tensor:
        return m.gpt(ids, targets)[1]

    ids = classes(4, LENGTH + 1)
    return Model(fn, ids[:, :-1], ids[:, 1:], gpt=GPT(vocab=VOCAB, context=LENGTH))


def shared() -> Model:
    def fn(m: Model, x: Tensor, y: Tensor) -> Tensor:
        h = m.first(x)
        for _ in range(3):
            h = torch.tanh(m.again(h))
        return F.cross_entropy(m.head(h), y)

    return Model(fn, rows(), classes(), first=linear(), again=linear(), head=linear(VOCAB))


def two_losses() -> Model:
    def fn(m: Model, x: Tensor, y: Tensor) -> Tensor:
        h = F.relu(m.a(x))
        return F.cross_entropy(m.b(h), y) + 0.01 * F.l1_loss(m.c(h), x)

    return Model(fn, rows(), classes(), a=linear(), b=linear(VOCAB), c=linear())


def divided() -> Model:
    def fn(m: Model, x: Tensor, y: Tensor) -> Tensor:
        weight = (y > 2).double()
        losses = F.cross_entropy(m.b(F.relu(m.a(x))), y, reduction="none")
        return (losses * weight).sum() / weight.sum() / 512

    return Model(fn, rows(), classes(), a=linear(), b=linear(VOCAB))


def dice() -> Model:
    def fn(m: Model, x: Tensor, y: Tensor) -> Tensor:
        p, t = m.b(F.relu(m.a(x))).softmax(-1), F.one_hot(y, VOCAB).double()
        overlap = 2 * (p * t).sum(0) + 1
        return 1 - (overlap / (p.sum(0) + t.sum(0) + 1)).mean()

    return Model(fn, rows(), classes(), a=linear(), b=linear(VOCAB))


def graph() -> Model:
    def fn(m: Model, x: Tensor, y: Tensor, source: Tensor, to: Tensor) -> Tensor:
        h = m.a(x)
        h = torch.zeros_like(h).index_add(0, to, h[source])
        return F.cross_entropy(m.b(F.relu(h)), y)

    edges = torch.randint(BATCH, (2, 4 * BATCH))
    return Model(fn, rows(), classes(), *edges, a=linear(), b=linear(VOCAB))


def in_place() -> Model:
    def fn(m: Model, x: Tensor, y: Tensor) -> Tensor:
        h = F.relu(m.b(F.relu(m.a(x), inplace=True)), inplace=True)
        z = m.c(h)
        z += h
        return F.cross_entropy(m.head(z.mul_(0.5)), y)

    parts = {name: linear() for name in "abc"}
    return Model(fn, rows(), classes(), **parts, head=linear(VOCAB))


def zero_branch() -> Model:
    def fn(m: Model, x: Tensor, y: Tensor) -> Tensor:
        h = m.a(x)
        h = h + m.down(F.gelu(m.up(h)))
        return F.cross_entropy(m.head(h), y)

    down = linear()
    nn.init.zeros_(down.weight)
    nn.init.zeros_(down.bias)
    return Model(fn, rows(), classes(), a=linear(), up=linear(), down=down, head=linear(VOCAB))


def gates() -> Model:
    def fn(m: Model, x: Tensor, y: Tensor) -> Tensor:
        gate, value = m.a(x).chunk(2, -1)
        first, second = m.b(F.silu(gate) * value).split([8, WIDTH - 8], -1)
        return F.cross_entropy(m.c(torch.cat([second, first.sigmoid()], -1)), y)

    return Model(fn, rows(), classes(), a=linear(2 * WIDTH), b=linear(), c=linear(VOCAB))


def bag() -> Model:
    def fn(m: Model, ids: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m.b(F.relu(m.a(m.bag(ids)))), y)

    parts = {"bag": nn.EmbeddingBag(VOCAB, WIDTH, mode="sum"), "a": linear()}
    return Model(fn, classes(BATCH, 5), classes(), **parts, b=linear(VOCAB))


MODELS = {
    make.__name__: make
    for make in (
        *(mlp, residual, transformer, convolutions, lstm, tied, shared, two_losses, divided),
        *(dice, graph, in_place, zero_branch, gates, bag),
    )
}


def loss(model: Model) -> Tensor:
    return model(*model.batch)


def scaled(name: str, **options: str) -> tuple[Model, Model]:
    """A plain model in float64, and the same unit-scaled."""
    torch.manual_seed(0)
    plain = MODELS[name]().double()
    return plain, unit_scale(plain, **options)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_true_times_powers_of_two(name: str) -> None:
    _, ours = scaled(name)
    exponents = check_true(ours, loss)
    assert exponents
    assert check_slopes(ours, loss) == exponents


def rms(x: Tensor) -> float:
    return x.detach().square().mean().sqrt().item()


LAYERS = (nn.Linear, nn.Conv2d, nn.LSTM)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_have_rms_one(name: str) -> None:
    """Those that enter a product, and those of parameters."""
    _, ours = scaled(name)
    found: dict[str, float] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: Tensor | tuple[Tensor, object]) -> None:
            result = output if isinstance(output, Tensor) else output[0]
            if result.requires_grad:
                result.register_hook(lambda grad: found.update({name: rms(grad)}))

        return hook

    for path, module in ours.named_modules():
        if isinstance(module, LAYERS):
            module.register_forward_hook(watch(path))
    loss(ours)
    _, grads = gradients(ours, loss)
    found |= {path: rms(grad) for path, grad in grads.items()}
    found = {path: size for path, size in found.items() if size}
    assert len(found) > 4
    assert all(1 / 4 <= size <= 4 for size in found.values()), found


@pytest.mark.parametrize("name", MODELS)
def test_a_preserved_model_has_its_function_and_its_gradients(name: str) -> None:
    plain, ours = scaled(name, init="preserve")
    loss(ours)
    expected, true = gradients(plain, loss)
    value, found = gradients(ours, loss)
    assert torch.equal(value, expected)
    for path, grad in true.items():
        torch.testing.assert_close(found[path], grad, rtol=1e-12, atol=1e-12 * rms(grad))


# Gradients that are zero but for rounding


class Keys(nn.Module):
    """Attention, whose softmax does not see the bias of the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        return torch.softmax(q @ k.mT / WIDTH**0.5, -1) @ v


NORMED = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.ReLU(), linear())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("model", "name"), [(Keys(), "key.bias"), (NORMED, "0.bias")])
def test_rounding_is_not_brought_to_rms_one(
    model: nn.Module, name: str, dtype: torch.dtype
) -> None:
    ours, x = unit_scale(copy.deepcopy(model).to(dtype)), rows().to(dtype)
    target = rows().to(dtype)
    for _ in range(3):
        _, grads = gradients(ours, lambda m: F.mse_loss(m(x), target))
    assert rms(grads[name].double()) <= 32 * torch.finfo(dtype).eps
    assert all(rms(grad) >= 1 / 4 for path, grad in grads.items() if path != name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_small_gradients_are_brought_to_rms_one(dtype: torch.dtype) -> None:
    """That of a weight whose scale a batch norm takes off is as small as its eps."""
    torch.manual_seed(0)
    model = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear(), nn.BatchNorm1d(WIDTH))
    ours, x, target = unit_scale(model.to(dtype)), rows().to(dtype), rows().to(dtype)
    _, grads = gradients(ours, lambda m: F.mse_loss(m(x), target))
    _, grads = gradients(ours, lambda m: F.mse_loss(m(x), target))
    assert 1 / 4 <= rms(grads["1.weight"]) <= 4


# Losses outside of the model


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCAB, WIDTH), Block(WIDTH, 4)
        self.head = linear(VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.embed(ids)))


def outside(model: nn.Module, ids: Tensor, divisor: float = 1.0) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) / divisor


def logits() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return unit_scale(Logits().double()), torch.randint(VOCAB, (BATCH, LENGTH))


def test_the_size_of_a_loss_outside_makes_no_difference() -> None:
    """The number of positions, of the steps of an accumulation, a loss scale."""
    (ours, ids), (divided, _) = logits(), logits()
    _, expected = gradients(ours, lambda m: outside(m, ids))
    _, found = gradients(divided, lambda m: outside(m, ids, 512))
    for name, grad in expected.items():
        assert torch.equal(found[name], grad), name
        assert 1 / 4 <= rms(grad) <= 4, name


def test_a_later_loss_is_in_proportion_to_the_first() -> None:
    """The size is measured once: a loss that falls has smaller gradients."""
    ours, ids = logits()
    _, first = gradients(ours, lambda m: outside(m, ids))
    _, later = gradients(ours, lambda m: outside(m, ids, 4))
    for name, grad in first.items():
        torch.testing.assert_close(4 * later[name], grad, rtol=1e-12, atol=0)


def test_gradients_of_a_loss_outside_are_true() -> None:
    ours, ids = logits()
    exponents = check_true(ours, lambda m: outside(m, ids))
    assert check_slopes(ours, lambda m: outside(m, ids)) == exponents


def test_gradients_of_a_loss_outside_of_a_preserved_model_are_its_own() -> None:
    torch.manual_seed(0)
    plain, ids = Logits().double(), torch.randint(VOCAB, (BATCH, LENGTH))
    ours = unit_scale(plain, init="preserve")
    expected, true = gradients(plain, lambda m: outside(m, ids, 512))
    value, found = gradients(ours, lambda m: outside(m, ids, 512))
    assert torch.equal(value, expected)
    for name, grad in true.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-12, atol=1e-12 * rms(grad))


# Gradients of inputs


@pytest.mark.parametrize("init", ["unit", "preserve"])
@pytest.mark.parametrize("inside", [True, False], ids=["loss inside", "loss outside"])
def test_gradients_of_inputs_are_true(inside: bool, init: str) -> None:
    """Without a power of two: they go on into what is before the model."""
    torch.manual_seed(0)

    def fn(m: Model, x: Tensor, y: Tensor) -> Tensor:
        z = m.b(F.gelu(m.a(x)))
        return F.cross_entropy(z, y) if inside else z

    plain = Model(fn, rows(), classes(), a=linear(), b=linear(VOCAB)).double()
    ours, (x, y) = unit_scale(plain, init=init), plain.batch

    def value(x: Tensor) -> Tensor:
        result = ours(x, y)
        return result if inside else F.cross_entropy(result, y) / 512

    value(x.requires_grad_()).backward()
    x.grad = None
    torch.autograd.gradcheck(value, x, fast_mode=True, eps=1e-6, atol=1e-9, rtol=1e-5)


def test_a_model_between_two_plain_ones_leaves_their_gradients_alone() -> None:
    torch.manual_seed(0)
    ours = unit_scale(nn.Sequential(linear(), nn.GELU(), linear()))
    whole = nn.Sequential(linear(), ours, linear(VOCAB)).double()
    x, y = rows(), classes()
    exponents = check_slopes(whole, lambda m: F.cross_entropy(m(x), y))
    plain = {name for name, exponent in exponents.items() if exponent == 0}
    assert plain >= {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert not plain.intersection(exponents.keys() - {"0.weight", "0.bias", "2.weight", "2.bias"})


# Other forms of call


def test_other_forms_of_call_have_the_same_exponents() -> None:
    """Evaluation with gradients, another length, a batch of one: their gradients are added up."""
    ours, ids = logits()
    first = check_true(ours, lambda m: outside(m, ids))
    forms = {
        "length": lambda m: outside(m, ids[:, : LENGTH // 2]),
        "batch of one": lambda m: outside(m, ids[:1]),
        "evaluation": lambda m: outside(m.eval(), ids),
    }
    for name, value in forms.items():
        assert check_true(ours, value) == first, name
        ours.train()


@pytest.mark.parametrize("name", ["mlp", "transformer", "lstm", "two_losses"])
def test_forms_with_a_loss_inside_have_the_same_exponents(name: str) -> None:
    _, ours = scaled(name)
    first = check_true(ours, loss)
    ours.eval()
    assert check_true(ours, loss) == first
    ours.batch = tuple(t[:1] for t in ours.batch)
    assert check_true(ours, loss) == first


@pytest.mark.parametrize("size", [0.25, 65536.0])
def test_forms_share_the_factor_of_a_loss_scale(size: float) -> None:
    """Of accumulation, or a GradScaler: what the first form has measured, and recalibrated ones."""
    _, ours = scaled("mlp")
    first = check_true(ours, lambda m: size * loss(m))
    ours.batch = tuple(t[:1] for t in ours.batch)
    assert check_true(ours, lambda m: size * loss(m)) == first
    uu.recalibrate(ours, ours.batch)
    assert check_true(ours, lambda m: size * loss(m)) == first


def test_forms_before_the_first_backward_pass_have_the_same_exponents() -> None:
    _, ours = scaled("mlp")
    batches = ours.batch, tuple(t[:1] for t in ours.batch)
    both = [ours(*batch) for batch in batches]
    (0.25 * sum(both)).backward()
    found = {name: p.grad.clone() for name, p in ours.named_parameters()}
    ours.zero_grad()
    for batch in batches:
        (0.25 * ours(*batch)).backward()
    assert all(torch.equal(found[name], p.grad) for name, p in ours.named_parameters())


def test_a_form_without_a_loss_first() -> None:
    """A model that is evaluated for its logits before it is trained with its loss inside."""
    torch.manual_seed(0)
    gpt, ids = unit_scale(GPT(vocab=VOCAB, context=LENGTH).double()), classes(4, LENGTH)
    with torch.no_grad():
        gpt(ids)
    exponents = check_true(gpt, lambda m: m(ids, ids.roll(-1, 1))[1])
    other = unit_scale(GPT(vocab=VOCAB, context=LENGTH).double())
    assert exponents.keys() == check_true(other, lambda m: m(ids, ids.roll(-1, 1))[1]).keys()
    for name, grad in gradients(gpt, lambda m: m(ids, ids.roll(-1, 1))[1])[1].items():
        assert 1 / 4 <= rms(grad) <= 4, name


def test_no_exponent_is_lost_in_float32() -> None:
    """Powers of two are exact: float32 agrees with float64 to its own rounding."""
    torch.manual_seed(0)
    model = mlp()
    x, y = model.batch
    ours = unit_scale(model)
    check_true(ours, lambda m: m(x.float(), y), rtol=1e-6)


def test_the_power_of_two_is_found() -> None:
    """The helper itself: it accepts powers of two only."""
    true = torch.randn(4, dtype=torch.float64)
    assert exponent(true / 8, true) == -3
    for wrong in (1.5 * true, -true, true + 1e-6):
        with pytest.raises(AssertionError):
            exponent(wrong, true)


# Factors without a rule

NODES, EDGES, CHANNELS, HEADS = 200, 1600, 64, 4


def edges() -> tuple[Tensor, Tensor]:
    source, to = torch.randint(NODES, (2, EDGES))
    return source, to


class Neighbours(nn.Module):
    """Graph attention (GAT): a softmax over the neighbours of a node, written with a sum by index.

    form: how the weights are divided, as it is written by hand and by libraries.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(8, CHANNELS), nn.Linear(CHANNELS, 8)
        self.layer, self.form = nn.Linear(CHANNELS, CHANNELS), form
        self.a, self.b = (nn.Parameter(torch.randn(HEADS, CHANNELS // HEADS)) for _ in range(2))

    def softmax(self, logits: Tensor, to: Tensor) -> Tensor:
        places, zeros = to[:, None].expand_as(logits), logits.new_zeros(NODES, HEADS)
        most = zeros.scatter_reduce(0, places, logits.detach(), "amax", include_self=False)
        weights = (logits - most[to]).exp()
        if self.form == "scatter":
            return weights / (zeros.scatter_add(0, places, weights) + 1e-16).gather(0, places)
        if self.form == "in place":
            return weights / zeros.scatter_add_(0, places, weights).clamp_min(1e-16)[to]
        return weights / (zeros.index_add(0, to, weights)[to] + 1e-16)

    def forward(self, x: Tensor, source: Tensor, to: Tensor, y: Tensor) -> Tensor:
        h = self.layer(torch.tanh(self.inp(x))).view(-1, HEADS, CHANNELS // HEADS)
        logits = F.leaky_relu((h * self.a).sum(-1)[source] + (h * self.b).sum(-1)[to], 0.2)
        rows = h[source] * self.softmax(logits, to).unsqueeze(-1)
        x = torch.zeros_like(h).index_add(0, to, rows).flatten(1)
        return F.cross_entropy(self.head(torch.tanh(x)), y)

    @staticmethod
    def batch() -> tuple[Tensor, ...]:
        return torch.randn(NODES, 8), *edges(), torch.arange(NODES) % 8


@pytest.mark.parametrize("form", ["scatter", "in place", "index"])
def test_attention_to_neighbours_has_unit_scale(form: str) -> None:
    """Its sums have no rule: their factors are measured, and the same however it is written."""
    torch.manual_seed(0)
    model, batch = unit_scale(Neighbours(form)), Neighbours.batch()
    model(*batch)
    found = uu.verify(model, batch)
    rms = next(r.rms for r in found.rows if (r.path, r.tensor) == ("head", "input"))
    assert 0.8 < rms < 1.25, found
    assert found.share("gradient") == 1, found
    rows = [r for r in uu.report(model) if r.call in ("scatter_add", "scatter_add_", "index_add")]
    assert {row.done for row in rows} == {"measured"}
    assert all("measured: times" in row.why for row in rows)
    exponents = check_true(model.double(), lambda m: m(batch[0].double(), *batch[1:]))
    assert exponents


class Weighted(nn.Module):
    """Graph convolution (GCN): rows times 1/sqrt(d_i d_j), numbers that come with the graph."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.scale = scale

    def forward(self, x: Tensor, source: Tensor, to: Tensor) -> Tensor:
        degrees = torch.zeros(NODES).index_add(0, to, torch.ones(EDGES)).clamp(min=1)
        weights = self.scale * (degrees[source] * degrees[to]).rsqrt()
        rows = self.layer(x)[source] * weights[:, None]
        return self.head(torch.zeros(NODES, CHANNELS).index_add(0, to, rows))


@pytest.mark.parametrize("scale", [1.0, 16.0])
def test_rows_times_numbers_have_unit_scale(scale: float) -> None:
    torch.manual_seed(0)
    found = uu.verify(unit_scale(Weighted(scale)), (torch.randn(NODES, CHANNELS), *edges()))
    rows = {(r.path, r.tensor): r.rms for r in found.rows}
    assert 2**-1.5 < rows["head", "input"] < 2**1.5, found
    assert 2**-1.5 < rows["layer", "gradient of output"] < 2**1.5, found


class Reduced(nn.Module):
    """A loss that is a mean or a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(), linear(VOCAB)

    def forward(self, x: Tensor, y: Tensor, reduction: str) -> Tensor:
        return F.cross_entropy(self.down(F.gelu(self.up(x))), y, reduction=reduction)


def test_another_form_of_call_has_gauges_for_its_own_gradients() -> None:
    """Those of parameters are the ones of the first form."""
    torch.manual_seed(0)
    model, x, y = unit_scale(Reduced()), torch.randn(1024, WIDTH), classes(1024)
    model(x, y, "mean").backward()
    means = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model(x, y, "sum").backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, 1024 * means[name], rtol=1e-3, atol=1e-2)
    given = {"x": x, "y": y, "reduction": "sum"}
    assert uu.verify(model, given).share("gradient") == 1
