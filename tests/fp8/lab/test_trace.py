"""The products of a model, against torch's own counter of FLOPs and by hand."""

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fp8.lab.preflight.demo import GPT
from fp8.lab.trace import trace
from tests.shared import Net, parametrize


def flops(model, *args):
    with (
        FlopCounterMode(display=False) as counter,
        torch.no_grad(),
        sdpa_kernel(SDPBackend.MATH),
    ):
        model(*args)
    return counter.get_total_flops()


MODELS = {
    "linear": (nn.Linear(12, 20), (torch.randn(3, 5, 12),)),
    "convolutions": (
        nn.Sequential(nn.Conv2d(4, 8, 3, 2, 1, groups=2), nn.Conv2d(8, 6, 1)),
        (torch.randn(2, 4, 9, 7),),
    ),
    "transposed": (nn.ConvTranspose1d(4, 6, 3, stride=2), (torch.randn(2, 4, 9),)),
    "attention": (nn.MultiheadAttention(16, 4), (torch.randn(5, 2, 16),) * 3),
    "GPT": (GPT(), (torch.randint(256, (2, 9)),)),
}


@parametrize("name", MODELS)
def test_flops_are_those_of_the_counter(name):
    model, args = MODELS[name]
    products = trace(model.eval(), args)
    assert sum(product.flops for product in products) == flops(model, *args)


def test_sizes_and_layers_by_hand():
    rows = {p.layer: p for p in trace(GPT(), torch.randint(256, (2, 9)))}
    qkv, head = rows["blocks.0.qkv"], rows["head"]
    assert (qkv.m, qkv.k, qkv.n, qkv.calls) == (16, 64, 192, 1)
    assert (head.m, head.k, head.n, head.weight_elements) == (16, 64, 256, 64 * 256)
    assert rows["blocks.0"].kind == "matmul"
    assert rows["blocks.0"].why_not == "no weight: cast under fp8.autocast only"
    grouped = trace(nn.Conv2d(4, 8, 3, groups=2), torch.randn(2, 4, 5, 5))[0]
    assert (grouped.m, grouped.k, grouped.n, grouped.calls) == (2 * 9, 2 * 9, 4, 2)


def test_a_tied_weight_belongs_to_the_layer_that_runs_and_calls_add_up():
    a, b = nn.Linear(8, 8), nn.Linear(8, 8)
    b.weight = a.weight
    tied = Net(lambda m, x: m.b(m.a(m.a(x))), a=a, b=b)
    rows = trace(tied, torch.randn(3, 8))
    assert [(row.layer, row.calls) for row in rows] == [("a", 2), ("b", 1)]


def of_weights(m, x):
    """A product with a weight that is computed: as autocast, a parametrization or a mask do."""
    if m.how == "mask":
        return nn.functional.linear(x, m.layer.weight.half() * m.mask)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=m.how == "autocast"):
        y = m.layer(x)
    return (
        torch.sparse.mm(torch.eye(3).to_sparse(), y) if m.how == "sparse" else y @ y.mT
    )


@parametrize("how", "plain autocast weight_norm spectral_norm mask sparse".split())
def test_a_computed_weight_belongs_to_its_layer(how):
    model = Net(of_weights, how=how, layer=nn.Linear(6, 8))
    model.register_buffer("mask", torch.ones(8, 6))
    if how.endswith("norm"):
        getattr(nn.utils.parametrizations, how)(model.layer)
    first, *others = trace(model, torch.randn(3, 6))
    assert (first.layer, first.kind, first.why_not) == ("layer", "linear", "")
    assert first.weight_elements == 48
    assert all(row.kind == "matmul" for row in others)


def test_a_model_in_evaluation_shows_the_products_of_training():
    """torch computes an encoder layer in evaluation by one kernel."""
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    x = torch.randn(2, 3, 16)
    rows = trace(model.train(), x)
    assert trace(model.eval(), x) == rows
    assert not model.training
