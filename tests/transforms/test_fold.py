"""`fold`: the plain model of the same class that computes what a unit-scaled one does."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import unit_scaling as uu
from unit_scaling.parameter import has_parameter_data
from unit_scaling.transforms import simulate_fp8, unit_scale

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("default")  # theirs to fix

IDS = torch.arange(24).reshape(2, 12)
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}


class Encoder(nn.Module):
    def __init__(self, rnn: type[nn.Module] | None = None, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        if rnn is None:
            layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **options)
            self.body: nn.Module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        else:
            self.body = rnn(32, 32, batch_first=True)
        self.head = nn.Linear(32, 64)

    def forward(self, ids: Tensor) -> Tensor:
        y = self.body(self.embed(ids))
        return self.head(y[0] if isinstance(y, tuple) else y)


class Dropping(nn.Module):
    """With a factor that holds in training alone: the depth is stochastic."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.up(x)
        if self.training:
            y = y.div(0.7) * torch.empty(len(x), 1).bernoulli_(0.7).to(x.dtype)
        return self.down(F.gelu(x + y))


def of(name: str, sizes: dict[str, Any], **options: Any) -> nn.Module:
    config, _, head = name.partition("For")
    kind = getattr(transformers, f"{config.removesuffix('LMHead')}Config")
    name = name if head else f"{name}Model"
    return getattr(transformers, name)(kind(**sizes, **options))


GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
DECODER = {"input_ids": IDS, "decoder_input_ids": IDS[:, :6]}

#: Model, inputs, the largest difference of the logits in float64, by the largest of them: what the
#: eps of norms leave: 1e-5 / 2 of squares of RMS 1, and more of tokens with small embeddings.
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], float]] = {
    "Llama": (lambda: of("LlamaForCausalLM", GROUPED), {"input_ids": IDS}, 7e-6),
    "Llama, tied": (
        lambda: of("LlamaForCausalLM", GROUPED, tie_word_embeddings=True),
        {"input_ids": IDS},
        7e-6,
    ),
    "Llama, biases, eager": (
        lambda: of(
            "LlamaForCausalLM",
            GROUPED,
            attention_bias=True,
            mlp_bias=True,
            hidden_act="gelu",
            attn_implementation="eager",
        ),
        {"input_ids": IDS},
        7e-6,
    ),
    "Phi3": (lambda: of("Phi3ForCausalLM", GROUPED, pad_token_id=0), {"input_ids": IDS}, 2e-4),
    "GPT2, tied": (lambda: of("GPT2LMHead", GPT2), {"input_ids": IDS}, 4e-5),
    "BERT": (lambda: of("BertForMaskedLM", SIZES), {"input_ids": IDS}, 1e-9),
    "ViT": (lambda: of("ViTForImageClassification", VISION), {"pixel_values": IMAGES}, 4e-5),
    "T5": (lambda: of("T5ForConditionalGeneration", T5), DECODER, 7e-6),
    "Encoder, pre-norm": (
        lambda: Encoder(norm_first=True, activation="gelu"),
        {"ids": IDS},
        2e-5,
    ),
    "MLP": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh()),
        {"input": torch.linspace(-2, 2, 32).view(4, 8)},
        1e-12,
    ),
}


def inputs_of(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in given.items()}


@torch.no_grad()
def logits(model: nn.Module, given: dict[str, Any]) -> Tensor:
    result = model.eval()(**given)
    if isinstance(result, tuple):
        return result[0]
    if isinstance(result, Tensor):
        return result
    return result.logits if "logits" in result else result.last_hidden_state


@torch.no_grad()
def moved(model: nn.Module) -> nn.Module:
    """With weights, biases and statistics that are not those of the start."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.add_(torch.rand_like(buffer))
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_the_plain_model_computes_the_same(name):
    make, given, tolerance = MODELS[name]
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(0)
        plain, given = make().to(dtype), inputs_of(given, dtype)
        model = unit_scale(plain)
        model.train()(**given)
        want = logits(moved(model), given)
        result = uu.fold(model)
        assert type(result) is type(plain)
        rounding = 0 if dtype is torch.float64 else 2e-6
        assert (logits(result, given) - want).abs().max() <= (
            tolerance + rounding
        ) * want.abs().max()
        missing = plain.load_state_dict(result.state_dict())
        assert not any(missing)
        torch.testing.assert_close(logits(plain, given), logits(result, given), rtol=0, atol=0)
        assert torch.equal(logits(model, given), want)  # it is as it was


def test_what_holds_in_training_alone():
    """The model has not run in evaluation: the factors are those of evaluation nevertheless."""
    torch.manual_seed(0)
    model, given = unit_scale(Dropping().double()), {"x": torch.randn(4, 8).double()}
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


def test_other_transforms_stay():
    model = simulate_fp8(unit_scale(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))))
    model(torch.randn(2, 8))
    assert "simulated casts to e4m3 and e5m2" in str(uu.fold(model))


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


@pytest.mark.parametrize("wrap", [torch.compile, uu.transforms.compile])
def test_compiled(wrap):
    """What `torch.compile` wraps comes back without it; what is compiled in place stays so."""
    torch._dynamo.reset()
    model = wrap(unit_scale(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))))
    given = {"input": torch.randn(4, 8)}
    want = logits(model, given)
    result = uu.fold(model)
    assert isinstance(result, nn.Sequential)
    torch.testing.assert_close(logits(result, given), want)


def test_preserve_has_no_factors():
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    result = uu.fold(unit_scale(plain, init="preserve"))
    for name, parameter in plain.named_parameters():
        assert torch.equal(result.get_parameter(name), parameter)


class Tied(nn.Module):
    """One weight in two products, which do not have the same factor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(self.layer(x)), self.layer.weight.mT)


@pytest.mark.parametrize(
    ("make", "given", "why"),
    [
        (lambda: Encoder(nn.LSTM), {"ids": IDS}, r"lstm in body \(its factors lie between"),
        (Tied, {"x": torch.randn(2, 8)}, r"output in the model itself"),
        (
            lambda: of("Gemma2ForCausalLM", GROUPED, head_dim=8),
            {"input_ids": IDS},
            r"add in model\.layers\.0 \(its terms have one ratio\)",
        ),
    ],
)
def test_what_no_weight_holds_is_named(make, given, why):
    torch.manual_seed(0)
    model = unit_scale(make())
    logits(model, given)
    with pytest.raises(ValueError, match=f"cannot hold the factors of unit_scale at: .*{why}"):
        uu.fold(model)


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
