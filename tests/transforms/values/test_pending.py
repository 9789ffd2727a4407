"""`unit_scale(model)` until and in its first call: whatever was made of the model before has the
values that `unit_scale(model, batch=...)` gives, or a warning names what has not."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

import unit_scaling as uu
from fp8.warnings import ScaleWarning
from tests.launch import run_ranks
from tests.threads import switching, together
from tests.transforms.models import GPT, Net, batch, gpt, graphs, hooks_of, same, step
from unit_scaling.parameter import tags_of
from unit_scaling.transforms import compile, simulate_fp8, unit_scale
from unit_scaling.transforms.values import pending

ROOT = Path(__file__).parents[3]


def expected(seed: int = 0) -> GPT:
    return unit_scale(gpt(seed), batch=batch())


def check_set(model: Any, reference: nn.Module | None = None) -> None:
    """Values and tags are those of a batch, and nothing is left of the hooks."""
    reference = expected() if reference is None else reference
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert tags_of(p) == tags_of(q), name
    assert not hooks_of(model)


def perturbed(model: nn.Module, *names: str) -> None:
    """Writes other values into parameters."""
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).mul_(1.5)


# Copies


class ModelEmaV2(nn.Module):
    """As timm's."""

    def __init__(self, model: nn.Module, decay: float = 0.9) -> None:
        super().__init__()
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        pairs = zip(self.module.state_dict().values(), model.state_dict().values(), strict=True)
        for average, value in pairs:
            average.copy_(self.decay * average + (1 - self.decay) * value)


def target_of(model: nn.Module) -> nn.Module:
    """As of a value function: loaded, and updated before the first call."""
    made = copy.deepcopy(model).requires_grad_(False)
    made.load_state_dict(model.state_dict())
    for p, q in zip(made.parameters(), model.parameters(), strict=True):
        p.lerp_(q.detach(), 0.005)
    return made


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "AveragedModel": lambda model: AveragedModel(model).module,
    "ModelEmaV2": lambda model: ModelEmaV2(model).module,
    "target network": target_of,
    "copy of a copy": lambda model: copy.deepcopy(copy.deepcopy(model)),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved,
}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["the model first", "the copy first"])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_set_with_the_model(name: str, order: tuple[int, int]) -> None:
    model = unit_scale(gpt())
    models = (model, COPIES[name](model))
    first, second = (models[i] for i in order)
    first(*batch())
    if name not in ("pickle", "torch.save"):
        check_set(second)  # before it runs itself
    second(*batch(1))
    for each in models:
        check_set(each)


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_made_after_the_first_call_is_plain(name: str) -> None:
    model = unit_scale(gpt())
    model(*batch())
    check_set(COPIES[name](model))


def averages(model: nn.Module) -> list[Tensor]:
    """Those of some steps, of two kinds, which begin at the start."""
    first, second = ModelEmaV2(model), AveragedModel(model)
    optimizer = uu.optim.AdamW(model.parameters())
    for seed in range(3):
        model(*batch(seed))[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        first.update(model)
        second.update_parameters(model)
    return [*first.module.parameters(), *second.module.parameters()]


def test_averages_are_those_of_a_model_with_a_batch() -> None:
    theirs = averages(expected())
    for ours, other in zip(averages(unit_scale(gpt())), theirs, strict=True):
        assert torch.equal(ours, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("what", ["copy", "model"])
def test_other_dtypes(what: str, dtype: torch.dtype) -> None:
    """Values are rounded to the dtype before and after the multiplication: by 2**-8 in bfloat16;
    numbers below 2**-14 are subnormal in float16."""
    model = unit_scale(gpt())
    other = copy.deepcopy(model) if what == "copy" else model
    other.to(dtype)
    (model if what == "copy" else other)(*batch())
    for p, q in zip(other.parameters(), expected().parameters(), strict=True):
        assert p.dtype == dtype
        torch.testing.assert_close(p.float(), q, rtol=2.0**-7, atol=2.0**-10)
        assert tags_of(p).mup_scale == pytest.approx(tags_of(q).mup_scale, rel=0.2)


def test_every_copy_has_the_report() -> None:
    model = unit_scale(gpt())
    other, part = copy.deepcopy(model), copy.deepcopy(model.blocks[0])
    assert "not run yet" in str(uu.report(model))
    uu.verify(other, batch())  # which runs a copy of it
    assert list(uu.report(model)) == list(uu.report(other)) == list(uu.report(expected()))
    assert "This is a copy" in str(uu.report(part))


def test_copies_of_float64() -> None:
    """What is remembered of the values is not the memory of one of them."""
    model = unit_scale(gpt().double())
    others = [copy.deepcopy(model) for _ in range(8)]
    model(*batch())
    for other in others:
        check_set(other, model)


def test_a_copy_of_a_part() -> None:
    model = unit_scale(gpt())
    part = copy.deepcopy(model.blocks[1])
    model(*batch())
    check_set(part, expected().blocks[1])


WRITTEN_BY_OTHERS = """
import sys, torch
from tests.transforms.models import batch
model = torch.load(sys.argv[1], weights_only=False)
model(*batch())
torch.save(model.state_dict(), sys.argv[1])
"""


@pytest.mark.parametrize("called", [False, True])
def test_another_process(called: bool, tmp_path: Path) -> None:
    path, model = tmp_path / "model.pt", unit_scale(gpt())
    if called:
        model(*batch())
    torch.save(model, path)
    command = [sys.executable, "-W", "error", "-c", WRITTEN_BY_OTHERS, str(path)]
    subprocess.run(command, check=True, cwd=ROOT)
    state = torch.load(path)
    assert all(torch.equal(state[name], p) for name, p in expected().named_parameters())


def test_a_copy_without_what_the_other_has_keeps_values_with_a_warning() -> None:
    """The model that ran first was edited, so that nothing is known of what it has lost."""
    model = unit_scale(gpt())
    other = copy.deepcopy(model)
    del model.blocks[1]
    with pytest.warns(ScaleWarning, match=r"10 parameters \(as blocks.1.norm1.weight\) of a copy"):
        model(*batch())
    assert torch.equal(other.blocks[1].up.weight, gpt().blocks[1].up.weight)
    uu.optim.AdamW(other.parameters()).step()
    assert not hooks_of(other)


# Values that are written before the first call


def test_vectors_of_parameters() -> None:
    model = unit_scale(gpt())
    vector_to_parameters(parameters_to_vector(model.parameters()), model.parameters())
    model(*batch())
    check_set(model)
    model = unit_scale(gpt())
    vector = parameters_to_vector(model.parameters())
    vector_to_parameters(vector + 0.01, model.parameters())
    written = copy.deepcopy(model.state_dict())
    with pytest.warns(ScaleWarning, match=r"10 weights \(as tokens.weight\) were written after"):
        model(*batch())
    assert all(torch.equal(value, written[name]) for name, value in model.state_dict().items())


def test_weights_that_are_half_written_are_named() -> None:
    model = unit_scale(gpt())
    perturbed(model, "blocks.0.up.weight", "blocks.1.down.bias")
    before = model.blocks[0].up.weight.detach().clone()
    with pytest.warns(ScaleWarning, match=r"1 weights \(as blocks.0.up.weight\).*half scaled"):
        model(*batch())
    assert torch.equal(model.blocks[0].up.weight, before)
    assert torch.equal(model.blocks[0].qkv.weight, expected().blocks[0].qkv.weight)


def test_biases_and_gains_that_are_written_stay_without_a_warning() -> None:
    model = unit_scale(gpt())
    with torch.no_grad():
        model.blocks[0].up.bias.fill_(0.1)
        model.norm.weight.fill_(2)
    model(*batch())
    assert (model.blocks[0].up.bias == 0.1).all()
    assert (model.norm.weight == 2).all()


def test_a_new_initialization() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    model = unit_scale(gpt()).apply(init)
    values = copy.deepcopy(model.state_dict())
    with pytest.warns(ScaleWarning, match=r"10 weights \(as tokens.weight\) were written after"):
        model(*batch())
    assert torch.equal(model.head.weight, values["head.weight"])


def trained() -> GPT:
    model = expected()
    optimizer = uu.optim.AdamW(model.parameters())
    for seed in range(4):
        model(*batch(seed))[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_a_checkpoint_of_a_scaled_model_is_loaded_as_it_is() -> None:
    """Its rates are decided by what it computes: near those of the process that saved it, which an
    optimizer's state_dict has."""
    reference, model = trained(), unit_scale(gpt(1))
    model.load_state_dict(reference.state_dict())
    model(*batch())
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)
        ours, theirs = tags_of(p), tags_of(q)
        assert (ours.mup_type, ours.mup_pending) == (theirs.mup_type, False)
        assert abs(math.log2(ours.mup_scale / theirs.mup_scale)) <= 1.5


def test_averaged_state_dicts() -> None:
    """Of two models that have run, in the plain class; of two that have not, with a warning."""

    def mean(*models: nn.Module) -> dict[str, Tensor]:
        states = [model.state_dict() for model in models]
        return {name: sum(state[name] for state in states) / 2 for name in states[0]}

    first, second = unit_scale(gpt()), unit_scale(gpt(1))
    plain, early = mean(first, second), unit_scale(gpt(2))
    for each in (first, second):
        each(*batch())
    soup = gpt(3)
    soup.load_state_dict(mean(first, second), strict=True)
    for p, a, b in zip(soup.parameters(), first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, (a + b) / 2)
    early.load_state_dict(plain)
    with pytest.warns(ScaleWarning, match="10 weights"):
        early(*batch())


def test_a_backbone_s_keys() -> None:
    """Loaded into the plain backbone, they compute what they compute in the model."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16))
    plain = Net(lambda m, x: m.head(m.backbone(x)), backbone=body, head=nn.Linear(16, 4))
    model, x = unit_scale(plain), 30 * torch.randn(8, 8)
    model(x)
    prefix = "backbone."
    state = {n.removeprefix(prefix): v for n, v in model.state_dict().items() if prefix in n}
    body.load_state_dict(state, strict=True)
    assert torch.equal(body(x), model.backbone(x))


# Which call is the first


def test_a_part_that_runs_before_the_model_is_named() -> None:
    model, x = unit_scale(gpt()), torch.randn(2, 4, 32)
    with pytest.warns(ScaleWarning, match=r"blocks.1 runs before the model .* as a whole"):
        y = model.blocks[1](x)
    assert torch.equal(y, gpt().blocks[1](x))
    model(*batch())
    check_set(model)


def test_a_graph_of_torch_fx() -> None:
    model = unit_scale(mlp())
    traced = torch.fx.symbolic_trace(model)
    with pytest.warns(ScaleWarning, match="0 runs before the model"):
        traced(X)
    assert torch.equal(model(X), traced(X))
    assert torch.equal(torch.fx.symbolic_trace(model)(X), traced(X))
    check_set(model, unit_scale(mlp(), batch=X))


FIRST: dict[str, Callable[[Any], Any]] = {
    "no_grad": torch.no_grad()(lambda model: model(*batch())),
    "inference_mode": torch.inference_mode()(lambda model: model(*batch())),
    "keywords": lambda model: model(ids=batch()[0], targets=batch()[1]),
    "evaluation": lambda model: model.eval()(*batch()),
    "torch.compile": lambda model: torch.compile(model, backend="eager")(*batch()),
    "Module.compile": lambda model: model.compile(backend="eager") or model(*batch()),
    "compile": lambda model: compile(model)(*batch()),
    "simulate_fp8": lambda model: simulate_fp8(model)(*batch()),
    "verify": lambda model: uu.verify(model, batch()) and model(*batch()),
    "within another": lambda model: Net(lambda m, given: m.a(*given), a=model)(batch()),
}


@pytest.mark.parametrize("name", FIRST)
def test_the_first_call_may_be_any(name: str) -> None:
    torch.compiler.reset()
    model = unit_scale(gpt())
    FIRST[name](model)
    check_set(model)
    tolerance = 1e-5 if "ompile" in name else 0.0
    same(step(model.train()), step(expected()), tolerance, tolerance)
    assert not any(p.is_inference() for p in model.parameters())


def test_under_autocast() -> None:
    """The numbers are on a grid, so that most are those of float32."""
    model, reference = unit_scale(gpt()), expected()
    with torch.autocast("cpu", torch.bfloat16):
        logits, _ = model(*batch())
    assert logits.dtype == torch.bfloat16
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.dtype == torch.float32
        assert tags_of(p).mup_scale == pytest.approx(tags_of(q).mup_scale, rel=0.2)


def test_the_graph_of_a_second_compiled_call_is_the_plain_one() -> None:
    plain, model = (graphs(m, batch(), calls=2) for m in (gpt(), unit_scale(gpt())))
    assert model[-len(plain) :] == plain
    model = unit_scale(gpt())
    model(*batch())
    assert graphs(model, batch(), fullgraph=True) == plain


class Counted(nn.Linear):
    """Counts its calls, and keeps the count in a list that no copy of a call restores."""

    def __init__(self, calls: list[int]) -> None:
        super().__init__(8, 8)
        self.count = lambda: calls.append(1)

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        return super().forward(x)


@pytest.mark.parametrize("depth", [1, 6])
def test_the_first_call_takes_few_forward_passes(depth: int) -> None:
    calls: list[int] = []

    def run(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = x + layer(nn.functional.layer_norm(x, (8,)))
        return m.head(x)

    layers = nn.ModuleList(Counted(calls) for _ in range(depth))
    model = unit_scale(Net(run, layers=layers, head=nn.Linear(8, 4)))
    model(torch.randn(16, 8))
    assert depth < len(calls) <= 25 * depth
    calls.clear()
    model(torch.randn(16, 8))
    assert len(calls) == depth


def test_threads_wait_for_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[int] = []
    decide = pending.decide
    monkeypatch.setattr(pending, "decide", lambda *args: decided.append(1) or decide(*args))
    model = unit_scale(gpt())
    with switching():
        results = together(*[lambda: model(*batch())[0] for _ in range(4)])
    assert len(decided) == 1
    assert all(torch.equal(result, expected()(*batch())[0]) for result in results)
    check_set(model)


def test_a_first_call_that_fails_changes_nothing() -> None:
    model = unit_scale(gpt())
    ids, _ = batch()
    for wrong, error in (((ids + 65,), IndexError), ((ids.float(),), RuntimeError)):
        with pytest.raises(error):
            model(*wrong)
        assert all(
            torch.equal(p, q) for p, q in zip(model.parameters(), gpt().parameters(), strict=True)
        )
    model(*batch())
    check_set(model)
    body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = unit_scale(body)
    with pytest.raises(ValueError, match="has NaN for this batch"):
        model(torch.full((2, 4), math.nan))
    model(torch.ones(2, 4))
    check_set(model, unit_scale(body, batch=torch.ones(2, 4)))


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4, bias=False))


def replicated(model: nn.Module) -> Any:
    """As by DataParallel, on another device."""
    copies = {m: m._replicate_for_data_parallel() for m in model.modules()}
    for module, made in copies.items():
        for name, child in module.named_children():
            setattr(made, name, copies[child])
        for name, p in module._parameters.items():
            setattr(made, name, None if p is None else p.clone())
    return copies[model](X)


REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    "torch.func.functional_call": lambda model: torch.func.functional_call(
        model, {name: p.detach() for name, p in model.named_parameters()}, (X,)
    ),
    "torch.func.functional_call or DataParallel": replicated,
    "torch.vmap": lambda model: torch.vmap(model)(X),
    "torch.export": lambda model: torch.export.export(model, (X,)),
    "fullgraph=True": lambda model: torch.compile(model, backend="eager", fullgraph=True)(X),
    "a call on the meta device": lambda model: copy.deepcopy(model).to("meta")(X.to("meta")),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's
@pytest.mark.parametrize("name", REFUSED)
def test_first_calls_without_values_are_refused(name: str) -> None:
    torch.compiler.reset()
    model, said = unit_scale(mlp()), f"call it once, or pass batch= to unit_scale, before {name}"
    with pytest.raises(Exception, match=said):
        REFUSED[name](model)
    model(X)
    check_set(model, unit_scale(mlp(), batch=X))
    REFUSED[name](model)


# Optimizers


@pytest.mark.parametrize("cls", [uu.optim.SGD, uu.optim.AdamW])
def test_an_optimizer_that_is_made_before_has_the_rates_of_one_that_is_made_after(cls: Any) -> None:
    model = unit_scale(gpt())
    early = cls(model.parameters(), lr=0.1)
    pickled = copy.deepcopy((model, early))
    model(*batch())
    late = cls(model.parameters(), lr=0.1)
    states = [each.state_dict()["param_groups"] for each in (early, pickled[1], late)]
    assert states[0] == states[1] == states[2]
    assert len(set(states[0][0]["mup_lr_scales"])) > 3


def test_rates_that_are_not_known_are_an_error() -> None:
    model = unit_scale(gpt())
    optimizer = uu.optim.AdamW(model.parameters())
    with pytest.warns(ScaleWarning, match="blocks.0 runs before the model"):
        model.blocks[0](torch.randn(2, 4, 32)).sum().backward()
    with pytest.raises(RuntimeError, match="has not set the values"):
        optimizer.step()
    with pytest.raises(ValueError, match="has not set the values"):
        uu.optim.scaled_parameters(model.parameters(), "adam", lr=0.1)
    model(*batch())
    optimizer.step()
    uu.optim.scaled_parameters(model.parameters(), "adam", lr=0.1)


# What is left


@pytest.fixture
def swapped() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("swapped")
@pytest.mark.parametrize("called", [False, True])
def test_parameters_that_are_swapped(called: bool) -> None:
    """torch exchanges what a parameter is in conversions and `load_state_dict`, and tags with it:
    modules know them."""
    reference, model = expected(), unit_scale(gpt())
    if called:
        model(*batch())
    model.double()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    model(*batch())
    if called:
        with pytest.raises(ValueError, match="restore_tags"):
            uu.optim.AdamW(model.parameters())
        uu.parameter.restore_tags(model)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q.double(), rtol=1e-6, atol=1e-7)
        assert tags_of(p).mup_scale == pytest.approx(tags_of(q).mup_scale)


@pytest.mark.parametrize("called", [False, True])
def test_nothing_is_left_of_a_model(called: bool) -> None:
    gc.collect()
    before = len(pending._RECORDS), len(pending.REPORTS)
    model = unit_scale(gpt())
    models = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    optimizer = uu.optim.AdamW(model.parameters())
    if called:
        step(model)
        optimizer.step()
    alive = [weakref.ref(x) for m in models for x in (*m.modules(), *m.parameters())]
    del model, models, optimizer
    gc.collect()
    assert not [ref() for ref in alive if ref() is not None]
    assert (len(pending._RECORDS), len(pending.REPORTS)) == before


# Several processes


def two_models() -> list[nn.Module]:
    """Of the same class and shapes."""
    torch.manual_seed(0)
    return [unit_scale(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))) for _ in range(2)]


def check_orders(rank: int, store: Path) -> None:
    """Each rank calls two models in an order of its own, on data of other sizes; one of them in
    DistributedDataParallel."""
    torch.manual_seed(rank)
    data = [torch.randn(8, 8), 30 * torch.randn(8, 8)]
    models = two_models()
    wrapped = [models[0], DistributedDataParallel(models[1])]
    for index in (0, 1) if rank else (1, 0):
        wrapped[index](data[index]).sum().backward()
    scales = torch.tensor([p.mup_scale for m in models for p in m.parameters()])
    gradients = torch.cat([p.grad.flatten() for p in models[1].parameters()])
    values = torch.cat([p.detach().flatten() for m in models for p in m.parameters()])
    for mine in (scales, gradients, values):
        theirs = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(theirs, mine)
        torch.testing.assert_close(theirs[0], theirs[1], rtol=1e-6, atol=1e-7)
    assert scales[0] / scales[4] > 16  # each has its own numbers


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch is built without gloo")
def test_processes_that_call_in_other_orders(tmp_path: Path) -> None:
    run_ranks(check_orders, 2, tmp_path / "store")
