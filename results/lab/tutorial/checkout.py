"""Make the tutorial's package and the programs in this folder importable. Each program imports this
module first."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
for folder in (ROOT, ROOT / "pipedream_tutorial"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
