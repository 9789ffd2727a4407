"""`fp8.preflight` from model to verdict, and what it says of problems it cannot measure."""

import copy
import math
import operator
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch
from torch import nn

import fp8
from fp8.lab.forecast.result import Forecast, Variant
from fp8.lab.preflight import stages
from fp8.lab.preflight.findings import Candidate, Findings
from fp8.lab.preflight.paired_runs import Budget
from fp8.lab.preflight.preflight import Preflight, PreflightError
from fp8.lab.preflight.search import finalists, recommended
from tests.shared import assert_same, parametrize, paths, proves, refuses
from unit_scaling.transforms import simulate_fp8

from .problems import Classifier, batches, setup

preflight = fp8.preflight
QUICK = {
    "recipes": ("bf16", "tensor", "mxfp4", "unit"),
    "steps": 12,
    "held_out": 2,
    "budget": 1000.0,
    "target": 0.05,
    "max_seeds": 3,
    "transforms": False,
    "progress": False,
}
ONE = QUICK | {"recipes": ("tensor",), "max_seeds": 1}
TWO = ONE | {"recipes": ("tensor", "mxfp4")}


@pytest.fixture(scope="module")
def report():
    return preflight(setup, **QUICK)


@proves("the field", "which precision a model tolerates, before training")
def test_every_stage_leaves_its_findings(report):
    found = report.findings
    assert [p.layer for p in found.products] == "first blocks.0 blocks.1 head".split()
    assert {c.name for c in found.candidates} >= {"bf16", "tensor", "mxfp4", "unit"}
    assert all(sorted(c.errors) == [3, 12] for c in found.candidates)
    assert any(candidate.kept for candidate in found.candidates)
    estimates = [row for row in found.forecasts if row.source == "estimate"]
    assert [row.hardware for row in estimates] == ["h100", "b200"]
    tried = [candidate.name for candidate in found.candidates]
    assert all(name in row for row in estimates for name in tried)
    sizes = [p.numel() for p in Classifier().parameters()]
    assert found.model["parameters"] == sum(sizes)
    assert found.verdict.answer


def test_policy_page_json_and_table(report, tmp_path):
    model = fp8.convert(Classifier(), report.policy, backend="simulate")
    assert paths(fp8.report(model), "converted")
    assert "policy = fp8.Policy(" in report.findings.verdict.code["fp8"]
    report.save(tmp_path / "a.html")
    assert "<title>" in (tmp_path / "a.html").read_text()
    report.save(tmp_path / "new folder" / "a.json")
    again = Preflight.load(tmp_path / "new folder" / "a.json")
    assert again.to_json() == report.to_json()
    assert again.policy == report.policy
    assert str(report).startswith(report.findings.verdict.answer)
    assert report.table().splitlines()[0].split()[:2] == ["policy", "outcome"]


def test_nothing_of_the_users_changes():
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters())
    before = [p.clone() for p in model.parameters()]
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with fp8.strict():  # which does not stop it
        preflight(model, batches(20), optimizer=optimizer, **ONE)
    assert_same(before, [*model.parameters()])
    assert not optimizer.state
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    assert not paths(fp8.report(model), "converted")


def test_resume_repeats_nothing(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    first = preflight(setup, save=path, **ONE)
    with monkeypatch.context() as patch:
        patch.setattr(stages, "train", None)  # which is not called
        again = preflight(setup, resume=path, **ONE)
    assert again.table() == first.table()
    other = lambda seed: setup(seed + 1)  # noqa: E731
    with refuses("seed 0 has other weights or batches than the run of ref"):
        preflight(other, resume=path, **ONE)
    with refuses("of another preflight: its parameters is"):
        preflight(Classifier(64), batches(20), resume=path, **ONE)
    with refuses(r"its recipes is .*, not \['row', 'tensor'\]"):
        preflight(setup, resume=path, **ONE | {"recipes": ("row",)})


def test_the_recipe_of_convert_is_always_trained():
    """Beside recipes that save nothing, which are not."""
    recipes = {"recipes": ("bf16", "static", "delayed")}
    found = preflight(setup, **ONE | recipes).findings
    outcomes = {c.name: c.outcome for c in found.candidates}
    assert outcomes["bf16"] == "not trained"
    assert outcomes["tensor"] != "not trained"
    # Also with stored scales.
    assert all(math.isfinite(c.errors[12]) for c in found.candidates)


def continued(report):
    """The line of Python in a verdict."""
    line = report.findings.verdict.answer.partition("this command: ")[2]
    assert line.startswith("fp8.preflight(..., ")
    return line


def test_the_command_of_the_verdict_continues(tmp_path, capsys):
    """A line of Python that resumes, with more seeds."""
    arguments = ONE | {"progress": True}
    first = preflight(setup, save=tmp_path / "a.json", **arguments)
    line = continued(first).replace("...", "setup, **arguments")
    arguments = {k: v for k, v in arguments.items() if k not in ("budget", "max_seeds")}
    more = eval(line, {"fp8": fp8, "setup": setup, "arguments": arguments})
    assert more.findings.settings["steps"] == first.findings.settings["steps"]
    assert len(more.findings.runs) > len(first.findings.runs)
    assert capsys.readouterr().err == ""  # no terminal


def test_progress_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    preflight(setup, **ONE | {"progress": True})
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["fp8 preflight: trace", "fp8 preflight: reference"]
    assert "fp8 preflight: tensor, seed 0" in lines


def test_without_a_recommendation_there_is_a_policy_to_try_first():
    """And a command, which begins again without a file."""
    report = preflight(setup, **ONE)  # one seed decides nothing
    assert report.policy is None
    verdict = report.findings.verdict
    assert verdict.policy["recipe"] == "tensor"  # of the first device, the H100
    assert "Policy" in verdict.code["fp8"]
    line = continued(report)
    assert float(line.partition("budget=")[2].partition(",")[0]) > QUICK["budget"]
    assert "resume" not in line


def test_the_budget_is_wall_time(monkeypatch):
    now = [0.0]
    clock = "fp8.lab.preflight.paired_runs.time.perf_counter"
    monkeypatch.setattr(clock, lambda: now[0])
    budget = Budget(100.0)
    assert budget.allows(70.0)
    assert not budget.allows(80.0)  # runs differ by 30 %
    now[0] = 50.0
    assert (budget.left, budget.part(0.2).left) == (50.0, 20.0)
    now[0] = 95.0
    assert budget.part(0.2).left == 5.0


@pytest.fixture(scope="module")
def whole():
    return preflight(setup, **TWO).findings


@parametrize("name", ["keeping", "LayerError", "estimate"])
def test_an_interrupted_stage_is_repeated_as_a_whole(
    name, tmp_path, monkeypatch, whole
):
    """And all numbers are the same again."""
    calls, path = [], tmp_path / "a.json"
    real = getattr(stages, name)

    def interrupted(*args, **kwargs):
        calls.append(name)
        result = real(*args, **kwargs)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(stages, name, interrupted)
    assert "interrupted" in preflight(setup, save=path, **TWO).findings.notes[-1]
    monkeypatch.undo()
    again = preflight(setup, resume=path, **TWO).findings
    for field in ("candidates", "forecasts", "notes"):
        assert getattr(again, field) == getattr(whole, field), field
    figures = operator.attrgetter("name", "losses", "held_out")
    assert [*map(figures, again.runs)] == [*map(figures, whole.runs)]


class Silent(nn.Module):
    def forward(self, x, y):
        one = torch.ones((), requires_grad=True)
        return (x.relu().sum() + y.float().relu().sum()) * one


class Unseen(Classifier):
    def forward(self, x, y):
        return super().forward(x, y) * (1 if self.training else math.nan)


@parametrize(
    "model, data, loss, message",
    [
        (Silent(), batches(20), None, "of this Silent can be cast: it computes none"),
        (Classifier(), batches(20), lambda y: y.expand(2), "one element"),
        (
            Classifier(),
            batches(20),
            lambda y: y * math.nan,
            "the reference became nan at step 1",
        ),
        (
            Unseen(),
            batches(20),
            None,
            "the held-out loss of the reference is not finite",
        ),
        (Classifier(), batches(3), None, "batches ran out after 3"),
        (
            nn.LSTM(16, 16),
            [torch.randn(2, 3, 16)] * 20,
            None,
            "one kernel computes all its",
        ),
    ],
)
def test_what_cannot_be_measured_is_said_with_what_was_measured(
    model, data, loss, message
):
    with refuses(message, PreflightError) as error:
        preflight(model, data, loss=loss, **QUICK)
    assert error.value.report.findings.notes[-1].startswith("stopped: ")


def test_a_loss_that_does_not_fall_and_batches_that_run_out_are_noted():
    model = Classifier()
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    notes = preflight(model, batches(1) * 10, optimizer=still, **ONE).findings.notes
    assert any("the batches last for 8 of 12 steps" in note for note in notes)
    assert any("did not fall" in note for note in notes)
    assert any("learning rate is 0" in note for note in notes)
    assert any("no second moments" in note for note in notes)


class Registry:
    """Of another class than the model's."""

    parts: ClassVar[dict[str, nn.Module]] = {}


class Held(Classifier):
    """Calls one of its blocks by what no copy can find."""

    def __init__(self):
        super().__init__()
        Registry.parts["block"] = self.blocks[0]

    def forward(self, x, y):
        x = self.first(x)
        logits = self.head(x + Registry.parts["block"](x).relu())
        return nn.functional.cross_entropy(logits, y)


@parametrize("as_function", [False, True])
def test_a_copy_that_computes_with_the_caller_s_model_is_refused(as_function):
    made = Held(), batches(20)
    arguments = ((lambda: made),) if as_function else made
    with refuses(r"computes with blocks.0.(weight|bias) of the model", PreflightError):
        preflight(*arguments, **ONE)


def test_several_losses_are_noted():
    class Two(Classifier):
        def forward(self, x, y):
            penalty = self.head.weight.square().mean()
            return {"penalty": penalty, "main": super().forward(x, y)}

    notes = preflight(Two(), batches(20), **ONE).findings.notes
    assert any("has 2 scalars that require a gradient" in note for note in notes)


@parametrize(
    "arguments, message",
    [
        ({"recipes": ("mxfp5",)}, "unknown recipe 'mxfp5'"),
        ({"recipes": ()}, "at least one recipe"),
        ({"hardware": ("h1000",)}, "unknown hardware"),
        ({"steps": 1}, "steps"),
        ({"budget": 0}, "budget must be a positive number"),
        ({"target": "a"}, "target must be a number"),
        ({"save": "a.html"}, "suffix"),
    ],
)
def test_bad_arguments(arguments, message):
    with refuses(message, (ValueError, TypeError)):
        preflight(setup, **QUICK | arguments)


@parametrize(
    "arguments, error, message",
    [
        ((Classifier(),), TypeError, "needs batches"),
        ((setup, batches(3)), TypeError, "go with a model"),
        ((lambda: 3,), PreflightError, "a setup is"),
    ],
)
def test_a_model_needs_batches_and_a_setup_has_its_own(arguments, error, message):
    with refuses(message, error):
        preflight(*arguments, **QUICK)


def test_transforms_are_found_and_trained_with_the_users_optimizer(monkeypatch):
    def transform(model):
        return copy.deepcopy(model)

    transform.recipe, found = "tensor", {"copied": transform}
    monkeypatch.setattr("fp8.lab.preflight.preflight.installed", lambda: found)
    found = preflight(setup, **ONE | {"transforms": True}).findings
    runs = {run.name: run for run in found.runs}
    assert list(runs) == ["reference", "copied", "tensor"]  # first, if time is short
    assert runs["copied"].losses == runs["tensor"].losses  # its parameters were trained
    assert found.verdict.reasons[-1].startswith("Trained as copied, the loss ends")


def candidate(name, bits, error, outcome="as the reference"):
    policy, errors = {"recipe": "row"}, {1: error}
    return Candidate(name, name, policy, bits=bits, errors=errors, outcome=outcome)


def runs_on(device, *names):
    variants = tuple(Variant(recipe=name, seconds=1.0) for name in names)
    return [Forecast(device, "estimate", variants)]


def names(chosen):
    return list(dict.fromkeys(c.name for c in chosen.values()))


def found(candidates, forecasts):
    return Findings(candidates=candidates, forecasts=forecasts)


def test_finalists_are_the_fine_ones_with_the_fewest_bits_of_each_device():
    """Without accelerators, of all."""
    rows = [candidate("row", 8, 0.1), candidate("mx", 8, 0.05)]
    rows += [candidate("four", 4, 0.2), candidate("coarse", 4, 0.9)]
    rows += [candidate("bf16", 16, 0.001)]
    new = [row.name for row in rows]
    on = runs_on("old", "row", "bf16") + runs_on("new", *new)
    assert names(finalists(found(rows, on))) == ["row", "four"]
    rows[0].outcome = "worse"
    assert names(finalists(found(rows, on))) == ["four"]
    rows[2].outcome = "worse"
    assert names(finalists(found(rows, on))) == ["mx"]
    assert names(finalists(found(rows, runs_on("x", "coarse")))) == ["coarse"]
    rows[0].outcome = "as the reference"
    assert names(finalists(found(rows, []))) == ["mx"]
    assert names(recommended(found(rows[:3], []))) == ["mx"]


def test_recommended_is_for_each_device_what_trains_with_the_fewest_bits():
    rows = [candidate("row", 8, 0.1), candidate("four", 4, 0.2, "worse")]
    on = runs_on("old", "row") + runs_on("new", "row", "four") + runs_on("none", "four")
    best = lambda: {d: c.name for d, c in recommended(found(rows, on)).items()}  # noqa: E731
    assert best() == {"old": "row", "new": "row"}
    rows[1].outcome = "within chance"  # only where nothing else is known to be good
    assert best() == {"old": "row", "new": "row", "none": "four"}
    rows[0].outcome, rows[0].high, rows[1].high = "within chance", 0.2, 0.1
    # The lowest upper end.
    assert names(recommended(found(rows, on))) == ["row", "four"]


@parametrize("wrapped", [lambda model: fp8.convert(model, "mxfp4"), torch.compile])
def test_a_converted_or_compiled_model_is_measured_in_its_own_precision(wrapped):
    model = Classifier()
    plain = preflight(model, batches(20), **ONE)
    again = preflight(wrapped(model), batches(20), **ONE)
    assert again.table() == plain.table()
    assert [p.layer for p in again.findings.products][:2] == ["first", "blocks.0"]


class Inside(Classifier):
    def forward(self, x, y):
        with fp8.autocast("mxfp4"):
            return super().forward(x, y)


CAST = "the reference is in low precision already: it casts the {} of first to {}"
REFERENCES = {
    "simulated": (
        lambda: simulate_fp8(Classifier()),
        nullcontext(),
        CAST.format("input", "e4m3"),
    ),
    "gradients": (
        Classifier,
        fp8.autocast(fp8.Recipe(name="gradients", grad=fp8.Cast(format="e5m2"))),
        "casts the grad of head to e5m2",
    ),
    "inside": (Inside, nullcontext(), CAST.format("input", "e2m1")),
    "torch": (
        Classifier,
        torch.autocast("cpu", torch.bfloat16),
        r"inside torch\.autocast, which reuses its copies of weights",
    ),
}


@parametrize("kind", REFERENCES)
def test_a_reference_in_low_precision_is_refused(kind):
    make, block, message = REFERENCES[kind]
    with block, refuses(message, PreflightError):
        preflight(make(), batches(20), **ONE)


def test_a_resumed_preflight_trains_what_the_budget_did_not_allow(
    tmp_path, monkeypatch
):
    """In runs of the steps that the first budget allowed."""
    path, note = tmp_path / "a.json", "the budget did not allow a training run of"
    little = ONE | {"steps": 50, "budget": 1e-3}
    first = preflight(setup, save=path, **little).findings
    assert any(text.startswith(note) for text in first.notes)
    steps = first.settings["steps"]
    assert steps < 50
    again = preflight(setup, resume=path, **ONE | {"steps": 50}).findings
    assert not any(text.startswith(note) for text in again.notes)
    assert {len(run.losses) for run in again.runs} == {steps}
    assert len(again.runs) > 1
