"""The stages of a preflight, from the trace of the products to the verdict."""

from __future__ import annotations

import datetime
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import nn

from ...common.step import described
from ...common.validation import check_number, check_whole
from ...formats.format import dtype_name
from ...recipes.policy import LayerRule, Policy
from ...recipes.recipe import AUTO, PLAIN, Recipe
from ...version import __version__
from ..forecast.estimate import estimate
from ..forecast.result import Forecast
from ..hardware import BF16, Hardware
from ..trace import left_alone, quiet, trace
from .findings import Candidate, Findings, Run
from .forecasts import compile_steps
from .paired_runs import (
    FIRST_LOOK,
    REFERENCE,
    Budget,
    OutOfTime,
    chance_of,
    compare,
    train_pairs,
)
from .search import (
    FINE,
    LayerError,
    bits_of,
    choose,
    finalists,
    keeping,
    name_of,
    recommended,
    shares,
    worst_error,
)
from .training import Prepare, Problem, Source, train, transformed, under
from .update_error import Probe, check_reference
from .verdict import SIMULATED, Continue, decide

# The parts of the budget for the reference run and for the search: pairs of runs take most of the
# rest, and the first look of a candidate takes three.
REFERENCE_PART, SEARCH_PART = 1 / 40, 1 / 6

FEWEST_STEPS, TIMED_STEPS = 20, 8

# One thread is used if its step takes less than so many times the step of all threads, which wait
# for one another where other programs run too.
ONE_THREAD = 1.3

# How the note begins that a training with more time makes obsolete.
NOT_TRAINED = "the budget did not allow a training run of"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to measure, as in `fp8.preflight`. The default recipe of `fp8.convert` is added to
    ``recipes``."""

    recipes: tuple[Recipe, ...]
    steps: int
    held_out: int
    budget: float
    target: float
    max_seeds: int
    hardware: tuple[Hardware, ...]
    transforms: Mapping[str, Callable[[nn.Module], nn.Module]]

    def __post_init__(self) -> None:
        check_whole("steps", self.steps, 2)
        check_whole("held_out", self.held_out)
        check_whole("max_seeds", self.max_seeds)
        for name in ("budget", "target"):
            value = getattr(self, name)
            check_number(name, value)
            if not value > 0:
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        if not self.recipes:
            raise ValueError("recipes must name at least one recipe, got none")
        if PLAIN.name not in {recipe.name for recipe in self.recipes}:
            object.__setattr__(self, "recipes", (*self.recipes, PLAIN))


@dataclass(eq=False)
class PreflightRun:
    """One preflight. findings: empty, or from an interrupted preflight; they grow. on_change:
    called after each stage and each training run, to save them."""

    source: Source
    settings: Settings
    findings: Findings
    proceed: Continue
    on_change: Callable[[], object]
    shows_progress: bool

    def __post_init__(self) -> None:
        self.budget = Budget(self.settings.budget)
        self._probes: list[Probe] = []
        self._step_seconds: dict[str, float] = {}
        self._recipes = {recipe.name: recipe for recipe in self.settings.recipes}
        # Which a resumption makes again, if they still hold.
        repeated = ("interrupted", "stopped", NOT_TRAINED)
        notes = self.findings.notes
        self.findings.notes = [n for n in notes if not n.startswith(repeated)]

    @cached_property
    def problem(self) -> Problem:
        """The weights and batches of all runs."""
        steps = self.findings.settings.get("steps", self.settings.steps)
        return Problem(self.source, steps, self.settings.held_out)

    def run(self) -> None:
        """All stages that ``findings`` does not have."""
        threads = torch.get_num_threads()
        stages = {
            "trace": self._trace,
            "reference": self._reference,
            "update errors": self._errors,
            "search": self._search,
            "estimates": self._estimate,
            "forecast": lambda: compile_steps(
                self.problem, self.settings.hardware, self.findings, self.budget
            ),
            "training": self._train_finalists,
        }
        try:
            self._describe()
            for note in check_reference(self.problem):
                self._note(note)
            for name, stage in stages.items():
                # Training goes on with a larger budget or more seeds.
                if name not in self.findings.seconds or name == "training":
                    self._say(name)
                    begun = time.perf_counter()
                    stage()
                    self.findings.seconds[name] = time.perf_counter() - begun
                    self.save()
        finally:
            torch.set_num_threads(threads)

    def save(self) -> None:
        """Concludes from what is measured so far, and saves it."""
        findings = self.findings
        findings.settings["chance"] = chance_of(findings.runs)
        compare(findings.candidates, findings.runs, self.settings.target)
        decide(findings, self.proceed)
        self.on_change()

    def _say(self, what: str) -> None:
        if self.shows_progress and sys.stderr.isatty():
            print(f"fp8 preflight: {what}", file=sys.stderr)

    def _note(self, text: str) -> None:
        if text not in self.findings.notes:
            self.findings.notes.append(text)

    # What is measured

    def _describe(self) -> None:
        """Raises ValueError if the findings to resume are of another preflight."""
        settings = self.settings
        findings = self.findings
        model = self.problem.setup.model
        first = next(model.parameters(), torch.empty(0))
        described = {
            "name": type(model).__name__,
            "parameters": sum(p.numel() for p in model.parameters()),
            "dtype": dtype_name(first.dtype),
            "device": str(first.device),
        }
        asked = {
            "steps_asked": settings.steps,
            "held_out": settings.held_out,
            "recipes": [recipe.name for recipe in settings.recipes],
        }
        for values, before in ((described, findings.model), (asked, findings.settings)):
            for key, value in values.items():
                if before.setdefault(key, value) != value:
                    raise ValueError(
                        f"the file to resume is of another preflight: its {key.replace('_', ' ')} "
                        f"is {before[key]!r}, not {value!r}"
                    )
        self._check_paired(0)
        # These may change from a preflight to its resumption; the others may not.
        findings.settings |= {"budget": settings.budget, "target": settings.target}
        findings.settings.setdefault("steps", self.problem.steps)
        # Sums depend on the number of threads, so that paired runs have the same.
        torch.set_num_threads(findings.settings.get("threads", torch.get_num_threads()))
        findings.versions = {
            "fp8": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "date": datetime.date.today().isoformat(),
        }
        if "reference" not in findings.seconds and self.problem.steps < settings.steps:
            self._note(
                f"the batches last for {self.problem.steps} of {settings.steps} steps"
            )

    def _trace(self) -> None:
        self.findings.products = trace(self.problem.setup.model, self.problem.batch)
        if not shares(self.findings.products):
            whys = {p.layer: p.why_not for p in self.findings.products}
            whys |= left_alone(self.problem.setup.model)
            listed = [f"{layer}: {why}" for layer, why in whys.items()]
            name = self.findings.model["name"]
            raise ValueError(
                f"no matrix product of this {name} can be cast: "
                + ("; ".join(listed) or "it computes none")
            )

    def _reference(self) -> None:
        self._fit()
        run = self._trained(REFERENCE, 0)
        if not math.isfinite(run.held_out):
            became = f"loss of the reference became {run.losses[-1]} at step {len(run.losses)}"
            if math.isfinite(run.losses[-1]):
                became = "held-out loss of the reference is not finite"
            raise ValueError(f"the {became}: nothing can be compared with it")
        self._check_moved()
        tenth = max(len(run.losses) // 10, 1)
        first = statistics.fmean(run.losses[:tenth])
        last = statistics.fmean(run.losses[-tenth:])
        if not last < first:
            self._note(
                f"the reference's loss did not fall: {first:.4g} at first, {last:.4g} at last; "
                "gaps and update errors say little about such a run"
            )

    def _check_moved(self) -> None:
        """Notes the parameters that the reference did not train. Raises ValueError if a run has
        computed with the caller's model."""
        self.problem.check_apart()
        optimizer = self.problem.setup.optimizer
        rates = [1.0]  # of AdamW, which is made without one
        if optimizer:
            rates = [group.get("lr", 1.0) for group in optimizer.param_groups]
        if not any(rates):
            self._note(
                "the optimizer's learning rate is 0, so that nothing was trained: schedules, which "
                "set it so for a warmup, make no steps here; pass the rate to train at"
            )
        elif unmoved := self.probes[-1].unmoved(self.problem.setup.model):
            names = unmoved[:3] + ["..."] * (len(unmoved) > 3)
            self._note(
                f"{len(unmoved)} parameters did not move in {self.problem.steps} steps, so that "
                f"nothing is known of their training: {', '.join(names)}"
            )

    def _fit(self) -> None:
        """Sets the number of threads and of steps, by timing a few steps."""
        problem = self.problem
        chosen = torch.get_num_threads()
        times = {count: self._step_time(count) for count in {1, chosen}}
        if times[1] < ONE_THREAD * times[chosen]:
            chosen = 1
        torch.set_num_threads(chosen)
        allowed = self.settings.budget * REFERENCE_PART / times[chosen]
        steps = max(min(problem.steps, int(allowed)), min(FEWEST_STEPS, problem.steps))
        if steps < problem.steps:
            self._note(f"runs have {steps} of {problem.steps} steps, to fit the budget")
            self.problem = problem.shortened(steps)
        self.findings.settings |= {"steps": steps, "threads": chosen}

    def _step_time(self, threads: int) -> float:
        ticks: list[float] = []
        torch.set_num_threads(threads)
        timed = self.problem.shortened(TIMED_STEPS)
        train(timed, REFERENCE, on_step=lambda: ticks.append(time.perf_counter()))
        # Without the first, which initializes, and the last, which evaluates.
        times = [b - a for a, b in pairwise(ticks[:-1])]
        return statistics.median(times or [1e-9])

    def _trained(self, name: str, seed: int) -> Run:
        """A run, of which the reference's first one is stored, with its probes. Raises OutOfTime
        for another that does not end in time."""
        self._check_paired(seed)
        steps = self.problem.steps
        first = (name, seed) == (REFERENCE, 0)
        at = []
        if first:
            at = sorted({max(steps // 4, 1), steps})

        def on_step() -> None:
            # Without the first run there is nothing to report.
            if not first and self.budget.left < 0:
                raise OutOfTime

        self._say(f"{name}, seed {seed}")
        with quiet():
            run, snapshots = train(
                self.problem,
                name,
                seed,
                self._preparation(name),
                snapshots=at,
                on_step=on_step,
            )
        if first:
            self._probes = [Probe(snapshot) for snapshot in snapshots]
            # A resumed preflight has it, and trains it again for the probes.
            if not any(r.name == name and r.seed == seed for r in self.findings.runs):
                self.findings.runs.append(run)
        return run

    def _check_paired(self, seed: int) -> None:
        """Raises ValueError if the file to resume has a run of this seed from another start."""
        for run in self.findings.runs:
            # 0 stands for runs of files without checksums.
            if run.seed == seed and run.data not in (0, self.problem.data(seed)):
                raise ValueError(
                    f"seed {seed} has other weights or batches than the run of {run.name} in the "
                    "file to resume: a preflight can be resumed if its setup returns the same in "
                    "every process"
                )

    @property
    def probes(self) -> list[Probe]:
        """The probes at the snapshots of the reference run of seed 0, in order. Trains it if
        needed."""
        if not self._probes:
            self._trained(REFERENCE, 0)
        return self._probes

    # What is tried

    def _errors(self) -> None:
        cast = sum(shares(self.findings.products).values())
        if not self.probes[-1].in_steps:
            self._note(
                "the optimizer has no second moments: update errors are those of the gradient "
                "itself, which is the step of SGD alone"
            )
        candidates = [
            self._candidate(recipe, [], cast) for recipe in self.settings.recipes
        ]
        self.findings.candidates = sorted(candidates, key=worst_error)

    def _candidate(
        self, recipe: Recipe, kept: Sequence[str], share: float
    ) -> Candidate:
        """The candidate that keeps some layers, with its update error at each snapshot."""
        policy = keeping(recipe, kept)
        name = name_of(recipe.name, kept)
        candidate = Candidate(
            name,
            recipe.name,
            policy.to_dict(),
            list(kept),
            share,
            bits_of(recipe, share),
        )
        for probe in self.probes:
            begun = time.perf_counter()
            candidate.errors[probe.step] = probe(policy)
            self._step_seconds[name] = time.perf_counter() - begun
        return candidate

    def _search(self) -> None:
        """Searches the layers to keep for every recipe that is too coarse for all layers."""
        findings = self.findings
        budget = self.budget.part(SEARCH_PART)
        coarse = [c for c in findings.candidates if worst_error(c) > FINE]
        finite = [c for c in coarse if math.isfinite(worst_error(c))]
        new = []
        # The narrowest first, as they save most. Layers may be at fault for an infinite error, too.
        for candidate in sorted(finite or coarse[-1:], key=lambda c: c.bits):
            recipe = self._recipes[candidate.recipe]
            errors = self._layer_errors(recipe, budget)
            if not errors:
                continue
            kept, share, _ = choose(recipe, errors, self.probes)
            if kept and share:
                new.append(self._candidate(recipe, kept, share))
        findings.candidates += new

    def _layer_errors(self, recipe: Recipe, budget: Budget) -> list[LayerError]:
        """Returns the error of casting each layer alone; empty if the budget does not allow all."""
        errors = list[LayerError]()
        share = shares(self.findings.products)
        for layer, part in share.items():
            if budget.left <= 0:
                self._note(
                    f"the budget allowed {len(errors)} of {len(share)} layers for {recipe.name}: "
                    "it was not searched"
                )
                return []
            alone = Policy(None, rules=(LayerRule(layer, recipe),))
            error = self.probes[-1](alone)
            errors.append(LayerError(layer, error**2, part))
        return errors

    def _estimate(self) -> None:
        products = self.findings.products
        forecasts = []
        for device in self.settings.hardware:
            variants = [estimate(products, {}, device)]
            for candidate in self.findings.candidates:
                if candidate.name == BF16:  # the first
                    continue
                cast = {p.layer for p in products} - set(candidate.kept)
                recipes = dict.fromkeys(cast, self._recipes[candidate.recipe])
                variants.append(estimate(products, recipes, device, candidate.name))
            forecasts.append(Forecast(device.name, "estimate", tuple(variants)))
        self.findings.forecasts = forecasts

    def _train_finalists(self) -> None:
        """Trains the transforms, the recipe of `fp8.convert` and the finalists: all to the first
        look, then those that are not decided."""
        for pairs in (FIRST_LOOK, self.settings.max_seeds):
            pairs = min(pairs, self.settings.max_seeds)
            # Transforms first: while the policies to train are several and may take all of the
            # budget, a transform is one candidate.
            self._train_transforms(pairs)
            self._train_policies(pairs)
        for run in self.findings.runs:
            if run.name == REFERENCE and not math.isfinite(run.held_out):
                self._note(
                    f"the reference diverged with seed {run.seed}, which does not count"
                )

    def _train_transforms(self, pairs: int) -> None:
        known = {candidate.name for candidate in self.findings.candidates}
        share = sum(shares(self.findings.products).values())
        for name, transform in self.settings.transforms.items():
            if name not in known:
                recipe = getattr(transform, "recipe", AUTO)
                self.findings.candidates.append(Candidate(name, recipe, share=share))
        for name in self.settings.transforms:
            # A transform is another package's, and need not take this model.
            try:
                self._train([name], pairs)
            except (ValueError, TypeError, RuntimeError) as error:
                self._note(f"{name} was not trained: {described(error)}")

    def _train_policies(self, pairs: int) -> None:
        """Trains the finalists and, if all are worse, the next ones, while there is time."""
        first = [c.name for c in finalists(self.findings).values()]
        self._train([PLAIN.name, *first], pairs)
        while not recommended(self.findings):
            untried = finalists(self.findings).values()
            new = [c.name for c in untried if c.outcome == "not trained"]
            if not any(self._has_time([name]) for name in new):
                break
            self._train(new, pairs)

    def _train(self, names: Sequence[str], pairs: int) -> None:
        """Trains candidates beside the reference until they are decided, and compares."""
        findings = self.findings
        names = list(dict.fromkeys(names))
        train_pairs(
            names,
            findings.runs,
            self._trained,
            tolerance=self.settings.target,
            max_seeds=pairs,
            has_time=self._has_time,
            on_run=self.save,
        )
        trained = {run.name for run in findings.runs}
        if left := [name for name in names if name not in trained]:
            self._note(f"{NOT_TRAINED} {', '.join(left)}")
        compare(findings.candidates, findings.runs, self.settings.target)

    def _has_time(self, names: Collection[str]) -> bool:
        return self.budget.allows(sum(map(self._run_seconds, names)))

    def _run_seconds(self, name: str) -> float:
        """Estimates the seconds of a run: from the longest run so far; before the first run, from
        the time of an update error or of the reference."""
        times = [run.seconds for run in self.findings.runs if run.name == name]
        if times:
            return max(times)
        steps = self._step_seconds.get(name, 0.0) * self.problem.steps
        reference = self.findings.runs[0].seconds
        if name != REFERENCE:
            reference *= SIMULATED
        return max(steps, reference)

    def _preparation(self, name: str) -> Prepare | None:
        if name == REFERENCE:
            return None
        if name in self.settings.transforms:
            return transformed(self.settings.transforms[name])
        policy = next(c.policy for c in self.findings.candidates if c.name == name)
        return under(Policy.from_dict(policy))
