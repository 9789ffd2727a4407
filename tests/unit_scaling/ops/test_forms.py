"""Spellings of torch's functions, and the arguments of products and norms."""

import inspect
import operator

import torch
from torch import Tensor
from torch.nn import functional as F

import unit_scaling.functional as U
from tests.shared import assert_close, normals, parametrize, refuses
from unit_scaling.rules.table import OPS, find_op

normal = normals(0)


X, Y, W, B = normal(4, 6), normal(4, 6), normal(3, 6), normal(3)
SIGNAL, KERNEL, QKV = (
    normal(2, 4, 9),
    normal(6, 4, 3),
    [normal(2, 5, 4) for _ in range(3)],
)
LEFT, RIGHT = normal(4, 5), normal(5, 6)
T = Tensor

#: Op -> some of its spellings.
SPELLINGS = {
    "add": [torch.add, T.add_, operator.add, operator.iadd, T.__radd__, T.__iadd__],
    "sub": [torch.subtract, torch.rsub, operator.isub, T.sub_, T.__rsub__],
    "mul": [operator.imul, torch.multiply, T.mul_, T.__rmul__],
    "div": [torch.true_divide, T.__itruediv__, operator.truediv],
    "cat": [torch.cat, torch.concat, torch.concatenate],
    "softmax": [F.softmax, torch.softmax, T.softmax],
    "sigmoid": [torch.special.expit, F.sigmoid, T.sigmoid_],
    "relu": [torch.relu, F.relu, T.relu_],
    "dropout": [F.dropout, torch.dropout],
    "matmul": [
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.mv,
        operator.matmul,
        T.__rmatmul__,
    ],
}


@parametrize("name", SPELLINGS)
def test_spellings(name):
    assert {find_op(function).name for function in SPELLINGS[name]} == {name}


FORMS = [  # (torch function, args, kwargs), with the same results in each line
    [(F.linear, (X, W, B), {}), (F.linear, (X,), {"weight": W, "bias": B})],
    [
        (torch.matmul, (X, W.T), {}),
        (operator.matmul, (X, W.T), {}),
        (T.__rmatmul__, (W.T, X), {}),
        (torch.matmul, (X,), {"other": W.T}),
        (torch.mm, (X,), {"mat2": W.T}),
    ],
    [
        (F.layer_norm, (X, (6,)), {}),
        (torch.layer_norm, (X, [6], None, None, 1e-5, True), {}),
    ],
    [(F.rms_norm, (X, (6,)), {}), (torch.rms_norm, (X, [6]), {"eps": None})],
    [
        (F.conv1d, (SIGNAL, KERNEL), {}),
        (F.conv1d, (SIGNAL, KERNEL, None, (1,), (0,), (1,), 1), {}),
    ],
    [
        (F.scaled_dot_product_attention, QKV, {"scale": 0.5}),
        (F.scaled_dot_product_attention, (*QKV, None, 0.0, False), {"scale": 0.5}),
    ],
    [
        (torch.einsum, ("ij , jk", [LEFT, RIGHT]), {}),
        (torch.einsum, ("ij,jk", LEFT, RIGHT), {}),
        (torch.einsum, (LEFT, [0, 1], RIGHT, [1, 2]), {}),
        (torch.einsum, (LEFT, [0, 1], RIGHT, [1, 2], [0, 2]), {}),
    ],
]


@parametrize("forms", FORMS)
def test_every_calling_form_of_torch(forms):
    func, args, kwargs = forms[0]
    op = find_op(func)
    expected = func(*args, **kwargs) * op.scales(args, kwargs, func=func)["output"]
    for func, args, kwargs in forms:
        assert find_op(func) is op
        # A constraint is ignored by ops without one.
        got = op.call(args, kwargs, func=func, constraint="to_output_scale")
        assert_close(got, expected)


@parametrize(
    "name, same",
    [
        *((n, "matmul") for n in ("mm", "bmm", "mv")),
        ("baddbmm", "addmm"),
        ("swiglu", "silu_glu"),
    ],
)
def test_other_names(name, same):
    assert getattr(U, name) is getattr(U, same)


def test_out_is_refused_unless_none():
    op = OPS["matmul"]
    assert "out" not in op.bind((X, X.T), {"out": None}, torch.mm)


MODULES = ("attention", "convolution", "norms", "products", "recurrent")


@parametrize(
    "name",
    [
        name
        for name, op in OPS.items()
        if op.fn.__module__.rpartition(".")[2] in MODULES
    ],
)
def test_products_and_norms_take_what_torch_hands_on(name):
    """torch.nn.functional hands all of its arguments on by name, defaults too, as out=None."""
    op = OPS[name]
    for function in op.replaces:
        if getattr(function, "__module__", "") != "torch.nn.functional":
            continue
        parameters = inspect.signature(function).parameters.values()
        required = [p for p in parameters if p.default is p.empty]
        needed = [None for p in required if p.kind is p.POSITIONAL_OR_KEYWORD]
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        bound = op.bind(needed, defaults, function)
        assert bound.keys() <= inspect.signature(op.fn).parameters.keys()


V, T3 = ValueError, normal(2, 3, 4)
ADDMM, LINEAR = OPS["addmm"], OPS["linear"]

REFUSED = [  # (a call, its error, the message)
    (
        lambda: OPS["gelu"].call((X,), {"beta": 1}),
        TypeError,
        "unexpected keyword argument 'beta'",
    ),
    (
        lambda: LINEAR.call((X, W, *[None] * 5), {}),
        TypeError,
        "takes 6 arguments but 7 were given",
    ),
    (
        lambda: U.leaky_relu(X, 1.0, None, 0, 0, 1),
        TypeError,
        "leaky_relu takes 5 arguments by pos",
    ),
    (
        lambda: ADDMM.call((X, X, X), {"out": X}, func=torch.addmm),
        TypeError,
        "no out= argument",
    ),
    (lambda: ADDMM.call((X, X), {}, func=torch.addmm), TypeError, r"missing .* 'mat2'"),
    (lambda: U.gelu(X, constraint="pow"), V, "choose one of None, 'amean', 'gmean'"),
    (lambda: U.einsum("ij,jk,kl->il", X, X, X), TypeError, "a tuple of the others"),
    (lambda: U.einsum("ij,jk", X), V, "needs 2 operands, got 1"),
    (lambda: U.einsum("ij->ij", T3), V, "'ij' does not fit an operand of 3 dimensions"),
    (lambda: U.linear(X, X[0]), V, r"weight of shape \(out, in\), got \(6,\)"),
    (lambda: U.softmax(X, 5), IndexError, "Dimension out of range"),
    (lambda: U.silu(X, True), V, "mult is True, not a number above 0; give torch's"),
    (lambda: U.softmax(X, -1, mult=-1.0), V, r"mult is -1\.0, not a"),
    (lambda: U.cat([X, Y[:, :2]]), RuntimeError, "Sizes of tensors must match"),
]


@parametrize("call, error, message", REFUSED)
def test_calls_that_do_not_fit_are_refused(call, error, message):
    with refuses(message, error):
        call()
