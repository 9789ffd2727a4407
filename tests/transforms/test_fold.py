"""`fold`: the plain model of the same class that computes what a unit-scaled one does."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import unit_scaling as uu
from tests.transforms.models import KINDS, Net, moved
from unit_scaling.parameter import has_parameter_data
from unit_scaling.transforms import simulate_fp8, unit_scale

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("default")  # theirs to fix

IDS = torch.arange(24).reshape(2, 12)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
BIASED = {"attention_bias": True, "mlp_bias": True, "attn_implementation": "eager"}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}

#: Class, configuration, the largest difference of the logits in float64, by the largest of them:
#: what the eps of norms leave, 1e-5 / 2 of squares of RMS 1, and more of small embeddings. Other
#: kinds of models are in test_models.
MODELS: dict[str, tuple[str, dict[str, Any], float]] = {
    "Llama, tied": ("LlamaForCausalLM", {**SIZES, "tie_word_embeddings": True}, 7e-6),
    "Llama, biases, eager": ("LlamaForCausalLM", {**SIZES, **BIASED, "hidden_act": "gelu"}, 7e-6),
    "Phi3": ("Phi3ForCausalLM", {**SIZES, "pad_token_id": 0}, 2e-4),
    "GPT2, tied": ("GPT2LMHeadModel", GPT2, 4e-5),
    "T5": ("T5ForConditionalGeneration", T5, 7e-6),
}


def of(name: str, config: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    return cls(cls.config_class(**config))


def tokens(model: nn.Module) -> dict[str, Tensor]:
    two = {"decoder_input_ids": IDS[:, :6]} if model.config.is_encoder_decoder else {}
    return {"input_ids": IDS, **two}


@torch.no_grad()
def logits(model: nn.Module, given: dict[str, Any]) -> Tensor:
    result = model.eval()(**given)
    return result if isinstance(result, Tensor) else result.logits


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_the_plain_model_computes_the_same(name):
    cls, config, tolerance = MODELS[name]
    for dtype in (torch.float64, torch.float32):
        plain = of(cls, config).to(dtype)
        model, given = unit_scale(plain), tokens(plain)
        model.train()(**given)
        want = logits(moved(model), given)
        result = uu.fold(model)
        assert type(result) is type(plain)
        rounding = 0 if dtype is torch.float64 else 2e-6
        difference = (logits(result, given) - want).abs().max()
        assert difference <= (tolerance + rounding) * want.abs().max()
        missing = plain.load_state_dict(result.state_dict())
        assert not any(missing)
        torch.testing.assert_close(logits(plain, given), logits(result, given), rtol=0, atol=0)
        assert torch.equal(logits(model, given), want)  # it is as it was


def test_what_holds_in_training_alone():
    """The model has not run in evaluation: the factors are those of evaluation nevertheless."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.up(x := m.stem(x))
        if m.training:  # the depth is stochastic
            y = y.div(0.7) * torch.empty(len(x), 1).bernoulli_(0.7).to(x.dtype)
        return m.down(F.gelu(x + y))

    torch.manual_seed(0)
    plain = Net(forward, **{name: nn.Linear(8, 8) for name in ("stem", "up", "down")}).double()
    model, given = unit_scale(plain), {"x": torch.randn(4, 8).double()}
    model.train()(**given).sum().backward()
    result = uu.fold(model)
    torch.testing.assert_close(logits(result, given), logits(model, given), rtol=1e-12, atol=1e-12)


def test_what_is_kept_and_what_is_gone():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).bfloat16()
    plain[0].weight.requires_grad_(False)
    seen: list[int] = []
    plain[2].register_forward_hook(lambda *_: seen.append(1))
    model = unit_scale(plain)
    x = torch.randn(3, 8).bfloat16()
    model(x)
    seen.clear()
    result = uu.fold(model)
    result(x)
    assert seen == [1]
    assert result[0].weight.dtype is torch.bfloat16
    assert not result[0].weight.requires_grad
    assert [type(m) for m in result.modules()] == [type(m) for m in plain.modules()]
    assert not any(has_parameter_data(p) for p in result.parameters())
    assert not any(vars(m).keys() & {"_scopes", "mup_tags"} for m in result.modules())
    with pytest.raises(ValueError, match="needs a model with unit_scale"):
        uu.report(result)
    copy.deepcopy(result)


@pytest.mark.parametrize("normed", ["spectral_norm", "pruned"])
def test_computed_weights(normed):
    """They keep their values."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).double()
    if normed == "pruned":
        prune.l1_unstructured(plain[0], "weight", amount=0.5)
    else:
        getattr(parametrizations, normed)(plain[0])
    model, given = unit_scale(plain), {"input": torch.randn(4, 8).double()}
    want = logits(model, given)
    torch.testing.assert_close(logits(uu.fold(model), given), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wrap", [torch.compile, uu.transforms.compile, simulate_fp8])
def test_wrapped(wrap):
    """What `torch.compile` wraps comes back without it; what is compiled in place stays so, and
    other transforms stay."""
    torch._dynamo.reset()
    model = wrap(unit_scale(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))))
    given = {"input": torch.randn(4, 8)}
    want = logits(model, given)
    result = uu.fold(model)
    assert isinstance(result, nn.Sequential)
    if wrap is simulate_fp8:  # which casts weights of other scales
        assert "simulated casts to e4m3 and e5m2" in str(result)
    else:
        torch.testing.assert_close(logits(result, given), want)


def test_preserve_has_no_factors():
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    result = uu.fold(unit_scale(plain, init="preserve"))
    for name, parameter in plain.named_parameters():
        assert torch.equal(result.get_parameter(name), parameter)


#: Model, batch, the call that is named.
def test_a_cell_that_keeps_its_weights_has_no_factors():
    torch.manual_seed(0)
    plain = Net(
        lambda m, x: m.head(m.cell(x, m.cell(x))), cell=nn.GRUCell(8, 8), head=nn.Linear(8, 4)
    )
    ours, x = unit_scale(plain), torch.randn(16, 8)
    y = ours(x)
    torch.testing.assert_close(uu.fold(ours)(x), y)


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor], str]] = {
    "LSTM": (KINDS["LSTM"].make, {"x": IDS % 12}, r"lstm in body \(its factors lie between"),
    "one weight in two products of other factors": (
        lambda: Net(
            lambda m, x: F.linear(F.gelu(m.a(x)), m.a.weight.mT), a=nn.Linear(8, 16, bias=False)
        ),
        {"x": torch.randn(2, 8)},
        "output in the model itself",
    ),
    "Gemma 2": (
        lambda: of("Gemma2ForCausalLM", {**SIZES, "head_dim": 8}),
        {"input_ids": IDS},
        r"add in model\.layers\.0 \(its terms have one ratio\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_weight_holds_is_named(name):
    make, given, why = REFUSED[name]
    torch.manual_seed(0)
    model = unit_scale(make())
    logits(model, given)
    with pytest.raises(ValueError, match=f"cannot hold the factors of unit_scale at: .*{why}"):
        uu.fold(model)


@dataclass
class Output:
    logits: Tensor
    hidden: Any


RESULTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dataclass": (lambda y: Output(y, None), lambda result: result.logits),
    "nested": (lambda y: {"first": [Output(y, y)]}, lambda result: result["first"][0].hidden),
    "distribution": (lambda y: torch.distributions.Normal(y, 1.0), lambda result: result.mean),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_within_objects_stay(name):
    pack, of = RESULTS[name]
    torch.manual_seed(0)
    plain = Net(lambda m, x: pack(m.b(m.a(x).relu())), a=nn.Linear(8, 16), b=nn.Linear(16, 4))
    model, x = unit_scale(plain), torch.randn(4, 8)
    expected = of(model(x))
    torch.testing.assert_close(of(uu.fold(model)(x)), expected)


def test_refused_by_name():
    with pytest.raises(TypeError, match=r"fold needs an nn\.Module, got str"):
        uu.fold("model")
    with pytest.raises(ValueError, match="fold needs a model with unit_scale, got a Linear"):
        uu.fold(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"has not run: .* call it once with an example batch"):
        uu.fold(unit_scale(nn.Linear(2, 2)))
    replaced = unit_scale(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), replace={F.relu: F.gelu})
    replaced(torch.randn(1, 2))
    with pytest.raises(ValueError, match="functions in replace of unit_scale cannot be folded"):
        uu.fold(replaced)
