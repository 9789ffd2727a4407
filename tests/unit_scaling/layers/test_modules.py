"""Modules: what torch's do, scaled, with tagged parameters that stay tagged."""

import copy
import inspect
import io
import math
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unit_scaling as uu
from unit_scaling.constraints import CONSTRAINTS
from unit_scaling.parameter import has_parameter_data


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


SIGNATURES = {  # the parameters of 0.3.5, in order; further ones may only follow
    "Conv1d": "in_channels out_channels kernel_size stride padding dilation groups bias "
    "padding_mode device dtype constraint weight_mup_type",
    "CrossEntropyLoss": "mult weight size_average ignore_index reduce reduction label_smoothing",
    "DepthModuleList": "modules",
    "DepthSequential": "args",
    "Dropout": "p inplace",
    "Embedding": "num_embeddings embedding_dim padding_idx max_norm norm_type scale_grad_by_freq "
    "sparse _weight _freeze device dtype",
    "GELU": "mult constraint approximate",
    "LayerNorm": "normalized_shape eps elementwise_affine bias device dtype",
    "Linear": "in_features out_features bias device dtype constraint weight_mup_type",
    "LinearReadout": "in_features out_features bias device dtype constraint weight_mup_type",
    "MHSA": "hidden_size heads is_causal dropout_p mult",
    "MLP": "hidden_size expansion_factor",
    "Parameter": "data mup_type mup_scaling_depth",
    "RMSNorm": "normalized_shape eps elementwise_affine",
    "SiLU": "mult constraint inplace",
    "Softmax": "dim mult constraint",
    "TransformerDecoder": "hidden_size vocab_size layers heads dropout_p residual_scaling",
    "TransformerLayer": "hidden_size heads mhsa_tau mlp_tau is_causal dropout_p",
    "TransformerStack": "layers residual_scaling kwargs",
    "transformer_residual_scaling_rule": "residual_mult residual_attn_ratio",
}


@pytest.mark.proves("unit-scaling", "uu for nn", how="own")
@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_a_drop_in(name: str):
    parameters = list(inspect.signature(getattr(uu, name)).parameters)
    expected = SIGNATURES[name].split()
    assert parameters[: len(expected)] == expected


def test_exports():
    assert len(uu.__all__) == len(set(uu.__all__))
    assert all(hasattr(uu, name) for name in uu.__all__)
    assert set(SIGNATURES) <= set(uu.__all__)
    assert all(hasattr(uu.modules, name) for name in uu.modules.__all__)


MODULES = {  # a module with parameters -> an input
    "Linear": (lambda **k: uu.Linear(8, 6, bias=True, **k), lambda: torch.randn(4, 8)),
    "LinearReadout": (lambda **k: uu.LinearReadout(8, 6, **k), lambda: torch.randn(4, 8)),
    "Conv1d": (lambda **k: uu.Conv1d(4, 6, 3, bias=True, **k), lambda: torch.randn(2, 4, 9)),
    "Embedding": (lambda **k: uu.Embedding(9, 4, **k), lambda: torch.randint(9, (3, 5))),
    "LayerNorm": (
        lambda **k: uu.LayerNorm(8, elementwise_affine=True, **k),
        lambda: torch.randn(4, 8),
    ),
    "RMSNorm": (
        lambda **k: uu.RMSNorm([8], elementwise_affine=True, **k),
        lambda: torch.randn(4, 8),
    ),
}
each_module = pytest.mark.parametrize("name", MODULES)


def tags(module: nn.Module) -> list[tuple[str, str, int | None]]:
    return [(n, p.mup_type, p.mup_scaling_depth) for n, p in module.named_parameters()]


@pytest.mark.proves("unit-scaling", "uu for nn", how="own")
@each_module
def test_is_the_torch_module(name: str):
    make, _ = MODULES[name]
    module = make()
    plain = getattr(nn, name.replace("Readout", ""))
    assert isinstance(module, plain)
    assert "(" in repr(module)
    assert all(has_parameter_data(p) for p in module.parameters())


@each_module
def test_device_and_dtype(name: str):
    make, example = MODULES[name]
    module = make(dtype=torch.float64)
    x = example()
    assert module(x.double() if x.is_floating_point() else x).dtype == torch.float64
    assert all(p.dtype == torch.float64 for p in module.parameters())
    assert all(p.is_meta for p in make(device="meta").parameters())


@each_module
@pytest.mark.parametrize("depth", [None, 3])
@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: _saved(m),
        lambda m: copy.deepcopy(pickle.loads(pickle.dumps(copy.deepcopy(m)))),
        lambda m: m.double().bfloat16().eval(),
        lambda m: torch.optim.swa_utils.AveragedModel(m).module,
    ],
    ids=["deepcopy", "pickle", "torch.save", "both", "to", "average"],
)
def test_tags_survive_copies(name: str, depth, copied):
    module = MODULES[name][0]()
    module = uu.DepthSequential(*[module] * depth)[0] if depth else module
    before = tags(module)
    assert tags(copied(module)) == before


def _saved(obj, **kwargs):
    file = io.BytesIO()
    torch.save(obj, file)
    file.seek(0)
    return torch.load(file, **({"weights_only": False} | kwargs))


@each_module
def test_tags_survive_new_parameters(name: str):
    """load_state_dict(assign=True), to_empty + reset_parameters, and plain assignment."""
    make, example = MODULES[name]
    stack = uu.DepthSequential(make(), make())
    before, values = tags(stack), stack.state_dict()
    stack.load_state_dict({k: v.clone() for k, v in values.items()}, assign=True)
    assert tags(stack) == before
    stack[0].weight = nn.Parameter(torch.zeros_like(stack[0].weight))
    assert tags(stack) == before

    meta = uu.DepthSequential(make(device="meta"), make(device="meta"))
    meta.to_empty(device="cpu")
    for layer in meta:
        layer.reset_parameters()
    assert tags(meta) == before
    assert meta[0](example()).isfinite().all()

    meta = uu.DepthSequential(make(device="meta"), make(device="meta"))
    meta.load_state_dict(values, assign=True)
    assert tags(meta) == before


def test_state_dict_is_plain_and_loads_weights_only():
    layer = uu.Linear(3, 2, bias=True)
    assert not any(hasattr(v, "mup_type") for v in layer.state_dict().values())
    kept = _saved(layer.state_dict(keep_vars=True), weights_only=True)
    assert kept["weight"].mup_type == "weight"


# --- single layers -------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_initial_values(bias: bool):
    for module in (uu.Linear(512, 256, bias), uu.Conv1d(256, 128, 4, bias=bias)):
        error = 5 / math.sqrt(2 * module.weight.numel())  # five standard errors of an RMS
        assert module.weight.square().mean().sqrt().item() == pytest.approx(1, abs=error)
        assert module.bias is None if not bias else not module.bias.any()


def test_dropout_is_off_in_eval():
    x = torch.randn(1000)
    module = uu.Dropout(0.5)
    assert not torch.equal(module(x), x)
    assert module.eval()(x) is x


def test_activation_modules():
    x = torch.randn(4, 6)
    functional = uu.functional
    assert torch.equal(uu.GELU(2.0, None, "tanh")(x), functional.gelu(x, 2.0, None, "tanh"))
    assert torch.equal(uu.SiLU(2.0, None)(x), functional.silu(x, 2.0, None))
    assert torch.equal(uu.Softmax(0, 2.0)(x), functional.softmax(x, 0, mult=2.0))
    with pytest.warns(UserWarning, match="Implicit dimension choice"):
        assert torch.equal(nn.Softmax()(x), F.softmax(x, 1))
    assert torch.equal(uu.Softmax()(x), functional.softmax(x, 1))


CONSTRAINED = [
    kind
    for name in uu.modules.__all__
    if inspect.isclass(kind := getattr(uu.modules, name))
    and "constraint" in inspect.signature(kind).parameters
]


@pytest.mark.parametrize("kind", CONSTRAINED, ids=lambda kind: kind.__name__)
def test_a_constraint_is_a_name_of_one(kind):
    """Refused when the module is made, not at its first call."""
    arguments = inspect.signature(kind).parameters.values()
    sizes = [
        p.name for p in arguments if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    given = dict.fromkeys(sizes, 2)
    for constraint in (None, "", *CONSTRAINTS):
        assert kind(**given, constraint=constraint).constraint == constraint
    with pytest.raises(
        ValueError, match="unknown constraint 'to_output'; choose None or one of 'am"
    ):
        kind(**given, constraint="to_output")


@pytest.mark.parametrize("constraint", [None, "gmean", "to_grad_input_scale", "to_output_scale"])
def test_conv1d_has_its_constraint(constraint):
    module = uu.Conv1d(8, 32, 5, stride=2, padding=2, constraint=constraint)
    x = torch.randn(2, 8, 64)
    expected = uu.functional.conv1d(x, module.weight, None, 2, 2, constraint=constraint)
    assert torch.equal(module(x), expected)


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate", "zeros"])
@pytest.mark.parametrize("padding", [0, 1, (2,), "same", "valid"], ids=str)
@pytest.mark.parametrize("kernel", [3, (5,)], ids=str)
def test_conv1d_padding(mode, padding, kernel):
    args = {"padding": padding, "padding_mode": mode, "dilation": (2,)}
    ours = uu.Conv1d(4, 6, kernel, bias=True, dtype=torch.float64, **args)
    plain = nn.Conv1d(4, 6, kernel, dtype=torch.float64, **args)
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(2, 4, 16).double()
    torch.testing.assert_close(ours(x), plain(x) * (4 * ours.kernel_size[0]) ** -0.5)


def test_frozen_embedding():
    weight = torch.randn(5, 3)
    assert not uu.Embedding(5, 3, _weight=weight, _freeze=True).weight.requires_grad
    assert not uu.Embedding.from_pretrained(weight).weight.requires_grad
    module = uu.Embedding.from_pretrained(weight, freeze=False, padding_idx=2)
    assert module.weight.requires_grad
    assert module.weight.mup_type == "weight"
    assert module.padding_idx == 2
    assert not uu.Embedding(5, 3, padding_idx=1).weight[1].any()


def test_cross_entropy_module():
    x, target = torch.randn(6, 4), torch.tensor([0, 1, -1, 3, 2, 1])
    module = uu.CrossEntropyLoss(2.0, torch.rand(4), ignore_index=-1, label_smoothing=0.2)
    expected = F.cross_entropy(2 * x, target, module.weight, ignore_index=-1, label_smoothing=0.2)
    assert torch.equal(module(x, target), expected)
    assert uu.CrossEntropyLoss(reduction="none", ignore_index=-1)(x, target).shape == (6,)


# --- transformer ---------------------------------------------------------------------------


def test_attention_module_has_no_dropout_in_eval():
    x, module = torch.randn(2, 8, 16), uu.MHSA(16, 4, is_causal=True, dropout_p=0.5)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    layer = uu.TransformerLayer(16, 4, 0.5, 0.5, is_causal=True, dropout_p=0.5).eval()
    assert torch.equal(layer(x), layer(x))


def test_attention_module_of_one_token_and_unbatched():
    module = uu.MHSA(16, 4, is_causal=True)
    assert module(torch.randn(2, 1, 16)).isfinite().all()
    x = torch.randn(2, 8, 16)
    torch.testing.assert_close(module(x)[0], module(x[0]))
    with pytest.raises(ValueError, match="heads must divide hidden_size 16: got 3"):
        uu.MHSA(16, 3, is_causal=True)


def test_decoder_at_initialisation():
    """Gradients of every parameter have RMS about 1; u-muP leaves the logits small."""
    model = uu.TransformerDecoder(128, 65, layers=4, heads=4)
    tokens = torch.randint(65, (4, 64))
    logits = model(tokens)
    assert logits.shape == (4, 64, 65)
    model.loss(tokens).backward()
    for name, p in model.named_parameters():
        # within a factor of 8: scales are constrained, and query and key share the value's
        assert 1 / 8 < p.grad.square().mean().sqrt() < 8, name
    assert list(dict(model.named_children())) == ["embedding", "layers", "final_norm", "projection"]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_decoder_compiles_whole():
    model = uu.TransformerDecoder(16, 11, layers=2, heads=2)
    tokens = torch.randint(11, (2, 8))
    expected = model.loss(tokens)
    torch._dynamo.reset()
    loss = torch.compile(model.loss, backend="eager", fullgraph=True)(tokens)
    torch.testing.assert_close(loss, expected)


# --- depth ---------------------------------------------------------------------------------


def depths(module: nn.Module) -> set[int | None]:
    return {p.mup_scaling_depth for p in module.parameters()}


def linears(n: int) -> list[nn.Module]:
    return [uu.Linear(2, 2) for _ in range(n)]


@pytest.mark.parametrize(
    "make", [lambda m: uu.DepthSequential(*m), uu.DepthModuleList], ids=["Sequential", "ModuleList"]
)
class TestDepth:
    def test_nesting_multiplies(self, make):
        assert depths(make([make(linears(4)) for _ in range(3)])) == {12}
        assert depths(make([make(linears(1))])) == {1}

    def test_slices_keep_the_depth_of_the_whole(self, make):
        stack = make(linears(4))
        assert depths(stack[1:3]) == {4}
        assert len(stack[1:3]) == 2
        assert stack[1:3][0] is stack[1]
        assert stack[-1] is stack[3]
        assert depths(stack) == {4}

    def test_resizing(self, make):
        stack = make(linears(2))
        stack.append(uu.Linear(2, 2))
        assert depths(stack) == {3}
        stack.extend(linears(2))
        assert depths(stack) == {5}
        stack.insert(0, uu.Linear(2, 2))
        assert depths(stack) == {6}
        removed = stack.pop(0)
        assert (depths(stack), depths(removed)) == ({5}, {None})
        old, stack[1] = stack[1], uu.Linear(2, 2)
        assert (depths(stack), depths(old)) == ({5}, {None})
        del stack[0]
        assert depths(stack) == {4}
        stack += make(linears(1))
        assert depths(stack) == {5}

    def test_untagged_parameters_are_refused_by_name(self, make):
        with pytest.raises(ValueError, match=r"parameter '1\.weight' has no mup_type"):
            make([uu.Linear(2, 2), nn.Linear(2, 2)])

    def test_copies(self, make):
        stack = make(linears(3))
        for copied in (copy.deepcopy(stack), pickle.loads(pickle.dumps(stack))):
            assert depths(copied) == {3}
            copied.append(uu.Linear(2, 2))
            assert depths(copied) == {4}


def test_depth_of_named_and_shared_layers():
    shared = uu.Linear(2, 2)
    assert depths(uu.DepthSequential(shared, shared)) == {2}
    named = uu.DepthSequential(OrderedDict(a=uu.Linear(2, 2), b=uu.Linear(2, 2)))
    assert depths(named) == {2}
    assert list(dict(named[1:].named_children())) == ["b"]
