"""Properties of every row of MODULES. A new row is tested by existing.

Modules that need arguments, or inputs other than a standard normal matrix, have a line in EXAMPLES.
"""

import inspect
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import unit_scaling as uu
from tests.shared import (
    assert_close,
    normal,
    parametrize,
    pickled,
    proves,
    rms,
    sampled,
)
from unit_scaling.modules import MODULES
from unit_scaling.parameter import has_parameter_data

SIGNAL, IMAGE, VOLUME = normal(2, 4, 9), normal(2, 4, 9, 8), normal(2, 4, 5, 6, 7)
SEQUENCE = normal(5, 3, 8)

X, Y, ONES = normal(3, 6), normal(3, 6, seed=1), torch.ones(3).long()
HALF, LOOKUPS = torch.full((3, 6), 0.5), torch.tensor([[1, 2], [8, 0]])

#: Module of torch.nn -> (arguments, inputs).
EXAMPLES = {
    nn.BCELoss: ((), {}, (HALF, HALF)),
    nn.BCEWithLogitsLoss: ((), {"reduction": "sum"}, (X, HALF)),
    nn.Conv1d: ((4, 6, 3), {"bias": True, "stride": 2}, (SIGNAL,)),
    nn.Conv2d: (
        (4, 6, (3, 2)),
        {"bias": True, "padding": (1, 0), "groups": 2},
        (IMAGE,),
    ),
    nn.Conv3d: ((4, 6, 3), {"bias": True, "padding": "same"}, (VOLUME,)),
    nn.ConvTranspose1d: ((4, 6, 3), {"bias": True, "stride": 2}, (SIGNAL, [20])),
    nn.ConvTranspose2d: ((4, 6, 3), {"bias": True, "groups": 2}, (IMAGE,)),
    nn.ConvTranspose3d: ((4, 6, 3), {"bias": True, "dilation": 2}, (VOLUME,)),
    nn.CrossEntropyLoss: ((), {}, (X, torch.tensor([1, 5, 0]))),
    nn.Embedding: ((9, 4), {"padding_idx": 2}, (LOOKUPS,)),
    nn.GRU: ((8, 6), {"num_layers": 2}, (SEQUENCE,)),
    nn.GroupNorm: ((2, 6), {}, (X,)),
    nn.HuberLoss: ((), {"delta": 2.0}, (X, Y)),
    nn.KLDivLoss: ((), {"reduction": "batchmean"}, (X, HALF)),
    nn.L1Loss: ((), {}, (X, Y)),
    nn.LSTM: ((8, 6), {"bidirectional": True}, (SEQUENCE,)),
    nn.LayerNorm: ((6,), {"elementwise_affine": True}, (X,)),
    nn.Linear: ((6, 4), {"bias": True}, (torch.randn(2, 3, 6),)),
    nn.MSELoss: ((), {}, (X, Y)),
    nn.MultiheadAttention: ((8, 2), {"batch_first": True}, (SEQUENCE,) * 3),
    nn.NLLLoss: ((), {"ignore_index": 1}, (X, 2 * ONES)),
    nn.RMSNorm: ((6,), {"elementwise_affine": True, "eps": 1e-5}, (X,)),
    nn.RNN: ((8, 6), {"nonlinearity": "relu"}, (SEQUENCE,)),
    nn.SmoothL1Loss: ((), {"beta": 0.5}, (X, Y)),
    nn.Softmax: ((-1,), {}, (X,)),
    **{
        getattr(nn, f"{name}{dims}d"): (args, kwargs, (torch.randn(2, 4, *[8] * dims),))
        for dims in (1, 2, 3)
        for name, args, kwargs in (
            ("AdaptiveAvgPool", (4,), {}),
            ("AdaptiveMaxPool", (4,), {"return_indices": True}),
            ("AvgPool", (2,), {"padding": 1}),
            ("BatchNorm", (4,), {"momentum": None}),
            ("Dropout", (0.2,), {}),
            ("InstanceNorm", (4,), {"affine": True, "track_running_stats": True}),
            ("MaxPool", (2,), {"stride": 1}),
        )
    },
}

NORMS = (nn.RMSNorm, nn.LayerNorm)
each_row = parametrize("plain", MODULES)


def example(plain):
    """torch's module, ours, and inputs for both."""
    args, kwargs, inputs = EXAMPLES.get(plain, ((), {}, (X,)))
    named = {nn.Softmax: "dim"} | dict.fromkeys(NORMS, "normalized_shape")
    if plain in named:
        args, kwargs = (), {named[plain]: args[0], **kwargs}
    return plain(*args, **kwargs), MODULES[plain](*args, **kwargs), inputs


def shapes(value):
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return [*map(shapes, value)] if isinstance(value, list | tuple) else value


def first(output):
    return output if isinstance(output, Tensor) else output[0]


@proves("unit-scaling", "uu for nn")
@each_row
def test_is_torchs_module(plain):
    theirs, ours, inputs = example(plain)
    assert isinstance(ours, plain)
    assert MODULES[plain].__name__ == plain.__name__
    # torch has a linear layer of its own, with another name, in its attention
    assert repr(ours) == repr(theirs).replace("NonDynamicallyQuantizable", "")
    # Of the same names and shapes.
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert shapes(ours(*inputs)) == shapes(theirs(*inputs))
    assert all(has_parameter_data(p) for p in ours.parameters())


#: Modules whose weights a factor for each of them would not make torch's: see ops/.
OTHERWISE = (nn.MultiheadAttention, nn.RNNBase)


@parametrize("plain", [cls for cls in MODULES if not issubclass(cls, OTHERWISE)])
def test_result_is_torchs_times_a_factor(plain):
    """In both modes, from the same parameters; losses and norms have the factor 1."""
    theirs, ours, inputs = example(plain)
    ours.load_state_dict(theirs.state_dict())
    for training in (True, False):
        results = []
        for module in (ours, theirs):
            torch.manual_seed(0)
            results.append(first(module.train(training)(*inputs)))
        got, expected = results
        factor = (got.norm() / expected.norm()).item()
        assert_close(got, expected * factor)
        if got.dim() == 0 or "Norm" in plain.__name__:
            assert factor == pytest.approx(1, abs=1e-5)
        assert_close(ours.state_dict(), theirs.state_dict())  # running statistics


def parameters(cls):
    named = inspect.signature(cls).parameters.values()
    return [p.name for p in named if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


@each_row
def test_takes_torchs_arguments_in_torchs_order(plain):
    ours = parameters(MODULES[plain])
    assert [name for name in ours if name in parameters(plain)] == parameters(plain)


@each_row
def test_weights_start_at_unit_scale(plain):
    """Five standard errors of an RMS; ones and zeros exactly."""
    _, ours, _ = example(plain)
    for name, p in ours.named_parameters():
        if p.dim() > 1:
            zero = p.shape[1] if getattr(ours, "padding_idx", None) is not None else 0
            size = rms(p) * (p.numel() / (p.numel() - zero)) ** 0.5
            assert size == pytest.approx(1, abs=5 / (2 * p.numel()) ** 0.5), name
        else:
            assert rms(p) == (0 if "bias" in name else 1), name


def tags(module):
    return [(n, p.mup_type, p.mup_scaling_depth) for n, p in module.named_parameters()]


each_row_with_parameters = parametrize(
    "plain", [cls for cls in MODULES if list(example(cls)[0].parameters())]
)


@each_row_with_parameters
def test_device_and_dtype(plain):
    args, kwargs, inputs = EXAMPLES[plain]
    ours = MODULES[plain](*args, **kwargs, dtype=torch.float64)
    inputs = [
        x.double() if torch.is_tensor(x) and x.is_floating_point() else x
        for x in inputs
    ]
    assert first(ours(*inputs)).dtype == torch.float64
    meta = MODULES[plain](*args, **kwargs, device="meta")
    assert all(p.is_meta for p in meta.parameters())


@each_row_with_parameters
def test_tags_survive_copies_and_new_parameters(plain):
    """deepcopy, pickle, load_state_dict(assign=True), and to_empty with reset_parameters."""
    _, ours, _ = example(plain)
    stack = uu.DepthSequential(ours, deepcopy(ours))
    before, values = tags(stack), stack.state_dict()
    assert {depth for *_, depth in before} == {2}
    assert tags(deepcopy(stack)) == tags(pickled(stack)) == before
    stack.load_state_dict({k: v.clone() for k, v in values.items()}, assign=True)
    assert tags(stack) == before
    empty = stack.to("meta").to_empty(device="cpu")
    for layer in empty:
        layer.reset_parameters()
    assert tags(empty) == before
    assert all(p.isfinite().all() for p in empty.parameters())


def gradients(module, inputs):
    """Of the sum of the first output, whatever else there is."""
    module.zero_grad()
    torch.manual_seed(0)  # for dropout and the like
    first(module(*inputs)).sum().backward()
    return {name: p.grad for name, p in module.named_parameters()}


@each_row_with_parameters
def test_gradients_of_parameters_follow_the_batch(plain):
    """Over nine times the rows, the sum is divided by three times as much."""
    _, ours, inputs = example(plain)
    before = gradients(ours, inputs)
    with uu.batch_multiplier(9):
        after = gradients(ours, inputs)
    assert_close(after, {name: g / 3 for name, g in before.items()})


@sampled(3)
@each_row
def test_exports(plain):
    """torch.export gives a program with the same result."""
    if issubclass(plain, nn.RNNBase):
        pytest.skip("torch's compiler does not take subclasses of its recurrent layers")
    _, ours, inputs = example(plain)
    if any(isinstance(i, list) for i in inputs):
        inputs = inputs[:1]
    torch.manual_seed(0)
    expected = ours.eval()(*inputs)
    program = torch.export.export(ours, inputs)
    assert_close(program.module()(*inputs), expected)


def test_a_language_model_is_exported():
    """For inference at any length. With gradients, the factors of the weights' depend on it."""
    model = uu.TransformerDecoder(
        16, 11, 2, 4, kv_heads=2, rotary_base=1e4, context_length=32
    )
    tokens = torch.randint(11, (2, 8))
    shapes = ({1: torch.export.Dim("length", min=2, max=32)},)
    with torch.no_grad():
        program = torch.export.export(model.eval(), (tokens,), dynamic_shapes=shapes)
        for size in (8, 5):
            given = tokens[:, :size]
            assert_close(program.module()(given), model(given))
