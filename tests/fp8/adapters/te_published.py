"""TransformerEngine's own Python, from its wheel, with mocks for what is compiled: run as a script.

``python -m tests.fp8.adapters.te_published WHEEL`` converts models with the real classes and prints
"ok". Its layers are made, copied, saved and taken out, and its contexts entered; products it cannot
compute. A process of its own, since nothing of it may stay in another.
"""

from __future__ import annotations

import copy
import enum
import importlib
import re
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch._inductor.standalone_compile  # before there is a triton, which is a mock
import torch.onnx
from torch import nn

import fp8
from fp8.adapters import transformer_engine

MOCKED = ("onnx", "onnxscript", "onnxscript.onnx_opset", "triton", "triton.language")


class Zeros(type):
    """A class whose every attribute is 0, as a compiled enum of unknown names."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


class Compiled(types.ModuleType):
    """The compiled part: a class or a function of any name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        mock = Zeros(name, (), {}) if name[0].isupper() else MagicMock(name=name)
        setattr(self, name, mock)
        return mock


def members(file: Path, kind: str) -> enum.EnumMeta:
    """A compiled enum with the names that the package mirrors in that file."""
    names = re.findall(rf"= int\((?:tex\.)?{kind}\.(\w+)\)", file.read_text(encoding="utf-8"))
    return enum.IntEnum(kind, {name: i for i, name in enumerate(names)})


def load(wheel: Path, patch: Any) -> Any:
    """``transformer_engine.pytorch``, its layers and contexts, on a device of capability 9.0."""
    patch.setenv("NVTE_PROJECT_BUILDING", "1")  # no shared libraries are looked for
    patch.setenv("NVTE_TORCH_COMPILE", "0")
    patch.syspath_prepend(str(wheel))
    root = wheel / "transformer_engine" / "pytorch"
    tex = Compiled("transformer_engine_torch")
    tex.DType = members(root / "constants.py", "DType")
    attention = "NVTE_Fused_Attn_Backend"
    setattr(tex, attention, members(root / "cpp_extensions/fused_attn.py", attention))
    te = types.ModuleType("transformer_engine.pytorch")
    te.__path__ = [str(root)]
    mocks = {name: MagicMock(name=name) for name in MOCKED}
    for name, module in {**mocks, tex.__name__: tex, te.__name__: te}.items():
        patch.setitem(sys.modules, name, module)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    layers = importlib.import_module("transformer_engine.pytorch.module")
    contexts = importlib.import_module("transformer_engine.pytorch.quantization")
    patch.setattr(contexts, "get_device_compute_capability", lambda: (9, 0))
    for name in ("Linear", "LayerNorm", "RMSNorm"):
        setattr(te, name, getattr(layers, name))
    te.autocast, te.fp8_autocast = contexts.autocast, contexts.fp8_autocast
    te.quantization = contexts
    return te


class Model(nn.Module):
    """Every layer that is converted, a tie, and a forward that asks what it runs under."""

    def __init__(self, te: Any) -> None:
        super().__init__()
        self.state = te.quantization.FP8GlobalStateManager
        self.a = nn.Linear(32, 32)
        self.b = nn.Linear(32, 32, bias=False)
        self.b.weight = self.a.weight
        self.norms = nn.Sequential(nn.LayerNorm(32, eps=1e-3), nn.RMSNorm(32))

    def forward(self) -> tuple[bool, Any]:
        """Whether FP8 is on, and under which recipe."""
        return self.state.is_fp8_enabled(), self.state.get_fp8_recipe()


def check_walk(te: Any) -> None:
    model = Model(te)
    model.a.comment = "mine"
    before = [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    keys, attributes = list(model.state_dict()), set(vars(model.a))
    fp8.convert(model, "tensor", backend="transformer_engine")
    assert {row.done for row in fp8.report(model)} == {"converted"}
    kinds = (te.Linear, te.Linear, te.LayerNorm, te.RMSNorm)
    found = (model.a, model.b, *model.norms)
    assert all(isinstance(layer, kind) for layer, kind in zip(found, kinds, strict=True))
    assert [(n, id(p)) for n, p in model.named_parameters(remove_duplicate=False)] == before
    assert list(model.state_dict()) == keys
    model.load_state_dict(model.state_dict())
    twin = copy.deepcopy(model)
    assert twin.b.weight is twin.a.weight
    assert isinstance(twin.a, te.Linear)
    assert {p.dtype for p in model.bfloat16().parameters()} == {torch.bfloat16}
    assert fp8.revert(model) is model
    assert [(n, id(p)) for n, p in model.named_parameters(remove_duplicate=False)] == before
    assert (type(model.a), type(model.norms[0])) == (nn.Linear, nn.LayerNorm)
    assert set(vars(model.a)) == attributes
    assert (model.norms[0].eps, model.norms[1].eps) == (1e-3, None)
    assert model.b.bias is None


def check_contexts(te: Any) -> None:
    model = Model(te)
    for name in ("unit", "delayed", "tensor"):
        fp8.convert(model, name, backend="transformer_engine")
        assert model.train()() == (True, model.fp8_te_recipe)
        assert model.eval()()[0] is False
    fp8.revert(model)
    recipe = transformer_engine.te_recipe("tensor")
    transformer_engine.convert(model, recipe, in_eval=True)
    assert model() == (True, recipe)
    del te.autocast
    with transformer_engine.autocast(recipe):  # fp8_autocast, whose arguments have other names
        assert fp8.revert(model)() == (True, recipe)


def check_scales(te: Any) -> None:
    """What its own update makes of the recipes: 1 under "unit", and 2**margin of room."""
    update = te.quantization._amax_and_scale_update
    history = torch.tensor([[7.0, 0.5, float("inf")]])
    for recipe, want in (
        (transformer_engine.te_recipe("unit"), [1.0, 1.0, 1.0]),
        (transformer_engine.delayed_scaling(margin=1), [32.0, 448.0, 2.0]),
    ):
        scale = torch.tensor([1.0, 1.0, 2.0]) if want[0] > 1 else torch.ones(3)
        update(history.clone(), scale, 448.0, recipe)
        assert scale.tolist() == want


if __name__ == "__main__":
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        library = load(Path(sys.argv[1]), patch)
        for check in (check_walk, check_contexts, check_scales):
            check(library)
    print("ok")
