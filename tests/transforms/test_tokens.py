"""Tokens beside a sequence, and models that are read off at some of the positions."""

import pytest
import torch
from torch import Tensor, nn

import unit_scaling as uu
from unit_scaling.transforms import unit_scale

WIDTH, LENGTH = 32, 24


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


def model(read, **options) -> nn.Module:
    torch.manual_seed(0)
    return unit_scale(Reader(read), **options)


READS = {
    "first": (lambda x: x[:, 0], 1 / LENGTH),
    "two": (lambda x: x[:, 0] + x[:, 1], 2 / LENGTH),
    "a quarter": (lambda x: x.narrow(1, 0, LENGTH // 4), 1 / 4),
    "two slices, summed": (lambda x: x[:, :3] - x[:, 5:8], 6 / LENGTH),
    "one beside an average": (lambda x: x[:, 0] + x[:, 1:].mean(1), 2 / LENGTH),
    "an average": (lambda x: x[:, 1:].mean(1), 1.0),
    "most": (lambda x: x[:, 1:], 1.0),
    "twice": (lambda x: x[:, 0] + x.mean(1), 1.0),
    "both halves": (lambda x: x[:, : LENGTH // 2] * x[:, LENGTH // 2 :], 1.0),
}
"""How it is read -> the share of positions that get a gradient, 1 where there is no factor."""


@pytest.mark.parametrize("name", READS)
def test_the_gradient_of_what_is_read_makes_up_for_the_rest(name: str) -> None:
    """The factors are those of the shares, and the same for every part that is read."""
    read, share = READS[name]
    ours = model(read)
    ours(torch.randn(8, LENGTH - 1, WIDTH))
    found = {row.why for row in uu.report(ours) if row.why.startswith("gradient only")}
    assert found == (set() if share == 1.0 else {f"gradient only: takes 1 in {1 / share:.3g}"})


def test_only_what_is_before_it_all_is_scaled() -> None:
    """A second path to the result would miss the factor: there is none then."""

    class Two(Reader):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            return self.head(self.norm(x)[:, 0] + x.mean(1))

    torch.manual_seed(0)
    ours = unit_scale(Two(None))
    ours(torch.randn(8, LENGTH, WIDTH))
    assert not [row for row in uu.report(ours) if row.why.startswith("gradient only")]


def test_a_token_of_zeros_starts_at_unit_scale() -> None:
    """A norm of zeros would make its gradient 1/sqrt(eps) = 300 times that of the others."""
    ours = model(READS["first"][0])
    rms = ours.token.detach().square().mean().sqrt().item()
    assert rms == pytest.approx(1, abs=5 / (2 * WIDTH) ** 0.5)  # five standard errors
    row = next(row for row in uu.report(ours) if row.call == "token")
    assert (row.done, row.why) == ("unit scale", "a token of zeros, drawn from a standard normal")


def test_a_token_is_kept_where_the_function_is() -> None:
    assert not model(READS["first"][0], init="preserve").token.any()
