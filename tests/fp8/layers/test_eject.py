"""`fp8.eject`: the file trains the same products without this package."""

import copy
import importlib.util
import json
from collections import namedtuple
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import fp8
from fp8.layers.eject import MAX_LINES, WIDTH
from tests.launch import ROOT, python
from tests.shared import linears, normal, pairs, parametrize, proves, quietly, refuses
from unit_scaling.transforms import unit_scale

from . import eject_models

HERE = Path(__file__).parent

MIXED = fp8.Policy(
    "tensor",
    rules=[
        ("blocks.1.*", "grad_weight", None),
        ("blocks.2.0", None, "row"),
        ("head", None, None),
    ],
)


Case = namedtuple("Case", "recipe dtype autocast", defaults=(torch.float32, False))
RECIPES = ("unit", "static", "static_gw_hp", "tensor", "row", "row_gw_hp", MIXED)
CASES = [
    *(Case(recipe) for recipe in RECIPES),
    *(Case(recipe, torch.bfloat16) for recipe in ("static", "row")),
    Case("tensor", autocast=True),
    Case("row_gw_hp", autocast=True),
]


def converted(recipe, dtype=torch.float32):
    """The model under a recipe, calibrated if that has static scales."""
    torch.manual_seed(0)
    model = fp8.convert(eject_models.Model().to(dtype), recipe)
    if str(recipe).startswith("static"):
        x, ids = eject_models.batch(dtype)
        fp8.calibrate(model, (x, ids), lambda y: y.float().square().mean())
    return model


def plain(model):
    """A copy that is not converted."""
    return fp8.revert(copy.deepcopy(model))


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The file of each case, and what this package computes."""
    folder = tmp_path_factory.mktemp("eject")
    for i, case in enumerate(CASES):
        model = converted(case.recipe, case.dtype)
        fp8.eject(model, folder / f"case_{i}.py")
        with quietly():  # a few large features, beside which others are zero
            wanted = eject_models.step(model, case.dtype, case.autocast)
        assert all(tensor.isfinite().all() for tensor in wanted)
        told = {"dtype": case.dtype, "autocast": case.autocast, "wanted": wanted}
        told["weights"] = plain(model).state_dict()
        torch.save(told, folder / f"case_{i}.pt")
    return folder


@pytest.fixture(scope="module")
def different(folder):
    """Case -> the tensors that differ in a fresh process."""
    arguments = folder, HERE / "eject_models.py", torch.get_num_threads()
    worker = HERE / "eject_worker.py"
    return json.loads(python("-I", worker, *arguments, warnings="default", cwd=folder))


@proves("the field", "layers as a file without the library")
@parametrize("case", range(len(CASES)))
def test_the_file_computes_the_same_bits(different, case):
    assert different[f"case_{case}"] == []


def test_the_file_is_short_and_clean(folder):
    pytest.importorskip("ruff", reason="the extra lint is not installed")
    config = str(ROOT / "pyproject.toml")
    for what in (["check", "--extend-ignore=D"], ["format", "--check"]):
        settings = "--config", config, "--config", f"line-length = {WIDTH}"
        python("-m", "ruff", *what, *settings, "--no-cache", ".", cwd=folder)
    for path in folder.glob("case_*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES == 150


LAYERS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()


def many(blocks):
    """Blocks of seven layers, calibrated so that no two neighbours have the same scales."""
    model = nn.Module()
    model.blocks = nn.ModuleList(
        nn.ModuleDict({name: nn.Linear(2, 2) for name in LAYERS}) for _ in range(blocks)
    )
    fp8.convert(model, "static")
    names = fp8.calibration(model)
    fp8.calibrate(model, scales={name: -(i % 19) + 1 for i, name in enumerate(names)})
    return model


def test_the_table_of_layers(tmp_path):
    """32 blocks of seven layers with different static scales fit, and the file has these scales."""
    model = many(32)
    scales = fp8.calibration(model)
    path = fp8.eject(model, tmp_path / "many.py")
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES
    for name, layer in load(path).convert(plain(model)).named_modules():
        if isinstance(layer, nn.Linear):
            roles = (f"{name}.{role}" for role in ("input", "weight", "grad"))
            fixed = (layer.fixed_x, layer.fixed_w, layer.fixed_g)
            assert [bits.view(torch.float32) for bits in fixed] == [
                2.0 ** scales[r] for r in roles
            ]
    with refuses("1400 layers do not fit"):
        fp8.eject(many(200), tmp_path / "more.py")


def test_a_model_that_is_one_layer(tmp_path):
    module = load(fp8.eject(linear("row"), tmp_path / "one.py"))
    layer = module.convert(nn.Linear(4, 4))
    x = normal(3, 4)
    wanted = x @ layer.weight.t() + layer.bias
    assert not torch.allclose(layer(x), wanted)
    assert layer(x[0]).shape == (4,)
    assert layer(x[:0]).shape == (0, 4)
    module.Float8Linear.enabled = False
    assert torch.allclose(layer(x), wanted)
    with refuses("a Float8Linear is not", TypeError):
        module.convert(layer)


@pytest.mark.native
@parametrize("recipe", "unit tensor row row_gw_hp".split())
def test_kernels(tmp_path, recipe):
    """torch's FP8 product, of a CPU, computes what the simulation does, up to two roundings of a
    result to bfloat16: 2**-8 of it each, and it is at most the sum of its terms' magnitudes."""
    model = fp8.convert(nn.Linear(64, 32), recipe)
    module = load(fp8.eject(model, tmp_path / "one.py"))
    layer = module.convert(plain(model).bfloat16())
    x, g = normal(48, 64), normal(48, 32)
    found = []
    for module.DEVICES in ((), ("cpu",)):
        inputs = x.bfloat16().requires_grad_()
        y = layer(inputs)
        gradients = torch.autograd.grad(y, (inputs, layer.weight), g.bfloat16())
        found.append([y, *gradients])
    w = layer.weight.float()
    sums = [x.abs() @ w.abs().t(), g.abs() @ w.abs(), g.abs().t() @ x.abs()]
    for simulated, native, size in pairs(*found, sums):
        assert (
            (simulated.float() - native.float()).abs() <= 2**-7 * size + 2**-7
        ).all()


def low_norm():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).bfloat16()
    return fp8.convert(fp8.apply_low_precision_layernorm(model, "amp_bf16"), "tensor")


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def linear(recipe):
    return fp8.convert(nn.Linear(4, 4), recipe)


OPERANDS = ("input", "weight", "grad")
E5M2 = fp8.Recipe(name="e5m2", **dict.fromkeys(OPERANDS, fp8.Cast(format="e5m2")))
HALF = fp8.Recipe(
    name="half",
    **dict.fromkeys(OPERANDS, fp8.Cast(format="e4m3", scaling="static")),
    grad_weight_input=fp8.Cast(format="e4m3"),
)

REFUSED = {
    "convolution": (
        lambda: fp8.convert(nn.Conv1d(4, 4, 3), "tensor"),
        r"\(model\): a Conv1d",
    ),
    "history": (
        lambda: fp8.convert(linears(4, 4, 4), "delayed"),
        "0, 1: recipe 'delayed' casts to e4m3, delayed, history 16",
    ),
    "blocks": (partial(linear, "block"), "casts to e4m3, block"),
    "format": (partial(linear, "bf16"), "casts to bf16, unit"),
    "sums": (
        partial(linear, "deepseek_v3"),
        "accumulate='hopper'",
    ),
    "no kernel": (partial(linear, E5M2), "e5m2 by e5m2"),
    "half static": (
        partial(linear, HALF),
        "none for grad_weight_input",
    ),
    "not calibrated": (
        partial(linear, "static"),
        "call fp8.calibrate",
    ),
    "switch": (
        partial(linear, fp8.Policy("tensor", switch=[(0.9, "row")])),
        r"\(model\): its policy has a switch",
    ),
    "dtype": (lambda: fp8.convert(nn.Linear(4, 4).double(), "tensor"), "torch.float64"),
    "norm": (low_norm, "1: "),
    "not run": (
        lambda: fp8.convert(unit_scale(linears(4, 4))),
        "call fp8.calibrate, or train a step",
    ),
    "parametrized": (
        lambda: parametrizations.orthogonal(linear("tensor")),
        "computed by a parametrization",
    ),
    "subclass": (
        lambda: fp8.convert(Doubled(4, 4), "tensor"),
        "a Doubled, whose forward",
    ),
    "nothing": (lambda: nn.Linear(4, 4), "no layer of the model is converted"),
}


@parametrize("name", REFUSED)
def test_what_is_refused(tmp_path, name):
    make, message = REFUSED[name]
    with refuses(message):
        fp8.eject(make(), tmp_path / "no.py")
    assert not list(tmp_path.iterdir())


def test_bad_arguments(tmp_path):
    model = linear("tensor")
    for name in ("my-fp8.py", "fp8.txt", "fp8"):
        with refuses("eject writes a module"):
            fp8.eject(model, tmp_path / name)
    with refuses("eject", TypeError):
        fp8.eject(model.weight, tmp_path / "my.py")
