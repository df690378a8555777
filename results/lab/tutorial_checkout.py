"""Imported first by the tutorial's programs here, so that they find its package."""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "pipedream_tutorial"
if str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))
