"""The texts that have gaps: pages/. No torch import."""

from pathlib import Path
from typing import Any


def fill(template: str, **values: Any) -> str:
    """A template with these values, which are escaped where it is HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # slow to import

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("pages")), autoescape=".html" in template,
        undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return templates.get_template(template).render(values)
