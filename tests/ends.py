"""Run the unit tests with the oldest or the newest versions in the ranges of pyproject.toml.

    python -m tests.ends oldest|newest

The packages of requirements.txt are installed in an environment in .venv/, which is made once."""

import subprocess
import sys

from tests.pool import ROOT

sys.path.insert(0, str(ROOT / "strategies"))
from check_requirements import declared_ranges, read_requirements

TESTS = ("settings", "models", "data", "plan", "predict", "planner", "records")


def list_requirements(end: str) -> list[str]:
    """Return what pip has to install. The tools of the tests have their pinned versions."""
    ranges = declared_ranges()
    pins = read_requirements((ROOT / "requirements.txt").read_text().splitlines())
    if end == "newest":
        return [str(ranges[name]) for name in pins]
    starts = {name: s for name in pins for s in ranges[name].specifier if s.operator == ">="}
    return [f"{name}=={start.version}" for name, start in starts.items()]


def main(end: str) -> int:
    folder = ROOT / ".venv" / end
    python = str(folder / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    tools = ["-r", str(ROOT / "tests" / "requirements.txt")]
    subprocess.run(
        [python, "-m", "pip", "install", "-q", *list_requirements(end), *tools], check=True
    )
    tests = [f"tests/{room}" for room in TESTS]
    return subprocess.run([python, "-m", "pytest", "-q", "-n", "2", *tests], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
