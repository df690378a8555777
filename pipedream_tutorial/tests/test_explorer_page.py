"""explorer.html as a reader has it: what the build makes, and at work in a headless browser."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TUTORIAL = HERE.parent
PAGE, SOURCES = TUTORIAL / "explorer.html", TUTORIAL / "explorer"


def test_the_committed_page_is_what_the_build_makes():
    done = subprocess.run(
        [sys.executable, SOURCES / "build.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_page_needs_no_network_and_files_stay_small():
    page = PAGE.read_text()
    assert "http" not in page
    assert 'src="' not in page
    long = [path for path in SOURCES.rglob("*.*") if len(path.read_text().splitlines()) > 320]
    assert not [path for path in long if path.suffix in (".mjs", ".py", ".css", ".html")]
