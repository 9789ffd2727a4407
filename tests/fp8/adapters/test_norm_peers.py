"""Composer and timm, which do not install beside this torch: our functions bound to the signatures
in their wheels, and what of their code runs without the rest, run."""

import ast
import importlib
import inspect
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fp8
from fp8.adapters import composer
from tests.shared import assert_close, parametrize, proves, refuses
from tests.wheels import signature, unpacked

COMPOSER, TIMM = "mosaicml==0.32.1", "timm==1.0.31"
SURGERY = "composer/algorithms/low_precision_layernorm/low_precision_layernorm.py"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    return {
        name: unpacked(name, tmp_path_factory.mktemp("wheel"))
        for name in (COMPOSER, TIMM)
    }


def parameters(text):
    """(name, source of the default) of each, without self and ``**kwargs``."""
    arguments = ast.parse(f"def f({text}): pass").body[0].args  # type: ignore[attr-defined]
    defaults = [""] * (len(arguments.args) - len(arguments.defaults))
    defaults += [ast.unparse(value) for value in arguments.defaults]
    pairs = [(a.arg, d) for a, d in zip(arguments.args, defaults, strict=True)]
    return [pair for pair in pairs if pair[0] != "self"]


def ours(function):
    """As `parameters`, of a function that is here."""
    return [
        (p.name, "" if p.default is p.empty else repr(p.default))
        for p in inspect.signature(function).parameters.values()
        if p.name != "self"
    ]


@proves(
    "Composer",
    "apply_low_precision_layernorm",
    "LowPrecisionLayerNorm",
    how="signatures",
)
def test_functions_take_what_those_of_the_same_name_take(wheels, real_composer):
    def theirs(wheel, file, name):
        return parameters(signature(wheels[wheel] / file, name))

    surgery = theirs(COMPOSER, SURGERY, "apply_low_precision_layernorm")
    assert ours(fp8.apply_low_precision_layernorm)[:3] == surgery
    norm = theirs(TIMM, "timm/layers/norm.py", "LayerNorm2d.__init__")
    assert ours(fp8.LayerNorm2d.__init__)[: len(norm)] == norm
    algorithm = composer.LowPrecisionLayerNorm()
    for name in ("match", "apply"):
        method = theirs(COMPOSER, "composer/core/algorithm.py", f"Algorithm.{name}")
        assert ours(getattr(algorithm, name)) == method
    functions = {"__init__": composer.LowPrecisionLayerNorm}
    functions["required_on_load"] = algorithm.required_on_load
    for name, function in functions.items():
        method = theirs(COMPOSER, SURGERY, f"LowPrecisionLayerNorm.{name}")
        assert [n for n, _ in ours(function)] == [n for n, _ in method]


def package(monkeypatch, name, folder):
    """A package of which only what is asked for is imported: its own __init__ imports the rest."""
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def real_composer(wheels, monkeypatch):
    """Composer's own Algorithm, Event and Precision names, and nothing else of it."""
    root = wheels[COMPOSER] / "composer"
    top = package(monkeypatch, "composer", root)
    top.core = package(monkeypatch, "composer.core", root / "core")
    utils = package(monkeypatch, "composer.utils", root / "utils")
    for name in "utils.string_enum core.serializable core.event core.algorithm".split():
        monkeypatch.delitem(sys.modules, f"composer.{name}", raising=False)
        module = importlib.import_module(f"composer.{name}")
        monkeypatch.setitem(sys.modules, f"composer.{name}", module)
        if name == "utils.string_enum":
            utils.StringEnum = module.StringEnum
    top.core.Event = sys.modules["composer.core.event"].Event
    top.core.Algorithm = sys.modules["composer.core.algorithm"].Algorithm

    class Precision(utils.StringEnum):  # composer.core.precision imports its devices
        FP32 = "fp32"
        AMP_BF16 = "amp_bf16"

    top.core.Precision = Precision
    return top


def state(model, precision):
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    return SimpleNamespace(model=model, optimizers=optimizers, precision=precision)


@proves("Composer", "LowPrecisionLayerNorm", "the Trainer's precision", how="library")
def test_algorithm_of_composers_own_class(real_composer):
    core = real_composer.core
    algorithm = composer.LowPrecisionLayerNorm()
    assert isinstance(algorithm, core.Algorithm)
    assert repr(algorithm) == "LowPrecisionLayerNorm(apply_at=Event.INIT)"
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    here = state(model, core.Precision.AMP_BF16)
    assert algorithm.match(core.Event.INIT, here)
    assert not algorithm.match(core.Event.FIT_START, here)
    assert algorithm.apply(core.Event.INIT, here, None) is None
    assert fp8.report(model)[1].why == "bfloat16"
    assert here.optimizers[0].param_groups[0]["params"][2] is model[1].weight
    with pytest.warns(fp8.warnings.ConvertWarning, match="fp32|FP32"):
        algorithm.apply(core.Event.INIT, state(model, core.Precision.FP32), None)
    assert algorithm.state_dict() == {"repr": repr(algorithm)}
    with refuses(r"Event\.INIT.*FIT_START"):
        composer.LowPrecisionLayerNorm(apply_at=core.Event.FIT_START)


@pytest.fixture
def timm_norms(wheels, monkeypatch):
    """timm's layers/norm.py, the real one, and what it imports."""
    root = wheels[TIMM] / "timm"
    package(monkeypatch, "timm", root)
    package(monkeypatch, "timm.layers", root / "layers")
    for name in ("timm.layers.fast_norm", "timm.layers.norm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    return sys.modules["timm.layers.norm"]


@proves("timm", "LayerNorm2d(num_channels, eps, affine)", how="library")
@parametrize("low", [False, True])
def test_layer_norm_2d_as_timms(timm_norms, low):
    """Also in low precision, as timm's after its ``set_fast_norm()``. The strides are not timm's:
    see `tests.fp8.training.test_layer_norm2d`."""
    sys.modules["timm.layers.fast_norm"].set_fast_norm(low)
    theirs, mine = timm_norms.LayerNorm2d(6), fp8.LayerNorm2d(6)
    assert repr(mine) == repr(theirs)
    assert (
        mine.normalized_shape
        == fp8.LayerNorm2d([6]).normalized_shape
        == theirs.normalized_shape
    )
    if low:
        fp8.apply_low_precision_layernorm(mine)
    nn.init.normal_(theirs.weight)
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 6, 4, 4).requires_grad_()
    outputs = [mine(x), theirs(x)]
    gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in outputs]
    for ours, reference in (outputs, gradients):
        assert torch.equal(ours, reference)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(mine(x), theirs(x), rtol=0.01, atol=0.01)
        assert mine(x).dtype == (torch.bfloat16 if low else torch.float32)
