"""`fp8.optim.Muon`: torch's, with an 8-bit momentum, and AdamW for what is no hidden matrix."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

import fp8
import unit_scaling as uu
from fp8.casts.casting import cast_forward
from fp8.optim import AdamW, Muon, muon_groups, state_bytes
from fp8.optim.encodings import decode
from fp8.optim.muon import amplifies, orthogonalized
from fp8.optim.state import read
from unit_scaling.optim import scaled_parameters

SHAPES = ((64, 96), (96, 64), (5, 3))
EXACT = {"first_moment": "float32"}
JORDAN, SAFE = (3.4445, -4.7750, 2.0315), (2.0, -1.5, 0.5)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameters(dtype: torch.dtype = torch.float32, shapes=SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(randn(*shape, seed=i).to(dtype)) for i, shape in enumerate(shapes)]


def steps(optimizer: torch.optim.Optimizer, count: int, start: int = 0) -> None:
    for step in range(start, start + count):
        for i, group in enumerate(optimizer.param_groups):
            for j, p in enumerate(group["params"]):
                p.grad = randn(*p.shape, seed=1000 * step + 100 * i + j).to(p.dtype)
        optimizer.step()


def assert_same(a: list[nn.Parameter], b: list[nn.Parameter]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"nesterov": False, "weight_decay": 0.0},
        {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.8, "ns_steps": 3},
        {"adjust_lr_fn": "original", "lr": torch.tensor(0.1), "eps": 1e-3},
        {"ns_coefficients": (2.0, -1.5, 0.5)},
    ],
    ids=str,
)
def test_with_a_float32_momentum_it_is_that_of_torch(settings):
    ours, theirs = parameters(), parameters()
    settings = {"lr": 0.02, **settings}
    first = Muon(ours, **settings, **EXACT)
    second = torch.optim.Muon(theirs, **settings)
    steps(first, 4)
    steps(second, 4)
    assert_same(ours, theirs)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(first.state[p]["momentum_buffer"], second.state[q]["momentum_buffer"])


def test_the_momentum_in_int8_is_off_by_half_a_unit_a_step():
    """A unit is the largest magnitude of 128 elements divided by 127. An error of a step decays by
    the momentum in each later one; float32's own rounding, of the quotient up to 127, is 2**-16
    units."""
    (p,), beta = parameters(shapes=[(96, 64)]), 0.9
    optimizer = Muon([p], momentum=beta)
    exact = bound = torch.zeros(96 * 64)
    for step in range(20):
        steps(optimizer, 1, step)
        gradient = p.grad.flatten() if step % 5 else p.grad.flatten() * 100
        exact = beta * exact + (1 - beta) * p.grad.flatten()
        stored = decode(read(optimizer.state[p], "momentum_buffer"))
        unit = optimizer.state[p]["momentum_buffer_scale"].repeat_interleave(128)
        bound = beta * bound + unit * (0.5 + 2**-15)
        assert gradient.shape == stored.shape
        assert ((stored - exact).abs() <= bound).all()
    assert optimizer.state[p]["momentum_buffer_values"].abs().view(-1, 128).amax(1).eq(127).all()
    assert not torch.equal(stored, exact)


@pytest.mark.proves("the field", "optimizer states in low precision", how="own")
def test_bytes_of_the_state():
    """A byte for each element and a float32 for 128: 26 % of torch's, as arXiv:2509.23106 says of
    the optimizer (about 74 % less)."""
    p = nn.Parameter(torch.zeros(512, 256))
    ours, theirs = Muon([p]), torch.optim.Muon([p])
    for optimizer in (ours, theirs):
        p.grad = torch.ones_like(p)
        optimizer.step()
    found = state_bytes(ours)["first_moment"] + state_bytes(ours)["step"]
    assert found == 512 * 256 * (1 + 4 / 128) + 4  # and the number of steps
    assert found / theirs.state[p]["momentum_buffer"].nbytes == pytest.approx(0.258, abs=1e-3)


@pytest.mark.parametrize("shape", [(48, 32), (32, 48)], ids=str)
@pytest.mark.parametrize("recipe", ["mxfp8", "row", "tensor"])
def test_newton_schulz_products_under_a_recipe(recipe, shape):
    """Each product is that of its cast operands, along the axis that it sums over."""
    cast, (a, b, c) = fp8.RECIPES[recipe].input, SAFE

    def product(left: Tensor, right: Tensor) -> Tensor:
        return cast_forward(left, cast, -1) @ cast_forward(right, cast, -2)

    x = randn(*shape)
    y = x.bfloat16() if shape[0] < shape[1] else x.bfloat16().T
    y = y / y.norm()
    for _ in range(5):
        gram = product(y, y.T)
        y = a * y + product(b * gram + c * product(gram, gram), y)
    found = orthogonalized(x, (a, b, c), 5, 1e-7, fp8.RECIPES[recipe])
    assert torch.equal(found, y if shape[0] < shape[1] else y.T)
    assert not torch.equal(found, orthogonalized(x, (a, b, c), 5, 1e-7))


def test_jordans_coefficients_amplify_casts():
    """Beyond a singular value of 1.264, where 3.4445 - 4.775 s^2 + 2.0315 s^4 is 1 again, they
    grow; those of (2, -1.5, 0.5) stay below 2**0.5, the same point of theirs."""
    x, recipe = randn(128, 256), fp8.RECIPES["mxfp8"]
    for coefficients, rests, next_point in ((JORDAN, 0.868, 1.264), (SAFE, 1.0, 2**0.5)):
        a, b, c = coefficients
        for s in (rests, next_point):
            assert a + b * s**2 + c * s**4 == pytest.approx(1, abs=2e-3)
        largest = []
        for used in (None, recipe):
            y = orthogonalized(x, coefficients, 5, 1e-7, used)
            largest.append(torch.linalg.matrix_norm(y.double(), 2))
        assert largest[0] < next_point
        assert (largest[1] > next_point) == (coefficients == JORDAN) == amplifies(*coefficients)
    assert not amplifies(1.5, -0.5, 0.0)
    assert amplifies(1.5, 0.5, 0.0)


def test_coefficients_that_amplify_are_warned_of():
    with pytest.warns(fp8.OptimizerWarning, match=r"amplify what recipe 'mxfp8' rounds off"):
        Muon(parameters(), recipe="mxfp8")
    Muon(parameters(), recipe="bf16")


def test_the_recipe_is_used():
    """An update has singular values below 2**0.5 times lr."""
    results = []
    for recipe in (None, "mxfp8"):
        (p,) = parameters(shapes=[(64, 96)])
        steps(Muon([p], recipe=recipe, ns_coefficients=SAFE, weight_decay=0.0), 1)
        results.append(p.detach() - parameters(shapes=[(64, 96)])[0].detach())
    assert not torch.equal(*results)
    assert all(torch.linalg.matrix_norm(update, 2) < 2**0.5 * 1e-3 for update in results)


def test_a_step_inside_of_autocast_is_not_cast():
    results = []
    for enabled in (False, True):
        (p,) = parameters(shapes=[(64, 96)])
        with fp8.autocast("tensor", enabled=enabled):
            steps(Muon([p], **EXACT), 2)
        results.append(p.detach())
    assert torch.equal(*results)


def test_groups_of_adamw_are_those_of_adamw():
    (ours,), (theirs,), (matrix,) = (parameters(shapes=[(80, 60)]) for _ in range(3))
    settings = {"lr": 1e-2, "weight_decay": 0.2, "betas": (0.8, 0.9), "eps": 1e-7}
    group = {"params": [ours], "algorithm": "adamw", **settings}
    mixed = Muon([{"params": [matrix]}, group])
    alone = AdamW([torch.nn.Parameter(torch.zeros(1))])
    alone.param_groups.clear()
    alone.add_param_group({"params": [theirs], **settings})
    for step in range(3):
        matrix.grad = ours.grad = randn(80, 60, seed=step)
        theirs.grad = ours.grad.clone()
        mixed.step()
        alone.step()
    assert torch.equal(ours, theirs)
    assert mixed.param_groups[1]["first_moment"] == "e4m3"
    assert mixed.state[ours].keys() == alone.state[theirs].keys()


@pytest.mark.parametrize("bad", [0, 1])
def test_nothing_is_stepped_if_a_gradient_is_not_finite(bad):
    matrix, vector = parameters(shapes=[(16, 16), (16,)])
    optimizer = Muon([{"params": [matrix]}, {"params": [vector], "algorithm": "adamw"}])
    steps(optimizer, 1)
    before = copy.deepcopy((matrix, vector, optimizer.state_dict()["state"]))
    matrix.grad, vector.grad = torch.ones(16, 16), torch.ones(16)
    (matrix, vector)[bad].grad.view(-1)[3] = torch.inf
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert_same([matrix, vector], before[:2])
    for i, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(t, before[2][i][name]) for name, t in state.items())


KINDS = [
    {},
    {"first_moment": "e4m3", "min_size": 0},
    {"first_moment": "bfloat16", "recipe": "bf16"},
    {"momentum": 0.995, "min_size": 0},
    {"master_weights": "float16", "min_size": 0},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_run_continues_to_the_same_bits(kind):
    """From a file that is read with weights_only=True; copied; and pickled."""

    def both(params: list[nn.Parameter]) -> Muon:
        *matrices, vector = params
        groups = [{"params": matrices}, {"params": [vector], "algorithm": "adamw", **ADAMW}]
        return Muon(groups, lr=0.1, **kind)

    ADAMW = {"first_moment": "e4m3"}
    shapes = (*SHAPES, (7,))
    undisturbed = parameters(torch.bfloat16, shapes)
    steps(both(undisturbed), 6)
    params = parameters(torch.bfloat16, shapes)
    first = both(params)
    steps(first, 3)
    copies = [copy.deepcopy(first), pickle.loads(pickle.dumps(first))]
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = both(params)
    second.load_state_dict(torch.load(file, weights_only=True))
    steps(second, 3, 3)
    assert_same(params, undisturbed)
    for other in copies:
        steps(other, 3, 3)
        assert_same([p for g in other.param_groups for p in g["params"]], undisturbed)


def test_a_state_of_torch_continues_and_goes_back():
    plain, params = parameters(), parameters()
    steps(torch.optim.Muon(plain), 6)
    first = torch.optim.Muon(params, momentum=0.95)
    steps(first, 2)
    second = Muon(params, momentum=0.5, **EXACT)
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["momentum"] == 0.95
    steps(second, 2, 2)
    third = torch.optim.Muon(params)
    third.load_state_dict(second.state_dict())
    steps(third, 2, 4)
    assert_same(params, plain)
    low = Muon(params, min_size=0)
    low.load_state_dict(third.state_dict())
    assert low.state[params[0]]["momentum_buffer_values"].dtype == torch.int8
    adam = torch.optim.Adam(params)
    steps(adam, 1)
    wrong = {**low.state_dict(), "state": adam.state_dict()["state"]}
    with pytest.raises(ValueError, match="exp_avg, exp_avg_sq is not part of the state of Muon"):
        low.load_state_dict(wrong)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("tied", [False, True])
def test_groups_of_a_model(tied):
    model = Model(tied)
    matrices, others = muon_groups(model)
    names = {id(p): name for name, p in model.named_parameters()}
    assert sorted(names[id(p)] for p in matrices["params"]) == [
        f"blocks.{i}.{name}.weight" for i in range(2) for name in ("down", "up")
    ]
    assert len(matrices["params"]) + len(others["params"]) == len(names)
    with pytest.raises(ValueError, match="Embedding has no hidden matrix: use AdamW"):
        muon_groups(model.embedding)
    with pytest.raises(TypeError, match="muon_groups"):
        muon_groups(model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    tokens = (torch.arange(88) % 11).view(8, 11)
    losses = []
    for _ in range(count):
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("settings", "left"),
    [({}, 0.1), ({"recipe": "mxfp8", "ns_coefficients": SAFE, "ns_steps": 3}, 0.5)],
    ids=str,
)
def test_it_trains(settings, left):
    torch.manual_seed(0)
    model = Model()
    rates = {"lr": 1e-2, "adjust_lr_fn": "match_rms_adamw", "min_size": 0}
    count = 60 if left < 0.5 else 20
    losses = train(model, Muon(muon_groups(model), **rates, **settings), count)
    assert losses[-1] < left * losses[0]


@pytest.mark.parametrize("level", fp8.LEVELS)
def test_levels(level):
    """torch's Muon and ours, of hidden matrices, become Muon with the level's formats."""
    for make in (torch.optim.Muon, Muon):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 64, bias=False), nn.ReLU(), nn.Linear(64, 128))
        hidden = [p for p in model.parameters() if p.dim() == 2]
        optimizer = make(hidden, lr=0.01)
        x = randn(32, 128)
        model(x).square().mean().backward()
        optimizer.step()
        model, optimizer = fp8.initialize(model, optimizer, level, "tensor")
        assert type(optimizer) is Muon
        losses = []
        for _ in range(20):
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        state = optimizer.state[model[0].weight]
        assert ("momentum_buffer" in state) == (level == "O1")
        assert ("master_values" in state) == (level == "O3")


def test_unit_scaled_groups():
    """The rates of LR_RULES; updates of the rule "muon" as in tests of `unit_scaling.optim`."""
    torch.manual_seed(0)
    model = uu.TransformerDecoder(32, 16, layers=2, heads=2)
    hidden, others = muon_groups(model)
    groups = scaled_parameters([hidden], "muon", lr=0.1)
    groups += scaled_parameters([others], "adam", lr=0.1)
    optimizer = Muon(groups, weight_decay=0.0)
    assert {g["algorithm"] for g in optimizer.param_groups} == {"muon", "adamw"}
    tokens = (torch.arange(64) % 16).reshape(4, 16)
    first = model.loss(tokens).item()
    for _ in range(30):
        optimizer.zero_grad()
        model.loss(tokens).backward()
        optimizer.step()
    assert model.loss(tokens).item() < 0.3 * first


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, "lr must be finite and not negative"),
        ({"momentum": 1.0}, ValueError, "momentum must be less than 1, got 1.0"),
        ({"seed": 0.5}, TypeError, "seed is an int"),
        ({"adjust_lr_fn": "adamw"}, ValueError, "unknown adjust_lr_fn 'adamw'"),
        ({"first_moment": "e5m3_block"}, ValueError, "unknown first_moment 'e5m3_block'"),
        ({"recipe": "mxfp"}, ValueError, "unknown recipe 'mxfp'"),
        ({"recipe": "delayed"}, ValueError, "'delayed' needs a history, which Muon does not keep"),
        ({"ns_steps": 100}, ValueError, "ns_steps must be 0 to 99, got 100"),
        ({"ns_coefficients": (1, 2)}, ValueError, "ns_coefficients are three numbers"),
        ({"ns_coefficients": 2}, ValueError, "ns_coefficients are three numbers"),
        ({"recipe": fp8.RECIPES["bf16"]}, TypeError, "recipe is a name in fp8.RECIPES"),
        ({"nesterov": 1}, TypeError, "nesterov must be True or False"),
        ({"master_weights": "e4m3"}, ValueError, "unknown master_weights 'e4m3'"),
    ],
)
def test_bad_settings(settings, error, message):
    with pytest.raises(error, match=message):
        Muon(parameters(), **settings)


def test_bad_parameters():
    with pytest.raises(TypeError, match=r'of shape \(7,\): give it .* algorithm="adamw"'):
        Muon(parameters(shapes=[(7,)]))
    with pytest.raises(ValueError, match=r"unknown algorithm 'adam'; .* did you mean 'adamw'"):
        Muon([{"params": parameters(), "algorithm": "adam"}])
    group = {"params": parameters(), "algorithm": "adamw", "first_moment": "int8_block"}
    with pytest.raises(ValueError, match="unknown first_moment 'int8_block'"):
        Muon([group])
    with pytest.raises(ValueError, match="stochastic_weights is not supported by algorithm 'muon'"):
        Muon([{"params": parameters(), "stochastic_weights": True}])
    (p,) = parameters(shapes=[(4, 4)])
    optimizer = Muon([p])
    p.grad = torch.eye(4).to_sparse()
    with pytest.raises(RuntimeError, match=r"Muon needs dense gradients, got torch.sparse_coo"):
        optimizer.step()
