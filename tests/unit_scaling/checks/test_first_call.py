"""Weights that were overwritten, and a loss that averages, say so at the first call of a model."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8
import unit_scaling as uu
import unit_scaling.functional as U
from unit_scaling.transforms import compile, simulate_fp8, track_scales, unit_scale


def init_weights(module: nn.Module) -> None:
    """As nanoGPT's."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


class Tokens(nn.Module):
    """A model of uu modules. overwritten: whether it has an init of its own."""

    def __init__(self, overwritten: bool) -> None:
        super().__init__()
        self.embed = uu.Embedding(64, 32)
        self.blocks = nn.Sequential(uu.Linear(32, 64), uu.GELU(), uu.Linear(64, 32))
        self.head = uu.LinearReadout(32, 64)
        if overwritten:
            self.apply(init_weights)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(0))


# Weights


@pytest.mark.parametrize("transform", [lambda m: m, simulate_fp8, copy.deepcopy, track_scales])
def test_weights_that_were_overwritten_warn_once(
    transform: Callable[[nn.Module], nn.Module], tokens: Tensor
):
    torch.manual_seed(0)
    model = transform(Tokens(overwritten=True))
    with pytest.warns(
        fp8.ScaleWarning, match=r"embed \(Embedding\) is 0.0[12]\d* instead of 1"
    ) as caught:
        model(tokens)
    assert len(caught) == 1
    assert "of 3 more layers not 1" in str(caught[0].message)
    assert "reset_parameters" in str(caught[0].message)
    model(tokens)  # no second one: warnings are errors here
    second = Tokens(overwritten=True)
    with pytest.warns(fp8.ScaleWarning):
        second(tokens)


def test_strict_raises_it(tokens: Tensor):
    with fp8.strict(), pytest.raises(fp8.ScaleWarning, match="instead of 1"):
        Tokens(overwritten=True)(tokens)


def test_weights_that_were_not_do_not(tokens: Tensor):
    torch.manual_seed(0)
    model = Tokens(overwritten=False)
    model(tokens)
    assert not any(part._forward_pre_hooks for part in model.modules())
    again = Tokens(overwritten=True)
    again.apply(lambda part: part.reset_parameters() if hasattr(part, "reset_parameters") else None)
    again(tokens)


def test_weights_that_were_trained_or_loaded_may_have_any_scale(tokens: Tensor):
    model = Tokens(overwritten=False)
    model(tokens)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(100)
    model(tokens)
    pickle.loads(pickle.dumps(model))(tokens)
    fresh = Tokens(overwritten=False)
    fresh.load_state_dict(model.state_dict())
    fresh(tokens)
    with torch.device("meta"):
        empty = Tokens(overwritten=False)
    empty.load_state_dict(model.state_dict(), assign=True)
    empty(tokens)


def test_those_of_zeros_and_of_few_numbers_may_have_any_rms():
    zero = uu.Linear(8, 8)
    nn.init.zeros_(zero.weight)
    zero(torch.randn(2, 8))
    small = uu.Linear(2, 2)
    nn.init.constant_(small.weight, 0.01)
    small(torch.randn(2, 2))


def test_compiled_and_mapped_calls_are_not_checked(tokens: Tensor):
    compiled = torch.compile(Tokens(overwritten=True), backend="eager", fullgraph=True)
    compiled(tokens)
    layer = uu.Linear(8, 8)
    torch.func.vmap(layer)(torch.randn(3, 8))
    mapped = uu.Linear(8, 8)
    stacked = {"weight": torch.randn(3, 8, 8)}
    torch.func.vmap(lambda p, x: torch.func.functional_call(mapped, p, (x,)))(
        stacked, torch.randn(3, 8)
    )


# The first gradient

AGAIN = "the first gradient at the output of a unit-scaled model has RMS"


def losses(model: nn.Module, tokens: Tensor, loss: Callable[..., Tensor], times: int = 2) -> int:
    """How many warnings there are of the gradient in some steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            loss(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    return sum(issubclass(each.category, fp8.ScaleWarning) for each in caught)


def test_a_loss_outside_of_the_model_warns_once(tokens: Tensor):
    torch.manual_seed(0)
    model = Tokens(overwritten=False)
    with pytest.warns(fp8.ScaleWarning, match=AGAIN) as caught:
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    assert len(caught) == 1
    assert "U.cross_entropy" in str(caught[0].message)
    assert "'tensor'" in str(caught[0].message)
    assert losses(model, tokens, F.cross_entropy) == 0
    torch.manual_seed(0)
    assert losses(Tokens(overwritten=False), tokens, F.cross_entropy) == 1
    with fp8.strict(), pytest.raises(fp8.ScaleWarning, match=AGAIN):
        F.cross_entropy(
            Tokens(overwritten=False)(tokens).flatten(0, 1), tokens.flatten()
        ).backward()


def test_a_loss_of_ours_a_scaled_or_a_summed_one_does_not(tokens: Tensor):
    scaled = [
        U.cross_entropy,
        lambda x, y: 2.0**16 * F.cross_entropy(x, y),  # as GradScaler
        lambda x, y: F.cross_entropy(x, y, reduction="sum"),
        lambda x, y: U.cross_entropy(x, y) / 8,  # of accumulated batches
    ]
    for loss in scaled:
        assert losses(Tokens(overwritten=False), tokens, loss) == 0


def test_nor_does_any_loss_of_a_transformed_model(tokens: Tensor):
    layers = nn.Embedding(64, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64)
    for factor in (1.0, 1e-3, 1e4):
        model = unit_scale(nn.Sequential(*layers))
        assert losses(model, tokens, lambda x, y, f=factor: f * F.cross_entropy(x, y)) == 0


def test_nor_does_a_loss_inside_a_compiled_model_or_one_that_makes_no_gradient(tokens: Tensor):
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)

        def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.head(self.embed(tokens))
            return logits, F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    model = unit_scale(WithLoss())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(tokens)[1].backward()
    model = Tokens(overwritten=False)
    model(tokens)
    (0.0 * model(tokens)).sum().backward()  # zeros say nothing: it is still to be seen
    assert losses(model, tokens, F.cross_entropy) == 1
    model = compile(unit_scale(nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))))
    assert not any(hasattr(part, "gradient_seen") for part in model.modules())


def test_the_check_leaves_torch_func_alone():
    model = unit_scale(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)))
    x, parameters = torch.randn(4, 8), dict(model.named_parameters())
    model(x)

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, p, (x,)).square().mean()

    torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    y = model(x)
    each = torch.eye(32).view(32, 4, 8)
    torch.autograd.grad(y, list(model.parameters()), each, is_grads_batched=True)
