"""Weights at a level, changed by what their formats round away: right, or warned of."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import fp8

AVERAGES = {"multi_avg_fn": get_ema_multi_avg_fn(0.99), "avg_fn": get_ema_avg_fn(0.99)}
TORCH = {
    "AdamW": lambda weights: torch.optim.AdamW(weights, foreach=True),
    "AdamW, one by one": lambda weights: torch.optim.AdamW(weights, foreach=False),
    "AdamW, fused": lambda weights: torch.optim.AdamW(weights, fused=True),
    "SGD": lambda weights: torch.optim.SGD(weights, foreach=True),
    "RMSprop": torch.optim.RMSprop,
}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def initialized(net, level):
    return fp8.initialize(net, torch.optim.AdamW(net.parameters()), level, recipe=None)


def backward(net):
    x = torch.randn(16, 64)
    (net(x) - x).square().mean().backward()


@pytest.mark.parametrize("how", AVERAGES)
@pytest.mark.parametrize("level", fp8.LEVELS)
def test_an_average_made_before_the_level(level, how):
    """In float32, of the weights that products use."""
    net = model()
    average = AveragedModel(net, **{how: AVERAGES[how]})
    net, optimizer = initialized(net, level)
    expected = {}
    for _ in range(20):
        optimizer.zero_grad()
        backward(net)
        optimizer.step()
        average.update_parameters(net)
        for name, weight in net.named_parameters():
            now = weight.detach().double() if weight.dim() == 1 else weight.dequantize().double()
            expected[name] = expected.get(name, now).lerp(now, 0.01)
    for name, weight in average.module.named_parameters():
        assert type(weight) is nn.Parameter
        torch.testing.assert_close(weight.double(), expected[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("level", fp8.LEVELS)
def test_an_average_made_after_it_is_warned_of(level):
    net, _ = initialized(model(), level)
    average = AveragedModel(net, multi_avg_fn=AVERAGES["multi_avg_fn"])
    average.update_parameters(net)  # a copy
    with pytest.warns(UserWarning, match="_foreach_lerp_ on a ScaledTensor.*before fp8.initialize"):
        average.update_parameters(net)


@pytest.mark.parametrize("name", TORCH)
def test_optimizers_of_torch_are_warned_of(name):
    """As a trainer makes one that was given none."""
    net, _ = initialized(model(), "O3")
    backward(net)
    optimizer = TORCH[name](net.parameters())
    with pytest.warns(UserWarning, match="on a ScaledTensor: its format rounds small steps away"):
        optimizer.step()
