"""Losses, pooling, arithmetic and norms: values that are torch's, counts, calling forms, errors."""

import inspect
import math
import operator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
import unit_scaling.functional as U
from unit_scaling.rules.quadrature import largest_square
from unit_scaling.rules.table import OPS, find_op
from unit_scaling.transforms import unit_scale

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


X, Y = normal(4, 6), normal(4, 6)
P, Q = X.softmax(-1), Y.softmax(-1)
CTC = normal(9, 2, 6).log_softmax(-1)
CLASSES = torch.tensor([0, 5, 2, 2])

# --- losses --------------------------------------------------------------------------------

LOSSES = [  # (torch's function, arguments, settings)
    (F.nll_loss, (P.log(), CLASSES), {"ignore_index": 2}),
    (F.nll_loss, (P.log(), CLASSES), {"weight": torch.rand(6, generator=GENERATOR).double()}),
    (F.nll_loss, (P.log()[0], CLASSES[0]), {}),
    (F.nll_loss, (P.log().reshape(2, 6, 2), CLASSES.reshape(2, 2)), {}),
    (F.l1_loss, (X, Y), {}),
    (F.l1_loss, (X, Y), {"weight": P}),
    (F.smooth_l1_loss, (X, Y), {"beta": 0.3}),
    (F.smooth_l1_loss, (X, Y), {"beta": 0.0}),
    (F.huber_loss, (X, Y), {"delta": 2.0}),
    (F.binary_cross_entropy_with_logits, (X, P), {"pos_weight": Q[0]}),
    (F.binary_cross_entropy, (P, Q), {"weight": Q}),
    (F.kl_div, (P.log(), Q), {}),
    (F.kl_div, (P.log(), Q.log()), {"log_target": True}),
    (F.ctc_loss, (CTC, CLASSES[:2, None], (9, 7), (1, 1)), {"blank": 1}),
    (F.ctc_loss, (CTC[:, 0], CLASSES[1:], (9,), (3,)), {"zero_infinity": True}),
    (F.cosine_embedding_loss, (X, Y, CLASSES.clamp(0, 1) * 2 - 1), {"margin": -0.5}),
]


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "batchmean"])
@pytest.mark.parametrize("case", LOSSES, ids=lambda c: f"{c[0].__name__} {[*c[2]]}")
def test_loss(case, reduction: str):
    """The value is torch's to the bit; the gradient is the sum's, times the rule."""
    plain, args, settings = case
    op = find_op(plain)
    if reduction == "batchmean" and op.name != "kl_div":
        with pytest.raises(ValueError, match="unknown reduction 'batchmean'; choose one of"):
            op.call(args, {**settings, "reduction": reduction})
        return
    ours, theirs = args[0].clone().requires_grad_(), args[0].clone().requires_grad_()
    loss = op.call((ours, *args[1:]), {**settings, "reduction": reduction})
    assert torch.equal(loss, plain(*args, **settings, reduction=reduction))
    total = plain(theirs, *args[1:], **settings, reduction="sum")
    (grad,) = torch.autograd.grad(loss.sum(), ours)
    (expected,) = torch.autograd.grad(total, theirs)
    scales = op.scales(args, settings)
    torch.testing.assert_close(grad, expected * list(scales.values())[1])


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_broadcast_target_collects_gradients():
    s = OPS["l1_loss"].rule(X, Y[:1])
    assert (s["input"], s["target"]) == (1.0, 0.5)
    y = Y[:1].clone().requires_grad_()
    U.l1_loss(X, y, reduction="sum").backward()
    torch.testing.assert_close(y.grad, (y.detach() - X).sign().sum(0, keepdim=True) / 2)


def test_log_softmax_and_nll_make_cross_entropy():
    """Up to sqrt(1 - 1/classes), in which cross_entropy knows more about the gradient."""
    a, b = X.clone().requires_grad_(), X.clone().requires_grad_()
    U.nll_loss(U.log_softmax(a, -1), CLASSES).backward()
    U.cross_entropy(b, CLASSES).backward()
    torch.testing.assert_close(a.grad, b.grad * (1 - 1 / 6) ** 0.5)


# --- pooling -------------------------------------------------------------------------------


def test_largest_of_independent_normals():
    """Closed forms for 2 and 3 numbers; for more, the density of the maximum by a fine sum."""
    assert largest_square(2) == pytest.approx(1.0, rel=1e-9)
    assert largest_square(3) == pytest.approx(1 + math.sqrt(3) / (2 * math.pi), rel=1e-9)
    x = torch.linspace(-9, 9, 200_001, dtype=torch.float64)
    for count in (9, 1000):
        share = torch.special.ndtr(x) ** count
        mean = (share.diff() * ((x[1:] + x[:-1]) / 2).square()).sum().item()
        assert largest_square(count) == pytest.approx(mean, rel=1e-7)


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("settings", [(3, 2, 1), (2, None, 0), (3, 3, 1), (2, 3, 0), (4, 1, 2)])
def test_pooling_counts_its_outputs(settings, ceil_mode: bool):
    """The factor of the gradient is 1/sqrt(outputs per input), as torch counts outputs."""
    x = torch.randn(1, 1, 11, 8)
    kernel, stride, padding = settings
    y = F.max_pool2d(x, kernel, stride, padding, ceil_mode=ceil_mode)
    args, named = (x, kernel, stride, padding), {"ceil_mode": ceil_mode}
    s = OPS["max_pool2d"].scales(args, named, constraint=None)
    assert s["input"] == pytest.approx((x.numel() / y.numel()) ** 0.5)


def test_pooling_returns_indices():
    x = normal(2, 3, 8)
    values, indices = U.max_pool1d(x, 2, return_indices=True)
    expected, where = F.max_pool1d(x, 2, return_indices=True)
    assert torch.equal(indices, where)
    torch.testing.assert_close(values, expected / largest_square(2) ** 0.5)
    torch.testing.assert_close(U.max_pool1d(x, 2), values)
    with pytest.raises(ValueError, match="norm_type is a positive number, got inf"):
        U.lp_pool1d(x, math.inf, 2)
    with pytest.raises(TypeError, match="avg_pool1d takes 7 arguments by position"):
        U.avg_pool1d(x, 2, 2, 0, False, True, None, 1)


RESIZED = [("nearest", 1, 3.0), ("linear", 1, 2.5), ("bilinear", 2, 0.5), ("bicubic", 2, 3.0)]
RESIZED += [("area", 2, 0.25), ("trilinear", 3, 2.0), ("nearest-exact", 1, 0.5)]


@pytest.mark.parametrize(("mode", "dims", "factor"), RESIZED)
def test_interpolation_weighs_as_torch_does(mode: str, dims: int, factor: float):
    """Five standard errors of an RMS over the independent inputs."""
    torch.manual_seed(0)
    x = torch.randn(64, 4, *[8] * dims, dtype=torch.float64).requires_grad_()
    y = U.interpolate(x, scale_factor=factor, mode=mode, constraint=None)
    (grad,) = torch.autograd.grad(y, x, torch.randn_like(y))
    count = min(x.numel(), y.numel())
    for value in (y, grad):
        assert value.square().mean().sqrt().item() == pytest.approx(1, abs=5 / (2 * count) ** 0.5)


def test_large_sizes_are_measured_in_small():
    big, small = torch.empty(1, 1, 16000, device="meta"), torch.empty(1, 1, 256, device="meta")
    rule = OPS["interpolate"].rule
    s, expected = (rule(x, None, 2.0, "linear", constraint=None) for x in (big, small))
    assert s == pytest.approx(expected)


# --- arithmetic ----------------------------------------------------------------------------

FORMS = [  # (torch function, args, kwargs), with the same results in each line
    [
        (torch.sub, (X, Y), {"alpha": 2}),
        (torch.Tensor.sub_, (X.clone(), Y), {"alpha": 2}),
        (torch.subtract, (X, Y), {"alpha": 2, "out": torch.empty_like(X)}),
    ],
    [(operator.sub, (X, Y), {}), (operator.isub, (X.clone(), Y), {}), (torch.rsub, (Y, X), {})],
    [(operator.sub, (1, X), {}), (torch.Tensor.__rsub__, (X, 1), {})],
    [
        (operator.mul, (X, Y), {}),
        (torch.Tensor.mul_, (X.clone(), Y), {}),
        (torch.multiply, (Y, X), {}),
    ],
    [
        (operator.mul, (2, X), {}),
        (torch.Tensor.__rmul__, (X, 2), {}),
        (operator.imul, (X.clone(), 2), {}),
    ],
    [(torch.sum, (X, 1), {}), (torch.Tensor.sum, (X,), {"axis": -1}), (torch.sum, (X, (1,)), {})],
    [(torch.mean, (X,), {"dim": 0}), (torch.Tensor.mean, (X, 0, False), {})],
    [(torch.mean, (X, -1, True), {}), (torch.Tensor.mean, (X,), {"dim": 1, "keepdim": True})],
    [(torch.mean, (X,), {}), (torch.Tensor.mean, (X,), {})],
    [(F.log_softmax, (X, -1), {}), (torch.log_softmax, (X, 1), {})],
    [(F.softmin, (X, -1), {}), (F.softmin, (X,), {"dim": 1, "_stacklevel": 5})],
]


@pytest.mark.parametrize("forms", FORMS, ids=lambda f: f[0][0].__name__)
def test_every_calling_form_of_torch(forms):
    func, args, kwargs = forms[0]
    op = find_op(func)
    expected = func(*args, **kwargs) * op.scales(args, kwargs, func=func)["output"]
    for func, args, kwargs in forms:
        got = op.call(args, kwargs, func=func, constraint="to_output_scale")
        torch.testing.assert_close(got, expected)


def test_numbers_and_integers_are_left_alone():
    positions = torch.arange(4)
    assert torch.equal(U.mul(X, 0.5), X * 0.5)
    assert torch.equal(U.sub(1.0, X), 1 - X)
    assert torch.equal(U.sub(positions, 1), positions - 1)
    assert torch.equal(U.mul(positions, positions), positions**2)
    assert torch.equal(U.cumsum(positions, 0), positions.cumsum(0))
    assert torch.equal(U.sum(positions, 0), torch.tensor(6))
    assert torch.equal(U.sum(X > 0, -1), (X > 0).sum(-1))


def test_a_mean_of_everything_is_a_loss():
    """Its value is kept, and without constraint its gradient is that of the sum."""
    x = X.clone().requires_grad_()
    loss = U.mean(x, constraint=None)
    assert torch.equal(loss, X.mean())
    loss.backward()
    torch.testing.assert_close(x.grad, torch.ones_like(X))
    assert OPS["mean"].rule(X) == {"output": 1.0, "input": 1.0}
    assert OPS["sum"].rule(X, 1, True, None) == {"output": 1.0, "input": 1.0}


def test_a_product_in_place_can_be_differentiated():
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    z = x * 1
    OPS["mul"].call((z, y), {}, func=torch.Tensor.mul_).sum().backward()
    torch.testing.assert_close(x.grad, Y)
    torch.testing.assert_close(y.grad, X)


def test_broadcast_factor_collects_gradients():
    gain = Y[0].clone().requires_grad_()
    U.mul(X, gain, constraint=None).sum().backward()
    torch.testing.assert_close(gain.grad, X.sum(0) / 2)


# --- norms and dropout ---------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("name", ["BatchNorm1d", "InstanceNorm1d"])
def test_running_statistics_are_torchs(name: str, momentum: float | None, training: bool):
    settings = {"momentum": momentum, "affine": True, "track_running_stats": True}
    if name == "InstanceNorm1d" and momentum is None:
        pytest.skip("torch has no average there")
    ours, theirs = (getattr(space, name)(3, **settings) for space in (uu, nn))
    for model in (ours, theirs):
        model.train(training)
        torch.manual_seed(0)
        for _ in range(2):
            output = model(torch.randn(4, 3, 5) * 2 + 1)
        model.output = output
    torch.testing.assert_close(ours.output, theirs.output)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_instance_norm_of_one_image():
    x = torch.randn(3, 7, 6)
    torch.testing.assert_close(uu.InstanceNorm2d(3)(x), nn.InstanceNorm2d(3)(x))
    with pytest.raises(ValueError, match="expected 3D or 4D input"):
        uu.InstanceNorm2d(3)(x[0])


def test_layer_norm_of_images():
    x, layer = torch.randn(2, 6, 4, 5), uu.LayerNorm2d(6, eps=1e-3)
    expected = F.layer_norm(x.permute(0, 2, 3, 1), (6,), eps=1e-3).permute(0, 3, 1, 2)
    torch.testing.assert_close(layer(x), expected)
    assert [p.mup_type for p in layer.parameters()] == ["norm", "bias"]
    bare = uu.LayerNorm2d(6, affine=False)
    assert list(bare.parameters()) == []
    assert [p.mup_type for p in uu.LayerNorm2d(6, bias=False).parameters()] == ["norm"]
    with pytest.raises(ValueError, match="6 channels, its input 7"):
        bare(torch.randn(2, 7, 4, 5))
    assert repr(layer) == f"LayerNorm2d({nn.LayerNorm(6, eps=0.001).extra_repr()})"
    with pytest.raises(ValueError, match=r"takes \(batch, channels, ...\), got 1 dimensions"):
        U.layer_norm2d(x[0, 0, 0])


@pytest.mark.parametrize("p", [1.0, 3.0, math.inf])
def test_normalize_with_other_norms(p: float):
    """The expected norm is right to the spread of a norm over 4096 numbers, a few percent."""
    torch.manual_seed(0)
    y = U.normalize(torch.randn(16, 4096, dtype=torch.float64), p, constraint=None)
    assert y.square().mean().sqrt().item() == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize(
    "name", ["dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"]
)
def test_dropout(name: str):
    fn, dims = getattr(U, name), int(name[7]) if name[7].isdigit() else 1
    x = torch.randn(2, 3, *[4] * dims)
    torch.testing.assert_close(fn(x, 0.5, training=False), x)
    assert fn(x, 1.0, training=True).isfinite().all()
    with pytest.raises(ValueError, match=r"between 0 and 1, but got -0\.1"):
        fn(x, -0.1)


# --- modules and the transform -------------------------------------------------------------


def test_signatures_of_modules():
    assert list(inspect.signature(uu.LeakyReLU).parameters) == [
        "mult",
        "constraint",
        "negative_slope",
        "inplace",
    ]
    parameters = list(inspect.signature(uu.MaxPool2d).parameters)
    assert parameters[0] == "kernel_size"
    assert parameters[-1] == "constraint"
    layer = uu.LeakyReLU(2.0, None, 0.3)
    torch.testing.assert_close(layer(X), U.leaky_relu(X, 2.0, None, 0.3))
    pool = uu.AvgPool1d(2, constraint=None)
    torch.testing.assert_close(pool(X), U.avg_pool1d(X, 2, constraint=None))


def test_transform_scales_a_convolutional_network():
    """Eight layers of relu, norms and pooling: every activation is within the 1.5 octaves
    from RMS 1 that need no exponent in casts."""
    torch.manual_seed(0)

    def block(width: int) -> list[nn.Module]:
        return [nn.Conv2d(width, 16, 3, padding=1, bias=False), nn.ReLU(inplace=True)]

    layers = [
        *block(3),
        *block(16),
        nn.MaxPool2d(2),
        *block(16),
        nn.BatchNorm2d(16),
        nn.Hardswish(),
    ]
    layers += [*block(16), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * 16, 10)]
    model = unit_scale(nn.Sequential(*layers))
    seen = []
    for layer in model[:-1]:
        layer.register_forward_hook(lambda _m, _i, y: seen.append(y.square().mean().sqrt().item()))
    model(torch.randn(32, 3, 16, 16))
    assert not uu.report(model).left_alone
    assert all(2**-1.5 < rms < 2**1.5 for rms in seen), seen


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


def test_wrong_operands_are_named():
    a = torch.randn(3, 3)
    with pytest.raises(TypeError, match="a tuple of the others"):
        U.einsum("ij,jk,kl->il", a, a, a)
    with pytest.raises(TypeError, match="equation must be a str"):
        U.einsum(a, [0, 1], a)
    with pytest.raises(ValueError, match=r"weight of shape \(out, in\), got \(3,\)"):
        U.linear(a, a[0])
    with pytest.raises(IndexError, match="Dimension out of range"):
        U.softmax(a, 5)
