"""A resumed run with static scales looks at the passes that the run without the interruption looks
at, and computes the same to the bit."""

import copy

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load, save
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
)

import fp8
from fp8.casts.watch import watch_of
from fp8.recipes.history import LOOKS, Schedule
from tests.shared import (
    assert_same,
    filterwarnings,
    linears,
    normal,
    parametrize,
    pickled,
    saved,
)
from unit_scaling.transforms import unit_scale

pytestmark = filterwarnings("ignore::fp8.warnings.PitfallWarning")

WIDTH, STEPS = 32, 21
OPTIMIZERS = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), 1e-3),
}
each_optimizer = parametrize("optimizer", OPTIMIZERS)


def new():
    torch.manual_seed(0)
    return fp8.convert(linears(WIDTH, WIDTH, torch.nn.GELU, WIDTH), "static")


def new_pending():
    """A model that `unit_scale` decides on in its first call, by passes of its own."""
    torch.manual_seed(0)
    return fp8.convert(unit_scale(linears(WIDTH, WIDTH, torch.nn.GELU, WIDTH)))


def batch(step):
    """The inputs of most steps are out of the range of the scales of the step before."""
    return normal(64, WIDTH, seed=step) * 2.0 ** (11 * step % 64 - 32)


def train(model, optimizer, first, last=STEPS, backend=None):
    """Steps ``first`` to ``last - 1``."""
    run = torch.compile(model, backend=backend) if backend else model
    for step in range(first, last):
        optimizer.zero_grad()
        run(batch(step)).tanh().sum().backward()
        optimizer.step()


def file_of(state):
    return load(save(state))


def interrupted(
    optimizer,
    at,
    store=saved,
    backend=None,
    order=("model", "optimizer"),
    new=new,
):
    """A run to step ``at``, which another model and optimizer resume; that model."""
    model = new()
    one = OPTIMIZERS[optimizer](model)
    train(model, one, 0, at, backend)
    states = {"model": store(model.state_dict()), "optimizer": saved(one.state_dict())}
    # The run that is not interrupted.
    train(model, one, at, backend=backend)
    resumed = new()
    other = OPTIMIZERS[optimizer](resumed)
    parts = {"model": resumed, "optimizer": other}
    for name in order:
        parts[name].load_state_dict(states[name])
    train(resumed, other, at, backend=backend)
    return model, resumed


@each_optimizer
@parametrize("at", [1, 2, 3, 6, 13])
def test_resumed_to_the_bit(at, optimizer):
    expected, found = interrupted(optimizer, at)
    assert_same(found.state_dict(), expected.state_dict())


@parametrize("at", [1, 3, 13])
def test_resumed_before_the_first_call_of_a_unit_scaled_model(at):
    expected, found = interrupted("SGD", at, new=new_pending)
    assert_same(found.state_dict(), expected.state_dict())
    assert watch_of(found).step == STEPS + 1


@parametrize("at, optimizer", [(3, "SGD"), (13, "AdamW")])
def test_compiled_and_resumed_to_the_bit(at, optimizer):
    expected, found = interrupted(optimizer, at, backend="aot_eager")
    assert_same(found.state_dict(), expected.state_dict())


@parametrize("store", [file_of, pickled], ids=["safetensors", "pickle"])
@parametrize("order", [("model", "optimizer"), ("optimizer", "model")], ids="-".join)
def test_in_any_order_from_any_file(store, order):
    expected, found = interrupted("AdamW", 6, store, order=order)
    assert_same(found.state_dict(), expected.state_dict())


@filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoint(tmp_path):
    def store(state):
        dcp.save(dict(state), checkpoint_id=tmp_path)
        other = new()
        loaded = get_model_state_dict(other)
        dcp.load(loaded, checkpoint_id=tmp_path)
        set_model_state_dict(other, loaded)
        return other.state_dict()

    expected, found = interrupted("SGD", 6, store)
    assert_same(found.state_dict(), expected.state_dict())


def test_earlier_checkpoints_load():
    """They have scales without a schedule: the model looks as if it were new."""
    model, optimizer = new(), OPTIMIZERS["SGD"]
    train(model, optimizer(model), 0, 3)
    state = {n: t for n, t in saved(model.state_dict()).items() if LOOKS not in n}
    resumed = new()
    resumed.load_state_dict(state)
    assert fp8.calibration(resumed) == fp8.calibration(model)
    assert watch_of(resumed).schedule == Schedule()


def test_parameters_alone_leave_the_schedule():
    model, optimizer = new(), OPTIMIZERS["SGD"]
    train(model, optimizer(model), 0, 3)
    model.state_dict()
    before = watch_of(model).schedule
    train(model, optimizer(model), 3, 5)
    model.load_state_dict(dict(model.named_parameters()), strict=False)
    assert watch_of(model).schedule.step == before.step + 2


@parametrize("copied", [copy.deepcopy, pickled], ids=lambda f: f.__name__)
def test_copies_go_on(copied):
    model, optimizer = new(), OPTIMIZERS["SGD"]
    train(model, optimizer(model), 0, 6)
    other = copied(model)
    train(model, optimizer(model), 6)
    train(other, optimizer(other), 6)
    assert_same(other.state_dict(), model.state_dict())


def descend_by_hand(model, first, last=STEPS):
    for step in range(first, last):
        model.zero_grad()
        model(batch(step)).tanh().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(1e-3 * parameter.grad)


@parametrize("at", [1, 2, 6])
def test_without_an_optimizer(at):
    """A pass ends when the next one begins."""
    model = new()
    descend_by_hand(model, 0, at)
    state = saved(model.state_dict())
    descend_by_hand(model, at)
    resumed = new()
    resumed.load_state_dict(state)
    descend_by_hand(resumed, at)
    assert_same(resumed.state_dict(), model.state_dict())


def test_several_products():
    """Their buffers are those of the file before the first pass."""

    def attention():
        torch.manual_seed(0)
        return fp8.convert(torch.nn.MultiheadAttention(WIDTH, 2), "static")

    def run(model, first, last):
        for step in range(first, last):
            x = batch(step)
            model.zero_grad()
            model(x, x, x)[0].sum().backward()
            optimizer.step()

    model = attention()
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    run(model, 0, 6)
    state = saved(model.state_dict())
    run(model, 6, 12)
    resumed = attention()
    resumed.load_state_dict(state)
    optimizer = torch.optim.SGD(resumed.parameters(), 1e-6)
    run(resumed, 6, 12)
    assert_same(resumed.state_dict(), model.state_dict())


def test_new_recipes_ask_at_once():
    """The pauses of the recipe before are over."""
    model, optimizer = new(), OPTIMIZERS["SGD"]
    train(model, optimizer(model), 0)
    assert watch_of(model).schedule.asks_from > 3
    with fp8.override(model, ("*", None, "tensor")):
        pass
    train(model, optimizer(model), 0, 2)
    assert watch_of(model).step == 3
    watch_of(model).ask()
    assert watch_of(model).schedule.asks_from == 4


@parametrize("at", [3, 6])
def test_recorded(at):
    """A record goes on from a checkpoint as the run does."""
    model, rows = new(), []
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with fp8.record(model, writer=rows.append, every=4):
        train(model, optimizer, 0, at)
        state = saved(model.state_dict())
        train(model, optimizer, at)
    resumed = new()
    resumed.load_state_dict(state)
    optimizer = torch.optim.SGD(resumed.parameters(), 1e-3)
    with fp8.record(resumed, writer=rows.append, every=4, start=at):
        train(resumed, optimizer, at)
    assert_same(resumed.state_dict(), model.state_dict())
