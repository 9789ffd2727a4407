"""Properties of every row of OPS. A new row is tested by existing.

Inputs that are not standard normal matrices, and statistics that a rule leaves aside on purpose,
are listed in `CALLS`, `UNCHECKED` and `FITTED`.
"""

import inspect
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import unit_scaling.functional as U
from tests.unit_scaling.ops import elementwise_calls
from unit_scaling.rules.table import OPS, Op, find_op, row, tie

# torch's compiler makes an instance of every autograd.Function it meets, which torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

SIZE = 256


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def rotated(x: Tensor) -> Tensor:
    """Rotary embedding as a product of complex numbers, in float64."""
    a, b = x.double().chunk(2, dim=-1)
    exponents = torch.arange(a.shape[-1], dtype=torch.float64) / a.shape[-1]
    angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * 10000.0**-exponents
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((z.real, z.imag), dim=-1).to(x.dtype)


#: Arguments of the unit-scaled function, where standard normal matrices will not do.
CALLS = {
    "addmm": lambda: {
        "input": normal(4, 64, 128),
        "mat1": normal(4, 64, 96),
        "mat2": normal(4, 96, 128),
    },
    "bilinear": lambda: {
        "input1": normal(SIZE, 24),
        "input2": normal(SIZE, 32),
        "weight": normal(40, 24, 32),
        "bias": normal(40) * 0,
    },
    "grouped_mm": lambda: {
        "left": normal(4 * SIZE, 64),
        "right": normal(4, 64, 96),
        "offs": torch.arange(1, 5, dtype=torch.int32) * SIZE,
    },
    "conv2d": lambda: {"input": normal(8, 16, 48, 40), "weight": normal(32, 16, 3, 5)},
    "conv3d": lambda: {"input": normal(2, 8, 16, 16, 16), "weight": normal(16, 8, 2, 3, 3)},
    "conv_transpose1d": lambda: {
        "input": normal(16, 32, 128),
        "weight": normal(32, 48, 4),
        "bias": normal(48) * 0,
        "stride": 2,
    },
    "conv_transpose2d": lambda: {
        "input": normal(8, 16, 32, 32),
        "weight": normal(16, 24, 3, 4),
        "stride": (1, 2),
    },
    "conv_transpose3d": lambda: {
        "input": normal(2, 8, 12, 12, 12),
        "weight": normal(8, 16, 2, 2, 2),
        "stride": 2,
    },
    "einsum": lambda: {
        "equation": "bhqd,bkhd->bhqk",
        "left": normal(3, 4, 64, 48),
        "right": normal(3, 80, 4, 48),
    },
    "embedding_bag": lambda: {"input": torch.randint(64, (128, 16)), "weight": normal(64, 32)},
    "conv1d": lambda: {"input": normal(16, 32, 256), "weight": normal(64, 32, 5), "padding": 2},
    "cross_entropy": lambda: {  # the rule is for uniform probabilities
        "input": normal(SIZE, 32) * 1e-2,
        "target": torch.randint(32, (SIZE,)),
    },
    "embedding": lambda: {"input": torch.randint(64, (32, 128)), "weight": normal(64, 32)},
    "layer_norm": lambda: {
        "input": normal(SIZE, 64),
        "normalized_shape": (64,),
        "weight": normal(64) * 0 + 1,
        "bias": normal(64) * 0,
    },
    "linear": lambda: {
        "input": normal(2, SIZE, 64),
        "weight": normal(96, 64),
        "bias": normal(96) * 0,
    },
    "linear_readout": lambda: {"input": normal(SIZE, 64), "weight": normal(96, 64)},
    "matmul": lambda: {"left": normal(4, 64, 96), "right": normal(4, 96, 128)},
    "rms_norm": lambda: {
        "input": normal(SIZE, 64),
        "normalized_shape": (64,),
        "weight": normal(64) * 0 + 1,
    },
    "scaled_dot_product_attention": lambda: {
        "query": normal(8, 4, 64, 16),
        "key": normal(8, 4, 64, 16),
        "value": normal(8, 4, 64, 16),
    },
    "softmax": lambda: {"input": normal(SIZE, SIZE), "dim": -1},
}

#: What is not meant to have RMS 1, and why.
UNCHECKED = {
    "cross_entropy": {"output"},  # a loss: the value is torch's
    "linear_readout": {"output"},  # 1/fan-in, as muP asks
    "mse_loss": {"output"},
    # One factor for all three gradients, which is right for the values'.
    "scaled_dot_product_attention": {"query", "key"},
    "silu_glu": {"gate"},  # tied to the output, whose RMS it shares only roughly
}

#: Rules with a measured interpolation are right to this factor; the exact ones to sampling error.
FITTED = {
    "gelu": 1.06,
    "scaled_dot_product_attention": 1.1,
    "silu": 1.06,
    "silu_glu": 1.1,
    "softmax": 1.6,
}


#: What an op is compared with, where torch has no such function or calls its arguments otherwise.
def by_group(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    """grouped_mm, of which torch has none in float64."""
    if left.dtype != torch.float64:
        return F.grouped_mm(left, right, offs=offs)
    parts = left.tensor_split(offs[:-1].long())
    return torch.cat([x @ w for x, w in zip(parts, right.unbind(), strict=True)])


PLAIN = {
    "grouped_mm": by_group,
    "addmm": lambda input, mat1, mat2: torch.baddbmm(input, mat1, mat2),
    "einsum": lambda equation, left, right: torch.einsum(equation, left, right),
    "matmul": lambda left, right: left @ right,
    "linear_readout": F.linear,
    "rotary": lambda input: rotated(input),
    "silu_glu": lambda input, gate: input * F.silu(gate),
}

#: What is not torch's up to a factor: a sum of two terms, each with its own (see test_products.py).
SUMS = {"addmm": {"output"}}

#: What torch cannot do with its own function.
TORCH_LACKS = {
    "embedding_bag": {"double backward", "vmap"},
    "grouped_mm": {"vmap"},
}

#: Arguments of the torch function that make it the same function, where defaults differ.
TORCH_FORM = {
    "cross_entropy": {"reduction": "sum"},  # the mean's gradient is that of the sum, see losses.py
    "mse_loss": {"reduction": "sum"},
    "rms_norm": {"eps": 1e-5},
    "scaled_dot_product_attention": {"scale": 1 / 16},
}


CALLS |= elementwise_calls.CALLS
UNCHECKED |= elementwise_calls.UNCHECKED
FITTED |= elementwise_calls.FITTED
PLAIN |= elementwise_calls.PLAIN
TORCH_LACKS |= elementwise_calls.TORCH_LACKS
TORCH_FORM |= elementwise_calls.TORCH_FORM


def op_kwargs(op: Op, dtype: torch.dtype = torch.float64) -> dict:
    """Arguments of op.fn: from CALLS, else a standard normal matrix for each required one."""
    torch.manual_seed(0)
    if op.name in CALLS:
        kwargs = CALLS[op.name]()
    else:
        required = [p for p in inspect.signature(op.fn).parameters.values() if p.default is p.empty]
        kwargs = {p.name: normal(SIZE, SIZE) for p in required}
    return {
        k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in kwargs.items()
    }


def with_gradients(kwargs: dict) -> dict:
    return {
        k: v.clone().requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in kwargs.items()
    }


def results(fn, kwargs: dict, *args) -> dict[str, Tensor]:
    """Output and gradients by name, for a standard normal gradient of the output."""
    kwargs = with_gradients(kwargs)
    torch.manual_seed(1)
    output = fn(*args, **kwargs)
    torch.manual_seed(2)
    output.backward(torch.randn(output.shape, dtype=output.dtype) if output.dim() else None)
    grads = {k: v.grad for k, v in kwargs.items() if isinstance(v, Tensor) and v.grad is not None}
    return {"output": output.detach(), **grads}


def ideal(op: Op) -> dict:
    return {"constraint": None} if op.constrainable else {}


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


#: Their arguments or results are tuples: see test_recurrent.py and test_arithmetic.py.
TUPLES = {"cat", "stack"} | {
    name + cell for name in ("gru", "lstm", "rnn_relu", "rnn_tanh") for cell in ("", "_cell")
}

each_op = pytest.mark.parametrize(
    "op", [op for op in OPS.values() if op.name not in TUPLES], ids=lambda op: op.name
)
each_torch_function = pytest.mark.parametrize(
    ("op", "func"),
    [(op, func) for op in OPS.values() for func in op.replaces],
    ids=lambda value: getattr(value, "name", getattr(value, "__qualname__", str(value))),
)


@pytest.mark.proves("unit-scaling", "U for F", how="own")
@each_op
def test_unit_scale_without_constraint(op: Op):
    """Five standard errors of an RMS over n values: 5 / sqrt(2 n), n counting rows and columns.

    Entries of a row share an operand, so a matrix counts as its shorter side squared at most.
    """
    factor = FITTED.get(op.name, 1.0)
    for name, x in results(op.fn, {**op_kwargs(op), **ideal(op)}).items():
        if name in UNCHECKED.get(op.name, ()):
            continue
        independent = min(x.numel(), SIZE)  # conservative: as many as the shortest sum has terms
        error = 1 + 5 / math.sqrt(2 * independent)
        if name == "bias" and not op_kwargs(op)["bias"].any():
            error = 1 + 5 / math.sqrt(2 * x.numel())
        assert 1 / (factor * error) < rms(x) < factor * error, (op.name, name, rms(x))


def torch_kwargs(op: Op) -> dict:
    return {**op_kwargs(op), **TORCH_FORM.get(op.name, {})}


@each_op
def test_constrained_gradient_is_parallel_to_torch(op: Op):
    """With the default constraint: the same function and gradients up to a factor per tensor."""
    plain = PLAIN[op.name] if op.name in PLAIN else op.replaces[0]
    fn = op.fn if op.name in PLAIN else lambda **kwargs: op.call((), kwargs)
    kwargs = torch_kwargs(op)
    ours, theirs = results(fn, kwargs), results(plain, kwargs)
    s = op.rule(
        **{k: v for k, v in op_kwargs(op).items() if k in inspect.signature(op.rule).parameters}
    )
    for name in theirs.keys() - SUMS.get(op.name, set()):
        # An op with mult=1 is the plain one times its factor; float64, so 1e-9 is rounding.
        torch.testing.assert_close(ours[name], theirs[name] * s[name], rtol=1e-9, atol=1e-9)


@pytest.mark.sampled(4)
@pytest.mark.proves("unit-scaling", "FP16 and FP8", how="own")
@each_op
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtype_is_kept(op: Op, dtype: torch.dtype):
    if dtype.itemsize == 2 and "half precision" in TORCH_LACKS.get(op.name, ()):
        pytest.skip("torch cannot")
    for x in results(op.fn, op_kwargs(op, dtype)).values():
        assert x.dtype == dtype
        assert x.isfinite().all()


@each_op
def test_autocast(op: Op):
    """The dtype of the output is that of the torch function under the same autocast."""
    kwargs = op_kwargs(op, torch.float32)
    plain = PLAIN[op.name] if op.name in PLAIN else op.replaces[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain(
            **{
                k: v.float() if torch.is_tensor(v) and v.is_floating_point() else v
                for k, v in torch_kwargs(op).items()
            }
        )
        got = results(op.fn, kwargs)
    assert got.pop("output").dtype == expected.dtype
    assert all(x.dtype == torch.float32 and x.isfinite().all() for x in got.values())


@each_op
def test_rule_reads_shapes_only(op: Op):
    kwargs = op_kwargs(op)
    meta = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    names = inspect.signature(op.rule).parameters
    expected = op.rule(**{k: v for k, v in kwargs.items() if k in names})
    assert op.rule(**{k: v for k, v in meta.items() if k in names}) == expected
    assert all(isinstance(scale, float | int) for scale in expected.values())
    assert "output" in expected
    assert set(expected) - {"output"} <= set(inspect.signature(op.fn).parameters)


@each_op
def test_double_backward(op: Op):
    """The gradient is itself differentiable: a penalty on it has a finite, non-zero gradient."""
    if "double backward" in TORCH_LACKS.get(op.name, ()):
        pytest.skip("torch cannot")
    kwargs = with_gradients(op_kwargs(op))
    torch.manual_seed(1)
    leaves = [v for v in kwargs.values() if isinstance(v, Tensor) and v.requires_grad]
    with sdpa_kernel(SDPBackend.MATH):  # torch's fused attention can be differentiated once
        output = op.fn(**kwargs)
    grads = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
    torch.autograd.backward(sum(g.square().sum() for g in grads))
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves)
    assert any(leaf.grad.any() for leaf in leaves)


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet")
@each_op
def test_func_grad_and_vmap(op: Op):
    """torch.func gives what autograd gives, one example at a time or all at once."""
    kwargs = op_kwargs(op)
    name = next(k for k, v in kwargs.items() if isinstance(v, Tensor) and v.is_floating_point())

    def loss(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        with sdpa_kernel(SDPBackend.MATH):
            return op.fn(**{**kwargs, name: x}).sum()

    x = kwargs[name].clone().requires_grad_()
    loss(x).backward()
    torch.testing.assert_close(torch.func.grad(loss)(kwargs[name]), x.grad)
    if op.name not in elementwise_calls.RANDOM and "vmap" not in TORCH_LACKS.get(op.name, ()):
        stacked = torch.stack([kwargs[name], 2 * kwargs[name]])
        both = torch.func.vmap(torch.func.grad(loss))(stacked)
        torch.testing.assert_close(both[0], x.grad)


@each_torch_function
def test_found_by_torch_function(op: Op, func):
    assert find_op(func) is op


def test_names():
    assert all(getattr(U, name) is op.fn for name, op in OPS.items())
    assert all(op.fn.__doc__ and op.rule.__doc__ for op in OPS.values())


def test_tie():
    tied = tie("hmean", output=2.0, left=2.0, right=2.0)
    assert tied == {"output": 2.0, "left": 2.0, "right": 2.0}
    assert tie(None, output=2.0, input=4.0) == {"output": 2.0, "input": 4.0}


def no_scales() -> dict:
    return {}


def weight_scales(weight: Tensor) -> dict:
    return {}


def test_refuses_a_second_row():
    def gelu(input):
        return input

    def another(input):
        return input

    with pytest.raises(ValueError, match="'gelu' is in OPS already"):
        row(no_scales)(gelu)
    with pytest.raises(ValueError, match="is replaced by 'linear'"):
        row(no_scales, replaces=(F.linear,))(another)
    with pytest.raises(ValueError, match="arguments the op lacks"):
        row(weight_scales)(another)
    assert "another" not in OPS
