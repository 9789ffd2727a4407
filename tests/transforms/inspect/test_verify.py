"""`verify` reports what the model computes: each number against one computed by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8
import unit_scaling as uu
import unit_scaling.functional as U
from tests.transforms.models import Checkpointed, batch, gpt
from unit_scaling.transforms import (
    Verification,
    compile,
    simulate_fp8,
    track_scales,
    unit_scale,
)


def rms(x: Tensor) -> float:
    return x.detach().double().square().mean().sqrt().item()


def found(result: Verification, path: str = "") -> dict[str, float]:
    """tensor -> rms of the rows of one module, without ambiguity."""
    rows = [row for row in result if row.path == path]
    names = [f"{row.call} {row.number} {row.tensor}" for row in rows]
    assert len(set(names)) == len(names)
    if len({(row.call, row.number) for row in rows}) == 1:
        return {row.tensor: row.rms for row in rows}
    return {name: row.rms for name, row in zip(names, rows, strict=True)}


def close(got: dict[str, float], expected: dict[str, float]) -> None:
    """float64 sums of the same float32 values, in another order."""
    assert got == pytest.approx(expected, rel=1e-9)


class Calls(nn.Module):
    """One function of two tensors, both of them parameters where asked."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], weight: Tensor) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


PRODUCTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (F.linear, (6, 4), (3, 4)),
    "linear by name": (lambda x, w: F.linear(weight=w, input=x), (6, 4), (3, 4)),
    "linear with a bias": (lambda x, w: F.linear(x, w, torch.ones(3)), (6, 4), (3, 4)),
    "operator": (lambda x, w: x @ w.T, (6, 4), (3, 4)),
    "method": (lambda x, w: x.matmul(w.transpose(0, 1)), (6, 4), (3, 4)),
    "addmm": (lambda x, w: torch.addmm(torch.ones(3), x, w), (6, 4), (4, 3)),
    "einsum": (lambda x, w: torch.einsum("ij,kj->ik", x, w), (6, 4), (3, 4)),
    "bmm": (lambda x, w: torch.bmm(x, w), (2, 3, 4), (2, 4, 5)),
    "conv1d": (lambda x, w: F.conv1d(x, w, padding=1), (2, 3, 8), (4, 3, 3)),
    "conv2d": (lambda x, w: F.conv2d(x, w, torch.ones(4), 2), (2, 3, 8, 8), (4, 3, 3, 3)),
    "conv_transpose1d": (F.conv_transpose1d, (2, 3, 8), (3, 4, 3)),
    "unit-scaled": (U.linear, (6, 4), (3, 4)),
    "unit-scaled convolution": (U.conv1d, (2, 3, 8), (4, 3, 3)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_spelling_of_a_product(name: str):
    function, shape, weight_shape = PRODUCTS[name]
    torch.manual_seed(0)
    x, weight = torch.randn(shape, requires_grad=True), 3 * torch.randn(weight_shape)
    model = Calls(function, weight)
    target = torch.randn_like(model(x))
    result = uu.verify(model, x, loss=lambda y: (y * target).sum())
    y = model(x)
    (y * target).sum().backward()
    expected = {
        "input": rms(x),
        "gradient of input": rms(x.grad),
        "weight": rms(model.weight),
        "gradient of weight": rms(model.weight.grad),
        "output": rms(y),
        "gradient of output": rms(target),
    }
    close(found(result), expected)
    assert {row.tensor: row.kind for row in result} == {
        "input": "activation",
        "gradient of input": "passed gradient",
        "weight": "weight",
        "gradient of weight": "weight gradient",
        "output": "output",
        "gradient of output": "gradient",
    }
    judged = {row.kind for row in result if row.inside is not None}
    assert judged == {"activation", "weight", "gradient"}


def test_embedding_has_a_weight_and_no_input():
    model = nn.Embedding(10, 4, sparse=True)
    result = uu.verify(model, torch.tensor([[1, 2, 2]]), loss=lambda y: 2 * y.sum())
    root = math.sqrt((2**2 + 4**2) * 4 / 40)  # one token once, one twice, eight never
    ours = found(result)
    assert set(ours) == {"weight", "gradient of weight", "output", "gradient of output"}
    assert ours["gradient of weight"] == pytest.approx(root, rel=1e-9)


def test_gradients_are_those_of_one_call():
    """Of a tensor with two readers, what each of them sends back, not the sum."""

    class Twice(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return (x @ w).sum() + 10 * (x @ w).sum()

    torch.manual_seed(0)
    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    ours = found(uu.verify(Twice(), (x, w)))
    first, second = ours["matmul 0 gradient of input"], ours["matmul 1 gradient of input"]
    assert second == pytest.approx(10 * first, rel=1e-6)
    assert x.grad is None


class Attention(nn.Module):
    def __init__(self, spelled: str) -> None:
        super().__init__()
        self.spelled = spelled
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.bias = nn.Parameter(torch.randn(4, 32))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.spelled == "fused":
            return F.scaled_dot_product_attention(q, k, v)
        scores = (q @ k.transpose(-2, -1)) / 32**0.5
        p = scores.softmax(-1) if self.spelled == "by hand" else F.softmax(scores.float(), dim=-1)
        return torch.matmul(F.dropout(p, 0.0), v)


@pytest.mark.parametrize("spelled", ["fused", "by hand", "with casts"])
def test_attention(spelled: str):
    """The logits and probabilities have no range, however it is written, and what only makes
    queries and keys has one of its own."""
    torch.manual_seed(0)
    # No kernel of a CPU fuses attention of five dimensions.
    result = uu.verify(Attention(spelled), torch.randn(1, 1, 2, 8, 32))
    kinds = {(row.number, row.tensor): row.kind for row in result if row.path == ""}
    value, last = ("activation", "passed gradient"), ("output", "gradient")
    if spelled == "fused":
        names = {(0, "query"): value, (0, "key"): value, (0, "value"): value, (0, "output"): last}
    else:
        names = {(0, "input"): value, (0, "other"): value, (0, "output"): ("attention", "gradient")}
        names |= {(1, "input"): ("attention",) * 2, (1, "other"): value, (1, "output"): last}
    expected = {(n, name): kind for (n, name), (kind, _) in names.items()}
    expected |= {(n, f"gradient of {name}"): kind for (n, name), (_, kind) in names.items()}
    assert kinds == expected
    assert all(row.inside is None for row in result if row.kind == "attention")
    for path, kind in {
        "q": "query-key gradient",
        "k": "query-key gradient",
        "v": "gradient",
    }.items():
        of_path = [row for row in result if row.path == path and "gradient" in row.tensor]
        assert {row.tensor: row.kind for row in of_path} == {
            "gradient of weight": "weight gradient",
            "gradient of output": kind,
        }


def test_a_softmax_that_is_no_attention():
    """A router's, and one of an attention's output: neither computes a query or a key. The layer
    whose output is the query and the key does."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.keys = nn.Linear(8, 4), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            keys = self.keys(x)
            y = F.scaled_dot_product_attention(keys, keys, x).softmax(-1)
            return F.softmax(self.gate(x), dim=-1) * (y @ y.transpose(-2, -1))[..., :4]

    torch.manual_seed(0)
    result = uu.verify(Router(), torch.randn(2, 4, 8, requires_grad=True))
    kinds = {(row.path, row.call, row.tensor): row.kind for row in result}
    small = {place for place, kind in kinds.items() if kind == "query-key gradient"}
    assert small == {("keys", "linear", "gradient of output")}
    rated = {p for p, kind in kinds.items() if kind == "gradient" and p[2].endswith("output")}
    assert rated == {
        (path, call, "gradient of output")
        for path, call in (("gate", "linear"), ("", "scaled_dot_product_attention"), ("", "matmul"))
    }
    assert "attention" not in kinds.values()


def test_multi_head_attention_is_seen_through():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    result = uu.verify(model, torch.randn(2, 8, 16))
    calls = [row.call for row in result if row.path == "self_attn" and row.tensor == "output"]
    assert calls == ["linear", "scaled_dot_product_attention", "linear"]


def test_a_unit_scaled_model_is_inside_and_a_plain_one_is_not():
    scaled, plain = unit_scale(gpt()), gpt()
    result, before = uu.verify(scaled, batch()), uu.verify(plain, batch())
    rated = {row.kind for row in result if row.inside is not None}
    assert rated == {"activation", "weight", "gradient"}
    assert {kind: result.share(kind) for kind in rated} == dict.fromkeys(rated, 1.0)
    assert not result.outside
    for kind in rated - {"activation"}:
        assert before.share(kind) == 0.0, kind


def test_the_gradients_of_queries_and_keys_are_in_their_range():
    torch.manual_seed(0)
    model = unit_scale(nn.Sequential(Attention("fused"), nn.Linear(32, 32)))
    result = uu.verify(model, torch.randn(8, 8, 32))
    assert result.share("query-key gradient") == 1.0
    assert sum(row.kind == "query-key gradient" for row in result) == 2


@pytest.mark.parametrize("init", ["unit", "preserve"])
def test_what_is_measured_is_what_the_transformed_model_computes(init: str):
    """Weights are measured as they are cast; the gradient of one that one call reads is the one
    that the optimizer gets."""
    model = unit_scale(gpt(), init=init)
    result = uu.verify(model, batch())
    model(*batch())[1].backward()
    for path in ("blocks.0.qkv", "blocks.1.down"):
        weight = model.get_parameter(f"{path}.weight")
        ours = found(result, path)
        assert ours["weight"] == pytest.approx(rms(weight) / weight.mup_scale, rel=1e-6)
        assert ours["gradient of weight"] == pytest.approx(rms(weight.grad), rel=1e-5)


def test_compiled_and_tracked_models_are_measured_as_they_are():
    model = unit_scale(gpt())
    expected = uu.verify(model, batch()).rows
    for each in (compile(model), torch.compile(model), track_scales(model)):
        assert uu.verify(each, batch()).rows == expected
    with fp8.autocast("unit"):
        inside = uu.verify(model, batch()).rows
    assert inside == uu.verify(simulate_fp8(model), batch()).rows != expected


def test_a_transformed_part_of_a_plain_model():
    torch.manual_seed(0)
    part = unit_scale(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)))
    model = nn.Sequential(nn.Linear(64, 64), part)
    x = torch.randn(64, 64)
    first, again = uu.verify(model, x), uu.verify(model, x)
    assert [row.path for row in first if row.tensor == "output"] == ["0", "1.0", "1.2"]
    assert first.rows == again.rows
    y = part(model[0](x))
    assert found(first, "1.2")["output"] == pytest.approx(rms(y), rel=1e-6)


def test_checkpoints_are_counted_once():
    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(4, 8)
    for each in (model, unit_scale(model)):
        ours = found(uu.verify(each, x), "layer")
        assert set(ours) == {
            "input", "weight", "gradient of weight", "output", "gradient of output"
        }  # fmt: skip


def test_nothing_of_the_model_changes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    embedding = nn.Embedding(4, 8, max_norm=0.1)
    model[0].weight.grad = torch.full((8, 8), 3.0)
    calls: list[int] = []
    model[0].weight.register_hook(lambda grad: calls.append(1))
    before = copy.deepcopy({**model.state_dict(), **embedding.state_dict()})
    x = torch.randn(4, 8, requires_grad=True)
    random = torch.get_rng_state()
    uu.verify(model, x)
    uu.verify(embedding, torch.tensor([1, 2]))
    assert torch.equal(torch.get_rng_state(), random)
    assert x.grad is None
    assert not calls
    assert type(model[0]) is nn.Linear
    assert torch.equal(model[0].weight.grad, torch.full((8, 8), 3.0))
    after = {**model.state_dict(), **embedding.state_dict()}
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_batches_and_losses():
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, how: str = "tensor"):
            y = self.layer(x)
            loss = y.square().mean()
            return {"tensor": y, "loss": {"out": y, "loss": loss}, "pair": (y, loss)}[how]

    torch.manual_seed(0)
    model, x = Head(), torch.randn(4, 4)
    expected = uu.verify(model, x, loss=lambda y: y.square().mean()).rows
    assert uu.verify(model, {"x": x, "how": "loss"}).rows == expected
    assert uu.verify(model, (x, "pair")).rows == expected
    unit = uu.verify(model, [x]).rows
    assert unit == uu.verify(model, x, seed=0).rows != uu.verify(model, x, seed=1).rows
    torch.manual_seed(1)
    wide = uu.verify(nn.Linear(4, 256), torch.randn(256, 4))
    grad = found(wide)["gradient of output"]
    assert grad == pytest.approx(1, abs=5 * (0.5 / 2**16) ** 0.5)  # variance of an rms: 1/(2n)


def test_the_result_prints():
    result = uu.verify(nn.Linear(4, 4), torch.randn(4, 4), loss=lambda y: y.sum() * math.inf)
    text = str(result)
    assert "(model)  linear" in text
    assert "outside" in text
    assert "gradient: 0 of 1 inside [0.25, 4]" in text.splitlines()
    assert "weight gradient:" not in text


def test_what_is_refused():
    with pytest.raises(TypeError, match=r"needs an nn\.Module, got int"):
        uu.verify(3, torch.ones(1))
    with pytest.raises(ValueError, match="requires a gradient"):
        uu.verify(nn.Linear(4, 4).requires_grad_(False), torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"one element, got a tensor of shape"):
        uu.verify(nn.Linear(4, 4), torch.randn(2, 4), loss=lambda output: output)
    result = uu.verify(nn.Linear(4, 4), torch.randn(4, 4))
    with pytest.raises(ValueError, match="choose one of 'activation', 'weight', 'gradient'"):
        result.share("bias")
    assert math.isnan(result.share("query-key gradient"))


def overwritten(layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(uu.Linear(64, 64) for _ in range(layers)))
    for layer in model:
        nn.init.normal_(layer.weight, std=0.02)
    return model


WELL = ["every tensor is in the range of its kind"]


def test_a_diagnosis_begins_with_the_cause():
    """Weights before activations, which are small for that, and before gradients."""
    found = uu.verify(overwritten(), torch.randn(64, 64))  # it warns of nothing by itself
    weights, activations, gradients = found.diagnosis
    assert weights.startswith("4 of 4 weights have RMS 0.02 instead of 1, the first in 0 (linear)")
    assert "reset_parameters" in weights
    assert activations.startswith("activations shrink from the input of 1 (linear) on, RMS 0.0")
    assert gradients.startswith("gradients shrink from the gradient of output of 2 (linear) on")
    assert str(found).endswith("\n".join(found.diagnosis))


def test_zeros_have_rows_and_do_not_count():
    """A head of zeros sends nothing to the layers in front of it, and gets nothing from a loss that
    is least there."""
    torch.manual_seed(0)
    model, x = nn.Sequential(uu.Linear(64, 64), uu.Linear(64, 64)), torch.randn(256, 64)
    nn.init.zeros_(model[1].weight)
    result = uu.verify(model, x)
    assert {row.path: row.rms == 0 for row in result if row.kind == "gradient"} == {
        "0": True,
        "1": False,
    }
    assert result.share("weight") == result.share("gradient") == 1
    assert "gradient: 1 of 1 inside [0.25, 4], 1 of zeros" in str(result).splitlines()
    assert result.diagnosis == WELL
    result = uu.verify(model, x, loss=lambda y: y.square().sum())
    zeros = [row.tensor for row in result if row.rms == 0 and row.kind == "gradient"]
    assert zeros == ["gradient of output"] * 2
    assert math.isnan(result.share("gradient"))
    (found,) = result.diagnosis
    assert found.startswith("every gradient is zero: ")
    assert "gradient: 0 of 0 inside [0.25, 4], 2 of zeros" in str(result).splitlines()


def labelled() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(512, 64), torch.randint(64, (512,))


def test_a_diagnosis_of_the_loss_and_of_modules_that_are_well():
    x, labels = labelled()
    model = nn.Sequential(uu.Linear(64, 64), uu.GELU(), uu.LinearReadout(64, 64))
    (found,) = uu.verify(model, x, loss=lambda y: F.cross_entropy(y, labels)).diagnosis
    assert found.startswith("the loss's gradient at the model's output has RMS 0.000")
    assert "U.cross_entropy" in found
    assert uu.verify(model, x, loss=lambda y: U.cross_entropy(y, labels)).diagnosis == WELL
    assert uu.verify(model, x).diagnosis == WELL


@pytest.mark.parametrize("trained", [False, True])
def test_a_transformed_model_is_well_under_any_loss(trained: bool):
    """It brings the gradient of its output to RMS 1 by what it measured at its first step."""
    x, labels = labelled()
    model = unit_scale(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)))
    loss = lambda y: F.cross_entropy(y, labels)  # noqa: E731
    around = nn.Sequential(model, uu.Linear(64, 64))
    fresh = [uu.verify(each, x).rows for each in (model, around)]
    if trained:
        loss(model(x)).backward()
    assert uu.verify(model, x, loss=loss).diagnosis == WELL
    assert uu.verify(model, x).diagnosis == WELL
    assert [uu.verify(each, x).rows for each in (model, around)] == fresh


def test_a_loss_that_follows_another_one_is_warned_of():
    """The scales at which the products cast gradients are those of the first step."""
    x, labels = labelled()
    model = simulate_fp8(unit_scale(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))))
    U.cross_entropy(model(x), labels).backward()
    with pytest.warns(
        fp8.warnings.ScaleWarning, match="the RMS of the grad of linear 2 .* is .*e-"
    ):
        uu.verify(model, x, loss=lambda y: 1e-4 * F.cross_entropy(y, labels))


@pytest.mark.filterwarnings("ignore:the RMS of:fp8.warnings.ScaleWarning")
def test_a_gradient_is_judged_at_the_scale_that_it_is_cast_at():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    x, targets = torch.randn(64, 32), torch.randint(8, (64,))

    def loss(logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, targets)

    model = fp8.convert(unit_scale(plain), "unit")
    fp8.calibrate(model, x, loss)
    assert uu.verify(model, x, loss=loss).share("gradient") == 1
    assert uu.verify(model, x, loss=lambda y: 1e-9 * loss(y)).share("gradient") == 0
