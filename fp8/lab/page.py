"""Pages of the commands: templates of this folder that extend ``page.html``, as HTML files that
load nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..common.libraries import need

Filters = Mapping[str, Callable[[Any], str]]
"""Name -> function of a value, in a template."""


def rendered(template: str, filters: Filters, **values: Any) -> str:
    """A template, by its path from this folder, with values, as one HTML document without
    references to other files. Equal values give the same text. Raises ImportError without jinja2,
    and its UndefinedError for a name without a value."""
    jinja2 = need("jinja2")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= filters
    return str(environment.get_template(template).render(values))
