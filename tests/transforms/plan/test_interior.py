"""What is not between two layers keeps its values: inputs, results, losses, tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8
import unit_scaling as uu
import unit_scaling.functional as U
from tests.transforms.gradients import check_true, exponent
from tests.transforms.models import Net
from unit_scaling.transforms import unit_scale

WIDTH = 32
Function = Callable[[Net, Tensor], Tensor]


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False)


def model(fn: Function) -> nn.Module:
    torch.manual_seed(0)
    return unit_scale(Net(fn, a=linear(), b=linear()))


def rows(net: nn.Module) -> dict[str, str]:
    return {row.call: f"{row.done}: {row.why}" for row in uu.report(net) if not row.path}


# Results


def with_and_without(end: Callable[[Tensor], Tensor]) -> tuple[nn.Module, nn.Module]:
    """Two equal models, of which one computes ``end`` of its logits."""
    return model(lambda m, x: end(m.b(F.relu(m.a(x))))), model(lambda m, x: m.b(F.relu(m.a(x))))


RESULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softmax": lambda y: y.softmax(-1),
    "deviation": lambda y: torch.exp(0.5 * y),
    "pixels": lambda y: (torch.tanh(y) + 1) / 2,
    "direction": lambda y: F.normalize(y, dim=-1),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_keep_their_values(name: str) -> None:
    """Its gradient is that of what it computes, times a power of two."""
    result = RESULTS[name]
    ours, logits = with_and_without(result)
    x = torch.randn(64, WIDTH)
    y, plain = ours(x), result(logits(x))
    torch.testing.assert_close(y, plain)
    cotangent = torch.randn(y.shape)
    mine, theirs = (
        torch.autograd.grad(z, net.b.weight, cotangent)[0]
        for z, net in ((y, ours), (plain, logits))
    )
    exponent(mine.double(), theirs.double(), rtol=1e-5)
    assert "keeps its values" in str(rows(ours))


TARGET = torch.linspace(-1, 1, 64)[:, None]

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "squares": lambda y: ((y - TARGET) ** 2).mean(),
    "half of them, weighted": lambda y: (0.5 * TARGET.abs() * (y - TARGET).pow(2)).sum(-1).mean(),
    "in decibels": lambda y: (-10 * torch.log10((y - TARGET).square().mean(-1) + 1e-8)).mean(),
    "a divergence": lambda y: -0.5 * torch.sum(1 + y - y.mean(0).pow(2) - y.exp()),
    "two terms": lambda y: y.abs().mean() + 0.1 * y.norm(dim=-1).mean(),
    "Charbonnier": lambda y: torch.sqrt((y - TARGET) ** 2 + 1e-3).mean(),
    "policy gradient": lambda y: -(y.log_softmax(-1)[:, 0] * TARGET[:, 0]).mean(),
    "a density": lambda y: -torch.distributions.Normal(y, 2.0).log_prob(TARGET).mean(),
    "a category": lambda y: torch.distributions.Categorical(logits=y).entropy().mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_written_out_keeps_its_value(name: str) -> None:
    """Its gradient is that of the loss, times a power of two."""
    loss = LOSSES[name]
    ours, logits = with_and_without(loss)
    x = torch.randn(64, WIDTH)
    mine, theirs = ours(x), loss(logits(x))
    torch.testing.assert_close(mine, theirs)
    mine.backward()
    theirs.backward()
    exponent(ours.b.weight.grad.double(), logits.b.weight.grad.double(), rtol=1e-5)
    assert not uu.report(ours).left_alone


@pytest.mark.parametrize(
    "end",
    [
        lambda a, b: ((a * b).sum(-1) - TARGET[:, 0]).abs().mean(),
        lambda a, b: (a @ b.T).logsumexp(-1),
        lambda a, b: 3.0 * F.silu(a) + b,
    ],
    ids=["a product in a loss", "logits", "a number"],
)
def test_what_comes_after_the_last_layer_keeps_its_values(
    end: Callable[[Tensor, Tensor], Tensor],
) -> None:
    ours, seen = model(lambda m, x: end(m.a(x), m.b(x))), dict[str, Tensor]()
    for name in "ab":
        ours.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: seen.update({name: output})
        )
    result = ours(torch.randn(64, WIDTH))
    torch.testing.assert_close(result, end(seen["a"], seen["b"]), rtol=0, atol=0)
    assert {line.partition(":")[0] for line in rows(ours).values()} <= {"unchanged"}


def test_probabilities_go_into_their_loss() -> None:
    ours = model(lambda m, x: F.binary_cross_entropy(torch.sigmoid(m.b(m.a(x))), x))
    assert ours(torch.rand(8, WIDTH)).item() == pytest.approx(0.7, abs=0.1)


def test_a_probability_whose_logarithm_is_taken_keeps_its_gradient() -> None:
    """The logarithm undoes what the softmax does to it: as log_softmax, which has a factor."""
    by_hand = model(lambda m, x: torch.log(m.b(m.a(x)).softmax(-1) + 1e-9))
    y = by_hand(torch.randn(64, WIDTH))
    y.backward(torch.randn(y.shape))
    assert 1 / 4 < by_hand.b.weight.grad.square().mean().sqrt() < 4


@pytest.mark.parametrize(
    "fn",
    [
        lambda m, x: m.b(torch.sigmoid(m.a(x))),
        lambda m, x: m.b(x * torch.sigmoid(m.a(x))),
        lambda m, x: x + m.b(torch.sigmoid(m.a(x))),
    ],
    ids=["product", "gate", "residual"],
)
def test_what_goes_on_is_no_result(fn: Function) -> None:
    ours = model(fn)
    ours(torch.randn(8, WIDTH))
    assert "keeps its values" not in str(rows(ours))


# What a model is called with


@pytest.mark.parametrize(
    "prepare",
    [
        lambda x: x / 255,
        lambda x: 2 * (x / 255) - 1,
        lambda x: (x - 127.5) / 127.5,
        lambda x: x + x,
    ],
)
def test_what_is_done_to_the_input_stays(prepare: Callable[[Tensor], Tensor]) -> None:
    """It is data: no number is taken out of it. A power of two of the layer makes up for it."""
    ours, seen = model(lambda m, x: m.a(prepare(x))), list[Tensor]()
    x = torch.rand(8, WIDTH) * 255
    ours.a.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    y = ours(x)
    torch.testing.assert_close(seen[-1], prepare(x), rtol=0, atol=0)
    exponent(y.double(), U.linear(prepare(x), ours.a.weight).double(), rtol=1e-5)
    assert 2**-1.5 < y.square().mean().sqrt() < 2**1.5


def test_the_input_as_target_is_no_second_path() -> None:
    """An autoencoder with its loss inside: its last layer is the readout."""
    ours, seen = model(lambda m, x: F.mse_loss(m.b(torch.tanh(m.a(x))), x)), list[Tensor]()
    x = torch.randn(8, WIDTH)
    ours.b.register_forward_hook(lambda module, args, output: seen.append(output))
    torch.testing.assert_close(ours(x), F.mse_loss(seen[-1], x), rtol=0, atol=0)
    (why,) = [row.why for row in uu.report(ours) if row.path == "b" and row.call == "linear"]
    assert why.startswith("readout: 1/fan_in")
    assert rows(ours)["tanh"].startswith("scaled")


@pytest.mark.parametrize(
    "fn",
    [
        lambda m, x: m.b(torch.tanh(m.a(x))) * x,
        lambda m, x: m.b(torch.tanh(m.a(x - x.mean(1)[:, None]))) + x.mean(1)[:, None],
    ],
    ids=["times it", "its mean"],
)
def test_an_input_that_wants_a_gradient_is_a_path(fn: Function) -> None:
    """Then its gradient is that of what is computed; the values are the same either way."""
    ours = model(fn).double()
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    values = ours(x)
    x.requires_grad_()
    torch.testing.assert_close(ours(x), values)
    torch.autograd.gradcheck(ours, x, fast_mode=True)


def test_a_value_whose_logarithm_needs_its_range_keeps_it() -> None:
    """The density of an action ``tanh(x)``, as in soft actor-critic, while the action goes on."""

    def loss(m: Net, x: Tensor) -> Tensor:
        action = torch.tanh(m.a(x))
        return (torch.log(1 - action.pow(2) + 1e-6).sum(-1) + m.b(action).mean(-1)).mean()

    ours = model(loss)
    value = ours(torch.randn(64, WIDTH))
    assert value.isfinite()
    value.backward()
    assert all(p.grad.isfinite().all() for p in ours.parameters() if p.grad is not None)


# Calls that need no rule


@pytest.mark.parametrize(
    "call",
    [
        lambda y: y + torch.zeros_like(y),
        lambda y: y + y.new_zeros(y.shape),
        lambda y: y * torch.randn_like(y),
        lambda y: y - y.amax(-1, keepdim=True).detach(),
        lambda y: torch.view_as_real(torch.view_as_complex(y.view(-1, 2))),
        lambda y: torch.broadcast_tensors(y, y[:1])[0],
        lambda y: F.pixel_shuffle(y.view(-1, 8, 2, 2), 2),
        lambda y: F.pixel_unshuffle(y.view(-1, 2, 4, 4), 2),
        lambda y: F.unfold(y.view(-1, 2, 4, 4), 2),
        lambda y: y.unfold(1, 4, 2),
        lambda y: torch.hstack((y, y)).tensor_split(2, dim=1)[0].rot90().diagonal(),
        lambda y: torch.zeros_like(y).scatter(0, y.argsort(0), y),
        lambda y: torch.zeros_like(y).index_put((torch.arange(len(y)),), y),
        lambda y: y.masked_select(y > 0).sort().values.nan_to_num().clamp_min(0),
        lambda y: F.max_unpool1d(*F.max_pool1d(y[:, None], 2, return_indices=True), 2),
    ],
)
def test_calls_that_need_no_rule_are_not_left_alone(call: Callable[[Tensor], Tensor]) -> None:
    ours = model(lambda m, x: call(m.a(x)))
    ours(torch.randn(8, WIDTH))
    assert not uu.report(ours).left_alone


def test_what_is_done_to_the_input_needs_no_rule() -> None:
    """No call without a rule either: nothing of it is scaled."""
    x, seen = torch.randn(8, WIDTH), list[Tensor]()
    ours = model(lambda m, x: m.a(x) * x.norm(dim=-1, keepdim=True).cumsum(0).log())
    ours.a.register_forward_hook(lambda module, args, output: seen.append(output))
    y = ours(x)
    torch.testing.assert_close(y, seen[-1] * x.norm(dim=-1, keepdim=True).cumsum(0).log())
    assert not uu.report(ours).left_alone
    assert {line.partition(":")[0] for line in rows(ours).values()} == {"unchanged"}


METHODS: dict[str, Function] = {
    "norm": lambda m, x: m.b(m.a(x) / m.a(x).norm(dim=-1, keepdim=True)),
    "split": lambda m, x: m.b(torch.cat(m.a(x).split(WIDTH // 2, -1), -1)),
    "unflatten": lambda m, x: m.b(m.a(x).unflatten(-1, (2, -1)).flatten(-2)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("recipe", ["", "unit", "block"])
@pytest.mark.parametrize("name", METHODS)
def test_methods_of_tensor_that_are_written_in_python_are_compiled(name: str, recipe: str) -> None:
    """The compiler does not find `Tensor.norm` in a dict of functions, nor follows the ``super()``
    of `Tensor.unflatten`, which a cast by blocks is made with too."""
    torch.compiler.reset()
    ours = model(METHODS[name])
    ours = fp8.convert(ours, recipe) if recipe else ours
    x = torch.randn(8, WIDTH)
    expected = ours(x)
    got = torch.compile(ours, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(got, expected)


# Functions that cannot be copied or seen


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x * torch.erf(x)


class Scripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scripted(x)


def test_a_torchscript_function_is_reported_by_name() -> None:
    ours = unit_scale(nn.Sequential(linear(), Scripted(), linear()))
    (row,) = uu.report(ours).left_alone
    assert (row.path, row.call) == ("1", "scripted")


def test_a_torchscript_function_as_attribute_is_refused() -> None:
    net = nn.Sequential(linear())
    net.activation = scripted
    with pytest.raises(TypeError, match="'activation' is a TorchScript function"):
        unit_scale(net)


def test_an_attribute_without_a_rule_is_reported_by_its_name() -> None:
    ours = model(lambda m, x: m.b(m.a(x).data))
    ours(torch.randn(4, WIDTH))
    assert rows(ours)["data"].startswith("left alone: no rule for data")


def test_a_recurrent_layer_of_one_hot_letters_is_no_weight() -> None:
    """Nothing that goes into it but weights is floating-point before the cast."""
    torch.manual_seed(0)
    net = Net(
        lambda m, ids: m.a(F.one_hot(ids, 8).float())[0], a=nn.LSTM(8, WIDTH, batch_first=True)
    )
    ours = unit_scale(net)
    ours(torch.randint(8, (4, 6)))
    assert [row.done for row in uu.report(ours) if row.call == "lstm"] == ["scaled"]


# What meets an input


class Returns(nn.Module):
    """A target of Q-learning: rewards and discounted values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rewards: Tensor) -> Tensor:
        self.values = self.b(F.relu(self.a(x)))
        return rewards + 0.9 * self.values.amax(1)


def test_what_meets_an_input_has_its_units() -> None:
    torch.manual_seed(0)
    ours, x, rewards = unit_scale(Returns()), torch.randn(16, WIDTH), torch.randn(16)
    result = ours(x, rewards)
    torch.testing.assert_close(result, rewards + 0.9 * ours.values.amax(1))


def test_a_loss_of_what_meets_an_input_has_gradients_of_unit_scale() -> None:
    """A forecast in units of its input, and its squared error, which is written out."""

    def loss(m: Net, x: Tensor) -> Tensor:
        mean = x[:, :1]
        y = m.b(F.relu(m.a(x - mean))) + mean
        return ((y - x.roll(1)) ** 2).mean()

    ours = model(loss)
    rows = uu.verify(ours, torch.randn(64, WIDTH)).rows
    (rms,) = (r.rms for r in rows if r.path == "b" and r.tensor == "gradient of output")
    assert 1 / 2 < rms < 2


# Statistics of what a model is called with

BATCH = 16


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def kept(net: nn.Module, x: Tensor) -> Tensor:
    """As RevIN is published: the statistics keep their dimensions."""
    mean, std = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
    return net((x - mean) / std) * std + mean


def squeezed(net: nn.Module, x: Tensor) -> Tensor:
    mean, std = x.mean(1)[:, None], x.std(1).unsqueeze(-1)
    return net((x - mean) / std) * std + mean


def of_squares(net: nn.Module, x: Tensor) -> Tensor:
    mean = x.mean()
    std = (x.pow(2).mean() - mean**2).sqrt()
    return net((x - mean) / std) * std + mean


def in_one_call(net: nn.Module, x: Tensor) -> Tensor:
    var, mean = torch.var_mean(x, 1)
    std = (var + 1e-5).sqrt()
    std = torch.where(std == 0, torch.ones_like(std), std)[:, None]
    return net((x - mean[:, None]) / std) * std + mean[:, None]


def computed_twice(net: nn.Module, x: Tensor) -> Tensor:
    mean, var = x.mean(1), x.var(1)
    y = net((x - mean[:, None]) / (var + 1e-5).sqrt()[:, None])
    return y * (var + 1e-5).sqrt()[:, None] + mean[:, None]


def to_a_range(net: nn.Module, x: Tensor) -> Tensor:
    low, high = x.amin(1)[:, None], x.amax(1)[:, None]
    return net((x - low) / (high - low)) * (high - low) + low


def of_its_size(net: nn.Module, x: Tensor) -> Tensor:
    total, size = x.sum(1)[:, None] / WIDTH, x.norm(dim=1)[:, None]
    return net((x - total) / size) * size + total


NORMALISED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    f.__name__: f
    for f in (kept, squeezed, of_squares, in_one_call, computed_twice, to_a_range, of_its_size)
}


class Normalised(nn.Module):
    def __init__(self, name: str, net: nn.Module) -> None:
        super().__init__()
        self.name, self.net = name, net

    def forward(self, x: Tensor) -> Tensor:
        return NORMALISED[self.name](self.net, x)


class Denoised(nn.Module):
    """EDM's preconditioning (Karras et al., arXiv 2206.00364, table 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers()

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        sigma, of_data = sigma.reshape(-1, 1), 0.5
        skip = of_data**2 / (sigma**2 + of_data**2)
        out = sigma * of_data / (sigma**2 + of_data**2).sqrt()
        into = 1 / (of_data**2 + sigma**2).sqrt()
        return skip * x + out * self.net(into * x)


def compare(plain: nn.Module, *inputs: Tensor) -> None:
    """Asserts that all but the layers is computed as in the plain model."""
    ours, made = unit_scale(plain), list[tuple[Tensor, Tensor]]()
    ours(*inputs)
    ours.net.register_forward_hook(lambda module, args, output: made.append((args[0], output)))
    got = ours(*inputs)
    ((into, output),) = made
    given: list[Tensor] = []

    def instead(module: nn.Module, args: tuple[Tensor], _: Tensor) -> Tensor:
        given.append(args[0])
        return output

    plain.net.register_forward_hook(instead)
    torch.testing.assert_close(got, plain(*inputs))
    torch.testing.assert_close(into, given[0])


def series() -> Tensor:
    torch.manual_seed(0)
    return 2 * torch.randn(BATCH, WIDTH) + 3


@pytest.mark.parametrize("name", NORMALISED)
def test_what_is_taken_off_an_input_is_put_on_again(name: str) -> None:
    compare(Normalised(name, layers()), series())


@pytest.mark.parametrize("shape", [(BATCH,), (BATCH, 1), ()])
def test_a_level_of_noise_weighs_the_input_and_the_result(shape: tuple[int, ...]) -> None:
    compare(Denoised(), series(), torch.rand(shape) + 0.1)


def test_a_trend_that_is_taken_off() -> None:
    """A moving average, as of Autoformer and DLinear; each part has a layer of its own."""

    def fn(m: Net, x: Tensor) -> Tensor:
        trend = F.avg_pool1d(F.pad(x, (2, 2), mode="replicate"), 5, 1)
        return m.a(trend) + m.b(x - trend)

    ours = unit_scale(Net(fn, a=nn.Linear(WIDTH, WIDTH), b=nn.Linear(WIDTH, WIDTH)))
    x, seen = series(), dict[str, Tensor]()
    for name in "ab":
        ours.get_submodule(name).register_forward_pre_hook(
            lambda module, args, name=name: seen.update({name: args[0]})
        )
    ours(x)
    torch.testing.assert_close(seen["a"] + seen["b"], x)


@pytest.mark.parametrize(
    "fn",
    [lambda x: x.mean(1), lambda x: F.silu(x[:, 0]), lambda x: x[:, 0] + x.sum(1)],
    ids=["pooled", "a function of it", "summed"],
)
def test_what_is_computed_of_the_input_keeps_its_values(fn: Callable[[Tensor], Tensor]) -> None:
    ours, seen = unit_scale(Net(lambda m, x: m.a(fn(x)), a=nn.Linear(8, 8))), list[Tensor]()
    ours.a.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    x = torch.randn(64, WIDTH, 8)
    y = ours(x)
    torch.testing.assert_close(seen[-1], fn(x), rtol=0, atol=0)
    exponent(y.double(), U.linear(fn(x), ours.a.weight).double(), rtol=1e-5)
    assert 1 / 2 < y.square().mean().sqrt() < 2


def test_a_part_of_a_model_that_runs_alone_is_called_with_values() -> None:
    """It computes what it does within the model."""
    x = series()
    ours = unit_scale(nn.Sequential(nn.Linear(WIDTH, WIDTH), Normalised("squeezed", layers())))
    expected = ours(x)
    alone = ours[1](ours[0](x))
    torch.testing.assert_close(alone, expected)
    assert {row.done for row in uu.report(ours) if row.call == "mean"} == {"scaled"}


# Tokens beside a sequence, and models that are read at some of the positions

LENGTH = 24


class Reader(nn.Module):
    """A sequence with tokens in front of it, of which it reads some positions."""

    def __init__(self, read) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.read = read
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1)
        return self.head(self.read(self.norm(x)))


def reader(read, **options) -> nn.Module:
    torch.manual_seed(0)
    return unit_scale(Reader(read), **options)


READS = {
    "first": lambda x: x[:, 0],
    "two": lambda x: x[:, 0] + x[:, 1],
    "a quarter": lambda x: x.narrow(1, 0, LENGTH // 4),
    "two slices, summed": lambda x: x[:, :3] - x[:, 5:8],
    "one beside an average": lambda x: x[:, 0] + x[:, 1:].mean(1),
    "an average": lambda x: x[:, 1:].mean(1),
    "most": lambda x: x[:, 1:],
    "twice": lambda x: x[:, 0] + x.mean(1),
    "both halves": lambda x: x[:, : LENGTH // 2] * x[:, LENGTH // 2 :],
}


@pytest.mark.parametrize("name", READS)
def test_gradients_of_what_is_read_at_some_positions(name: str) -> None:
    """They are the true ones. That of the token is one of all positions, as of any bias."""
    ours, x = reader(READS[name]).double(), torch.randn(8, LENGTH - 1, WIDTH, dtype=torch.float64)

    noise = torch.randn(8, LENGTH, WIDTH, dtype=torch.float64)

    def loss(net: nn.Module) -> Tensor:
        y = net(x)
        return (y * noise[:, : y[0].numel() // WIDTH].view_as(y)).sum() / 100

    check_true(ours, loss)
    ours.zero_grad()
    loss(ours).backward()
    for parameter, grad in ((n, p.grad) for n, p in ours.named_parameters()):
        size = grad.square().mean().sqrt()
        assert 2**-2.5 < size < 2**2.5 or size < 1e-14, parameter  # a bias minus itself


def test_a_token_of_zeros_starts_at_unit_scale() -> None:
    """A norm of zeros would make its gradient 1/sqrt(eps) = 300 times that of the others."""
    ours = reader(READS["first"])
    rms = ours.token.detach().square().mean().sqrt().item()
    assert rms == pytest.approx(1, abs=5 / (2 * WIDTH) ** 0.5)  # five standard errors
    row = next(row for row in uu.report(ours) if row.call == "token")
    assert (row.done, row.why) == ("unit scale", "a token of zeros, drawn from a standard normal")


def test_a_token_is_kept_where_the_function_is() -> None:
    assert not reader(READS["first"], init="preserve").token.any()
