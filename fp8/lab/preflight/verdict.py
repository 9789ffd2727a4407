"""The verdict of a preflight in words, cause first."""

from __future__ import annotations

from collections.abc import Mapping

from ..hardware import Estimate
from .findings import Candidate, Findings
from .paired_runs import finalists, seeds_needed, worst_error

LOST = 0.1
"""The share of an operand that becomes zero above which the verdict names it."""


def sentences(found: Findings, best: Mapping[str, Candidate]) -> list[str]:
    """The verdict: what trains, what fails and why, what it saves. best: by device."""
    each = list({c.name: c for c in best.values()}.values())
    trains = [f"{c.name} trains as {_dtype(found)} does ({_gap(c)}).{_kept(c)}" for c in each]
    lines = [*(trains or [_open(found)]), *_fails(found)]
    named = {(device, candidate.name) for device, candidate in best.items()}
    lines += [_saving(row) for row in found.estimates if (row.hardware, row.candidate) in named]
    return lines + ([_cache(found.cache)] if found.cache else [])


def _open(found: Findings) -> str:
    """The verdict if no policy is known to train as the reference."""
    trained = [c for c in found.candidates if c.outcome != "not trained"]
    first = next(iter(finalists(found.candidates, found.estimates).values()), None)
    if not trained:
        return (
            f"No policy was trained. {_by_error(first)}." if first else "Nothing was measured yet."
        )
    if first is not None:
        trains = (
            f" ({_gap(first)}).{_needs(found, first)}" if first in trained else ", not trained."
        )
        return f"Not decided. {_by_error(first)}{trains}"
    worst = ", ".join(f"{c.name} {c.outcome}" for c in trained)
    return f"No policy that was trained ends as {_dtype(found)} does: {worst}."


def _by_error(candidate: Candidate) -> str:
    error = worst_error(candidate)
    return f"By its update error of {error:.2g}, {candidate.name} is the first to try"


def _needs(found: Findings, candidate: Candidate) -> str:
    """About how many seeds would decide."""
    target = found.settings.get("target")
    if not target or candidate.low is None or candidate.high is None:
        return " More seeds are needed."
    count = seeds_needed(candidate.low, candidate.high, candidate.seeds, target)
    return f" About {max(count, candidate.seeds + 1)} seeds decide to within {target:g}."


def _dtype(found: Findings) -> str:
    return str(found.model.get("dtype") or "the reference")


def _gap(candidate: Candidate) -> str:
    if candidate.gap is None:
        return "no finite loss"
    if candidate.low is None or candidate.high is None:
        return f"gap {candidate.gap:+.4f}, one seed"
    half = (candidate.high - candidate.low) / 2
    return f"gap {candidate.gap:+.4f} ± {half:.4f}, {candidate.seeds} seeds"


def _kept(candidate: Candidate) -> str:
    if not candidate.kept:
        return ""
    some = ", ".join(candidate.kept[:6])
    more = f" and {len(candidate.kept) - 6} more" if candidate.kept[6:] else ""
    return f" Keep {some}{more} in high precision: {candidate.share:.0%} of the FLOPs are cast."


def _fails(found: Findings) -> list[str]:
    """The operand that loses most, and the recipes that train worse."""
    lines = []
    lost = max(found.ranges, key=lambda r: r.zero, default=None)
    if lost is not None and lost.zero > LOST:
        lines.append(
            f"Under {lost.recipe} {lost.zero:.0%} of the {lost.operand} of "
            f"{lost.layer} becomes zero in {lost.format}."
        )
    for candidate in found.candidates:
        if candidate.outcome in ("worse", "diverges"):
            lines.append(f"{candidate.name}: {candidate.outcome} ({_gap(candidate)}).")
    return lines


def _saving(row: Estimate) -> str:
    slower = f"; {row.slower} of {row.of} layers get slower" if row.slower else ""
    if row.speedup <= 1:
        slower += ": at these sizes it is not worth it"
    return (
        f"On {row.hardware} the products take {1 / row.speedup:.2f} of bf16's time under "
        f"{row.candidate} (estimate){slower}."
    )


def _cache(found: Mapping[str, float]) -> str:
    return (
        f"A cache of keys and values takes {found['bytes']:,.0f} bytes per token in FP8, "
        f"{found['bytes_bf16']:,.0f} in bf16; the next-token distributions change by "
        f"{found['kl']:.2g} nats (KL), a logit by at most {found['largest']:.2g}."
    )
