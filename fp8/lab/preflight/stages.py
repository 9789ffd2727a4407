"""The stages of a preflight, from the trace of the products to the verdict."""

from __future__ import annotations

import copy
import datetime
import math
import platform
import statistics
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...adapters.policies import as_code
from ...adapters.transformers import cache_found, has_cache
from ...common.step import Batch, call, copied, described, loss_value, scalars, untouched
from ...common.validation import check_whole
from ...formats.format import get_format
from ...recipes.policy import CASTS, Policy
from ...recipes.recipe import AUTO, PRODUCTS, Recipe
from ...selection.layers import candidates
from ...selection.roles import roles
from ...surgery.convert import convert, report
from ...version import __version__
from ..hardware import Hardware, Product, estimate
from ..stats import stats
from .findings import Candidate, CastScore, Choice, Findings, Run
from .paired_runs import FINE, REFERENCE, compare, finalists, prove, recommended, worst_error
from .search import choice, frontier, keeping, knee, name_of, published, score, shares
from .trace import trace
from .training import Prepare, Problem, train, under
from .update_error import Probe, quiet
from .verdict import sentences

REFERENCE_PART, SEARCH_PART, CASTS_PART = 1 / 20, 1 / 5, 1 / 10
"""The parts of the budget for the reference run, for the search and for single casts."""

FEWEST_STEPS, TIMED_STEPS = 20, 8

#: One thread is chosen if a step takes less than this many times that of all threads: threads that
#: wait for one another lose much more than that on a machine that does other work too.
ONE_THREAD = 1.3

#: What each of a finalist's runs costs, relative to the reference's, before one was timed.
SIMULATED_COST = 3.0

NO_RUN = "the budget did not allow a training run of"
"""How the note begins that a training with more time makes obsolete."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `fp8.preflight` that say how to measure."""

    recipes: tuple[Recipe, ...]
    steps: int
    held_out: int
    budget: float
    target: float
    max_seeds: int
    hardware: tuple[Hardware, ...]
    transforms: Mapping[str, Callable[[nn.Module], nn.Module]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_whole("steps", self.steps, 2)
        check_whole("held_out", self.held_out)
        check_whole("max_seeds", self.max_seeds)
        for name in ("budget", "target"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        if not self.recipes:
            raise ValueError("recipes must name at least one recipe, got none")


class PreflightRun:
    """One preflight. `on_stage` is called after each stage. source: as for `Problem`. findings:
    empty, or those of an interrupted preflight of the same problem, which grow."""

    def __init__(self, source: Any, settings: Settings, findings: Findings) -> None:
        self.settings = settings
        self.findings = findings
        self.on_stage: Callable[[], object] = lambda: None
        self.shows_progress = False
        self._source = source
        self._begun = time.perf_counter()
        self._problem: Problem | None = None
        self._probes: list[Probe] = []
        _forget_unfinished(findings)

    @property
    def problem(self) -> Problem:
        """The weights and batches of all runs."""
        if self._problem is None:
            steps = self.findings.settings.get("steps", self.settings.steps)
            self._problem = Problem(self._source, steps, self.settings.held_out)
        return self._problem

    def run(self) -> None:
        """All stages that ``findings`` does not have."""
        threads = torch.get_num_threads()
        stages = {
            "trace": self._trace,
            "reference": self._reference,
            "update errors": self._errors,
            "search": self._search,
            "estimates": self._estimate,
            "cache": self._cache,
            "operands": self._operands,
            "single casts": self._casts,
            "training": self._prove,
        }
        try:
            self._describe()
            self._look_at_a_step()
            for name, run in stages.items():
                if name not in self.findings.seconds or name == "training":
                    begun = time.perf_counter()
                    run()
                    self.findings.seconds[name] = time.perf_counter() - begun
                    self.conclude()
                    self.on_stage()
        finally:
            torch.set_num_threads(threads)

    def conclude(self) -> None:
        """Writes outcomes, the recommended policy, or else the first to try, and the verdict."""
        found = self.findings
        found.settings["peak_memory"] = _peak_memory()
        compare(found.candidates, found.runs, self.settings.target)
        best = recommended(found.candidates, found.estimates)
        found.decided = bool(best)
        first = next(iter((best or self._finalists()).values()), None)
        found.policy = {} if first is None else first.policy
        found.code = {} if first is None else as_code(Policy.from_dict(first.policy))
        found.verdict = sentences(found, best)

    # What is measured

    def _describe(self) -> None:
        settings, model = self.settings, self.problem.setup.model
        parameters = list(model.parameters())
        described = {
            "name": type(model).__name__,
            "parameters": sum(p.numel() for p in parameters),
            "dtype": str(parameters[0].dtype).removeprefix("torch.") if parameters else "",
            "device": str(parameters[0].device) if parameters else "",
        }
        asked = {
            "steps_asked": settings.steps,
            "held_out": settings.held_out,
            "recipes": [recipe.name for recipe in settings.recipes],
        }
        before = self.findings.model | {k: self.findings.settings.get(k) for k in asked}
        for key, value in (described | asked).items() if self.findings.model else ():
            if before[key] != value:
                raise ValueError(
                    f"the file to resume is of another preflight: its {key.replace('_', ' ')} is "
                    f"{before[key]!r}, not {value!r}"
                )
        self._check_paired(0)
        self.findings.model = described
        self.findings.settings |= asked | {"budget": settings.budget, "target": settings.target}
        self.findings.settings.setdefault("steps", self.problem.steps)
        torch.set_num_threads(self.findings.settings.get("threads", torch.get_num_threads()))
        self.findings.versions = {
            "fp8": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "date": datetime.date.today().isoformat(),
        }
        if "reference" not in self.findings.seconds and self.problem.steps < settings.steps:
            self._note(f"the batches last for {self.problem.steps} of {settings.steps} steps")

    def _look_at_a_step(self) -> None:
        """Raises ValueError if a step of the model casts operands: the candidates are compared with
        it. Notes that its output has several losses, of which the runs minimize one."""
        model, loss = copy.deepcopy(self.problem.setup.model).train(), self.problem.setup.loss
        trained = [p for p in model.parameters() if p.requires_grad]
        if any(torch.is_autocast_enabled(kind) for kind in {p.device.type for p in trained}):
            raise ValueError(
                "preflight was called inside torch.autocast, which reuses its copies of weights "
                "until the block ends: enter it in the forward of the model"
            )
        casts = stats(model, every=1)
        with untouched(model), torch.enable_grad(), quiet(), casts:
            output = call(model, copied(self.problem.batch))
            value = loss_value(output, loss)
            if value is not None and value.requires_grad and trained:
                torch.autograd.grad(value, trained, allow_unused=True)
        if rows := casts.rows():
            listed = ", ".join(f"the {r.operand} of {r.layer} to {r.format}" for r in rows[:3])
            raise ValueError(
                f"the reference is in low precision already: it casts {listed}"
                f"{', ...' if len(rows) > 3 else ''}. Pass the model without simulate_fp8, and "
                "call preflight outside of fp8.autocast"
            )
        if loss is None and len(found := scalars(output)) > 1:
            self._note(
                f"the output has {len(found)} scalars that require a gradient and none named loss: "
                "the first alone is minimized; loss= computes another one from the output"
            )

    def _trace(self) -> None:
        self.findings.products = _traced(self.problem.setup.model, self.problem.batch)
        if not shares(self.findings.products):
            whys = {p.layer: p.why_not for p in self.findings.products}
            whys |= _left_alone(self.problem.setup.model)
            why = "; ".join(f"{layer}: {why}" for layer, why in whys.items()) or "it computes none"
            name = self.findings.model["name"]
            raise ValueError(f"no matrix product of this {name} can be cast: {why}")

    def _reference(self) -> None:
        self._fit()
        run = self._trained(REFERENCE, 0)
        if not math.isfinite(run.held_out):
            became = f"loss of the reference became {run.losses[-1]} at step {len(run.losses)}"
            if math.isfinite(run.losses[-1]):
                became = "held-out loss of the reference is not finite"
            raise ValueError(f"the {became}: nothing can be compared with it")
        optimizer = self.problem.setup.optimizer
        if optimizer and not any(group.get("lr", 1.0) for group in optimizer.param_groups):
            self._note(
                "the optimizer's learning rate is 0, so that nothing was trained: schedules, which "
                "set it so for a warmup, make no steps here; pass the rate to train at"
            )
        tenth = max(len(run.losses) // 10, 1)
        first, last = map(statistics.fmean, (run.losses[:tenth], run.losses[-tenth:]))
        if not last < first:
            self._note(
                f"the reference's loss did not fall: {first:.4g} at first, {last:.4g} at last; "
                "gaps and update errors say little about such a run"
            )

    def _fit(self) -> None:
        """By timing a few steps: one thread or all, and how many steps fit into the budget."""
        settings, problem, threads = self.settings, self.problem, torch.get_num_threads()
        times = {count: self._step_time(count) for count in {1, threads}}
        chosen = 1 if times[1] < ONE_THREAD * times[threads] else threads
        torch.set_num_threads(chosen)
        allowed = settings.budget * REFERENCE_PART / times[chosen]
        steps = max(min(problem.steps, int(allowed)), min(FEWEST_STEPS, problem.steps))
        if steps < problem.steps:
            self._note(f"runs have {steps} of {problem.steps} steps, to fit the budget")
            self._problem = problem.shortened(steps)
        self.findings.settings |= {"steps": steps, "threads": chosen}

    def _step_time(self, threads: int) -> float:
        """The median seconds of a training step with this number of threads."""
        ticks: list[float] = []
        torch.set_num_threads(threads)
        timed = self.problem.shortened(TIMED_STEPS)
        train(timed, REFERENCE, on_step=lambda: ticks.append(time.perf_counter()))
        times = [b - a for a, b in pairwise(ticks[:-1])]  # the last step also evaluates
        return statistics.median(times) if times else 1e-9

    def _trained(self, name: str, seed: int) -> Run:
        """The run of a candidate, or of the reference, which is stored if it is new."""
        self._check_paired(seed)
        steps = self.problem.steps
        with self._progress(f"{name}, seed {seed}", steps) as tick, quiet():
            prepare = None if name == REFERENCE else self._preparation(name)
            at = sorted({max(steps // 4, 1), steps}) if (name, seed) == (REFERENCE, 0) else ()
            run, snapshots = train(self.problem, name, seed, prepare, snapshots=at, on_step=tick)
        if (name, seed) == (REFERENCE, 0):
            model, loss = self.problem.setup.model, self.problem.setup.loss
            self._probes = [Probe(model, snapshot, loss) for snapshot in snapshots]
            if not any(r.name == name and r.seed == seed for r in self.findings.runs):
                self.findings.runs.append(run)
        return run

    def _check_paired(self, seed: int) -> None:
        """Raises ValueError if the runs of a seed, of a file to resume, had another start."""
        for run in self.findings.runs:
            if run.seed == seed and run.data not in (0, self.problem.data(seed)):
                raise ValueError(
                    f"seed {seed} has other weights or batches than the run of {run.name} in the "
                    "file to resume: a preflight can be resumed if its setup returns the same in "
                    "every process"
                )

    @property
    def probes(self) -> list[Probe]:
        """At the snapshots of the reference run of seed 0, in order. Trains it if needed."""
        if not self._probes:
            self._trained(REFERENCE, 0)
        return self._probes

    # What is tried

    def _errors(self) -> None:
        cast = sum(shares(self.findings.products).values())
        probes = self.probes
        if not probes[-1].in_steps:
            self._note(
                "the optimizer has no second moments: update errors are those of the gradient "
                "itself, which is the step of SGD alone"
            )
        with self._progress("update errors", len(self.settings.recipes)) as tick:
            for recipe in self.settings.recipes:
                self._measured(self._candidate(recipe, [], cast), probes)
                tick()
        self.findings.candidates.sort(key=worst_error)

    def _candidate(self, recipe: Recipe, kept: Sequence[str], share: float) -> Candidate:
        policy = keeping(recipe, kept).to_dict()
        name = name_of(recipe.name, kept)
        return Candidate(name, recipe.name, policy, list(kept), share, _bits(recipe, share))

    def _measured(self, candidate: Candidate, probes: Sequence[Probe]) -> None:
        policy = Policy.from_dict(candidate.policy)
        for probe in probes:
            found = probe(policy)
            candidate.errors[probe.step] = found.error
            candidate.slopes[probe.step] = found.slope
        self.findings.candidates.append(candidate)

    def _search(self) -> None:
        """Searches the layers to keep for every recipe that is too coarse for all layers."""
        share = shares(self.findings.products)
        coarse = [c for c in self.findings.candidates if worst_error(c) > FINE]
        deadline = time.perf_counter() + SEARCH_PART * self.settings.budget
        searched = [c for c in coarse if math.isfinite(worst_error(c))] or (
            self.findings.candidates[-1:]
        )
        with self._progress("search", len(share) * len(searched)) as tick:
            for candidate in sorted(searched, key=lambda c: c.bits):
                self._searched(candidate, share, deadline, tick)

    def _searched(
        self,
        candidate: Candidate,
        share: Mapping[str, float],
        deadline: float,
        tick: Callable[[], None],
    ) -> None:
        recipe, probe, scores = self._recipe(candidate.recipe), self.probes[-1], list[CastScore]()
        for layer, part in share.items():
            tick()
            if time.perf_counter() >= deadline:
                self._note(
                    f"the budget allowed {len(scores)} of {len(share)} layers for {recipe.name}: "
                    "it was not searched"
                )
                return
            scores.append(score(probe, recipe, layer, part))
        self.findings.scores += scores
        choices = frontier(recipe.name, scores)
        choices[0].measured = worst_error(candidate)
        chosen = choices[0]  # all layers, if that is fine
        if worst_error(candidate) > FINE:
            chosen = self._first_fine(recipe, choices[1:-1]) or knee(choices)
        chosen.chosen = True
        chosen.measured = probe(keeping(recipe, chosen.kept)).error
        self.findings.choices += choices + self._published(recipe, scores)
        if chosen.kept and chosen.share:
            self._measured(self._candidate(recipe, chosen.kept, chosen.share), self.probes)

    def _first_fine(self, recipe: Recipe, choices: Sequence[Choice]) -> Choice | None:
        """The first choice whose error is measured to be fine at all snapshots, or None: errors
        fall along the frontier, so it is found by bisection. Predictions of recipes that lose
        values, as without scales, are too low."""

        def is_fine(choice: Choice) -> bool:
            policy = keeping(recipe, choice.kept)
            return max(probe(policy).error for probe in self.probes) <= FINE

        first = bisect_left(choices, True, key=is_fine)
        return choices[first] if first < len(choices) else None

    def _published(self, recipe: Recipe, scores: Sequence[CastScore]) -> list[Choice]:
        """The selections of papers and other libraries, measured at the same snapshot."""
        found = []
        for name, kept in published(self.problem.setup.model).items():
            cast = [s for s in scores if s.layer not in kept]
            if cast and kept:
                selected = choice(name, recipe.name, kept, cast)
                selected.measured = self.probes[-1](keeping(recipe, kept)).error
                selected.published = True
                found.append(selected)
        return found

    def _operands(self) -> None:
        """The ranges of operands under the best candidate, and under casts without scales."""
        unscaled = [recipe.name for recipe in self.settings.recipes if recipe.unscaled]
        names = dict.fromkeys([*filter(None, [self._shown()]), *unscaled])
        self.findings.ranges = [
            row for name in names for row in self.probes[-1].ranges(self._recipe(name))
        ]

    def _shown(self) -> str:
        """The recipe whose single casts are worth a map: the lowest precision of the finalists, or
        else of the others, with a scale for each product of an operand; "" if there is none."""
        for among in (self._finalists().values(), self.findings.candidates):
            found = [c for c in among if not self._recipe(c.recipe).keeps_history]
            if found:
                return min(found, key=lambda c: (c.bits, worst_error(c))).recipe
        return ""

    def _casts(self) -> None:
        """Each cast alone, layers with the largest share of the FLOPs first."""
        share = shares(self.findings.products)
        if not self._shown():
            self._note("the recipes have no single casts: they store one scale for two products")
            return
        recipe, probe = self._recipe(self._shown()), self.probes[-1]
        deadline = time.perf_counter() + CASTS_PART * self.settings.budget
        order = sorted(share, key=lambda name: share[name], reverse=True)
        with self._progress("single casts", len(order)) as tick:
            for done, layer in enumerate(order):
                if time.perf_counter() > deadline:
                    left = len(order) - done
                    self._note(f"the budget did not allow the single casts of {left} layers")
                    break
                tick()
                self.findings.scores += [
                    score(probe, recipe, layer, share[layer] / 3, cast) for cast in CASTS
                ]

    def _finalists(self) -> dict[str, Candidate]:
        return finalists(self.findings.candidates, self.findings.estimates)

    def _prove(self) -> None:
        """Trains the finalists. If all of them are worse, the next ones, while there is time."""
        found, transforms = self.findings, self._with_transforms()
        names = [*dict.fromkeys(c.name for c in self._finalists().values()), *transforms]
        while names:
            prove(
                names,
                found.runs,
                self._trained,
                tolerance=self.settings.target,
                seeds=range(self.settings.max_seeds),
                has_time=self._has_time,
            )
            for run in found.runs:
                if run.name == REFERENCE and not math.isfinite(run.held_out):
                    self._note(f"the reference diverged with seed {run.seed}, which does not count")
            trained = {run.name for run in found.runs}
            if left := [name for name in names if name not in trained]:
                self._note(f"{NO_RUN} {', '.join(left)}")
            compare(found.candidates, found.runs, self.settings.target)
            if recommended(found.candidates, found.estimates):
                break
            new = {c.name for c in self._finalists().values() if c.outcome == "not trained"}
            names = [name for name in new if self._has_time(name)]

    def _with_transforms(self) -> list[str]:
        """The names of the transforms, which become candidates."""
        known = {candidate.name for candidate in self.findings.candidates}
        for name, transform in self.settings.transforms.items():
            if name not in known:
                share = sum(shares(self.findings.products).values())
                candidate = Candidate(name, getattr(transform, "recipe", AUTO), share=share)
                self.findings.candidates.append(candidate)
        return list(self.settings.transforms)

    def _has_time(self, name: str) -> bool:
        """Whether a run of ``name`` fits into what is left of the budget."""
        times = [run.seconds for run in self.findings.runs if run.name == name]
        known = self.findings.runs[0].seconds * (1 if name == REFERENCE else SIMULATED_COST)
        needed = max(times, default=known)
        return time.perf_counter() - self._begun + needed < self.settings.budget

    def _preparation(self, name: str) -> Prepare:
        if name in self.settings.transforms:
            return partial(_transformed, self.settings.transforms[name])
        policy = next(c.policy for c in self.findings.candidates if c.name == name)
        return under(Policy.from_dict(policy))

    def _estimate(self) -> None:
        """Every candidate on every device, at the full size of the model."""
        products = self._products_at_full_size()
        cast = [product.layer for product in products if not product.why_not]
        for candidate in self.findings.candidates:
            recipe = self._recipe(candidate.recipe)
            recipes = {name: None if name in candidate.kept else recipe for name in cast}
            for device in self.settings.hardware:
                self.findings.estimates.append(
                    estimate(products, recipes, device, candidate=candidate.name)
                )

    def _cache(self) -> None:
        """What a cache in FP8 saves at the full size, and changes after the reference run."""
        if not has_cache(self.problem.setup.model, self.problem.batch):
            return
        probe, full = self.probes[-1], self.problem.setup.full_size
        try:
            self.findings.cache = cache_found(probe.model, probe.batch, full and full.model)
        except Exception as error:  # of the code of the model
            self._note(f"a cache in FP8 was not measured: {described(error)}")

    def _products_at_full_size(self) -> list[Product]:
        full = self.problem.setup.full_size
        try:
            return self.findings.products if full is None else _traced(*full)
        except Exception as error:  # of the code of a model without memory
            self._note(
                "the estimates are for the model that was trained, as its full size cannot be "
                f"traced: {described(error)}"
            )
            return self.findings.products

    def _recipe(self, name: str) -> Recipe:
        return next(recipe for recipe in self.settings.recipes if recipe.name == name)

    @contextmanager
    def _progress(self, name: str, total: int) -> Iterator[Callable[[], None]]:
        """A bar on stderr, or a line where tqdm is missing; yields the function of a tick."""
        if not self.shows_progress:
            yield lambda: None
        elif find_spec("tqdm") is None:
            print(f"{name} ...", file=sys.stderr, flush=True)
            yield lambda: None
        else:
            from tqdm import tqdm

            with tqdm(total=total, desc=name, leave=False, dynamic_ncols=True) as bar:
                yield lambda: bar.update() and None

    def _note(self, text: str) -> None:
        if text not in self.findings.notes:
            self.findings.notes.append(text)


def _peak_memory() -> int | None:
    """The largest memory of the process so far, in bytes; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _left_alone(model: nn.Module) -> dict[str, str]:
    """Layer -> why `fp8.convert` does not cast it."""
    with quiet():
        rows = report(convert(copy.deepcopy(model), "tensor", backend="simulate"))
    return {row.path or "(model)": row.why for row in rows.left_alone}


def _traced(model: nn.Module, batch: Batch) -> list[Product]:
    """The products of a model, with the roles of their layers and why some are not cast."""
    named = roles(model, candidates(model))
    return trace(model, batch, roles=named, why_not=_left_alone(model))


def _forget_unfinished(found: Findings) -> None:
    """Removes what the stage that was interrupted has left, so that it can be repeated."""
    done = found.seconds
    if "update errors" not in done:
        found.candidates = []
    if "search" not in done:
        found.candidates = [c for c in found.candidates if not c.kept]
        found.scores, found.choices = [], []
    if "estimates" not in done:
        found.estimates = []
    if "operands" not in done:
        found.ranges = []
    if "single casts" not in done:
        found.scores = [s for s in found.scores if not s.product]
    repeated = ("interrupted", "stopped", NO_RUN)
    found.notes = [note for note in found.notes if not note.startswith(repeated)]


def _transformed(
    transform: Callable[[nn.Module], nn.Module], model: nn.Module, optimizer: Optimizer
) -> tuple[nn.Module, Optimizer]:
    """The transformed model under its recipe, and the optimizer with its parameters."""
    new = transform(model)
    own = dict(new.named_parameters())
    by_id = {id(p): own[name] for name, p in model.named_parameters() if name in own}
    for group in optimizer.param_groups:
        group["params"] = [by_id.get(id(p), p) for p in group["params"]]
    return under(Policy(getattr(transform, "recipe", AUTO)))(new, optimizer)


def _bits(recipe: Recipe, share: float) -> float:
    """Bits per operand, averaged over the FLOPs of all products; high precision counts as 16."""
    widths = [
        max(16 if cast is None else get_format(cast.format).bits for cast in getattr(recipe, name))
        for name in PRODUCTS
    ]
    return share * statistics.fmean(widths) + (1 - share) * 16
