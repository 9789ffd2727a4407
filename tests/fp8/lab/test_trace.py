"""The products of a model, against torch's own counter of FLOPs and by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import fp8
from fp8.lab.preflight.demo import GPT
from fp8.lab.trace import trace


def flops(model, *args):
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
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


@pytest.mark.parametrize("name", MODELS)
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
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.b = nn.Linear(8, 8)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(self.a(x)))

    rows = trace(Tied(), torch.randn(3, 8))
    assert [(row.layer, row.calls) for row in rows] == [("a", 2), ("b", 1)]


def test_the_model_and_its_input_are_not_changed():
    model = nn.Sequential(nn.Hardtanh(0, 0.5, inplace=True), nn.BatchNorm1d(4), nn.Linear(4, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.ones(8, 4)
    trace(model, x)
    assert torch.equal(x, torch.ones(8, 4))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not model._forward_pre_hooks
    assert not model[1]._forward_hooks


def test_what_is_not_cast_has_the_reason_of_the_report():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)
            self.attention = nn.MultiheadAttention(16, 4, add_bias_kv=True)

        def forward(self, x):
            x = self.layer(x)
            return self.attention(x, x, x)[0]

    rows = [row for row in trace(Attends(), torch.randn(5, 2, 16)) if row.weight_elements]
    left = {row.path: row.why for row in fp8.report(fp8.convert(Attends(), "tensor")).left_alone}
    assert {row.layer: row.why_not for row in rows if row.why_not} == left
    assert "layer" in {row.layer for row in rows if not row.why_not}


def test_a_model_on_the_meta_device_needs_no_memory():
    with torch.device("meta"):
        norm = nn.BatchNorm1d(1 << 17)  # has buffers
        model = nn.Sequential(nn.Linear(1 << 15, 1 << 17), norm, nn.Linear(1 << 17, 64))
        x = torch.zeros(8, 1 << 15)
    rows = trace(model, x)
    assert [row.layer for row in rows] == ["0", "2"]
    assert rows[0].weight_elements == 1 << 32


def test_products_of_functions_belong_to_the_module_that_calls_them():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return F.linear(x, self.weight) @ x.mT

    rows = trace(nn.Sequential(Own()), torch.randn(3, 4))
    assert [(r.layer, r.kind) for r in rows] == [("0", "linear"), ("0", "matmul")]
    assert trace(nn.ReLU(), torch.randn(3)) == []


class OfWeights(nn.Module):
    """A product with a weight that is computed: as autocast, a parametrization or a mask do."""

    def __init__(self, how):
        super().__init__()
        self.how, self.layer = how, nn.Linear(6, 8)
        self.register_buffer("mask", torch.ones(8, 6))
        if how.endswith("norm"):
            getattr(nn.utils.parametrizations, how)(self.layer)

    def forward(self, x):
        if self.how == "mask":
            return F.linear(x, self.layer.weight.half() * self.mask)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.how == "autocast"):
            y = self.layer(x)
        return torch.sparse.mm(torch.eye(3).to_sparse(), y) if self.how == "sparse" else y @ y.mT


@pytest.mark.parametrize(
    "how", ["plain", "autocast", "weight_norm", "spectral_norm", "mask", "sparse"]
)
def test_a_computed_weight_belongs_to_its_layer(how):
    first, *others = trace(OfWeights(how), torch.randn(3, 6))
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
