"""A transformed model is still that model: copied, saved, cast, wrapped, hooked, compiled."""

from __future__ import annotations

import copy
import inspect
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import fp8
from tests.transforms.gradients import gradients
from tests.transforms.models import GPT, TRANSFORMS, Net, batch, gpt, no_block, same, step, tiny
from unit_scaling.formats import FPFormat
from unit_scaling.transforms import compile, simulate_format, simulate_fp8, unit_scale
from unit_scaling.transforms.state import EXTRA_STATE, MARKER

PRINTED = {
    "unit_scale": "unit_scale",
    "simulate_fp8": "simulated casts to e4m3 and e5m2",
    "both": "unit_scale, simulated casts to e4m3 and e5m2",
}
every_transform = pytest.mark.parametrize("name", TRANSFORMS)


def transformed(name: str) -> GPT:
    model = TRANSFORMS[name](gpt())
    step(model)
    return model


@every_transform
def test_identity(name: str) -> None:
    plain, model = gpt(), transformed(name)
    assert isinstance(model, GPT)
    assert type(model).__name__ == "GPT"
    assert all(isinstance(b.qkv, nn.Linear) for b in model.blocks)
    marker = (
        [MARKER, EXTRA_STATE] if getattr(model._scopes[0][0], "unit_scaled", False) else []
    )  # test_checkpoints
    assert sorted(model.state_dict()) == sorted([*plain.state_dict(), *marker])
    assert model.head.weight is model.tokens.weight
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    first, transforms, *rest = repr(model).splitlines()
    assert transforms == f"  {PRINTED[name]}"
    assert "\n".join([first, *rest]) == repr(plain)  # none but the root shows them


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@every_transform
def test_pure_dtypes(name: str, dtype: torch.dtype) -> None:
    expected = step(transformed(name))
    model = TRANSFORMS[name](gpt().to(dtype))
    logits, loss = model(*batch())
    assert logits.dtype == dtype
    assert all(p.dtype == dtype for p in model.parameters())
    loss.backward()
    assert loss.item() == pytest.approx(expected[0].item(), rel=0.02)


@every_transform
def test_bf16_autocast(name: str) -> None:
    model = transformed(name)
    expected = step(model)[0].item()
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(*batch())
    assert logits.dtype == torch.bfloat16
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=0.02)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@every_transform
def test_hooks_fire_once(name: str) -> None:
    model = TRANSFORMS[name](gpt())
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("model"))
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append("block"))
    model.blocks[0].up.register_full_backward_hook(lambda *_: calls.append("backward"))
    for _ in range(2):  # the first call is also the one that is recorded
        calls.clear()
        step(model)
        assert calls == ["block", "model", "backward"]


@every_transform
def test_submodules_and_methods_run_transformed(name: str) -> None:
    model = transformed(name)
    seen: list[torch.Tensor] = []
    handle = model.blocks[1].register_forward_hook(lambda _, args, out: seen.extend([*args, out]))
    model(*batch())
    handle.remove()
    torch.testing.assert_close(model.blocks[1](seen[0]), seen[1], rtol=0, atol=0)


def test_a_submodule_called_first_then_the_model() -> None:
    """Its residual adds keep the sizes of their terms in that call."""
    model = TRANSFORMS["unit_scale"](gpt())
    expected = copy.deepcopy(model.blocks[0])(x := torch.randn(2, 16, 32))
    assert torch.equal(model.blocks[0](x), expected)
    assert step(model)[0].item() == pytest.approx(step(transformed("unit_scale"))[0].item(), 0.02)
    assert torch.equal(model.blocks[0](x), expected)


def test_gradient_checkpointing_of_blocks() -> None:
    plain, model = gpt(), gpt()
    model.recomputed = True
    for name in TRANSFORMS:
        same(step(TRANSFORMS[name](model)), step(TRANSFORMS[name](plain)))
    # The compiler takes no side effects inside of a checkpoint, unless told that they need not be
    # repeated: the counts of calls by which a plan is followed are such.
    scaled = unit_scale(model)
    wanted = step(scaled)
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        same(step(torch.compile(scaled, fullgraph=True, backend="eager")), wanted, 1e-5, 1e-5)


@pytest.mark.proves("unit-scaling", "unit_scale(simulate_fp8(model))", how="own")
@pytest.mark.parametrize(
    "order", [("unit", "fp8"), ("fp8", "unit"), ("compile", "fp8", "unit")], ids="-".join
)
def test_any_order_applies_each_once(order: tuple[str, ...]) -> None:
    """unit_scale and a coarse format change every value: twice or not at all, it shows."""
    coarse = FPFormat(3, 1, "nearest")
    steps = {
        "unit": unit_scale,
        "fp8": lambda m: simulate_format(m, coarse, coarse),
        "compile": compile,
    }
    expected = step(unit_scale(simulate_format(no_block(), coarse, coarse)))
    model: nn.Module = no_block()
    for name in order:
        model = steps[name](model)
    tolerance = 1e-5 if "compile" in order else 0.0
    for _ in range(2):  # recorded in eager mode, then compiled
        same(step(model), expected, rtol=tolerance, atol=tolerance)
    assert not torch.allclose(expected[0], step(unit_scale(no_block()))[0], rtol=1e-4)
    assert not torch.allclose(expected[0], step(simulate_format(no_block(), coarse, coarse))[0])


def test_twice_is_once() -> None:
    same(step(unit_scale(unit_scale(gpt()))), step(unit_scale(gpt())))
    same(step(simulate_fp8(simulate_fp8(gpt()))), step(simulate_fp8(gpt())))


def test_twice_in_two_ways_is_refused() -> None:
    """It would stay as it is."""
    model = unit_scale(no_block())
    with pytest.raises(ValueError, match="is unit-scaled already, without these functions in"):
        unit_scale(model, {torch.relu: torch.tanh})


@pytest.mark.proves("unit-scaling", "with torch.compile", how="own")
def test_compiled_before_the_first_call() -> None:
    torch._dynamo.reset()
    expected = step(unit_scale(tiny()))
    counter = CompileCounter()
    compiled = torch.compile(unit_scale(tiny()), backend=counter)
    for _ in range(3):
        same(step(compiled), expected, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1  # one whole graph, once the model has been seen


def test_fullgraph_before_the_first_call_says_what_to_do() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(unit_scale(tiny()), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="call the model once before compiling"):
        compiled(*batch())


def test_slices_of_a_transformed_container() -> None:
    model, x = unit_scale(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))), torch.ones(8)
    model(x)
    torch.testing.assert_close(model[:2](x), model[1](model[0](x)))


def test_script_modules_are_refused_by_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's, about TorchScript
        scripted = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(TypeError, match="'0' is a TorchScript module"):
        unit_scale(nn.Sequential(scripted))
    for transform in (unit_scale, simulate_fp8):
        with pytest.raises(TypeError, match="is a TorchScript module"):
            transform(scripted)


def test_simulate_format_takes_names() -> None:
    """The named formats of fp8, rounded to nearest: the same as simulate_fp8."""
    by_name = step(simulate_format(tiny(), "e4m3", "e5m2"))
    torch.testing.assert_close(by_name, step(simulate_fp8(tiny())), rtol=0, atol=0)
    formats = fp8.FORMATS["e4m3"], fp8.FORMATS["e5m2"]
    torch.testing.assert_close(by_name, step(simulate_format(tiny(), *formats)), rtol=0, atol=0)
    coarse = step(simulate_format(tiny(), "e2m1", "e5m2"))
    assert not torch.allclose(by_name[0], coarse[0])


def test_factors_at_methods_written_in_python_compile() -> None:
    """A method of Tensor that is written in Python squares the gain."""
    torch.manual_seed(0)
    layers = {name: nn.Linear(8, 8) for name in "ab"}
    plain = Net(lambda m, x: m.b((m.a(x) * m.gain**2).tanh()), **layers)
    plain.gain = nn.Parameter(torch.ones(8))
    model, x = unit_scale(plain), torch.randn(4, 8)
    loss = lambda m: m(x).square().mean()  # noqa: E731
    gradients(model, loss)
    expected = gradients(model, loss)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(model, lambda _: loss(compiled)), expected)
