"""The page of `fp8 preflight`: its findings as one HTML file that loads nothing."""

from __future__ import annotations

import json
import math
from importlib import resources
from typing import Any

from ...common.libraries import need
from .figures import losses
from .findings import Findings
from .verdict import bytes_in_words, recipe_in_words

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def page(findings: Findings) -> str:
    """The findings of a preflight, complete or not, as one HTML document without references to
    other files. Equal findings give the same text. Raises ImportError without the extra
    ``preflight`` (jinja2, matplotlib)."""
    jinja2 = need("jinja2")
    from markupsafe import Markup, escape  # what jinja2 escapes with

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        "breakable": lambda name: escape(name).replace(".", Markup(".<wbr>")),
        "bytes": bytes_in_words,
        "number": _number,
        "percent": _percent,
        "plain": _plain,
        "recipe": lambda name: recipe_in_words(str(name)).capitalize(),
        "seconds": _seconds,
        "signed": _signed,
    }
    text = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(text).render(
        findings=findings,
        verdict=findings.verdict,
        candidates=sorted(findings.candidates, key=lambda row: row.outcome == "not trained"),
        snapshots=sorted({step for row in findings.candidates for step in row.errors}),
        flops=sum(product.flops for product in findings.products),
        losses=losses(findings.runs),
        policy=json.dumps(findings.verdict.policy, indent=2) if findings.verdict.policy else "",
    )


# Numbers as text


def _number(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return "not measured"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "−∞" if value < 0 else "∞"
    return f"{value:#.3g}".rstrip(".").replace("-", "−") if value else "0"


def _signed(value: float) -> str:
    if not math.isfinite(value) or abs(value) >= 100:
        return _number(value)
    return f"{value:+.4f}".replace("-", "−")


def _percent(share: float) -> str:
    """In percent, with one digit after the point below 10 %."""
    if not math.isfinite(share):
        return _number(share)
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{100 * share:.{int(share < 0.0995)}f} %" if share else "0 %"


def _seconds(value: float) -> str:
    """In the largest unit of which there is one, or in the smallest."""
    size, unit = next((row for row in _TIMES if value >= row[0]), _TIMES[-1])
    return f"{_number(value / size)} {unit}"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value)) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        text = f"{value:,}" if abs(value) >= 10_000 else str(value)
        return text.replace(",", "\N{NARROW NO-BREAK SPACE}")
    return f"{value:g}" if isinstance(value, float) else str(value)
