"""Every calling form of torch, by name, by position, as a method, operator or in place."""

import inspect
import operator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import unit_scaling.functional as U
from unit_scaling.rules.table import OPS, find_op

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


X, Y, W, B = normal(4, 6), normal(4, 6), normal(3, 6), normal(3)
SIGNAL, KERNEL, QKV = normal(2, 4, 9), normal(6, 4, 3), [normal(2, 5, 4) for _ in range(3)]
LEFT, RIGHT = normal(4, 5), normal(5, 6)
INDICES = torch.tensor([[0, 2], [1, 2]])
T = Tensor


def of(*functions, args=(X,), **kwargs) -> list:
    """Functions of the same arguments; those in place get copies."""
    return [(f, args, kwargs) for f in functions]


FORMS = [  # (torch function, args, kwargs), with the same results in each line
    [(F.linear, (X, W), {}), (F.linear, (X,), {"weight": W}), (F.linear, (X, W, None), {})],
    [(F.linear, (X, W, B), {}), (F.linear, (X, W), {"bias": B})],
    [(F.silu, (X, False), {}), (F.silu, (X,), {"inplace": False}), (F.silu, (X, True), {})],
    of(F.gelu, approximate="tanh"),
    [
        (F.softmax, (X, -1), {}),
        (F.softmax, (X, 1, 5), {}),
        (F.softmax, (X,), {"dim": 1, "_stacklevel": 5, "dtype": None}),
        (torch.softmax, (X, 1), {}),
        (torch.softmax, (X, 1, torch.float64), {}),
        (T.softmax, (X, -1), {"dtype": torch.float64}),
    ],
    [(F.log_softmax, (X, -1), {}), (torch.log_softmax, (X, 1), {})],
    [(F.softmin, (X, -1), {}), (F.softmin, (X,), {"dim": 1, "_stacklevel": 5})],
    [
        *of(torch.matmul, T.matmul, T.__matmul__, operator.matmul, args=(X, W.T)),
        (T.__rmatmul__, (W.T, X), {}),
        (torch.matmul, (X,), {"other": W.T}),
        (torch.mm, (X,), {"mat2": W.T}),
    ],
    [(torch.bmm, (SIGNAL, SIGNAL.mT), {}), (T.bmm, (SIGNAL,), {"mat2": SIGNAL.mT})],
    [
        *of(torch.add, T.add, T.add_, args=(X, X), alpha=2),
        (torch.add, (X, X), {"alpha": 2, "out": torch.empty_like(X)}),
    ],
    of(operator.add, T.__radd__, operator.iadd, T.__iadd__, args=(X, X)),
    [*of(operator.add, T.__radd__, args=(X, 1)), (torch.add, (1, X), {})],
    [
        *of(torch.sub, T.sub_, args=(X, Y), alpha=2),
        (torch.subtract, (X, Y), {"alpha": 2, "out": torch.empty_like(X)}),
    ],
    [*of(operator.sub, operator.isub, args=(X, Y)), (torch.rsub, (Y, X), {})],
    [(operator.sub, (1, X), {}), (T.__rsub__, (X, 1), {})],
    [(torch.rsub, (X, Y), {"alpha": 2}), (T.__rsub__, (X, Y), {"alpha": 2})],
    [*of(operator.mul, T.mul_, args=(X, Y)), (torch.multiply, (Y, X), {})],
    [(operator.mul, (2, X), {}), *of(T.__rmul__, operator.imul, args=(X, 2))],
    *(
        of(torch.div, torch.true_divide, T.div, T.__truediv__, operator.truediv, args=(X, divisor))
        for divisor in (2.0, Y, Y[:1])
    ),
    of(T.div_, T.__itruediv__, operator.itruediv, args=(X, Y)),
    of(torch.div, args=(X, Y), rounding_mode="floor"),
    [(torch.sum, (X, 1), {}), (T.sum, (X,), {"axis": -1}), (torch.sum, (X, (1,)), {})],
    [(torch.mean, (X,), {"dim": 0}), (T.mean, (X, 0, False), {})],
    [(torch.mean, (X, -1, True), {}), (T.mean, (X,), {"dim": 1, "keepdim": True})],
    of(torch.mean, T.mean),
    *(
        of(function, args=(X, *args), **named)
        for function in (torch.var, torch.std)
        for args, named in [
            ((), {}),
            ((1,), {}),
            ((True,), {}),
            ((0, False), {}),
            ((1, True, True), {}),
            (((0, 1),), {"correction": 2, "keepdim": True}),
            ((), {"unbiased": False}),
        ]
    ),
    [(F.layer_norm, (X, (6,)), {}), (torch.layer_norm, (X, [6], None, None, 1e-5, True), {})],
    [(F.rms_norm, (X, (6,)), {}), (torch.rms_norm, (X, [6]), {"eps": None})],
    [(F.embedding, (INDICES, W), {}), (F.embedding, (INDICES,), {"weight": W, "sparse": False})],
    [(F.dropout, (X, 0.3, False), {}), (torch.dropout, (X,), {"p": 0.3, "train": False})],
    [(F.conv1d, (SIGNAL, KERNEL), {}), (F.conv1d, (SIGNAL, KERNEL, None, (1,), (0,), (1,), 1), {})],
    [
        (F.conv1d, (SIGNAL, KERNEL, None, 1, "same"), {}),
        (F.conv1d, (SIGNAL, KERNEL), {"padding": 1}),
    ],
    [
        (F.scaled_dot_product_attention, QKV, {"scale": 0.5}),
        (F.scaled_dot_product_attention, (*QKV, None, 0.0, False), {"scale": 0.5}),
    ],
    [(F.mse_loss, (X, Y), {}), (F.mse_loss, (X, Y, None, None, "mean"), {})],
    [
        (F.leaky_relu, (X, 0.2), {}),
        (F.leaky_relu, (X, 0.2, True), {}),
        (F.leaky_relu_, (X, 0.2), {}),
    ],
    [*of(torch.relu, T.relu_), (F.relu, (X, True), {})],
    [(F.elu, (X, 0.5), {}), (F.elu, (X,), {"alpha": 0.5, "inplace": False})],
    [*of(torch.celu, torch.celu_, args=(X, 0.5)), (F.celu, (X,), {"alpha": 0.5})],
    [(F.softplus, (X, 2, 3), {}), (F.softplus, (X,), {"beta": 2, "threshold": 3})],
    [
        (F.hardtanh, (X, -2.0, 0.5, False), {}),
        (F.hardtanh_, (X,), {"min_val": -2.0, "max_val": 0.5}),
    ],
    of(torch.tanh, T.tanh, torch.tanh_),
    of(torch.sigmoid, torch.special.expit, F.sigmoid),
    [
        (torch.einsum, ("ij , jk", [LEFT, RIGHT]), {}),
        (torch.einsum, ("ij,jk", LEFT, RIGHT), {}),
        (torch.einsum, (LEFT, [0, 1], RIGHT, [1, 2]), {}),
        (torch.einsum, (LEFT, [0, 1], RIGHT, [1, 2], [0, 2]), {}),
    ],
]


def copied(args) -> tuple:
    """The arguments, of which forms in place may change the first."""
    return tuple(a.clone() if isinstance(a, Tensor) and i == 0 else a for i, a in enumerate(args))


@pytest.mark.parametrize("forms", FORMS, ids=lambda forms: forms[0][0].__name__)
def test_every_calling_form_of_torch(forms):
    func, args, kwargs = forms[0]
    op = find_op(func)
    scales = op.scales(copied(args), kwargs, func=func)
    expected = func(*copied(args), **kwargs) * scales["output"]
    for func, args, kwargs in forms:
        assert find_op(func) is op
        # A constraint is ignored by ops without one.
        got = op.call(copied(args), kwargs, func=func, constraint="to_output_scale")
        torch.testing.assert_close(got, expected)
        assert op.scales(copied(args), kwargs, func=func)["output"] == scales["output"]


@pytest.mark.parametrize(
    ("name", "same"),
    [*((n, "matmul") for n in ("mm", "bmm", "mv")), ("baddbmm", "addmm"), ("swiglu", "silu_glu")],
)
def test_other_names(name: str, same: str):
    assert getattr(U, name) is getattr(U, same)


@pytest.mark.parametrize("func", [T.mul_, T.div_, T.__itruediv__, operator.itruediv])
def test_in_place_products_can_be_differentiated(func):
    leaf, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    x = leaf * 1
    result = find_op(func).call((x, y), {}, func=func)
    assert result is x
    result.sum().backward()
    is_product = func is T.mul_
    torch.testing.assert_close(leaf.grad, Y if is_product else 1 / Y)
    torch.testing.assert_close(y.grad, X if is_product else -X / Y**2)


OUT = {
    "a name": (torch.tensordot, (X, X), {"out": X}),
    "a position": (torch.tensordot, (X, X, 2, X), {}),
    "a position of normalize": (F.normalize, (X, 2.0, 1, 1e-12, X), {}),
}


@pytest.mark.parametrize("given", OUT)
def test_out_is_refused_unless_none(given: str):
    function, args, kwargs = OUT[given]
    op = find_op(function)
    with pytest.raises(TypeError, match=f"unit-scaled {op.name} has no out= argument"):
        op.bind(args, kwargs, function)
    without = tuple(None if i > 1 and value is X else value for i, value in enumerate(args))
    assert "out" not in op.bind(without, dict.fromkeys(kwargs), function)


@pytest.mark.parametrize("name", OPS)
def test_ops_take_what_torch_hands_on(name: str):
    """torch.nn.functional hands all of its arguments on by name, defaults too, as out=None."""
    op = OPS[name]
    for function in op.replaces:
        if getattr(function, "__module__", "") != "torch.nn.functional":
            continue
        given = inspect.signature(function).parameters.values()
        needed = [None for p in given if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        defaults = {p.name: p.default for p in given if p.default is not p.empty}
        bound = op.bind(needed, defaults, function)
        assert bound.keys() <= inspect.signature(op.fn).parameters.keys()


REFUSED = {  # a call -> the error
    "of no argument": (
        lambda: OPS["gelu"].call((X,), {"beta": 1}),
        TypeError,
        "unexpected keyword argument 'beta'",
    ),
    "of too many": (
        lambda: OPS["linear"].call((X, W, None, None, None, 1.0, 2), {}),
        TypeError,
        "linear takes 6 arguments but 7 were given",
    ),
    "of too many settings": (
        lambda: U.leaky_relu(X, 1.0, None, 0.1, False, True),
        TypeError,
        "leaky_relu takes 5 arguments by position",
    ),
    "of too many of a window": (
        lambda: U.avg_pool1d(SIGNAL, 2, 2, 0, False, True, None, 1),
        TypeError,
        "avg_pool1d takes 7 arguments by position",
    ),
    "out": (lambda: OPS["matmul"].call((X, W.T), {"out": X}), TypeError, "no out= argument"),
    "out of addmm": (
        lambda: OPS["addmm"].call((X, X, X), {"out": X}, func=torch.addmm),
        TypeError,
        "no out= argument",
    ),
    "too few": (
        lambda: OPS["addmm"].call((X, X), {}, func=torch.addmm),
        TypeError,
        r"missing .* 'mat2'",
    ),
    "no constraint": (
        lambda: U.gelu(X, constraint="pow"),
        ValueError,
        "choose None or one of 'amean', 'gmean'",
    ),
    "operands": (
        lambda: U.einsum("ij,jk,kl->il", X, X, X),
        TypeError,
        "a tuple of the others",
    ),
    "no equation": (lambda: U.einsum(X, [0, 1], X), TypeError, "equation must be a str"),
    "few operands": (lambda: U.einsum("ij,jk", X), ValueError, "needs 2 operands, got 1"),
    "dimensions": (
        lambda: U.einsum("ij->ij", SIGNAL),
        ValueError,
        "'ij' does not fit an operand of 3 dimensions",
    ),
    "weight": (
        lambda: U.linear(X, X[0]),
        ValueError,
        r"weight of shape \(out, in\), got \(6,\)",
    ),
    "dim": (lambda: U.softmax(X, 5), IndexError, "Dimension out of range"),
    "inplace as mult": (
        lambda: U.silu(X, True),
        ValueError,
        "mult is True, not a number above 0; give torch's",
    ),
    "mult of zero": (lambda: U.silu_glu(X, X, 0.0), ValueError, "mult is 0.0, not a number"),
    "negative mult": (lambda: U.softmax(X, -1, mult=-1.0), ValueError, "mult is -1.0, not a"),
    "no p": (lambda: U.normalize(X, p=-1), ValueError, "normalize needs p above 0: got -1"),
    "no norm": (
        lambda: U.lp_pool1d(SIGNAL, float("inf"), 2),
        ValueError,
        "norm_type is a positive number, got inf",
    ),
    "sizes": (
        lambda: U.cat([X, Y[:, :2]]),
        RuntimeError,
        "Sizes of tensors must match",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_calls_that_do_not_fit_are_refused(case: str):
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call()
