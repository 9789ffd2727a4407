"""Properties of every row of OPS. A new row is tested by existing.

Inputs that are not standard normal matrices, and statistics that a rule leaves aside on purpose,
are listed in calls.py.
"""

import functools
import inspect
import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import unit_scaling.functional as U
from tests.shared import (
    assert_close,
    filterwarnings,
    in_one_graph,
    one_in,
    parametrize,
    proves,
    rms,
    sampled,
)
from tests.unit_scaling.ops.calls import (
    FITTED,
    PLAIN,
    RANDOM,
    SIZE,
    SUMS,
    TORCH_FORM,
    TORCH_LACKS,
    TUPLES,
    UNCHECKED,
    op_kwargs,
    results,
    with_gradients,
)
from unit_scaling.rules.table import OPS


def ideal(op):
    return {"constraint": None} if "constraint" in op.takes else {}


each_op = parametrize(
    "op", [op for op in OPS.values() if op.name not in TUPLES], ids=lambda op: op.name
)


@proves("unit-scaling", "U for F")
@each_op
def test_unit_scale_without_constraint(op):
    """Five standard errors of an RMS over n values: 5 / sqrt(2 n), n counting rows and columns.

    Entries of a row share an operand, so a matrix counts as its shorter side squared at most.
    """
    factor = FITTED.get(op.name, 1.0)
    for name, x in results(op.fn, {**op_kwargs(op), **ideal(op)}).items():
        if name in UNCHECKED.get(op.name, ()):
            continue
        # Conservative: as many as the shortest sum has terms.
        independent = min(x.numel(), SIZE)
        error = 1 + 5 / math.sqrt(2 * independent)
        if name == "bias" and not op_kwargs(op)["bias"].any():
            error = 1 + 5 / math.sqrt(2 * x.numel())
        assert 1 / (factor * error) < rms(x) < factor * error, (op.name, name, rms(x))


def rule_of(op, kwargs):
    """Its factors: it reads some of the arguments."""
    read = inspect.signature(op.rule).parameters
    return op.rule(**{k: v for k, v in kwargs.items() if k in read})


def torch_kwargs(op):
    return {**op_kwargs(op), **TORCH_FORM.get(op.name, {})}


@each_op
def test_constrained_gradient_is_parallel_to_torch(op):
    """With the default constraint: the same function and gradients up to a factor per tensor."""
    plain = PLAIN.get(op.name) or op.replaces[0]
    kwargs = torch_kwargs(op)
    ours, theirs = results(op.fn, kwargs), results(plain, kwargs)
    s = rule_of(op, op_kwargs(op))
    for name in theirs.keys() - SUMS.get(op.name, set()):
        # An op with mult=1 is the plain one times its factor; float64, so 1e-9 is rounding.
        assert_close(ours[name], theirs[name] * s[name], rtol=1e-9, atol=1e-9)


@sampled(4)
@proves("unit-scaling", "FP16 and FP8")
@each_op
@parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_is_kept(op, dtype):
    if dtype.itemsize == 2 and "half precision" in TORCH_LACKS.get(op.name, ()):
        pytest.skip("torch cannot")
    for x in results(op.fn, op_kwargs(op, dtype)).values():
        assert x.dtype == dtype
        assert x.isfinite().all()


@each_op
def test_autocast(op):
    """The dtype of the output is that of the torch function under the same autocast."""
    kwargs = op_kwargs(op, torch.float32)
    plain = PLAIN.get(op.name) or op.replaces[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain(**kwargs | TORCH_FORM.get(op.name, {}))
        got = results(op.fn, kwargs)
    assert got.pop("output").dtype == expected.dtype
    assert all(x.dtype == torch.float32 and x.isfinite().all() for x in got.values())


@each_op
def test_rule_reads_shapes_only(op):
    kwargs = op_kwargs(op)
    meta = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    expected = rule_of(op, kwargs)
    assert rule_of(op, meta) == expected
    assert all(isinstance(scale, float | int) for scale in expected.values())
    assert "output" in expected
    assert set(expected) - {"output"} <= set(inspect.signature(op.fn).parameters)


@each_op
def test_double_backward(op):
    """The gradient is itself differentiable: a penalty on it has a finite, non-zero gradient."""
    if "double backward" in TORCH_LACKS.get(op.name, ()):
        pytest.skip("torch cannot")
    kwargs = with_gradients(op_kwargs(op))
    torch.manual_seed(1)
    leaves = [v for v in kwargs.values() if isinstance(v, Tensor) and v.requires_grad]
    with sdpa_kernel(
        SDPBackend.MATH
    ):  # torch's fused attention can be differentiated once
        output = op.fn(**kwargs)
    grads = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
    torch.autograd.backward(sum(g.square().sum() for g in grads))
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves)
    assert any(leaf.grad.any() for leaf in leaves)


@filterwarnings("ignore:There is a performance drop because we have not yet")
@each_op
def test_func_grad_and_vmap(op):
    """torch.func gives what autograd gives, one example at a time or all at once."""
    kwargs = op_kwargs(op)
    name = next(
        k for k, v in kwargs.items() if isinstance(v, Tensor) and v.is_floating_point()
    )

    def loss(x):
        torch.manual_seed(1)
        with sdpa_kernel(SDPBackend.MATH):
            return op.fn(**{**kwargs, name: x}).sum()

    x = kwargs[name].clone().requires_grad_()
    loss(x).backward()
    assert_close(torch.func.grad(loss)(kwargs[name]), x.grad)
    if op.name not in RANDOM and "vmap" not in TORCH_LACKS.get(op.name, ()):
        stacked = torch.stack([kwargs[name], 2 * kwargs[name]])
        both = torch.func.vmap(torch.func.grad(loss))(stacked)
        assert_close(both[0], x.grad)


def test_names():
    assert all(getattr(U, name) is op.fn for name, op in OPS.items())
    assert all(op.fn.__doc__ and op.rule.__doc__ for op in OPS.values())


# --- compiled ------------------------------------------------------------------------------

#: Ops that compile as another does, line for line.
COMPILE_ALIKE = {"conv3d", "conv_transpose2d", "conv_transpose3d"}


def run_all(settings, **calls):
    return {name: OPS[name].fn(**kwargs, **settings) for name, kwargs in calls.items()}


def all_results(fn, settings, calls):
    """As `results`, by op, of one call for several of them."""
    calls = {name: with_gradients(kwargs) for name, kwargs in calls.items()}
    outputs = fn(settings, **calls)
    torch.manual_seed(2)
    gradients = [torch.randn(y.shape) for y in outputs.values()]
    torch.autograd.backward(list(outputs.values()), gradients)
    grads = {
        name: {k: v.grad for k, v in kwargs.items() if isinstance(v, Tensor)}
        for name, kwargs in calls.items()
    }
    return {"output": {k: v.detach() for k, v in outputs.items()}, **grads}


def has_dynamic_rule(op):
    return not {"input", "left", "query"}.isdisjoint(
        inspect.signature(op.rule).parameters
    )


def groups():
    """(operations that are compiled as one graph, their constraint, whether sizes are symbols).

    Symbolic sizes are for rules that read sizes, without constraint where there is a choice. What
    the compiler makes of those is not in the rules: its backend comes with sizes that are known.
    """
    ops = [op for op in OPS.values() if op.name not in RANDOM | COMPILE_ALIKE | TUPLES]
    free, tied = (
        [op for op in ops if ("constraint" in op.takes) is can] for can in (True, False)
    )
    found = [
        (tied, {}, False),
        (tied, {}, True),
        (free, {"constraint": "to_output_scale"}, False),
    ]
    found += [(free, {"constraint": None}, False), (free, {"constraint": None}, True)]
    return [
        pytest.param(
            part, settings, dynamic, id=f"{part[0].name} to {part[-1].name}, {dynamic}"
        )
        for group, settings, dynamic in found
        for rows in [[op for op in group if has_dynamic_rule(op) or not dynamic]]
        for part in (rows[i : i + 8] for i in range(0, len(rows), 8))
    ]


@parametrize("backend", ["eager", one_in(8, "aot_eager")])
@parametrize("ops, settings, dynamic", groups())
def test_compiles_whole(ops, settings, dynamic, backend):
    calls = {op.name: op_kwargs(op, torch.float32) for op in ops}
    compiled = torch.compile(run_all, backend=backend, fullgraph=True, dynamic=dynamic)
    expected, got = (all_results(fn, settings, calls) for fn in (run_all, compiled))
    assert_close(got, expected)


@parametrize("name", sorted(RANDOM))
def test_random_op_compiles_whole(name):
    compiled = in_one_graph(OPS[name].fn)
    kwargs = op_kwargs(OPS[name], torch.float32)
    expected, got = results(OPS[name].fn, kwargs), results(compiled, kwargs)
    assert all(
        got[k].isfinite().all() and got[k].shape == x.shape for k, x in expected.items()
    )


def test_forward_mode_in_a_graph():
    def derivatives(x, tangent):
        ops = [U.exp, U.sigmoid, U.tanh, functools.partial(U.softmax, dim=-1)]
        return [torch.func.jvp(op, (x,), (tangent,)) for op in ops]

    x, tangent = torch.randn(2, 4, 8, dtype=torch.float64).unbind()
    got = in_one_graph(derivatives)(x, tangent)
    assert_close(got, derivatives(x, tangent))
