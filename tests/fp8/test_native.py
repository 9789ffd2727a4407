"""Backend "native": the FP8 kernels compute what the simulation does, from one byte an element."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fp8
from fp8 import RECIPES, Cast, Recipe, casting, native
from fp8.matmul import casts_of, linear
from tests.fp8.test_matmul import randn

NATIVE = [name for name, recipe in RECIPES.items() if not native.why_not_recipe(recipe)]
SHAPES = [(16, 16, 16), (48, 32, 64), (5, 32, 16), (1, 16, 32), (33, 128, 48)]  # rows, in, out

pytestmark = pytest.mark.skipif(
    bool(native.why_not_device(torch.device("cpu"))), reason="no FP8 product on this device"
)


def run(backend: str, recipe: str, tensors: tuple[Tensor, ...], scales=(1.0, 1.0, 1.0)) -> list:
    """The output and the gradients of input, weight and bias."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = linear(*leaves, scales=scales, recipe=RECIPES[recipe], backend=backend)
    y.backward(randn(*y.shape, seed=9).to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def tensors(rows: int, inner: int, outer: int, dtype=torch.float32) -> tuple[Tensor, ...]:
    shapes = ((rows, inner), (outer, inner), (outer,))
    return tuple(randn(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes))


def test_some_recipes_have_kernels_and_the_others_say_why_not():
    assert {"unit", "unit_e4m3", "tensor", "row"} <= set(NATIVE)
    reasons = {name: native.why_not_recipe(recipe) for name, recipe in RECIPES.items()}
    assert "scaling 'mx'" in reasons["mxfp8"]
    assert "high precision" in reasons["row_gw_hp"]
    assert "format 'bf16'" in reasons["bf16"]
    e5m2 = Cast(format="e5m2")
    assert "e5m2 by e5m2" in native.why_not_recipe(
        Recipe(name="x", input=e5m2, weight=e5m2, grad=e5m2)
    )


@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.0), (0.25, 0.5, 0.125)], ids=["plain", "unit"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("recipe", NATIVE)
def test_native_is_the_simulation(recipe, shape, scales):
    """Operands are the same to the bit, so products differ by the order of float32 sums.

    Of n terms a sum has an error of at most n * 2**-24 times the sum of magnitudes; both have.
    """
    got, want = (
        run(backend, recipe, tensors(*shape), scales) for backend in ("native", "simulate")
    )
    sums = {0: shape[1], 1: shape[2], 2: shape[0], 3: shape[0]}
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        bound = 2 * (sums[i] + 4) * 2**-24 * sums[i] ** 0.5 * 8 * w.abs().max().clamp(min=1)
        assert (g - w).abs().max() <= bound, (i, recipe)


@pytest.mark.parametrize("recipe", NATIVE)
def test_operands_are_the_same_to_the_bit(recipe):
    x = randn(32, 48, seed=3) * torch.logspace(-12, 6, 32)[:, None]
    casts = casts_of(RECIPES[recipe])
    for spec in set(casts):
        for axis in (-1, -2):
            stored = native.store(x, spec, axis)
            simulated = casting.round_straight(x, spec, axis)
            assert torch.equal(stored.data.float() * stored.scale, simulated)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_and_autocast(dtype):
    given = tensors(32, 48, 64, dtype)
    got, want = (run(backend, "tensor", given) for backend in ("native", "simulate"))
    assert all(g.dtype == dtype for g in got)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=2**-7, atol=2**-6)
    x, w, b = tensors(32, 48, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, w, b, recipe=RECIPES["unit"], backend="native").dtype == torch.bfloat16
    assert run("native", "unit", (x, w, b))[0].dtype == torch.float32


@pytest.mark.parametrize("recipe", ["unit", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_kept_for_backward_is_bytes(recipe, dtype):
    x, w, _ = (t.requires_grad_() for t in tensors(256, 512, 384, dtype))
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        linear(x, w, recipe=RECIPES[recipe], backend="native")
    full = (x.numel() + w.numel()) * x.element_size()
    assert sum(kept.values()) <= {torch.float32: 0.26, torch.bfloat16: 0.51}[dtype] * full


def test_in_a_block_and_in_a_converted_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 17), nn.Linear(17, 16))
    x = randn(2, 5, 32, seed=1)
    with fp8.autocast("tensor"):
        want = model(x)
    with fp8.autocast("tensor", backend="native"):
        got = model(x)
        with fp8.autocast("tensor"):
            assert torch.equal(model(x), want)
    torch.testing.assert_close(got, want)
    fp8.convert(model, "tensor", backend="native")
    torch.testing.assert_close(model(x), want)
    rows = {row.path: row.why for row in fp8.report(model)}
    assert rows["0"] == "tensor, native"
    assert "17" in rows["2"]
    assert "simulated" in rows["2"]


def test_the_backend_of_a_block_is_that_of_its_products(monkeypatch):
    computed = []
    product = native.product
    monkeypatch.setattr(native, "product", lambda *args: computed.append(args) or product(*args))
    x, w, b = tensors(32, 48, 64)
    with fp8.autocast("unit", backend="native"):
        nn.functional.linear(x, w, b)
        x @ w.mT
        torch.einsum("mk,nk->mn", x, w)
        assert len(computed) == 3
        with fp8.autocast("unit"):
            x @ w.mT
    assert len(computed) == 3


def test_compiled_in_one_piece():
    given = tensors(32, 48, 64)
    layer = fp8.convert(nn.Linear(48, 64), "unit", backend="native")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(given[0]), layer(given[0]))
    compiled(given[0]).sum().backward()
    assert layer.weight.grad is not None


def test_bad_input():
    with pytest.raises(ValueError, match="unknown backend 'gpu'; choose one of simulate, native"):
        fp8.autocast("unit", backend="gpu")
    with pytest.raises(ValueError, match=r"recipe 'mxfp8' has no kernels: .* scaling 'mx'"):
        fp8.autocast("mxfp8", backend="native")
    assert fp8.autocast("mxfp8", backend="auto").backend == "simulate"
    x, w, _ = tensors(16, 16, 16)
    with pytest.raises(RuntimeError, match="'native': no FP8 product is known for meta"):
        linear(x.to("meta"), w.to("meta"), recipe=RECIPES["unit"], backend="native")
