"""The page of `fp8 preflight`: its findings as one HTML file that loads nothing."""

from __future__ import annotations

import json

from ..page import Filters, rendered
from .findings import Findings
from .verdict import bytes_in_words, recipe_in_words


def page(findings: Findings) -> str:
    """What decides of the findings of a preflight, complete or not, as one HTML document without
    references to other files. Equal findings give the same text. Raises ImportError without the
    extra ``preflight`` (jinja2)."""
    filters: Filters = {
        "bytes": bytes_in_words,
        "number": lambda value: f"{value:.3g}",
        "percent": lambda share: f"{share:.0%}",
        "recipe": lambda name: recipe_in_words(name).capitalize(),
        "signed": lambda value: f"{value:+.4f}",
    }
    trained_first = sorted(
        findings.candidates, key=lambda row: row.outcome == "not trained"
    )
    verdict = findings.verdict
    return rendered(
        "preflight/page.html",
        filters,
        findings=findings,
        verdict=verdict,
        candidates=trained_first,
        snapshots=sorted({step for row in findings.candidates for step in row.errors}),
        codes=verdict.code | {"JSON": json.dumps(verdict.policy, indent=2)},
    )
