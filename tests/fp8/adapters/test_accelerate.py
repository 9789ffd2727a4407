"""Accelerate, run for real on the CPU: its Accelerator, its recipe objects, its checkpoints."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fp8
from fp8.adapters import accelerate
from tests.fp8.adapters.loops import accelerated, adam, batches, plain_loop, small
from tests.fp8.adapters.te_library import RAN
from tests.shared import by_path, parametrize, paths, proves, quietly, refuses, theirs

with quietly():
    pytest.importorskip("accelerate", reason="the library that is adapted")
    import accelerate as library
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
    from accelerate.utils import dataclasses as kwargs_module


pytestmark = theirs


@pytest.fixture(autouse=True)
def _fresh():
    """Accelerate keeps the settings of the first Accelerator of a process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def accelerator():
    return library.Accelerator(cpu=True)


@pytest.fixture
def model():
    return small()


@pytest.fixture
def te_kwargs(te, monkeypatch):
    """TERecipeKwargs, which asks whether TransformerEngine is installed."""
    monkeypatch.setattr(kwargs_module, "is_transformer_engine_available", lambda: True)
    return TERecipeKwargs


POLICY = fp8.Policy("tensor", rules=[("down", None, "row")], keep=["readout"])


@proves("Accelerate", "FP8 by prepare", how="library")
@parametrize("recipe", ["tensor", POLICY], ids=["recipe", "policy"])
def test_the_same_losses_as_a_plain_loop(recipe, accelerator, model):
    other = deepcopy(model)
    prepared = accelerate.prepare(accelerator, model, adam(model), recipe=recipe)
    got = accelerated(accelerator, *prepared, batches(6))
    fp8.convert(other, recipe)
    assert fp8.report(model) == fp8.report(other)
    assert got == plain_loop(other, adam(other), batches(6))
    assert got[-1] < got[0]


def test_objects_in_any_order_and_several_models(accelerator, model):
    """As ``accelerator.prepare(unet, text_encoder, optimizer, loader, scheduler)`` is called."""
    second = small()
    optimizer = adam(model)
    loader = torch.utils.data.DataLoader(torch.cat(batches(2)), batch_size=8)
    objects = (loader, model, second, None, optimizer)
    prepared = accelerate.prepare(accelerator, *objects, recipe="row")
    assert type(prepared[0]).__name__ == "DataLoaderShard"
    assert prepared[1:3] == (model, second)
    assert {module.up.fp8_recipe.name for module in prepared[1:3]} == {"row"}
    accelerated(accelerator, model, prepared[4], list(prepared[0]))
    alone = small()
    assert accelerate.prepare(accelerator, alone) is alone


def test_an_error_for_one_model_converts_none(accelerator, model):
    other = nn.Linear(4, 4)
    policy = fp8.Policy("row", rules=[("up", None, None)])
    with refuses("'up' matches no layer"):
        accelerate.prepare(accelerator, model, other, recipe=policy)
    for level in ({"opt_level": "O2"}, {"backend": "msamp"}):
        with refuses("'O2' needs one model and its optimizer, got 2 and 1"):
            accelerate.prepare(accelerator, model, other, adam(model), **level)
    left = {"not chosen", "a lookup, not a product"}
    assert {row.why for row in fp8.report(model)} == left


@proves("Accelerate", "BF16 around FP8", how="library")
def test_with_bf16_and_gradient_accumulation(model):
    other = deepcopy(model)
    accelerator = library.Accelerator(
        cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2
    )
    model, optimizer = accelerate.prepare(
        accelerator, model, adam(model), recipe="tensor"
    )
    got = accelerated(accelerator, model, optimizer, batches(4))
    fp8.convert(other, "tensor")

    def loss_of(model, tokens):
        logits = model(
            tokens[:, :-1]
        ).float()  # Accelerate's autocast is around the model alone
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten()
        )

    options = {"every": 2, "dtype": torch.bfloat16}
    assert got == plain_loop(other, adam(other), batches(4), loss_of, **options)


@proves("Accelerate", "TERecipeKwargs", how="library")
@parametrize("in_eval", [False, True])
def test_recipe_object_of_transformer_engine(
    te, te_kwargs, in_eval, accelerator, model
):
    """Accelerate drops amax_compute_algo="most_recent", which it documents, since that is its own
    default: TransformerEngine's, "max", is what then runs."""
    options = {"margin": 1, "fp8_format": "E4M3", "amax_history_len": 64}
    given = te_kwargs(use_autocast_during_eval=in_eval, **options)
    assert "amax_compute_algo" not in given.to_kwargs()
    model, _ = accelerate.prepare(accelerator, model, adam(model), recipe=given)
    model(batches(1)[0])
    recipe = RAN[-1]
    assert (type(recipe).__name__, recipe.margin) == ("DelayedScaling", 1)
    assert (recipe.fp8_format.name, recipe.amax_history_len) == ("E4M3", 64)
    assert recipe.amax_compute_algo == "most_recent"
    assert model.head.weight is model.embed.weight
    assert isinstance(model.up, te.Linear)
    assert isinstance(model.norm, te.LayerNorm)
    model.eval()(batches(1)[0])
    assert RAN[-1] is (recipe if in_eval else None)


def test_mxfp8_of_transformer_engine(te_kwargs, accelerator, model):
    given = te_kwargs(use_mxfp8_block_scaling=True)
    recipe = accelerate.prepare(accelerator, model, recipe=given).fp8_te_recipe
    assert type(recipe).__name__ == "MXFP8BlockScaling"
    assert recipe.fp8_format.name == "HYBRID"  # as the object says
    given = te_kwargs(use_mxfp8_block_scaling=True, amax_history_len=16)
    with refuses("amax_history_len=16 is no option of MXFP8"):
        accelerate.prepare(accelerator, small(), recipe=given)


@proves("TransformerEngine", "interval", "override_linear_precision", how="library")
@parametrize(
    "option", [{"interval": 2}, {"override_linear_precision": (True, False, False)}]
)
def test_what_nothing_computes_is_an_error(te_kwargs, option, accelerator, model):
    """Accelerate hands these to a TransformerEngine that ignores them."""
    with refuses(f"{next(iter(option))} must be"):
        accelerate.prepare(accelerator, model, recipe=te_kwargs(**option))
    assert type(model.up) is nn.Linear


@proves("Accelerate", "AORecipeKwargs", how="library")
@parametrize("config", [True, False])
def test_recipe_object_of_torchao(config, accelerator, model):
    """Its default configuration asks for an all-gather in FP8, for which torchao replaces every
    weight, FSDP2 or not: an optimizer made before then holds none of them."""
    pytest.importorskip("torchao")
    from torchao.float8 import Float8LinearConfig

    given = AORecipeKwargs(config=Float8LinearConfig(emulate=True) if config else None)
    assert config or given.config.enable_fsdp_float8_all_gather
    optimizer = adam(model)
    before = [id(p) for p in model.parameters()]
    model, optimizer = accelerate.prepare(accelerator, model, optimizer, recipe=given)
    assert [id(p) for p in model.parameters()] == before
    rows = by_path(fp8.report(model))
    assert rows["up"].why == "not chosen"  # the first and the last layer, as documented
    assert rows["head"].why == "not chosen"
    assert rows["down"].why == "torchao, Float8Linear" + config * ", emulated"
    assert model.down.config.pad_inner_dim is not config
    losses = accelerated(accelerator, model, optimizer, batches(6))
    assert losses[-1] < losses[0]
    given = AORecipeKwargs(module_filter_func=lambda layer, name: name == "up")
    model = accelerate.prepare(accelerator, small(), recipe=given)
    assert paths(fp8.report(model), "converted") == {"up"}


def test_bad_input(accelerator, model):
    given = AORecipeKwargs(module_filter_func=lambda layer, name: True)
    known = "'simulate', 'native', 'auto', 'transformer_engine', 'torchao', 'msamp'"
    for options, message in (
        (
            {"recipe": AORecipeKwargs(), "backend": "native"},
            "is for backend 'torchao', got 'native",
        ),
        (
            {"recipe": given, "where": lambda name, layer: True},
            "give where, or AORecipeKwargs its",
        ),
        (
            {"recipe": "unit", "backend": "te"},
            f"unknown backend 'te'; choose one of {known}",
        ),
        ({"recipe": AORecipeKwargs(), "backend": "te"}, "unknown backend 'te'"),
        ({"opt_level": "O4"}, "unknown opt_level 'O4'"),
    ):
        with refuses(message):
            accelerate.prepare(accelerator, model, adam(model), **options)
    with refuses("one of TERecipeKwargs, AORecipeKwargs, MSAMPRecipeKwargs", TypeError):
        accelerate.prepare(accelerator, model, recipe=3)
    with refuses("converts the model itself"):
        accelerate.prepare(SimpleNamespace(mixed_precision="fp8"), model)
    with refuses(r"prepare needs an nn.Module among .* got AdamW, NoneType", TypeError):
        accelerate.prepare(accelerator, adam(model), None)
    assert type(model.up) is nn.Linear


@proves("Accelerate", "opt_level", how="library")
@parametrize("level", ["O2", "O3"])
def test_levels(level, tmp_path, accelerator, model):
    """Trained, checkpointed and resumed at a level, with the losses of a plain loop."""
    other = deepcopy(model)

    def start(model):
        return accelerate.prepare(
            accelerator, model, adam(model), recipe="tensor", opt_level=level
        )

    first = start(deepcopy(model))
    got = accelerated(accelerator, *first, batches(3))
    accelerator.save_state(str(tmp_path))
    got += accelerated(accelerator, *first, batches(3, start=3))
    fp8.initialize(other, optimizer := adam(other), opt_level=level, recipe="tensor")
    assert got == plain_loop(other, optimizer, batches(6))
    assert got[-1] < got[0]
    accelerator.free_memory()
    second = start(model)
    accelerator.load_state(str(tmp_path))
    assert accelerated(accelerator, *second, batches(3, start=3)) == got[3:]


@proves("Accelerate", "opt_level", how="library")
@parametrize("recipe", [MSAMPRecipeKwargs(), MSAMPRecipeKwargs(opt_level="O1"), "unit"])
def test_recipe_object_of_ms_amp(recipe, accelerator, model):
    backend = "msamp" if recipe == "unit" else "auto"
    model, _ = accelerate.prepare(
        accelerator, model, adam(model), recipe=recipe, backend=backend
    )
    level = getattr(recipe, "opt_level", "O2")
    report = fp8.report(model)
    assert report.notes[-1].startswith(f"level {level}: ")
    products = recipe if recipe == "unit" else "tensor"
    converted = [row.why for row in report if not row.left_alone]
    assert {why.partition(",")[0] for why in converted} == {products}


@proves("Accelerate", "FP8RecipeKwargs", how="library")
def test_deprecated_recipe_object(te, te_kwargs, accelerator, model):
    """Accelerate leaves its opt_level None where the backend is MS-AMP."""
    given = library.utils.FP8RecipeKwargs(backend="msamp")
    assert given.opt_level is None
    model, _ = accelerate.prepare(accelerator, model, adam(model), recipe=given)
    assert fp8.report(model).notes[0].startswith("level O2")
    given = library.utils.FP8RecipeKwargs(backend="te")
    model = accelerate.prepare(accelerator, small(), recipe=given)
    assert isinstance(model.up, te.Linear)


@proves("Accelerate", "TransformerEngine with MS-AMP", how="library")
@parametrize("backend", ["transformer_engine", "torchao"])
def test_layers_of_another_library_and_a_level(te, backend, accelerator):
    """ "Combining the two": the products are TransformerEngine's, the states of the optimizer those
    of the level."""
    model = small(64)
    other = deepcopy(model)
    options = {"recipe": "tensor", "backend": backend}
    prepared = accelerate.prepare(
        accelerator, model, adam(model), **options, opt_level="O2"
    )
    got = accelerated(accelerator, *prepared, batches(6))
    assert isinstance(
        prepared[0].up, te.Linear if backend == "transformer_engine" else nn.Linear
    )
    state = prepared[1].state[prepared[0].up.weight]
    assert {t.dtype for t in state.values() if t.numel() > 100} == {
        torch.float8_e4m3fn,
        torch.float16,
    }
    want = plain_loop(
        fp8.convert(other, "tensor", backend="simulate"), adam(other), batches(6)
    )
    assert got == pytest.approx(want, rel=0.02)
    with refuses("'O3' keeps weights in FP8"):
        accelerate.prepare(accelerator, other, adam(other), **options, opt_level="O3")
