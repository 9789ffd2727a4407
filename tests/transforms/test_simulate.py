"""`simulate_fp8`, `simulate_format` and the tools that measure, on models of `unit_scale` whose
values are set or pending, in each order."""

import copy
import inspect

import torch
from torch import Tensor, nn

import fp8
import unit_scaling as uu
from tests.fp8.compare import outcome
from tests.shared import (
    assert_close,
    assert_same,
    filterwarnings,
    in_one_graph,
    parametrize,
    proves,
    refuses,
    sampled,
    seeded,
    warns,
)
from tests.transforms.models import (
    GPT,
    KINDS,
    Image,
    Net,
    batch,
    gpt,
    hooks_of,
    loss_of,
    step,
    tiny,
)
from unit_scaling.formats import FPFormat
from unit_scaling.transforms import (
    compile,
    simulate_format,
    simulate_fp8,
    track_scales,
    unit_scale,
)

COARSE = FPFormat(3, 1, "nearest")
RANDOM = FPFormat(4, 3, "stochastic")

FORMATS = {
    "fp8": simulate_fp8,
    "coarse": lambda model: simulate_format(model, COARSE, COARSE),
    "stochastic": lambda model: simulate_format(
        model, RANDOM, FPFormat(5, 2, "stochastic")
    ),
}


def pending(model):
    return unit_scale(model)


def with_batch(model):
    return unit_scale(model, batch=batch())


def ran(model):
    model = unit_scale(model)
    model(*batch())
    return model


def results(model):
    """Of three steps, of which the first one measures scales."""
    torch.manual_seed(0)
    return [t for _ in range(3) for t in step(model)]


@proves("unit-scaling", "unit_scale(simulate_fp8(model))")
@parametrize("scale", [pending, with_batch, ran])
@parametrize("name", FORMATS)
def test_any_order(name, scale):
    """Each is applied once: a format that is applied twice, or not at all, shows. The first call of
    a pending model measures scales of plain values no more than others."""
    simulated = FORMATS[name]
    expected = results(simulated(with_batch(tiny())))
    before, after = scale(simulated(tiny())), simulated(scale(tiny()))
    for model in (before, after, copy.deepcopy(before), simulated(after)):
        assert_same(results(model), expected)
        assert not hooks_of(model)
    assert not torch.allclose(expected[0], step(with_batch(tiny()))[0], rtol=1e-5)
    assert not torch.allclose(expected[0], step(simulated(tiny()))[0], rtol=1e-5)


@parametrize("first", ["fp8", "compile", "track_scales"])
def test_compiled_or_tracked_in_between(first):
    transforms = {"fp8": simulate_fp8, "compile": compile, "track_scales": track_scales}
    expected = results(simulate_fp8(with_batch(tiny())))
    model = transforms.pop(first)(tiny())
    for transform in (pending, *transforms.values()):
        model = transform(model)
    assert_close(results(model), expected, rtol=1e-4, atol=1e-5)


@filterwarnings("ignore:.*stays in high precision under fp8.autocast")
@proves("unit-scaling", "simulate_fp8(model)")
@sampled(2)
@parametrize("name", KINDS)
def test_it_learns_in_fp8_and_casts_lose_nothing(name):
    """From its first call on, which sets values and then measures scales."""
    kind = KINDS[name]
    x = kind.batch()
    if x.is_floating_point():
        x = x.float()
    model = simulate_fp8(unit_scale(kind.make().float()))
    first = loss_of(model, x)
    optimizer = uu.optim.AdamW(model.parameters(), lr=2**-3)
    casts = fp8.stats(model, every=1)
    with casts:
        for _ in range(20):
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
    assert loss_of(model, x) < 0.995 * first
    rows = casts.rows()
    lost = [row for row in rows if row.zero > 0.2 or row.saturated > 0.05]
    assert len(lost) <= 0.05 * len(rows), lost


def test_simulate_format_takes_names():
    """The named formats of fp8, rounded to nearest: the same as simulate_fp8."""
    by_name = step(simulate_format(tiny(), "e4m3", "e5m2"))
    assert_same(by_name, step(simulate_fp8(tiny())))
    assert_same(
        by_name, step(simulate_format(tiny(), fp8.FORMATS["e4m3"], fp8.FORMATS["e5m2"]))
    )
    assert not torch.allclose(
        by_name[0], step(simulate_format(tiny(), "e2m1", "e5m2"))[0]
    )


@parametrize("how", ["simulated", "compiled", "both"])
def test_identity(how):
    """The user's class, with the transforms in its description."""
    plain, model = gpt(), ran(gpt())
    if how != "compiled":
        model = simulate_fp8(model)
    if how != "simulated":
        model = compile(model)
    assert isinstance(model, GPT)
    assert type(model).__name__ == "GPT"
    assert model.head.weight is model.tokens.weight
    assert [n for n, _ in model.named_modules()] == [
        n for n, _ in plain.named_modules()
    ]
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    if how != "compiled":
        assert repr(model).splitlines()[1].strip() == "simulated casts to e4m3 and e5m2"


class Yields(nn.Linear):
    def forward(self, x):
        yield super().forward(x)


class Awaits(nn.Linear):
    async def forward(self, x):
        return super().forward(x)


@parametrize("kind", [Yields, Awaits])
@parametrize("transform", [simulate_fp8, track_scales])
def test_a_forward_that_goes_on_is_refused(transform, kind):
    with refuses(f"forward of {kind.__name__} goes on after its call", TypeError):
        transform(kind(4, 4))


def test_recurrent_layers_say_that_their_products_are_not_cast():
    x = torch.randn(5, 3, 8)
    for model in (
        nn.LSTM(8, 8),
        unit_scale(nn.LSTM(8, 8)),
        unit_scale(nn.LSTM(8, 8), batch=x),
    ):
        with warns("lstm stays in high precision", fp8.warnings.RecipeWarning):
            simulate_fp8(model)(x)


@parametrize("simulated", [False, True])
@parametrize("name", ["ResNet", "U-Net"])
def test_inputs_of_a_subclass_of_tensor(name, simulated):
    """Values and gradients are the same, and what follows may write into a result. In float64, as
    sums of convolutions depend on where their operands lie in memory."""

    def gradients(model, x):
        model.zero_grad()
        output = model(x.clone())
        assert type(output) is type(x)
        output.as_subclass(Tensor).square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    x, steps = KINDS[name].batch(), []
    for each in (x, x.as_subclass(Image)):
        torch.manual_seed(0)
        model = unit_scale(KINDS[name].make().double())
        if simulated:
            model = simulate_fp8(model)
        steps.append([g for _ in range(3) for g in gradients(model, each)])
    assert_close(steps[1], steps[0], rtol=1e-9, atol=1e-12)


# Other tools


def test_verify_measures_the_model_that_a_first_call_makes():
    """It is that call: a pending model is set by it, in the model and in what is verified."""
    expected = uu.verify(with_batch(gpt()), batch())
    model = pending(gpt())
    assert uu.verify(model, batch()) == expected == uu.verify(model, batch())
    assert uu.verify(ran(gpt()), batch()) == expected


@proves("unit-scaling", "with torch.compile")
@parametrize("scale", [with_batch, ran, pending])
def test_compile(scale, no_code):
    expected = step(with_batch(tiny()))
    for model in (
        compile(scale(tiny())),
        scale(compile(tiny())),
        compile(compile(scale(tiny()))),
    ):
        for _ in range(2):
            assert_close(step(model), expected, rtol=1e-4, atol=1e-5)


# Control flow and graph breaks


def part(m, x):
    return m.second(torch.relu(m.first(x)))


@torch.compiler.nested_compile_region
def region(m, x):
    return part(m, x)


def conditional(m, x):
    return torch.cond(
        x.sum() > -1e9, lambda x: part(m, x), lambda x: part(m, x) * 2, (x,)
    )


def breaks(m, x):
    h = torch.relu(m.first(x))
    torch._dynamo.graph_break()
    return m.second(h)


X = torch.randn(8, 16, generator=seeded(1)).requires_grad_()
TRANSFORMS = {
    "pending": unit_scale,
    "simulate_fp8": simulate_fp8,
    "both": lambda model: simulate_fp8(unit_scale(model)),
}


def of_x(call):
    return outcome(lambda: call(X), [X])


def made(name, forward):
    torch.manual_seed(0)
    return TRANSFORMS[name](
        Net(forward, first=nn.Linear(16, 16), second=nn.Linear(16, 16))
    )


@filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's
@parametrize("forward", [conditional, region, breaks])
@parametrize("name", TRANSFORMS)
def test_control_flow(name, forward):
    """Eager and compiled, it is what a straight function is; of simulated models a graph that
    breaks is left to eager mode."""
    expected = of_x(made(name, part))
    model = made(name, forward)
    assert_close(of_x(model), expected)
    expected = of_x(model)
    if (name, forward) == ("both", conditional):
        return  # torch.cond in a graph allows no branch the list of a converted layer
    whole = forward is not breaks
    compiled = torch.compile(model, backend="aot_eager", fullgraph=whole)
    assert_close(of_x(compiled), expected)
    assert_close(of_x(compiled), expected)


@parametrize("levels", [1, 4])
def test_a_model_of_many_levels_compiles(levels):
    """A compiler follows each call by dozens of its own, torch 2.12's by more than the others, and
    Python allows 1000."""
    model = nn.Linear(4, 4)
    for _ in range(
        min(levels, 2) if (2, 12) <= torch.__version__ < (2, 13) else levels
    ):
        model = nn.Sequential(model)
    ours, x = simulate_fp8(unit_scale(model)), torch.randn(2, 4)
    expected = ours(x)
    assert_same(in_one_graph(ours, "eager")(x), expected)
