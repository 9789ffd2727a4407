"""`unit_scale(model)` until and in its first call: whatever was made of the model before has the
values that `unit_scale(model, batch=...)` gives, or a warning names what has not."""

import copy
import gc
import math
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

import unit_scaling as uu
from fp8.warnings import ScaleWarning
from tests.launch import needs_gloo, run_ranks
from tests.shared import (
    Net,
    assert_close,
    assert_same,
    both,
    in_one_graph,
    linears,
    pairs,
    parametrize,
    pickled,
    refuses,
    seeded,
    warns,
)
from tests.transforms.models import batch, gpt, graphs, hooks_of, step
from unit_scaling.parameter import tags_of
from unit_scaling.transforms import compile, simulate_fp8, unit_scale
from unit_scaling.transforms.values import pending


def run(model):
    return model(*batch())


def expected(seed=0):
    return unit_scale(gpt(seed), batch=batch())


def check_set(model, reference=None):
    """Values and tags are those of a batch, and nothing is left of the hooks."""
    reference = expected() if reference is None else reference
    for (name, p), q in pairs(model.named_parameters(), reference.parameters()):
        assert torch.equal(p, q), name
        assert tags_of(p) == tags_of(q), name
    assert not hooks_of(model)


def perturbed(model, *names):
    """Writes other values into parameters."""
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).mul_(1.5)


@pytest.fixture
def model():
    return unit_scale(gpt())


# Copies


def target_of(model):
    """As of a value function: loaded, and updated before the first call."""
    made = copy.deepcopy(model).requires_grad_(False)
    made.load_state_dict(model.state_dict())
    for p, q in both(made, model):
        p.lerp_(q.detach(), 0.005)
    return made


COPIES = {
    "deepcopy": copy.deepcopy,
    "target network": target_of,
    "copy of a copy": lambda model: copy.deepcopy(copy.deepcopy(model)),
    "pickle": pickled,
}


@parametrize("order", [(0, 1), (1, 0)], ids=["the model first", "the copy first"])
@parametrize("name", COPIES)
def test_a_copy_is_set_with_the_model(model, name, order):
    models = (model, COPIES[name](model))
    first, second = (models[i] for i in order)
    run(first)
    if name != "pickle":
        check_set(second)  # before it runs itself
    second(*batch(1))
    for each in models:
        check_set(each)


def test_a_moving_average_of_equal_values_is_set(model):
    """0.9 w + 0.1 w rounds, as timm's ModelEmaV2 computes it."""
    average = copy.deepcopy(model).requires_grad_(False)
    for p, q in both(average, model):
        p.copy_(0.9 * p + 0.1 * q.detach())
    run(model)
    for p, q in both(average, expected()):
        assert_close(p, q)


def trained(model, average=None):
    optimizer = uu.optim.AdamW(model.parameters())
    for seed in range(3):
        model(*batch(seed))[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            average.update_parameters(model)
    return model


def test_averages_are_those_of_a_model_with_a_batch():
    averages = []
    for model in (unit_scale(gpt()), expected()):
        averages.append(AveragedModel(model))
        trained(model, averages[-1])
    check_set(*[average.module for average in averages])


@parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(model, dtype):
    """Values are rounded to the dtype before and after the multiplication: by 2**-8 in bfloat16;
    numbers below 2**-14 are subnormal in float16."""
    other = copy.deepcopy(model).to(dtype)
    run(model)
    for p, q in both(other, expected()):
        assert p.dtype == dtype
        assert_close(p.float(), q, rtol=2.0**-7, atol=2.0**-10)
        assert tags_of(p).mup_scale == pytest.approx(tags_of(q).mup_scale, rel=0.2)


def test_every_copy_has_the_report(model):
    other, part = copy.deepcopy(model), copy.deepcopy(model.blocks[0])
    assert "not run yet" in str(uu.report(model))
    uu.verify(other, batch())  # which runs a copy of it
    assert (
        list(uu.report(model)) == list(uu.report(other)) == list(uu.report(expected()))
    )
    assert "This is a copy" in str(uu.report(part))


def test_copies_of_float64():
    """What is remembered of the values is not the memory of one of them."""
    model = unit_scale(gpt().double())
    others = [copy.deepcopy(model) for _ in range(8)]
    run(model)
    for other in others:
        check_set(other, model)


def test_a_copy_of_a_part(model):
    part = copy.deepcopy(model.blocks[1])
    run(model)
    check_set(part, expected().blocks[1])


def another_reads_the_model(rank, store):
    path = store.with_name("model.pt")
    set_by_another(torch.load(path, weights_only=False), path)


def another_reads_the_values(rank, store):
    path, model = store.with_name("model.pt"), unit_scale(gpt(1))
    model.load_state_dict(torch.load(path))
    set_by_another(model, path)


def set_by_another(model, path):
    run(model)
    torch.save(model.state_dict(), path)


@needs_gloo
@parametrize("read", [another_reads_the_model, another_reads_the_values])
def test_another_process(model, read, tmp_path):
    path, whole = tmp_path / "model.pt", read is another_reads_the_model
    torch.save(model if whole else model.state_dict(), path)
    run_ranks(read, 1, tmp_path / "store")
    assert_same(expected().state_dict(), torch.load(path))


def test_a_copy_without_what_the_other_has_keeps_values_with_a_warning(model):
    """The model that ran first was edited, so that nothing is known of what it has lost."""
    other = copy.deepcopy(model)
    del model.blocks[1]
    with warns(r"10 parameters \(as blocks.1.norm1.weight\) of a copy", ScaleWarning):
        run(model)
    assert_same(other.blocks[1].up.weight, gpt().blocks[1].up.weight)
    uu.optim.AdamW(other.parameters()).step()
    assert not hooks_of(other)


# Plain values of another pending model


def copied_values(target, source):
    for p, q in both(target, source):
        p.data.copy_(q)


def saved(state, tmp_path):
    torch.save(state, tmp_path / "state.pt")
    return torch.load(tmp_path / "state.pt")


LOADS = {
    "state_dict": lambda target, source, _: target.load_state_dict(source.state_dict()),
    "of a copy": lambda target, source, _: target.load_state_dict(
        copy.deepcopy(source).state_dict()
    ),
    "file": lambda target, source, path: target.load_state_dict(
        saved(source.state_dict(), path)
    ),
    "tensors": lambda target, source, _: target.load_state_dict(
        {name: p.clone() for name, p in source.state_dict().items()}
    ),
    "parameters": lambda target, source, _: copied_values(target, source),
}


@parametrize("order", [(0, 1), (1, 0)], ids=["the source first", "the target first"])
@parametrize("name", LOADS)
def test_a_model_with_all_plain_values_of_another_is_a_copy_of_it(
    model, name, order, tmp_path
):
    """Also where their first calls are on other data, and a copy stays what it was."""
    target = unit_scale(gpt(1))
    other = copy.deepcopy(target)
    LOADS[name](target, model, tmp_path)
    models = model, target
    models[order[0]](*batch())
    models[order[1]](*[each[:1, :5] for each in batch(1)])
    check_set(model)
    check_set(target)
    run(other)
    check_set(other, expected(1))


def test_a_part_with_plain_values_of_another_is_set_as_if_it_had_them_before(
    model, tmp_path
):
    """Also those of a model that is gone, from a file."""
    plain, target = gpt(), unit_scale(gpt())
    source = unit_scale(gpt(1))
    for p, q in both(plain.blocks[0], source.blocks[0]):
        p.data.copy_(q)
    model.blocks[0].load_state_dict(source.blocks[0].state_dict())
    state = saved(source.blocks[0].state_dict(), tmp_path)
    del source
    gc.collect()
    target.blocks[0].load_state_dict(state)
    target = copy.deepcopy(target)
    for each in model, target:
        run(each)
        check_set(each, unit_scale(plain, batch=batch()))


# Values that are written before the first call


def test_vectors_of_parameters(model):
    vector = parameters_to_vector(model.parameters())
    vector_to_parameters(vector + 0.01, model.parameters())
    written = copy.deepcopy(model.state_dict())
    with warns(r"10 weights \(as tokens.weight\) were written after", ScaleWarning):
        run(model)
    assert_same(model.state_dict(), written)


def test_weights_that_are_half_written_are_named(model):
    perturbed(model, "blocks.0.up.weight", "blocks.1.down.bias")
    before = model.blocks[0].up.weight.detach().clone()
    with warns(r"1 weights \(as blocks.0.up.weight\).*half scaled", ScaleWarning):
        run(model)
    assert_same(model.blocks[0].up.weight, before)
    assert_same(model.blocks[0].qkv.weight, expected().blocks[0].qkv.weight)


def test_biases_and_gains_that_are_written_stay_without_a_warning(model):
    with torch.no_grad():
        model.blocks[0].up.bias.fill_(0.1)
        model.norm.weight.fill_(2)
    run(model)
    assert (model.blocks[0].up.bias == 0.1).all()
    assert (model.norm.weight == 2).all()


def test_a_checkpoint_of_a_scaled_model_is_loaded_as_it_is():
    """Its rates are decided by what it computes: near those of the process that saved it, which an
    optimizer's state_dict has."""
    reference, model = trained(expected()), unit_scale(gpt(1))
    model.load_state_dict(reference.state_dict())
    run(model)
    for p, q in both(model, reference):
        assert_same(p, q)
        ours, theirs = tags_of(p), tags_of(q)
        assert (ours.mup_type, ours.mup_pending) == (theirs.mup_type, False)
        assert abs(math.log2(ours.mup_scale / theirs.mup_scale)) <= 1.5


# Which call is the first


def test_a_part_that_runs_before_the_model_is_named():
    model, x = unit_scale(gpt()), torch.randn(2, 4, 32)
    with warns(r"blocks.1 runs before the model .* as a whole", ScaleWarning):
        y = model.blocks[1](x)
    assert_same(y, gpt().blocks[1](x))
    run(model)
    check_set(model)


def test_a_graph_of_torch_fx():
    model = unit_scale(mlp())
    traced = torch.fx.symbolic_trace(model)
    with warns("0 runs before the model", ScaleWarning):
        traced(X)
    assert_same(model(X), traced(X))
    assert_same(torch.fx.symbolic_trace(model)(X), traced(X))
    check_set(model, unit_scale(mlp(), batch=X))


FIRST = {
    "no_grad": torch.no_grad()(run),
    "inference_mode": torch.inference_mode()(run),
    "keywords": lambda model: model(ids=batch()[0], targets=batch()[1]),
    "evaluation": lambda model: model.eval()(*batch()),
    "torch.compile": lambda model: torch.compile(model, backend="eager")(*batch()),
    "Module.compile": lambda model: model.compile(backend="eager") or run(model),
    "compile": lambda model: compile(model)(*batch()),
    "within another": lambda model: Net(lambda m, given: m.a(*given), a=model)(batch()),
}


@parametrize("name", FIRST)
def test_the_first_call_may_be_any(name, no_code):
    model = unit_scale(gpt())
    FIRST[name](model)
    check_set(model)
    tolerance = 1e-5 if "ompile" in name else 0.0
    assert_close(step(model.train()), step(expected()), rtol=tolerance, atol=tolerance)
    assert not any(p.is_inference() for p in model.parameters())


def test_under_autocast():
    """The numbers are on a grid, so that most are those of float32."""
    model, reference = unit_scale(gpt()), expected()
    with torch.autocast("cpu", torch.bfloat16):
        logits, _ = run(model)
    assert logits.dtype == torch.bfloat16
    for p, q in both(model, reference):
        assert p.dtype == torch.float32
        assert tags_of(p).mup_scale == pytest.approx(tags_of(q).mup_scale, rel=0.2)


def test_the_graph_of_a_second_compiled_call_is_the_plain_one():
    plain, model = (graphs(m, batch(), calls=2) for m in (gpt(), unit_scale(gpt())))
    assert model[-len(plain) :] == plain


class Counted(nn.Linear):
    """Counts its calls, and keeps the count in a list that no copy of a call restores."""

    def __init__(self, calls):
        super().__init__(8, 8)
        self.count = lambda: calls.append(1)

    def forward(self, x):
        self.count()
        return super().forward(x)


@parametrize("depth", [1, 6])
def test_the_first_call_takes_few_forward_passes(depth):
    calls = []

    def run(m, x):
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


def test_a_first_call_that_fails_changes_nothing(model):
    ids, _ = batch()
    for wrong, error in (((ids + 65,), IndexError), ((ids.float(),), RuntimeError)):
        with pytest.raises(error):
            model(*wrong)
        assert_same(model.state_dict(), gpt().state_dict())
    run(model)
    check_set(model)
    body = linears(4, 4, 4)
    model = unit_scale(body)
    with refuses("has NaN for this batch"):
        model(torch.full((2, 4), math.nan))
    model(torch.ones(2, 4))
    check_set(model, unit_scale(body, batch=torch.ones(2, 4)))


X = torch.randn(4, 8, generator=seeded(1))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4, bias=False))


def replicated(model):
    """As by DataParallel, on another device."""
    copies = {m: m._replicate_for_data_parallel() for m in model.modules()}
    for module, made in copies.items():
        for name, child in module.named_children():
            setattr(made, name, copies[child])
        for name, p in module._parameters.items():
            setattr(made, name, None if p is None else p.clone())
    return copies[model](X)


REFUSED = {
    "torch.func.functional_call": lambda model: torch.func.functional_call(
        model, {name: p.detach() for name, p in model.named_parameters()}, (X,)
    ),
    "torch.func.functional_call or DataParallel": replicated,
    "torch.vmap": lambda model: torch.vmap(model)(X),
    "torch.export": lambda model: torch.export.export(model, (X,)),
    "fullgraph=True": lambda model: in_one_graph(model, "eager")(X),
    "a call on the meta device": lambda model: copy.deepcopy(model).to("meta")(
        X.to("meta")
    ),
}


@parametrize("name", REFUSED)
def test_first_calls_without_values_are_refused(name):
    model, said = (
        unit_scale(mlp()),
        f"call it once, or pass batch= to unit_scale, before {name}",
    )
    with refuses(said, Exception):
        REFUSED[name](model)
    model(X)
    check_set(model, unit_scale(mlp(), batch=X))
    REFUSED[name](model)


# Optimizers


@parametrize("cls", [uu.optim.SGD, uu.optim.AdamW])
def test_an_optimizer_that_is_made_before_has_the_rates_of_one_that_is_made_after(
    model, cls
):
    early = cls(model.parameters(), lr=0.1)
    pickled = copy.deepcopy((model, early))
    run(model)
    late = cls(model.parameters(), lr=0.1)
    states = [each.state_dict()["param_groups"] for each in (early, pickled[1], late)]
    assert states[0] == states[1] == states[2]
    assert len(set(states[0][0]["mup_lr_scales"])) > 3


def test_rates_that_are_not_known_are_an_error(model):
    optimizer = uu.optim.AdamW(model.parameters())
    with warns("blocks.0 runs before the model", ScaleWarning):
        model.blocks[0](torch.randn(2, 4, 32)).sum().backward()
    with refuses("has not set the values", RuntimeError):
        optimizer.step()
    with refuses("has not set the values"):
        uu.optim.scaled_parameters(model.parameters(), "adam", lr=0.1)
    run(model)
    optimizer.step()
    uu.optim.scaled_parameters(model.parameters(), "adam", lr=0.1)


# What is left


@pytest.fixture
def swapped():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("swapped")
def test_parameters_that_are_swapped():
    """torch exchanges what a parameter is in conversions and `load_state_dict`, and tags with it:
    modules know them."""
    model = unit_scale(gpt()).double()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    run(model)
    for p, q in both(model, expected()):
        assert_close(p, q.double(), rtol=1e-6, atol=1e-7)
        assert tags_of(p).mup_scale == pytest.approx(tags_of(q).mup_scale)


@parametrize("called", [False, True])
def test_nothing_is_left_of_a_model(called):
    gc.collect()
    before = len(pending._RECORDS), len(pending.REPORTS)
    model = unit_scale(gpt())
    models = [model, copy.deepcopy(model), pickled(model)]
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


def two_models():
    """Of the same class and shapes."""
    torch.manual_seed(0)
    return [unit_scale(linears(8, 16, 4)) for _ in range(2)]


def check_orders(rank, store):
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
        assert_close(theirs[0], theirs[1], rtol=1e-6, atol=1e-7)
    assert scales[0] / scales[4] > 16  # each has its own numbers


@needs_gloo
def test_processes_that_call_in_other_orders(tmp_path):
    run_ranks(check_orders, 2, tmp_path / "store")


def test_reading_a_weight_that_is_computed_runs_no_part():
    """Of a pending model, which `simulate_fp8` does."""
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
    plain, x = nn.Sequential(layer, nn.Linear(16, 16)), torch.randn(8, 16)
    model = unit_scale(plain)
    assert_same(model[0].weight, layer.weight)
    want = simulate_fp8(unit_scale(plain, batch=x))(x)
    assert_same(simulate_fp8(model)(x), want)
