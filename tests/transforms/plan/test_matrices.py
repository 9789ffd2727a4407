"""Formulas of matrices keep their values: products of a matrix with itself, algebra, transforms."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
from unit_scaling.transforms import unit_scale

N, WIDTH = 6, 32
EYE = torch.eye(N)
Formula = Callable[[Tensor], Tensor]


def positive(m: Tensor) -> Tensor:
    return m @ m.mT + 0.1 * EYE


def nystrom(m: Tensor) -> Tensor:
    """The Moore-Penrose inverse of Xiong et al., "Nystromformer" (2021), equation 11."""
    k = F.softmax(m, -1)
    v = 1 / k.sum(-2).amax(-1)[:, None, None] * k.mT
    for _ in range(6):
        kv = k @ v
        v = 0.25 * v @ (13 * EYE - kv @ (15 * EYE - kv @ (7 * EYE - kv)))
    return v


def muon(m: Tensor) -> Tensor:
    x = m / m.norm(dim=(-1, -2), keepdim=True)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def cubic(m: Tensor) -> Tensor:
    x = m / m.norm(dim=(-1, -2), keepdim=True)
    for _ in range(6):
        x = 1.5 * x - 0.5 * x @ x.mT @ x
    return x


def newton(m: Tensor) -> Tensor:
    a = positive(m)
    x = a.mT / a.abs().sum(-1).amax(-1)[:, None, None] ** 2
    for _ in range(6):
        x = x @ (2 * EYE - a @ x)
    return x


def roots(m: Tensor) -> Tensor:
    """Denman and Beavers' iteration for a square root, as in second-order pooling."""
    a = positive(m)
    size = a.norm(dim=(1, 2), keepdim=True)
    y, z = a / size, EYE.expand_as(a)
    for _ in range(5):
        t = 0.5 * (3 * EYE - z @ y)
        y, z = y @ t, t @ z
    return y * size.sqrt()


def neumann(m: Tensor) -> Tensor:
    power = m * 0.1
    total = EYE + power
    for _ in range(3):
        power = power @ (m * 0.1)
        total = total + power
    return total


def power_iteration(m: Tensor) -> Tensor:
    a, v = positive(m), torch.ones(len(m), N, 1) / N**0.5
    for _ in range(4):
        v = a @ v
        v = v / v.norm(dim=1, keepdim=True)
    return (v.mT @ a @ v) * v @ v.mT


def householder(m: Tensor) -> Tensor:
    q = EYE
    for i in range(3):
        v = F.normalize(m[:, i], dim=-1)
        q = q @ (EYE - 2 * v[:, :, None] * v[:, None])
    return q


def kalman(m: Tensor) -> Tensor:
    state, spread, step = m[:, 0, :, None], EYE.expand_as(m), EYE + 0.1 * m
    for i in range(3):
        state, spread = step @ state, step @ spread @ step.mT + 0.1 * EYE
        gain = spread @ torch.linalg.inv(spread + EYE)
        state = state + gain @ (m[:, i + 1, :, None] - state)
        spread = (EYE - gain) @ spread
    return state @ state.mT


def whitened(m: Tensor) -> Tensor:
    x = m.flatten(1)
    x = x - x.mean(0)
    spread = x.T @ x / len(x) + 0.1 * torch.eye(x.shape[1])
    return torch.linalg.solve_triangular(torch.linalg.cholesky(spread), x.T, upper=False).T


def whitened_by_newton(m: Tensor) -> Tensor:
    """Huang et al., "Iterative Normalization" (2019)."""
    x = m.flatten(1)
    x = x - x.mean(0)
    spread = x.T @ x / len(x) + 0.01 * torch.eye(x.shape[1])
    size = 1 / spread.diagonal().sum()
    p = torch.eye(x.shape[1])
    for _ in range(4):
        p = 1.5 * p - 0.5 * p @ p @ p @ (spread * size)
    return x @ (p * size.sqrt())


def logarithm(m: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(positive(m))
    return vectors @ torch.diag_embed(values.log()) @ vectors.mT


def polar(m: Tensor) -> Tensor:
    u, _, v = torch.linalg.svd(m)
    return u @ v


def kernel(m: Tensor) -> Tensor:
    return torch.exp(-(torch.cdist(m, m) ** 2) / N) + 0.1 * EYE


def distance(m: Tensor) -> Tensor:
    squares = m.pow(2).sum(-1)
    return torch.exp(-(squares[:, :, None] + squares[:, None] - 2 * m @ m.mT) / N)


DIRECTIONS = torch.randn(N, N, generator=torch.Generator().manual_seed(2))


def random_features(m: Tensor) -> Tensor:
    """Of the kernel of a softmax: Choromanski et al., "Rethinking Attention" (2021), lemma 1."""
    return torch.exp(m @ DIRECTIONS - m.square().sum(-1, keepdim=True) / 2)


def filtered(m: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(m) * torch.tensor([1, 2, 0.5, 0]), n=N)


def in_place(m: Tensor) -> Tensor:
    k = torch.linalg.inv(positive(m)) + EYE
    k[:, 0].mul_(0.5)
    return k


FORMULAS: dict[str, Formula] = {
    "Nystromformer": nystrom,
    "Newton-Schulz of degree 5": muon,
    "Newton-Schulz of degree 3": cubic,
    "Newton's inverse": newton,
    "a square root": roots,
    "a Neumann series": neumann,
    "power iteration": power_iteration,
    "Householder": householder,
    "Kalman": kalman,
    "whitening": whitened,
    "iterative whitening": whitened_by_newton,
    "a logarithm": logarithm,
    "a polar factor": polar,
    "a kernel": kernel,
    "a distance": distance,
    "random features": random_features,
    "a filter": filtered,
    "in place": in_place,
    "fft2": lambda m: torch.fft.fft2(m).real,
    "inv": lambda m: torch.linalg.inv(positive(m)),
    "inverse": lambda m: torch.inverse(positive(m)),
    "solve": lambda m: torch.linalg.solve(positive(m), m),
    "cholesky": lambda m: torch.linalg.cholesky(positive(m)),
    "cholesky_solve": lambda m: torch.cholesky_solve(m, torch.linalg.cholesky(positive(m))),
    "qr": lambda m: torch.linalg.qr(m)[0],
    "matrix_exp": lambda m: torch.linalg.matrix_exp(0.3 * (m - m.mT)),
    "matrix_power": lambda m: torch.linalg.matrix_power(0.3 * m, 3),
    "Cayley": lambda m: torch.linalg.solve(EYE + (m - m.mT), EYE - (m - m.mT)),
}


class Computes(nn.Module):
    def __init__(self, formula: Formula) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, m: Tensor) -> Tensor:
        return self.formula(m)


class Model(nn.Module):
    """Matrices that a layer makes, a formula of them, and a layer that reads it."""

    def __init__(self, formula: Formula) -> None:
        super().__init__()
        self.up, self.make = nn.Linear(16, WIDTH), nn.Linear(WIDTH, N * N)
        self.formula = Computes(formula)
        self.read, self.head = nn.Linear(N * N, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        m = self.make(F.relu(self.up(x))).view(-1, N, N)
        y = self.formula(m).reshape(len(x), N * N)
        return F.cross_entropy(self.head(F.relu(self.read(y))), torch.arange(len(x)) % 8)


def run(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, what goes into the formula, and what the layer behind it reads."""
    seen: dict[nn.Module, Tensor] = {}
    for part in (model.formula, model.read):
        part.register_forward_pre_hook(lambda m, args: seen.update({m: args[0].detach()}))
    return model(x), seen[model.formula], seen[model.read]


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_of_matrices_keeps_its_values(name: str) -> None:
    """What comes out is what torch computes of what goes in, times one number: of RMS about 1."""
    torch.manual_seed(0)
    plain, x = Model(FORMULAS[name]), torch.randn(64, 16)
    model = unit_scale(plain)
    loss, m, y = run(model, x)
    expected = FORMULAS[name](m).reshape(y.shape)
    factor = (y * expected).sum() / expected.square().sum()
    torch.testing.assert_close(y, factor * expected, rtol=1e-3, atol=1e-3)
    assert 1 / 2 < y.square().mean().sqrt() < 2
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert not uu.report(model).left_alone
    preserved = unit_scale(plain, init="preserve")
    torch.testing.assert_close(preserved(x), plain(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Nystromformer", "Newton-Schulz of degree 5", "Kalman", "fft2"])
def test_a_model_with_a_formula_of_matrices_learns(name: str) -> None:
    torch.manual_seed(0)
    model, x = unit_scale(Model(FORMULAS[name])), torch.randn(64, 16)
    first = model(x)
    optimizer = uu.optim.AdamW(model.parameters(), lr=2**-5)
    for _ in range(30):
        optimizer.zero_grad()
        last = model(x)
        last.backward()
        optimizer.step()
    assert last < 0.9 * first


class Attends(nn.Module):
    """Attention, by some function of queries, keys and values."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up, self.attend = nn.Linear(16, WIDTH), attend
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = h + self.o(self.attend(self.q(h), self.k(h), self.v(h)))
        return F.cross_entropy(self.head(h.mean(1)), torch.arange(len(x)) % 8)


def by_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.linspace(-1, 1, q.shape[1])  # as ALiBi has it: a constant, and no formula
    return F.softmax(q @ k.mT / WIDTH**0.5 + bias, -1) @ v


def by_distance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(-(torch.cdist(q, k) ** 2) / WIDTH**0.5, -1) @ v


def by_itself(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v + F.softmax(q @ q.mT / WIDTH**0.5, -1) @ v


def linearly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ (k.mT @ v) + v


@pytest.mark.parametrize("attend", [by_product, by_itself, linearly])
def test_attention_is_no_formula_of_matrices(attend: Callable[..., Tensor]) -> None:
    model = unit_scale(Attends(attend))
    model(torch.randn(16, 12, 16))
    assert not any("formula of matrices" in row.why for row in uu.report(model))


def test_distances_keep_their_values_in_attention() -> None:
    torch.manual_seed(0)
    model, x = unit_scale(Attends(by_distance)), torch.randn(16, 12, 16)
    model(x)
    checked = uu.verify(model, x)
    assert checked.share("gradient") >= 0.9
    assert any(row.call == "cdist" and row.done == "unchanged" for row in uu.report(model))


def test_parts_of_one_layer_are_no_powers() -> None:
    """Queries and keys of one product are different values: no weight is between, nor is needed."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.head = nn.Linear(16, 3 * 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            y = self.qkv(x)
            a, b = y[..., :16], y[..., 16:32]
            scores = q @ k.mT + (a @ b.mT + a.sum(-1, keepdim=True)) / 4
            return F.cross_entropy(self.head((scores @ v).mean(1)), torch.arange(len(x)) % 8)

    model = unit_scale(Fused())
    model(torch.randn(16, 12, 16))
    assert not any("formula of matrices" in row.why for row in uu.report(model))


def test_an_activation_of_a_formula_is_scaled_by_its_rule() -> None:
    torch.manual_seed(0)
    model, seen = unit_scale(Model(lambda m: F.gelu(0.01 * torch.fft.fft(m).real))), []
    model.read.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(torch.randn(64, 16))
    assert 0.7 < seen[-1].square().mean().sqrt() < 1.42
    (row,) = [row for row in uu.report(model) if row.call == "gelu"]
    assert (row.done, row.why) == ("scaled", "")


def test_a_formula_ends_at_the_residual_adds_above_it() -> None:
    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.mix, self.head = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(12, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            h = h + self.mix(F.relu(h))
            return self.head(torch.cdist(h, h))

    model = unit_scale(Stream())
    model(torch.randn(16, 12, 16))
    whys = {row.call: row.why for row in uu.report(model)}
    assert whys["add"].startswith("residual add")
    assert "formula of matrices" in whys["cdist"]


class Angle(torch.autograd.Function):
    """As YOSO has it: arccos of what is at most 1 for directions."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor) -> Tensor:
        ctx.save_for_backward(q, k)
        return (1 - torch.acos((q @ k.mT).clamp(max=1 - 1e-6)) / math.pi) ** 4

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        q, k = ctx.saved_tensors
        return grad @ k, grad.mT @ q


def test_directions_keep_their_values_for_an_autograd_function() -> None:
    def by_angle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.normalize(Angle.apply(F.normalize(q, dim=-1), F.normalize(k, dim=-1)) @ v, dim=-1)

    model = unit_scale(Attends(by_angle))
    loss = model(torch.randn(16, 12, 16))
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    done = [row.done for row in uu.report(model) if row.call == "normalize"]
    assert done == ["unchanged", "unchanged", "scaled"]


def test_complex_weights() -> None:
    """A Fourier layer (Li et al., 2021): its weights have unit modulus on average."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, 4, dtype=torch.cfloat) / WIDTH)
            self.up, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 8)

        def forward(self, x: Tensor) -> Tensor:
            spectrum = torch.fft.rfft(self.up(x).mT)[..., :4]
            y = torch.fft.irfft(torch.einsum("bix,iox->box", spectrum, self.weight), n=x.shape[1])
            return F.cross_entropy(self.head(F.gelu(y).mT.mean(1)), torch.arange(len(x)) % 8)

    torch.manual_seed(0)
    plain, x = Layer(), torch.randn(16, 12, 16)
    torch.testing.assert_close(unit_scale(plain, init="preserve")(x), plain(x))
    model = unit_scale(plain)
    model(x).backward()
    assert abs(model.weight.abs().square().mean().sqrt() - 1) < 1e-5
    assert 1 / 4 < model.weight.grad.abs().square().mean().sqrt() < 4
    checked = uu.verify(model, x)
    assert checked.share("activation") == 1, checked


def test_a_window_larger_than_its_input() -> None:
    """With ceil_mode a kernel may be: EfficientNet of transformers pools what is left so."""
    pool = nn.AvgPool2d(320, ceil_mode=True)
    model = unit_scale(nn.Sequential(nn.Conv2d(3, 64, 1), pool, nn.Conv2d(64, 8, 1)))
    seen: list[Tensor] = []
    model[1].register_forward_hook(lambda m, args, y: seen.append(y))
    model(torch.randn(256, 3, 4, 4))
    y = seen[-1]
    assert y.shape == (256, 64, 1, 1)
    assert abs(y.square().mean().sqrt() - 1) < 0.1


def test_a_constant_in_a_product_counts_as_one_of_unit_scale() -> None:
    """A cosine transform and its inverse, with a gate in between."""
    n = torch.arange(12.0)
    basis = torch.cos(math.pi / 12 * (n + 0.5) * n[:, None]) * (2 / 12) ** 0.5

    def in_frequencies(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return basis.T @ ((basis @ v) * torch.sigmoid(q + k))

    torch.manual_seed(0)
    model, x = unit_scale(Attends(in_frequencies)), torch.randn(16, 12, 16)
    model(x)
    assert uu.verify(model, x).share("gradient") == 1


def test_a_correlation_over_samples_keeps_its_values_in_a_loss() -> None:
    """Zbontar et al., "Barlow Twins" (2021): an entry is compared with 1."""

    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
            self.norm = nn.BatchNorm1d(WIDTH, affine=False)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            c = self.norm(self.body(a)).T @ self.norm(self.body(b))
            c.div_(len(a))
            diagonal = torch.diagonal(c).sub(1).pow(2).sum()
            return diagonal + 0.005 * (c.pow(2).sum() - c.diagonal().pow(2).sum())

    torch.manual_seed(0)
    model, x, seen = unit_scale(Twins()), torch.randn(64, 16), []
    model.norm.register_forward_hook(lambda *call: seen.append(call[-1].detach()))
    loss = model(x, x + 0.5 * torch.randn_like(x))
    c = seen[-2].T @ seen[-1] / len(x)
    squares = c.square().sum() - c.diagonal().square().sum()
    torch.testing.assert_close(loss, (c.diagonal() - 1).square().sum() + 0.005 * squares)
