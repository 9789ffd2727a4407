"""What single rows of PRODUCTS promise beyond what all of them do (test_autocast.py)."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fp8
from fp8 import RECIPES
from fp8.products.einsum import in_pairs
from tests.fp8.calls import (
    ADDMM,
    CALLS,
    COARSE,
    MATMUL,
    A,
    B,
    V,
    cast,
    operands,
)
from tests.fp8.compare import outcome
from tests.shared import (
    assert_close,
    assert_same,
    filterwarnings,
    normal,
    parametrize,
    randn,
    refuses,
)

# --- addmm and its kin


@parametrize("function", [torch.addmm, torch.baddbmm])
@parametrize("beta, alpha", [(0.5, 2.0), (0, 3)])
def test_beta_and_alpha(function, beta, alpha):
    input, a, b = (t.requires_grad_() for t in operands(CALLS[function]))
    qa, qb = (cast(t.detach(), COARSE.input).requires_grad_() for t in (a, b))
    with fp8.autocast(COARSE):
        y = function(input, a, b, beta=beta, alpha=alpha)
    g = cast(normal(*y.shape), COARSE.grad)
    exact = outcome(
        lambda: function(input, qa, qb, beta=beta, alpha=alpha), (qa, qb), g
    )
    assert_close(outcome(lambda: y, (a, b), g), exact)


def test_beta_zero_does_not_read_the_input():
    _, a, b = operands(ADDMM)
    with fp8.autocast("unit"):
        assert (
            torch.addmm(torch.full((6,), float("nan")), a, b, beta=0).isfinite().all()
        )


def test_what_torch_refuses_is_refused():
    x, a, b = operands(ADDMM)
    with fp8.autocast("unit"):
        with refuses("make them equal", TypeError):
            torch.addmm(x.double(), a, b)
        with refuses("expand", RuntimeError):
            torch.addmm(torch.zeros(2, 5, 6), a, b)
        with refuses("keywords", TypeError):
            torch.addmm(1, x, 1, a, b)
        for call in (lambda: torch.mm(a[None], b[None]), lambda: torch.bmm(a, b)):
            with pytest.raises(RuntimeError):
                call()


# --- einsum


@parametrize(
    "equation, left, right",
    [
        ("ij,jk->ik", (5, 8), (8, 6)),
        ("ij,jk->ki", (5, 8), (8, 6)),
        ("i j , j k -> i k", (5, 8), (8, 6)),
        ("bij,bkj->bik", (3, 5, 8), (3, 6, 8)),
        ("bhid,bhjd->bhij", (2, 3, 5, 8), (2, 3, 6, 8)),
        ("...ij,...jk", (2, 3, 5, 8), (2, 3, 8, 6)),
        ("iab,bak->ik", (5, 2, 4), (4, 2, 6)),
        ("ij,jk->i", (5, 8), (8, 6)),
    ],
)
def test_an_einsum_of_two_is_the_same_product_as_matmul(equation, left, right):
    """Also where a scale belongs to a block along what is summed over."""
    a, b, recipe = randn(*left), randn(*right, seed=1), RECIPES["nvfp4"]
    with fp8.autocast(recipe):
        y = torch.einsum(equation, a, b)
    assert_close(y.detach(), torch.einsum(equation, a, b), atol=1.5, rtol=0.5)
    g = normal(*y.shape, seed=2)
    as_matrices = {
        "ij,jk->ki": lambda: (a, b, g.mT),
        "bij,bkj->bik": lambda: (a, b.mT, g),
        "bhid,bhjd->bhij": lambda: (a, b.mT, g),
        "iab,bak->ik": lambda: (a.flatten(1), b.transpose(0, 1).flatten(0, 1), g),
        "ij,jk->i": lambda: (a, b, g[:, None].expand(5, 6)),
    }
    operands = as_matrices.get(equation, lambda: (a, b, g))()
    z = fp8.products.matmul.matmul(*operands[:2], recipe=recipe)
    seed = torch.get_rng_state()
    got = torch.autograd.grad(y, (a, b), g)
    torch.set_rng_state(seed)
    for one, other in zip(
        got, torch.autograd.grad(z, (a, b), operands[2]), strict=True
    ):
        assert_close(one, other)


def test_an_einsum_that_is_not_one_product_stays_in_high_precision():
    a = normal(5, 8)
    calls = [
        lambda: torch.einsum("ii,ij->j", a[:, :5], a),
        lambda: torch.einsum("ij,kj->ik", a[:, :1], a),
    ]
    for call in calls:
        warns = pytest.warns(
            fp8.warnings.RecipeWarning, match="^einsum .*not one product of"
        )
        with fp8.autocast("tensor"), warns:
            y = call()
        assert_same(y, call())


RARE = {
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "vecdot": torch.linalg.vecdot,
    "inner": torch.inner,
    "tensordot": lambda a, b: torch.tensordot(a, b, ([1], [1])),
    "bilinear": lambda a, b: F.bilinear(a, b, torch.ones(2, 8, 8)),
    "addmv": lambda a, b: torch.addmv(torch.zeros(5), a, b[0]),
    "addbmm": lambda a, b: torch.addbmm(torch.zeros(5, 5), a[None], b.mT[None]),
    "addmm_": lambda a, b: torch.zeros(5, 5).addmm_(a, b.mT),
}


@parametrize("name", RARE)
def test_rare_products_stay_in_high_precision_with_a_warning(name):
    a, b = normal(5, 8), normal(5, 8, seed=1)
    with (
        fp8.autocast("tensor"),
        pytest.warns(fp8.warnings.RecipeWarning, match=f"{name} .*@"),
    ):
        y = RARE[name](a, b)
    assert_same(y, RARE[name](a, b))


THREE = [
    ("ij,jk,kl->il", ((5, 8), (8, 6), (6, 4))),
    ("...ij,jk,...k->...i", ((2, 5, 8), (8, 6), (2, 6))),
    ("bi,oij,bj->bo", ((5, 8), (6, 8, 4), (5, 4))),
    ("bnd,bde,bn,be->bne", ((2, 5, 8), (2, 8, 6), (2, 5), (2, 6))),
    ("ij,kl,lm->ijm", ((5, 8), (6, 4), (4, 3))),
]


@parametrize("equation, shapes", THREE)
def test_an_einsum_of_three_is_products_of_two(equation, shapes):
    """In torch's order, and without the mode equal to it."""
    tensors = [randn(*s, seed=i) for i, s in enumerate(shapes)]
    plain = in_pairs(equation, tensors)
    assert_same(plain, torch.einsum(equation, *tensors))
    g = normal(*plain.shape, seed=7)
    pairs = []

    def product(*args):
        pairs.append(args[0])
        return torch.einsum(*args)

    results = []
    for call in (
        lambda: torch.einsum(equation, *tensors),
        lambda: torch.einsum(equation, tensors),
        lambda: in_pairs(equation, tensors, product),
    ):
        torch.manual_seed(0)
        with fp8.autocast("nvfp4"):
            results.append(outcome(call, tensors, g))
    assert [pair.count(",") for pair in pairs] == [1] * (len(tensors) - 1)
    assert not torch.equal(results[2][0], plain)
    assert_same(results[0], results[2])
    assert_same(results[1], results[2])


def test_an_einsum_of_three_is_in_the_order_of_opt_einsum_where_torch_is():
    """From the left, the first would have the product of all operands' indices in memory."""
    pytest.importorskip("opt_einsum")
    for equation in ("ij,kl,jk->il", "er,rd,bd->be", "ij,kl,jk,lm->im"):
        terms = equation.partition("->")[0].split(",")
        tensors = [randn(*(ord(c) - 90 for c in term)) for term in terms]
        sizes = []

        def product(*args, sizes=sizes):
            y = torch.einsum(*args)
            sizes.append(y.numel())
            return y

        y = in_pairs(equation, tensors, product)
        assert_same(y, torch.einsum(equation, *tensors))
        assert max(sizes) < 500


@parametrize(
    "equation, shapes",
    [
        ("ij->ji", (A,)),
        ("i,j->ij", (V, (5,))),
        ("bik,bkj->bij", ((2, 5, 1), (2, 1, 6))),
        ("ij,k->i", (A, V)),
    ],
)
def test_an_einsum_that_sums_no_products_is_left_alone(equation, shapes):
    tensors = [randn(*s, seed=i) for i, s in enumerate(shapes)]
    with fp8.autocast(COARSE):
        y = torch.einsum(equation, *tensors)
    assert_same(y, torch.einsum(equation, *tensors))
    (y.sum() / 3).backward()
    assert not torch.equal(tensors[0].grad, cast(tensors[0].grad, COARSE.grad))


# --- what is left alone


@filterwarnings("ignore:a product of complex numbers")
@parametrize("dtype", [torch.int64, torch.int32, torch.complex64])
def test_integers_and_complex_numbers_are_left_alone(dtype):
    a, b = (torch.arange(n).reshape(s).to(dtype) * 100 for n, s in ((40, A), (48, B)))
    expected = a @ b
    with fp8.autocast("unit"):
        for y in (
            a @ b,
            torch.mm(a, b),
            F.linear(a, b.mT),
            torch.einsum("ij,jk", a, b),
        ):
            assert_same(y, expected)
        assert_same(torch.addmm(expected, a, b), 2 * expected)


def test_outer_products_are_left_alone_and_layers_are_not():
    column, row = normal(5, 1), normal(1, 6)
    added = torch.addmm(row, column, row)  # rounds once on CPUs that fuse it
    with fp8.autocast(COARSE):
        assert_same(column @ row, column * row)
        assert_same(torch.addmm(row, column, row), added)
        assert_same(
            F.linear(column, row.mT),
            cast(column, COARSE.input) * cast(row, COARSE.weight),
        )
        image, kernel = normal(2, 4, 3, 1), normal(4, 1, 1, 1)
        y = F.conv2d(image, kernel, groups=4)
    assert_same(
        y,
        cast(image, COARSE.input) * cast(kernel, COARSE.weight)[:, 0, 0, 0, None, None],
    )


def test_sparse_products_are_left_alone():
    a, b = operands(MATMUL)
    expected = a @ b
    with fp8.autocast("unit"):
        assert_close(a.to_sparse() @ b, expected)
        with pytest.warns(fp8.warnings.RecipeWarning, match="sparse"):
            torch.sparse.mm(a.to_sparse(), b)


# --- flex_attention, which has no gradients on CPUs


@filterwarnings("ignore:flex_attention called without:UserWarning")
@parametrize(
    "recipe, is_causal, compiled", [("mxfp8", True, False), ("tensor", False, True)]
)
def test_flex_attention_is_attention(recipe, is_causal, compiled):
    qkv = [normal(1, 2, 128, 32, seed=seed) for seed in range(3)]
    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 2, 128, 128, device="cpu")

    def run(attention, **arguments):
        with fp8.autocast(recipe):
            return attention(*qkv, **arguments)

    wanted = run(F.scaled_dot_product_attention, is_causal=is_causal)
    assert not torch.equal(
        wanted, F.scaled_dot_product_attention(*qkv, is_causal=is_causal)
    )
    ours = torch.compile(run, backend="aot_eager") if compiled else run
    got = ours(flex_attention, block_mask=mask if is_causal else None)
    assert_close(got, wanted)  # not to the bit: another order of the same sums


def test_an_einsum_of_too_few_operands_gets_torchs_error():
    # By torch, or by opt_einsum, whose path torch takes.
    with fp8.autocast("row"), refuses("einsum", (RuntimeError, ValueError)):
        torch.einsum("ij,jk,kl,lm->im", randn(2, 2), randn(2, 2), randn(2, 2))
