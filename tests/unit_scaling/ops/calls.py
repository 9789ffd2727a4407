"""How to call and judge each row of OPS: what tests of the table need beside the rows."""

import inspect

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.shared import pairs

SIZE = 256


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64)


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.float64)


def image(dims):
    return normal(4, 8, *{1: (960,), 2: (32, 24), 3: (8, 12, 8)}[dims])


def normed(*shape):
    return {
        "input": normal(*shape),
        "weight": zeros(shape[1]) + 1,
        "bias": zeros(shape[1]),
    }


def rotated(x):
    """Rotary embedding as a product of complex numbers, in float64."""
    a, b = x.double().chunk(2, dim=-1)
    exponents = torch.arange(a.shape[-1], dtype=torch.float64) / a.shape[-1]
    angles = (
        torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * 10000.0**-exponents
    )
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((z.real, z.imag), dim=-1).to(x.dtype)


def by_group(left, right, offs):
    """grouped_mm, of which torch has none in float64."""
    if left.dtype != torch.float64:
        return F.grouped_mm(left, right, offs=offs)
    parts = left.tensor_split(offs[:-1].long())
    return torch.cat([x @ w for x, w in pairs(parts, right.unbind())])


def normals(*, settings=None, **shapes):
    """Standard normal arguments of these shapes, and others."""
    tensors = {
        n: normal(*(s if isinstance(s, tuple) else (s,))) for n, s in shapes.items()
    }
    return tensors | (settings or {})


def labels(classes, *shape):
    return torch.randint(classes, shape)


#: Arguments of the unit-scaled function, where standard normal matrices will not do. The rules of
#: losses are for uniform probabilities.
CALLS = {
    "addmm": lambda: normals(input=(4, 64, 128), mat1=(4, 64, 96), mat2=(4, 96, 128)),
    "grouped_mm": lambda: normals(
        left=(4 * SIZE, 64),
        right=(4, 64, 96),
        settings={"offs": torch.arange(1, 5, dtype=torch.int32) * SIZE},
    ),
    "conv1d": lambda: normals(
        input=(16, 32, 256), weight=(64, 32, 5), settings={"padding": 2}
    ),
    "conv2d": lambda: normals(input=(8, 16, 48, 40), weight=(32, 16, 3, 5)),
    "conv3d": lambda: normals(input=(2, 8, 16, 16, 16), weight=(16, 8, 2, 3, 3)),
    "conv_transpose1d": lambda: normals(
        input=(16, 32, 128),
        weight=(32, 48, 4),
        settings={"bias": zeros(48), "stride": 2},
    ),
    "conv_transpose2d": lambda: normals(
        input=(8, 16, 32, 32), weight=(16, 24, 3, 4), settings={"stride": (1, 2)}
    ),
    "conv_transpose3d": lambda: normals(
        input=(2, 8, 12, 12, 12), weight=(8, 16, 2, 2, 2), settings={"stride": 2}
    ),
    "einsum": lambda: normals(
        left=(3, 4, 64, 48),
        right=(3, 80, 4, 48),
        settings={"equation": "bhqd,bkhd->bhqk"},
    ),
    "embedding": lambda: normals(
        weight=(64, 32), settings={"input": labels(64, 32, 128)}
    ),
    "linear": lambda: normals(
        input=(2, SIZE, 64), weight=(96, 64), settings={"bias": zeros(96)}
    ),
    "linear_readout": lambda: normals(input=(SIZE, 64), weight=(96, 64)),
    "matmul": lambda: normals(left=(4, 64, 96), right=(4, 96, 128)),
    "scaled_dot_product_attention": lambda: normals(
        query=(8, 4, 64, 16), key=(8, 4, 64, 16), value=(8, 4, 64, 16)
    ),
    # norms
    "batch_norm": lambda: {
        **normed(64, 32, 16),
        **dict.fromkeys(("running_mean", "running_var")),
        "training": True,
    },
    "group_norm": lambda: {**normed(64, 32, 16), "num_groups": 4},
    "instance_norm": lambda: normed(64, 32, 64),
    "layer_norm": lambda: {**normed(SIZE, 64), "normalized_shape": (64,)},
    "rms_norm": lambda: normals(
        input=(SIZE, 64), settings={"normalized_shape": (64,), "weight": zeros(64) + 1}
    ),
    # elementwise, dropout and softmax
    "dropout1d": lambda: normals(input=(SIZE, 64, 4)),
    "dropout2d": lambda: normals(input=(SIZE, 64, 2, 2)),
    "dropout3d": lambda: normals(input=(SIZE, 64, 2, 2, 2)),
    "softmax": lambda: normals(input=(SIZE, SIZE), settings={"dim": -1}),
    # arithmetic
    "div": lambda: {
        "input": normal(64, SIZE),
        "other": normal(SIZE).sign() + normal(SIZE) / 50,
    },
    "mul": lambda: normals(input=(64, SIZE), other=SIZE),
    "sub": lambda: normals(input=(SIZE, 64), other=(SIZE, 64), settings={"alpha": 2.0}),
    # losses
    "binary_cross_entropy": lambda: {
        "input": normal(SIZE, 16) * 1e-2 + 0.5,
        "target": labels(2, SIZE, 16).double(),
    },
    "binary_cross_entropy_with_logits": lambda: {
        "input": normal(SIZE, 16) * 1e-2,
        "target": labels(2, SIZE, 16).double(),
    },
    "cross_entropy": lambda: {
        "input": normal(SIZE, 32) * 1e-2,
        "target": labels(32, SIZE),
    },
    "kl_div": lambda: {
        "input": normal(SIZE, 64).log_softmax(-1),
        "target": normal(SIZE, 64).softmax(-1),
        "reduction": "sum",
    },
    "nll_loss": lambda: normals(
        input=(SIZE, 32), settings={"target": labels(32, SIZE)}
    ),
    # pooling
    "adaptive_avg_pool1d": lambda: {"input": image(1), "output_size": 120},
    "adaptive_avg_pool2d": lambda: {"input": image(2), "output_size": (16, 8)},
    "adaptive_avg_pool3d": lambda: {"input": image(3), "output_size": (4, None, 4)},
    "adaptive_max_pool1d": lambda: {"input": image(1), "output_size": 120},
    "adaptive_max_pool2d": lambda: {"input": image(2), "output_size": 8},
    "adaptive_max_pool3d": lambda: {"input": image(3), "output_size": 4},
    "avg_pool1d": lambda: {"input": image(1), "kernel_size": 4},
    "avg_pool2d": lambda: {"input": image(2), "kernel_size": (3, 2), "stride": 2},
    "avg_pool3d": lambda: {"input": image(3), "kernel_size": 2, "divisor_override": 3},
    "max_pool1d": lambda: {
        "input": image(1),
        "kernel_size": 3,
        "stride": 2,
        "dilation": 2,
    },
    "max_pool2d": lambda: {"input": image(2), "kernel_size": 3, "stride": 2},
    "max_pool3d": lambda: {"input": image(3), "kernel_size": (2, 3, 2)},
}

#: What is not meant to have RMS 1, and why.
UNCHECKED = {
    "linear_readout": {"output"},  # 1/fan-in, as muP asks
    # One factor for all three gradients, which is right for the values'.
    "scaled_dot_product_attention": {"query", "key"},
    # tied to the output, whose RMS it shares only roughly
    **{name: {"gate"} for name in ("geglu", "silu_glu")},
    # values that torch gives a loss; targets have no gradient as a rule
    **{f"{name}_loss": {"output"} for name in "huber l1 mse nll smooth_l1".split()},
    "cross_entropy": {"output"},
    "binary_cross_entropy": {"output", "target"},
    "binary_cross_entropy_with_logits": {"output", "target"},
    "kl_div": {"output", "target"},
}

#: Rules with a measured interpolation are right to this factor; the exact ones to sampling error.
FITTED = {
    "gelu": 1.06,
    "silu": 1.06,
    "silu_glu": 1.1,
    "scaled_dot_product_attention": 1.1,
}
FITTED |= {"kl_div": 1.3, "softmax": 1.6}

#: What an op is compared with, where torch has no such function or calls its arguments otherwise.
PLAIN = {
    "grouped_mm": by_group,
    "addmm": lambda input, mat1, mat2: torch.baddbmm(input, mat1, mat2),
    "einsum": lambda equation, left, right: torch.einsum(equation, left, right),
    "matmul": lambda left, right: left @ right,
    "linear_readout": F.linear,
    "rotary": lambda input: rotated(input),
    "silu_glu": lambda input, gate: input * F.silu(gate),
    "geglu": lambda input, gate: input * F.gelu(gate),
    "logsigmoid": F.logsigmoid,
    "relu_squared": lambda input: F.relu(input).square(),
}

#: What is not torch's up to a factor: a sum of two terms, each with its own (see test_products.py).
SUMS = {"addmm": {"output"}}

#: What torch cannot do with its own function, on a CPU.
TORCH_LACKS = {
    "grouped_mm": {"vmap"},
    "avg_pool3d": {"half precision"},
    "binary_cross_entropy": {"vmap"},  # twice a probability is none
    "hardsigmoid": {"double backward"},
}

#: Arguments of the torch function that make it the same function, where defaults differ.
TORCH_FORM = {
    "rms_norm": {"eps": 1e-5},
    "scaled_dot_product_attention": {"scale": 1 / 16},
} | {  # the gradient of a mean is that of the sum, see losses.py
    name: {"reduction": "sum"}
    for name in UNCHECKED
    if name.endswith(("loss", "kl_div", "entropy", "logits"))
}

#: Compiled or under vmap, they draw other random numbers.
RANDOM = {"dropout", "dropout1d", "dropout2d", "dropout3d"}

#: Their arguments or results are tuples: see test_recurrent.py and test_arithmetic.py.
TUPLES = set("cat stack gru lstm rnn_relu rnn_tanh".split())


def op_kwargs(op, dtype=torch.float64):
    """Arguments of op.fn: from CALLS, else a standard normal matrix for each required one."""
    torch.manual_seed(0)
    if op.name in CALLS:
        kwargs = CALLS[op.name]()
    else:
        required = [
            p
            for p in inspect.signature(op.fn).parameters.values()
            if p.default is p.empty
        ]
        kwargs = {p.name: normal(SIZE, SIZE) for p in required}
    return {
        k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in kwargs.items()
    }


def with_gradients(kwargs):
    return {
        k: v.clone().requires_grad_()
        if isinstance(v, Tensor) and v.is_floating_point()
        else v
        for k, v in kwargs.items()
    }


def results(fn, kwargs, *args):
    """Output and gradients by name, for a standard normal gradient of the output."""
    kwargs = with_gradients(kwargs)
    torch.manual_seed(1)
    output = fn(*args, **kwargs)
    torch.manual_seed(2)
    output.backward(
        torch.randn(output.shape, dtype=output.dtype) if output.dim() else None
    )
    grads = {
        k: v.grad
        for k, v in kwargs.items()
        if isinstance(v, Tensor) and v.grad is not None
    }
    return {"output": output.detach(), **grads}
