"""Statistics of what a model is called with, and one number a sample, keep their values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
import unit_scaling.functional as U
from tests.transforms.models import Net
from unit_scaling.transforms import unit_scale

BATCH, WIDTH = 16, 32


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


@pytest.mark.parametrize("name", NORMALISED)
def test_without_layers_it_is_the_input(name: str) -> None:
    x = series()
    torch.testing.assert_close(unit_scale(Normalised(name, nn.Identity()))(x), x)


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
    ("fn", "expected"),
    [
        (lambda m, x: m.a(x.mean(1)), lambda x: WIDTH**0.5 * x.mean(1)),
        (lambda m, x: m.a(F.silu(x[:, 0])), lambda x: U.silu(x[:, 0])),
        (lambda m, x: m.a(x[:, 0] + x.sum(1)), lambda x: x[:, 0] + x.sum(1) * WIDTH**-0.5),
    ],
    ids=["pooled", "a function of it", "summed"],
)
def test_what_meets_the_input_no_more_is_a_value(
    fn: Callable[[Net, Tensor], Tensor], expected: Callable[[Tensor], Tensor]
) -> None:
    ours, x = unit_scale(Net(fn, a=nn.Linear(8, 8))), torch.randn(64, WIDTH, 8)
    torch.testing.assert_close(ours(x), U.linear(expected(x), ours.a.weight))


def test_a_part_of_a_model_that_runs_alone_is_called_with_values() -> None:
    """It computes what it does within the model."""
    x = series()
    ours = unit_scale(nn.Sequential(nn.Linear(WIDTH, WIDTH), Normalised("squeezed", layers())))
    expected = ours(x)
    alone = ours[1](ours[0](x))
    torch.testing.assert_close(alone, expected)
    assert {row.done for row in uu.report(ours) if row.call == "mean"} == {"scaled"}
