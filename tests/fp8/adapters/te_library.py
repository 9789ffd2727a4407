"""TransformerEngine's Python on a machine without a GPU: the installed package or, where its
compiled part is not built, the published wheel with nothing behind that part.

A layer asks torch for a device when it is made. Its kernels cannot run: torch's functions compute
its products here, after TransformerEngine's own checks of recipe, shapes and dtypes.
"""

import ast
import enum
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from unittest.mock import MagicMock

import pytest
import torch
from torch.nn import functional as F

from fp8.common.libraries import probe
from tests.wheels import unpacked

VERSION = "2.20.2"
RAN = []
"""The recipe in force in each product that was called; None: high precision."""

ABSENT = ("transformer_engine_torch", "triton", "onnx", "onnxscript", "nvdlfw_inspect")
"""What TransformerEngine imports beside its Python: the compiled part, and what its kernels, its
export to ONNX and its debugger use."""
ENUMS = {
    "DType": ("constants.py", "DType", ""),
    "NVTE_Fused_Attn_Backend": (
        "cpp_extensions/fused_attn.py",
        "FusedAttnBackend",
        "NVTE_",
    ),
}
"""Enumeration of the compiled part -> file, name and prefix of its copy in Python, which is
compared with it at import."""
MODULES = {}
"""The imported modules of the wheel."""


class _Absent(types.ModuleType):
    """A module that has every name."""

    __all__: tuple[str, ...] = ()
    __version__ = "3.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, python):
        self.python = python

    def find_spec(self, name, *_):
        absent = name.partition(".")[0] in ABSENT
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True)
            if absent
            else None
        )

    def create_module(self, spec):
        return _Absent(spec.name)

    def exec_module(self, module):
        for name, (file, copy, prefix) in ENUMS.items():
            body = ast.parse((self.python / file).read_text()).body
            (found,) = [node for node in body if getattr(node, "name", "") == copy]
            members = [
                ast.unparse(n.targets[0])
                for n in found.body
                if isinstance(n, ast.Assign)
            ]
            setattr(
                module, name, enum.IntEnum(name, [prefix + m for m in members], start=0)
            )


def _import_wheel(folder):
    """Fills MODULES. Skips the test where the wheel cannot be fetched."""
    # Asks once whether there is triton: before the finder.
    importlib.import_module("torch._dynamo")
    root = unpacked(f"transformer_engine=={VERSION}", folder)
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("NVTE_PROJECT_BUILDING", "1")  # the core library is not loaded
        patch.syspath_prepend(root)
        finder = _Finder(root / "transformer_engine" / "pytorch")
        patch.setattr(sys, "meta_path", [*sys.meta_path, finder])
        common = importlib.import_module("transformer_engine.common")
        common.load_framework_extension = lambda framework: None
        importlib.import_module("transformer_engine.pytorch")
    for name in set(sys.modules) - before:
        top = name.partition(".")[0]
        if top == "transformer_engine" or top in ABSENT:
            MODULES[name] = sys.modules.pop(name)


@pytest.fixture
def te(monkeypatch, tmp_path_factory):
    """``transformer_engine.pytorch``, which `fp8.common.libraries.need` then returns."""
    if probe("transformer_engine").status == "missing":
        if not MODULES:
            _import_wheel(tmp_path_factory.mktemp("transformer_engine"))
        for name, module in MODULES.items():
            if name.startswith("transformer_engine"):
                monkeypatch.setitem(sys.modules, name, module)
    library = importlib.import_module("transformer_engine.pytorch")
    pretend_device(monkeypatch)
    for name, forward in FORWARDS.items():
        monkeypatch.setattr(getattr(library, name), "forward", forward)
    RAN.clear()
    return library


def pretend_device(monkeypatch):
    """What TransformerEngine asks torch when it makes layers and enters contexts."""
    blackwell = types.SimpleNamespace(major=10, minor=0)  # which has all recipes
    device = {
        "is_available": True,
        "current_device": 0,
        "get_device_properties": blackwell,
    }
    for name, value in device.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def recipe_in_force():
    state = sys.modules["transformer_engine.pytorch.quantization"].FP8GlobalStateManager
    return state.get_fp8_recipe() if state.is_fp8_enabled() else None


def _norm(self, x, prefix=""):
    weight, bias = (getattr(self, prefix + name, None) for name in ("weight", "bias"))
    if bias is None:
        return F.rms_norm(x, weight.shape, weight, self.eps)
    return F.layer_norm(x, weight.shape, weight, bias, self.eps)


def _product(self, x, prefix=""):
    weight, bias = (getattr(self, prefix + name) for name in ("weight", "bias"))
    RAN.append(recipe_in_force())
    # Asks for CUDA's.
    self.allow_different_data_and_param_types = torch.is_autocast_enabled("cpu")
    self.set_activation_dtype(x)
    if RAN[-1] is not None:
        utils = sys.modules["transformer_engine.pytorch.utils"]
        utils.assert_dim_for_fp8_exec(x, weight)
    return F.linear(x, weight, bias if bias.numel() else None)


def _mlp(self, x):
    x = _product(self, _norm(self, x, "layer_norm_"), "fc1_")
    functions = {
        "gelu": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "silu": F.silu,
    }
    return _product(self, functions[self.activation](x), "fc2_")


FORWARDS = {
    "Linear": _product,
    "LayerNorm": _norm,
    "RMSNorm": _norm,
    "LayerNormLinear": lambda self, x: _product(self, _norm(self, x, "layer_norm_")),
    "LayerNormMLP": _mlp,
}
