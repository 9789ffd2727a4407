"""The factor of attention follows from its mask: from how many keys each query sees."""

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import unit_scaling.functional as U
from tests.launch import needs_gloo, run_ranks
from tests.shared import (
    Net,
    assert_close,
    assert_same,
    in_one_graph,
    pairs,
    parametrize,
    rms,
    seeded,
)
from unit_scaling.rules.table import OPS

BATCH, HEADS, LENGTH, WIDTH = 64, 2, 48, 32
ROW = torch.arange(LENGTH)[:, None]
KEY = torch.arange(LENGTH)
CAUSAL = ROW >= KEY
ATTENTION = OPS["scaled_dot_product_attention"]


def window(size):
    return CAUSAL & (size > ROW - KEY)


def random(*sizes):
    generator = seeded(1)
    return torch.rand(*sizes, LENGTH, generator=generator) < 0.2


def padding():
    lengths = torch.randint(1, LENGTH, (BATCH,), generator=seeded(1))
    return lengths[:, None, None, None] > KEY


#: Which keys a query sees: broadcastable to (batch, heads, queries, keys).
MASKS = {
    "all": lambda: torch.ones(LENGTH, LENGTH).bool(),
    "causal": lambda: CAUSAL,
    "itself": lambda: window(1),
    "window of 4": lambda: window(4),
    "both sides": lambda: (ROW - KEY).abs() < 3,
    "causal documents": lambda: CAUSAL & (ROW // 12 == KEY // 12),
    "prefix": lambda: CAUSAL | (KEY < 20),
    "random by head": lambda: random(1, HEADS, LENGTH),
    "padding": padding,
    "padding and causal": lambda: padding() & CAUSAL,
    "queries without keys": lambda: window(4) & (ROW > 9),
    "one key for all": lambda: KEY == 3,
    "the same for all keys": lambda: ROW > 20,
}
each_mask = parametrize("name", MASKS)

#: Ways of writing a mask.
FORMS = {
    "boolean": lambda shown: shown,
    "-inf": lambda shown: torch.zeros(shown.shape).masked_fill(~shown, -math.inf),
    "finfo.min": lambda shown: (~shown).float() * torch.finfo().min,
    "-1e9": lambda shown: (~shown).float() * -1e9,
    "of bfloat16": lambda shown: ((~shown).float() * -1e4).bfloat16(),
    "minimum of float16": lambda shown: (
        (~shown).half() * torch.finfo(torch.float16).min
    ),
    "of four dimensions": lambda shown: shown.expand(BATCH, HEADS, LENGTH, LENGTH),
}


def scale(shown, **settings):
    """The factor of the rule for operands of these sizes."""
    like = torch.empty(BATCH, HEADS, LENGTH, WIDTH)
    return torch.as_tensor(
        ATTENTION.rule(like, like, attn_mask=shown, **settings)["output"]
    )


@each_mask
def test_outputs_and_gradients_have_rms_1(name):
    """Of queries that see a key, and of values that are seen as often as keys are.

    A mean over the `BATCH * HEADS * WIDTH` = 4096 columns, which are independent, has a standard
    error of sqrt(2 / 4096) for the mean square, and half of it for the RMS: five of them.
    """
    shown = MASKS[name]()
    q, k, v = (
        torch.randn(BATCH, HEADS, LENGTH, WIDTH, requires_grad=True) for _ in range(3)
    )
    output = U.scaled_dot_product_attention(q, k, v, shown)
    grad = torch.randn_like(output)
    (of_value,) = torch.autograd.grad(output, v, grad)
    rows = shown.expand(BATCH, HEADS, LENGTH, LENGTH).any(-1)
    error = 5 / math.sqrt(2 * BATCH * HEADS * WIDTH)
    # u-muP has log(n) for the sum of 1/1 to 1/n: is_causal and a causal mask have the same excess
    harmonic = sum(1 / n for n in range(1, LENGTH + 1))
    excess = math.sqrt(harmonic / math.log(LENGTH)) if name == "causal" else 1.0
    assert rms(output[rows]) == pytest.approx(excess, rel=error)
    assert not output[~rows].any()
    # as many squares of probabilities in columns as in rows: those of rows that see keys
    seen = math.sqrt(rows.double().mean().item())
    assert rms(of_value) == pytest.approx(excess * seen, rel=2 * error)


@parametrize("form", FORMS)
@each_mask
def test_a_mask_has_one_factor_in_all_its_forms(name, form):
    """By counting: the factor of the harmonic mean of the numbers of keys."""
    shown = MASKS[name]()
    rows = (
        shown.expand(*torch.broadcast_shapes(shown.shape, (LENGTH, LENGTH)))
        .sum(-1)
        .flatten()
    )
    length = 1 / (1 / rows[rows > 0].double()).mean().item()
    want = (
        scale(None, is_causal=True)
        if name == "causal"
        else scale(None, context_length=length)
    )
    assert_close(scale(FORMS[form](shown)), want, rtol=1e-6, atol=0)


def test_biases_that_are_finite_are_not_read():
    """ALiBi: the factor of all keys, or of those that its -inf leaves. A bias that a model learns
    has a gradient that knows of no factor, and the same factor in training and evaluation."""
    slopes = 2.0 ** -torch.arange(1, HEADS + 1)[:, None, None]
    alibi = slopes * (KEY - ROW)
    assert_close(scale(alibi), scale(None), rtol=2e-7, atol=0)
    causal = alibi.masked_fill(~CAUSAL, -math.inf)
    assert_same(scale(causal), scale(CAUSAL))
    learned = torch.randn(LENGTH, LENGTH, requires_grad=True)
    assert not scale(learned).requires_grad
    q, k, v = (torch.randn(1, 1, 5, 4, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda m: U.scaled_dot_product_attention(q, k, v, m), bias
    )


def test_masks_at_their_limits():
    """No key for any query, no query, no key, one of each, and float64: as torch without a factor,
    and a factor that is finite."""
    for queries, keys in ((3, 4), (0, 4), (3, 0), (1, 1)):
        q = torch.randn(2, 2, queries, 8, dtype=torch.float64)
        k, v = torch.randn(2, 2, 2, keys, 8, dtype=torch.float64)
        for shown in (
            torch.zeros(queries, keys).bool(),
            torch.ones(queries, keys).bool(),
        ):
            s = ATTENTION.rule(q, v, attn_mask=shown)["output"]
            assert s.dtype == torch.float64
            assert s.isfinite()
            plain = nn.functional.scaled_dot_product_attention(
                q, k, v, shown, scale=1 / 8
            )
            assert_close(U.scaled_dot_product_attention(q, k, v, shown), plain * s)


def attend(x, mask):
    return U.scaled_dot_product_attention(x, x, x, mask)


@parametrize("form", ["boolean", "-inf"])
@parametrize("name", ["causal", "window of 4", "padding and causal", "one key for all"])
def test_compiled_is_eager(name, form):
    """With the mask as an argument and as a buffer, in one graph, with gradients."""
    mask = FORMS[form](MASKS[name]())
    x = torch.randn(BATCH, 1, LENGTH, 8, requires_grad=True)
    model = Net(lambda m, x: attend(x, m.mask))
    model.register_buffer("mask", mask)
    for function, args in ((attend, (x, mask)), (model, (x,))):
        got = in_one_graph(function)(*args)
        want, grad = function(*args), torch.randn_like(x)
        assert_close(got, want)
        of_got, of_want = (torch.autograd.grad(y, x, grad) for y in (got, want))
        assert_close(of_got, of_want)


def test_masks_of_all_lengths_share_a_dynamic_graph():
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (12, 20, 36):
        x = torch.randn(2, 4, length, 8)
        causal = torch.ones(length, length).bool().tril()
        for mask in (None, causal, torch.rand(length, length) < 0.5):
            assert_close(compiled(x, mask), attend(x, mask))
    assert (
        torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    )  # with a mask and without


def test_functional_transforms_and_export():
    x, masks = torch.randn(3, 2, 6, 8), torch.rand(3, 6, 6) < 0.5
    each = [attend(one, mask) for one, mask in pairs(x, masks)]
    assert_close(torch.vmap(attend)(x, masks), torch.stack(each))

    def loss(x, mask):
        return attend(x, mask).square().sum()

    leaf = x.clone().requires_grad_()
    sum(loss(one, mask) for one, mask in pairs(leaf, masks)).backward()
    assert_close(torch.vmap(torch.func.grad(loss))(x, masks), leaf.grad)
    model = Net(lambda m, given: attend(*given))
    exported = torch.export.export(model, ((x, masks[0]),)).module()
    for mask in masks:
        assert_close(exported((x, mask)), attend(x, mask))


def test_no_value_of_a_mask_is_read():
    """Fake tensors have none; on a card each read would be a synchronization."""
    with FakeTensorMode():
        x, mask = (
            torch.empty(2, 4, 6, 8, device="cuda"),
            torch.empty(6, 6, device="cuda"),
        )
        assert attend(x, mask.bool()).device.type == "cuda"
        assert attend(x.bfloat16(), mask.bfloat16()).dtype == torch.bfloat16


def check_ranks(rank, store):
    """Masks that are DTensors: the count is that of the whole mask on each rank."""
    mesh = init_device_mesh("cpu", (2,))
    for shown in (CAUSAL, CAUSAL.expand(4, 1, -1, -1), padding()[:4], window(4)):
        placement = Shard(0) if shown.dim() == 4 else Replicate()
        counted = scale(distribute_tensor(shown.contiguous(), mesh, [placement]))
        assert_close(counted.full_tensor(), scale(shown))


@needs_gloo
def test_masks_of_several_processes(tmp_path):
    run_ranks(check_ranks, 2, tmp_path / "store", warnings="default")
