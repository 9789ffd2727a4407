"""Behaviour of single functions: calling forms, edge cases, and errors."""

import inspect
import math
import operator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import unit_scaling.functional as U
from unit_scaling.rules.table import OPS, find_op

X = torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(4, 6)
ATTENTION = OPS["scaled_dot_product_attention"]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def gradient(loss: Tensor, x: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss, x)
    return grad


# --- calling forms -------------------------------------------------------------------------

SIGNATURES = {  # the parameters of 0.3.5, in order; further ones may only follow
    "add": "input other constraint alpha out",
    "conv1d": "input weight bias stride padding dilation groups constraint scale_power",
    "cross_entropy": "input target weight size_average ignore_index reduce reduction "
    "label_smoothing mult",
    "dropout": "input p training inplace",
    "embedding": "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse",
    "gelu": "input mult constraint approximate",
    "layer_norm": "input normalized_shape weight bias eps",
    "linear": "input weight bias constraint scale_power",
    "linear_readout": "input weight bias constraint",
    "matmul": "left right constraint",
    "mse_loss": "input target size_average reduce reduction",
    "residual_add": "residual skip tau",
    "residual_apply": "fn input tau",
    "residual_split": "input tau",
    "rms_norm": "input normalized_shape weight eps",
    "scaled_dot_product_attention": "query key value attn_mask dropout_p is_causal mult",
    "silu": "input mult constraint inplace",
    "silu_glu": "input gate mult",
    "softmax": "input dim dtype constraint mult",
}


@pytest.mark.proves("unit-scaling", "U for F", how="own")
@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_a_drop_in(name: str):
    parameters = list(inspect.signature(getattr(U, name)).parameters)
    expected = SIGNATURES[name].split()
    assert parameters[: len(expected)] == expected
    assert name in U.__all__


@pytest.mark.parametrize(
    ("name", "same"),
    [
        *((name, "matmul") for name in ("mm", "bmm", "mv")),
        ("baddbmm", "addmm"),
        ("swiglu", "silu_glu"),
    ],
)
def test_other_names(name: str, same: str):
    assert getattr(U, name) is getattr(U, same)


W, B = torch.randn(3, 6, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
INDICES = torch.tensor([[0, 2], [1, 2]])
SIGNAL, KERNEL = torch.randn(2, 4, 9, dtype=torch.float64), torch.randn(6, 4, 3).double()
QKV = tuple(torch.randn(2, 5, 4, dtype=torch.float64) for _ in range(3))

FORMS = [  # (torch function, args, kwargs), with the same results in each line
    [(F.linear, (X, W), {}), (F.linear, (X,), {"weight": W}), (F.linear, (X, W, None), {})],
    [(F.linear, (X, W, B), {}), (F.linear, (X, W), {"bias": B})],
    [(F.silu, (X, False), {}), (F.silu, (X,), {"inplace": False}), (F.silu, (X.clone(), True), {})],
    [(F.gelu, (X,), {"approximate": "tanh"})],
    [
        (F.softmax, (X, -1), {}),
        (F.softmax, (X, 1, 5), {}),
        (F.softmax, (X,), {"dim": 1, "_stacklevel": 5, "dtype": None}),
        (torch.softmax, (X, 1), {}),
        (torch.softmax, (X, 1, torch.float64), {}),
        (torch.Tensor.softmax, (X, -1), {"dtype": torch.float64}),
    ],
    [
        (torch.matmul, (X, W.T), {}),
        (torch.matmul, (X,), {"other": W.T}),
        (torch.Tensor.matmul, (X, W.T), {}),
        (torch.Tensor.__matmul__, (X, W.T), {}),
        (torch.Tensor.__rmatmul__, (W.T, X), {}),
        (operator.matmul, (X, W.T), {}),
        (torch.mm, (X,), {"mat2": W.T}),
    ],
    [(torch.bmm, (SIGNAL, SIGNAL.mT), {}), (torch.Tensor.bmm, (SIGNAL,), {"mat2": SIGNAL.mT})],
    [
        (torch.add, (X, X), {"alpha": 2}),
        (torch.Tensor.add, (X, X), {"alpha": 2}),
        (torch.Tensor.add_, (X.clone(), X), {"alpha": 2}),
        (torch.add, (X, X), {"alpha": 2, "out": torch.empty_like(X)}),
    ],
    [
        (operator.add, (X, X), {}),
        (torch.Tensor.__radd__, (X, X), {}),
        (operator.iadd, (X.clone(), X), {}),
        (torch.Tensor.__iadd__, (X.clone(), X), {}),
    ],
    [(operator.add, (X, 1), {}), (torch.Tensor.__radd__, (X, 1), {}), (torch.add, (1, X), {})],
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
    [(F.mse_loss, (X, X + 1), {}), (F.mse_loss, (X, X + 1, None, None, "mean"), {})],
]


@pytest.mark.parametrize("forms", FORMS, ids=lambda f: f[0][0].__name__)
def test_every_calling_form_of_torch(forms):
    outputs = []
    for func, args, kwargs in forms:
        op = find_op(func)
        constraint = {"constraint": "to_output_scale"}  # ignored by ops without one
        scale = op.scales(args, kwargs, func=func)["output"]
        outputs.append(op.call(args, kwargs, func=func, **constraint))
        # In-place forms have changed their first argument by now: compare with the first form.
        plain = forms[0][0](*forms[0][1], **forms[0][2])
        torch.testing.assert_close(outputs[-1], plain * scale)
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0])


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


def test_calls_that_do_not_fit_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'beta'"):
        OPS["gelu"].call((X,), {"beta": 1})
    with pytest.raises(TypeError, match="linear takes 6 arguments but 7 were given"):
        OPS["linear"].call((X, W, None, None, None, 1.0, 2), {})
    with pytest.raises(TypeError, match="no out= argument"):
        OPS["matmul"].call((X, W.T), {"out": X})
    with pytest.raises(ValueError, match="choose None or one of 'amean', 'gmean'"):
        U.gelu(X, constraint="pow")


# --- products ------------------------------------------------------------------------------


def test_linear_of_an_empty_batch():
    x, w = torch.zeros(0, 6, requires_grad=True), torch.randn(3, 6, requires_grad=True)
    y = U.linear(x, w)
    y.sum().backward()
    assert y.shape == (0, 3)
    assert x.grad.shape == x.shape
    assert not w.grad.any()


def test_matmul_of_vectors_and_broadcast_batches():
    v, m = torch.randn(6).double(), torch.randn(2, 1, 6, 5).double()
    n = torch.randn(3, 4, 6).double()
    for left, right in ((v, v), (v, m), (n, v), (n, m)):
        torch.testing.assert_close(U.matmul(left, right), torch.matmul(left, right) / 6**0.5)
    # the gradient of a matrix that is shared by a batch collects one term from each
    scales = OPS["matmul"].rule(n, W.T, constraint=None)
    assert scales["right"] == pytest.approx((3 * 4) ** -0.5)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("padding", ["same", "valid", 1, (2,)])
@pytest.mark.parametrize("stride", [1, (1,)])
def test_conv1d_padding(padding, stride):
    w = torch.randn(6, 4, 4).double()
    scale = OPS["conv1d"].rule(SIGNAL, w, stride, padding)["output"]
    expected = F.conv1d(SIGNAL, w, stride=stride, padding=padding)
    torch.testing.assert_close(
        U.conv1d(SIGNAL, w, stride=stride, padding=padding), expected * scale
    )


# --- activations ---------------------------------------------------------------------------


def test_dropout_is_the_identity_when_not_training():
    assert U.dropout(X, 0.5, training=False) is X
    assert torch.equal(U.dropout(X, 1.0), torch.zeros_like(X))
    assert torch.equal(U.dropout(X, 0.0), X)
    with pytest.raises(ValueError, match=r"between 0 and 1, but got 1\.5"):
        U.dropout(X, 1.5)


def test_in_place_forms_write_to_their_input():
    x = X.clone()
    assert U.silu(x, inplace=True) is x
    torch.testing.assert_close(x, U.silu(X))
    leaf = X.clone().requires_grad_()
    y = leaf * 1
    U.silu(y, inplace=True).sum().backward()
    other = X.clone().requires_grad_()
    U.silu(other).sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)
    z = torch.ones(1000)
    assert U.dropout(z, 0.5, inplace=True) is z
    assert sorted(z.unique().tolist()) == pytest.approx([0.0, 2**0.5])


def test_add_leaves_integers_and_numbers_alone():
    positions = torch.arange(4)
    assert torch.equal(U.add(positions, 1), positions + 1)
    assert torch.equal(U.add(positions, positions), positions * 2)
    assert torch.equal(U.add(X, positions[:, None]), X + positions[:, None])
    assert torch.equal(U.add(2.0, X), X + 2)


@pytest.mark.parametrize("shape", [(), (5,), (4, 5), (2, 4, 5)])
def test_softmax_without_dim(shape):
    x = torch.randn(shape).double()
    dim = 0 if len(shape) in (0, 1, 3) else 1
    total = U.softmax(x).sum(dim)  # s times a sum of 1
    torch.testing.assert_close(total, torch.full_like(total, total.flatten()[0].item()))
    assert U.softmax(x, None, torch.float32).dtype == torch.float32


@pytest.mark.parametrize("f", [U.gelu, U.silu, U.silu_glu], ids=lambda f: f.__name__)
def test_strided_and_broadcast_inputs(f):
    n = 2 if f is U.silu_glu else 1
    for view in (lambda x: x.mT, lambda x: x[::2, 1:], lambda x: x[:1]):
        args = [torch.randn(6, 5).double() for _ in range(n)]
        leaves = [view(x).detach().requires_grad_() for x in args]
        copies = [view(x).clone().contiguous().requires_grad_() for x in args]
        f(*leaves).sum().backward()
        f(*copies).sum().backward()
        for leaf, copy in zip(leaves, copies, strict=True):
            torch.testing.assert_close(leaf.grad, copy.grad)
    row, matrix = torch.randn(5).double(), torch.randn(6, 5).double()
    expected = U.silu_glu(row.expand(6, 5), matrix)
    torch.testing.assert_close(U.silu_glu(row, matrix), expected)


def test_forward_mode_derivatives():
    x, g = X.clone(), torch.randn_like(X)
    for f in (U.gelu, U.silu, lambda x: U.silu_glu(x, 2 * x), lambda x: U.silu_glu(X, x)):
        _, tangent = torch.func.jvp(f, (x,), (g,))
        _, backward = torch.func.vjp(f, x)
        # <J g, 1> = <g, J^T 1>
        torch.testing.assert_close(tangent.sum(), (backward(torch.ones_like(x))[0] * g).sum())


# --- attention -----------------------------------------------------------------------------


def test_attention_to_one_token_returns_its_value():
    q = torch.randn(2, 1, 4)
    assert torch.equal(U.scaled_dot_product_attention(q, q, q, is_causal=True), q)
    assert ATTENTION.rule(q, q, is_causal=True)["output"] == 1.0


def test_attention_scale_and_mult():
    scaled = U.scaled_dot_product_attention(*QKV, scale=0.5, mult=3.0)
    torch.testing.assert_close(scaled, U.scaled_dot_product_attention(*QKV, mult=3.0 * 0.5 * 4))
    s = ATTENTION.rule(QKV[0], QKV[2], scale=0.5)["output"]
    plain = F.scaled_dot_product_attention(*QKV, scale=0.5)
    torch.testing.assert_close(U.scaled_dot_product_attention(*QKV, scale=0.5), plain * s)


@pytest.mark.parametrize("mask", ["boolean", "additive"])
def test_attention_mask(mask: str):
    allowed = torch.ones(5, 5).bool().tril()
    given = (
        allowed
        if mask == "boolean"
        else torch.zeros(5, 5).double().masked_fill(~allowed, -math.inf)
    )
    s = ATTENTION.rule(QKV[0], QKV[2])["output"]
    plain = F.scaled_dot_product_attention(*QKV, is_causal=True, scale=0.25)
    torch.testing.assert_close(U.scaled_dot_product_attention(*QKV, attn_mask=given), plain * s)


def test_grouped_query_attention():
    q, k, v = torch.randn(2, 6, 5, 4), torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4)
    repeated = [t.repeat_interleave(3, dim=1) for t in (k, v)]
    expected = U.scaled_dot_product_attention(q, *repeated, is_causal=True)
    got = U.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(got, expected)


# --- norms, embedding, residuals -----------------------------------------------------------


@pytest.mark.parametrize("shape", [[6], (6,), torch.Size([6])], ids=str)
def test_norms_take_any_sequence(shape):
    assert U.rms_norm(X, shape).shape == U.layer_norm(X, shape).shape == X.shape


def test_embedding_forms():
    w = torch.randn(5, 3, requires_grad=True)
    assert U.embedding(torch.zeros(0, 2, dtype=torch.long), w).shape == (0, 2, 3)
    U.embedding(INDICES, w, padding_idx=2).sum().backward()
    assert not w.grad[2].any()
    scale = (5 / 4) ** 0.5
    assert w.grad[0].tolist() == pytest.approx([scale] * 3)
    w.grad = None
    U.embedding(INDICES, w, sparse=True).sum().backward()
    assert w.grad.is_sparse
    renormed = U.embedding(INDICES, w.detach().clone() * 10, max_norm=1.0)
    assert renormed.norm(dim=-1).max() <= 1 + 1e-5


@pytest.mark.proves("unit-scaling", "skip and residual additions", how="own")
def test_residual_branch_equals_its_weighted_sum():
    """split and add together have the gradient of the weighted sum itself."""
    tau, x = 0.3, X.clone().requires_grad_()
    a, b = tau / (1 + tau**2) ** 0.5, 1 / (1 + tau**2) ** 0.5
    y = U.residual_apply(torch.sin, x, tau)
    torch.testing.assert_close(y, a * X.sin() + b * X)
    torch.testing.assert_close(gradient(y.sum(), x), a * X.cos() + b)


def test_residual_add_broadcasts():
    branch, skip = torch.ones(4, 1, requires_grad=True), torch.ones(6, requires_grad=True)
    U.residual_add(branch, skip).sum().backward()
    assert branch.grad.tolist() == [[6.0]] * 4
    assert skip.grad.tolist() == [4.0] * 6


@pytest.mark.parametrize("tau", [-0.5, float("nan")])
def test_a_branch_of_negative_weight_is_refused(tau):
    for call in (lambda: U.residual_split(X, tau), lambda: U.residual_add(X, X, tau)):
        with pytest.raises(ValueError, match=f"tau, .* is at least 0, got {tau}"):
            call()


def test_one_branch_without_gradient():
    x = X.clone().requires_grad_()
    branch, _ = U.residual_split(x, 2.0)
    torch.testing.assert_close(gradient(branch.sum(), x), torch.full_like(X, 2 / 5**0.5))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: U.silu(x, True),
        lambda x: U.silu_glu(x, x, 0.0),
        lambda x: U.softmax(x, -1, mult=-1.0),
    ],
)
def test_a_mult_that_is_no_number_above_zero(call):
    """Torch's ``silu(x, inplace)`` was a division by zero, or silently not in place."""
    with pytest.raises(ValueError, match=r"mult is .*, not a number above 0; give torch's"):
        call(X)
