"""What was fitted or measured rather than derived: constants.json. No torch import.

Each entry has a value (or several that were fitted together), its unit, what it is, the record that
gave it and the range in which it was seen.
"""

import json
from pathlib import Path
from types import SimpleNamespace

_TEXT = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
_ENTRIES = json.loads(_TEXT, object_hook=lambda entry: SimpleNamespace(**entry))
# FITTED.link_share, FITTED.launching_s.step
FITTED = SimpleNamespace(**{name: entry.value for name, entry in vars(_ENTRIES).items()})
