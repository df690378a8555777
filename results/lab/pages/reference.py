"""Generate the list of keys in configs/README.md."""

import itertools
from operator import attrgetter

from distributed_training.cli import format_key_help
from distributed_training.settings.config import KEYS


def config_reference() -> str:
    """Return the CONFIG reference as Markdown: all keys with their defaults, by group. A star marks
    the keys that must match if runs are to be compared or resumed."""
    lines = []
    for title, keys in itertools.groupby(KEYS.values(), attrgetter("group")):
        lines.append(f"## {title}\n")
        for key in keys:
            star = r"\*" if key.work else ""
            has_choices = any(str(choice) not in key.help for choice in key.choices)
            text = format_key_help(key) if has_choices else key.help
            lines.append(f"- `{key.name}={key.default!r}`{star}: {text}")
        lines.append("")
    return "\n".join(lines)
