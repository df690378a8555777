"""Generate the CONFIG reference in REAL_MODELS_GUIDE.md."""

import itertools
from operator import attrgetter

from distributed_training.cli import format_key_help
from distributed_training.settings.config import KEYS


def config_reference() -> str:
    """Return the CONFIG reference as Markdown: all keys with their defaults, by group, followed by
    the keys that must match if runs are to be compared or resumed."""
    lines = []
    for title, keys in itertools.groupby(KEYS.values(), attrgetter("group")):
        lines.append(f"### {title}\n")
        for key in keys:
            also = ", ".join(f"`{alias}`" for alias in key.aliases)
            text = format_key_help(key, *([f"also {also}"] if also else []))
            lines.append(f"- `{key.name}={key.default!r}`: {text}")
        lines.append("")
    names = ", ".join(f"`{name}`" for name, key in KEYS.items() if key.work)
    lines.append("### The work\n")
    lines.append(
        "Runs can be compared or resumed only if these keys and the global batch size match: "
        f"{names}.\n"
    )
    return "\n".join(lines)
