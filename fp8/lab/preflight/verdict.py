"""The verdict of a preflight: the answer, what it saves, and why, in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from ...adapters.policies import as_code
from ...recipes.policy import Policy
from ...recipes.recipe import RECIPES
from ..forecast.result import Forecast
from ..hardware import BF16
from .findings import Candidate, Findings, Verdict
from .paired_runs import ERROR, FIRST_LOOK, LOOKS, MARGIN, REFERENCE, Gap, seeds_needed
from .search import AS_GOOD, FAILED, FINE, finalists, recommended, worst_error

SCALES = {
    "unit": "without scale factors",
    "tensor": "with one scale factor for each tensor",
    "delayed": "with one scale factor for each tensor, from earlier steps",
    "static": "with one scale factor for each tensor, measured once",
    "row": "with one scale factor for each row of a matrix",
    "block": "with one scale factor for each block of 128 values",
    "mx": "with one scale factor for each 32 values",
    "nv": "with one scale factor for each 16 values",
}
"""Name in `fp8.recipes.scaling.SCALINGS` -> its scale factors, in words."""

Continue = Callable[[float, int], str]
"""(seconds, seeds) -> the command, or line of Python, that continues with them."""


def recipe_in_words(name: str) -> str:
    """A recipe's name, and in brackets what it does."""
    cast = RECIPES[name].input if name in RECIPES else None
    if cast is None:
        return f"recipe {name}"
    bits = cast.number_format.bits
    return f"recipe {name} ({bits}-bit numbers {SCALES[cast.scaling]})"


def decide(findings: Findings, proceed: Continue) -> None:
    """Writes the verdict: of the recommended candidates or, without one, of those to try."""
    untried = finalists(findings)
    best = recommended(findings)
    candidate = next(iter((best or untried).values()), None)
    findings.verdict = verdict = Verdict(recommended=bool(best))
    if candidate is not None:
        verdict.policy = candidate.policy
        verdict.code = as_code(Policy.from_dict(candidate.policy))
        verdict.reasons = _reasons(findings, candidate)
    verdict.reasons += _transforms(findings)
    verdict.savings = _savings(findings, best or untried, bool(best))
    failed = [c for c in findings.candidates if c.outcome in FAILED]
    # A failure is an answer only where no candidate is left to train.
    if best and candidate is not None:
        verdict.answer = _yes(findings, candidate)
    elif candidate is None and failed:
        gaps = []
        for row in failed:
            gap = "diverges" if row.gap is None else f"{row.gap:+.4f}"
            gaps.append(f"{row.name} {gap}")
        verdict.answer = (
            f"No, {_runs(findings)}: every recipe that was trained ends with a higher loss "
            f"({', '.join(gaps)})."
        )
    else:
        seeds, seconds = _missing(findings, untried.values())
        minutes = max(math.ceil(seconds / 60), 1)
        time = "1 more minute" if minutes == 1 else f"{minutes} more minutes"
        command = proceed(60.0 * minutes, seeds)
        verdict.answer = f"Not decided: run {time} with this command: {command}"


def _precision(findings: Findings) -> str:
    """The reference's dtype."""
    return str(findings.model.get("dtype")).replace("bfloat16", BF16)


def _yes(findings: Findings, candidate: Candidate) -> str:
    answer = "Yes, with"
    chance = ""
    if candidate.outcome == "within chance":
        chance = "; the loss differs by less than from seed to seed"
    if candidate.kept:
        kept = _layers(candidate.kept)
        precision = _precision(findings)
        answer = f"Yes, but keep {kept} in {precision}; all other layers with"
    return f"{answer} {recipe_in_words(candidate.recipe)}, {_runs(findings)}{chance}."


def _runs(findings: Findings) -> str:
    """How long the runs are that a verdict rests on."""
    steps = findings.settings["steps"]
    asked = findings.settings["steps_asked"]
    of_asked = f" of {asked}" if steps < asked else ""
    return f"in runs of {steps}{of_asked} steps"


def _layers(names: Sequence[str]) -> str:
    if len(names) > 3:
        names = [*names[:3], f"{len(names) - 3} more"]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _missing(findings: Findings, untried: Iterable[Candidate]) -> tuple[int, float]:
    """About how many seeds decide about the next candidate, and the seconds that they take."""
    settings = findings.settings
    seconds = {run.name: run.seconds for run in findings.runs}
    if REFERENCE not in seconds:
        return FIRST_LOOK, float(settings.get("budget", 60.0))
    started = [row for row in findings.candidates if row.outcome == "not decided"]
    least = max(settings["target"], settings["chance"])
    reference = seconds[REFERENCE]
    seeds = FIRST_LOOK
    missing = list[float]()
    for row in (*started, *untried):
        if row.outcome not in AS_GOOD:
            needed = _seeds(row, least)
            each = seconds.get(row.name, SIMULATED * reference)
            missing.append((needed - row.seeds) * (each + reference))
            seeds = max(seeds, needed)
    return seeds, MARGIN * min(missing, default=0.0)


def _seeds(row: Candidate, tolerance: float) -> int:
    following = min((seeds for seeds in LOOKS if seeds > row.seeds), default=max(LOOKS))
    if row.gap is None or row.low is None or row.high is None:
        return following
    # The upper end falls below the tolerance when half the interval is what the mean leaves of it.
    found = Gap(row.gap, row.low, row.high, row.seeds)
    return max(seeds_needed(found, tolerance - max(row.gap, 0)), following)


# The time of a run with simulated casts, relative to the reference's, before one was timed.
SIMULATED = 3.0


def _savings(
    findings: Findings, shown: Mapping[str, Candidate], decided: bool
) -> list[str]:
    """What the candidate of each device saves; one line for devices that agree."""
    several = len({candidate.name for candidate in shown.values()}) > 1
    saved: dict[str, str] = {}
    # The compiler's forecasts follow the estimates, and take their place.
    for row in findings.forecasts:
        if row.hardware in shown and shown[row.hardware].name in row:
            saved[row.hardware] = _saving(row, shown[row.hardware].name, several)
    begin = "On" if decided else "If it trains as well: On"
    lines = []
    for text in dict.fromkeys(saved.values()):
        devices = [device for device in saved if saved[device] == text]
        lines.append(f"{begin} {' and '.join(devices)}{text}")
    return lines


def _saving(forecast: Forecast, name: str, several: bool) -> str:
    policy = saves = memory = ""
    if several:
        policy = f" with {name}"
    step = "the matrix products of a training step are"
    basis = "estimate"
    if forecast.source == "compiler":
        step = "a training step is"
        basis = "forecast from the compiler's code"
    speedup = 1 / forecast.ratio(name)
    if speedup <= 1:
        saves = "no time is saved: "
    low = forecast[name].saved
    high = forecast.variants[0].saved
    if low < high:
        memory = (
            "; what it saves for the backward pass takes "
            f"{bytes_in_words(low)} in place of {bytes_in_words(high)}"
        )
    return f"{policy}, {saves}{step} {speedup:.2f} times as fast{memory} ({basis})."


def bytes_in_words(count: float) -> str:
    """The number of bytes in the largest unit in which it is at least 1."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:  # of three digits
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _reasons(findings: Findings, candidate: Candidate) -> list[str]:
    lines = [_by_training(findings, candidate)]
    name = candidate.name
    slower = {}
    for row in findings.forecasts:
        if name in row and row.slower(name):
            count = len(row.slower(name))
            total = len(row[name].layers)
            slower[row.hardware] = f"{count} of {total} layers on {row.hardware}"
    if slower:
        lines.append(
            f"Slower than in bf16 are {' and '.join(slower.values())}: their products are so small "
            "that rounding the operands takes longer than the products save."
        )
    return lines


def _transforms(findings: Findings) -> list[str]:
    """What training with each transform gave: candidates without a policy."""
    lines = []
    for row in findings.candidates:
        if row.policy or row.outcome == "not trained":
            continue
        text = f"Trained as {row.name}, the loss diverges."
        if row.gap is not None:
            text = (
                f"Trained as {row.name}, {_ends(row, 'the reference')}: {row.outcome}."
            )
        lines.append(text)
    return lines


def _ends(row: Candidate, reference: str) -> str:
    """Where the loss of a candidate that was trained ends, beside the reference's."""
    assert row.gap is not None
    pairs = "pairs" if row.seeds > 1 else "pair"
    where = "above" if row.gap >= 0 else "below"
    return (
        f"the loss ends {abs(row.gap):.4f} {where} that of {reference} "
        f"({row.seeds} {pairs} of runs)"
    )


def _by_training(findings: Findings, candidate: Candidate) -> str:
    if candidate.gap is None:
        return (
            f"Rounding with {candidate.name} changes each update of the weights by "
            f"{worst_error(candidate):.0%} (its update error); up to {FINE:.0%} is expected to "
            "train as well. It was not trained yet."
        )
    reference = f"the model in {_precision(findings)}"
    text = (
        f"Trained with {candidate.name} from the same weights on the same batches, "
        f"{_ends(candidate, reference)}."
    )
    if candidate.low is None or candidate.high is None:
        return f"{text} Fewer than {FIRST_LOOK} pairs do not tell a difference from chance."
    target = findings.settings["target"]
    chance = findings.settings["chance"]
    text += (
        f" It lies between {candidate.low:+.4f} and {candidate.high:+.4f} with {1 - 2 * ERROR:.0%} "
        f"confidence; a difference below {target:g} counts as none."
    )
    if chance > target:
        text += (
            " Over seeds, the loss of the model itself has a standard deviation of "
            f"{chance:.4f}."
        )
    return text
