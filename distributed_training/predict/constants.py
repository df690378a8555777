"""What was fitted or measured rather than derived: constants.json. No torch import.

Each entry has a value (or several that were fitted together), its unit, what it is, the record that
gave it and the range in which it was seen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_ENTRIES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
FITTED: dict[str, Any] = {name: entry["value"] for name, entry in _ENTRIES.items()}
