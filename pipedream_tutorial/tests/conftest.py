"""The tutorial's folder comes first on the path: it stands alone, wherever pytest was started."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
