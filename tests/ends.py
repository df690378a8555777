"""Run the unit tests with the oldest or the newest versions in the ranges of pyproject.toml.

    python -m tests.ends oldest|newest

The packages are installed in an environment of their own in .venv/."""

import subprocess
import sys

from tests.pool import ROOT

sys.path.insert(0, str(ROOT / "strategies"))
from check_requirements import declared_ranges, read_requirements

TESTS = ("settings", "models", "data", "plan", "predict", "planner", "records")


def list_requirements(end: str) -> list[str]:
    """Return what pip has to install."""
    files = ROOT / "requirements.txt", ROOT / "tests" / "requirements.txt"
    pins = read_requirements("\n".join(file.read_text() for file in files).splitlines())
    ranges = declared_ranges()
    requirements = []
    for name, pin in pins.items():
        range_or_pin = ranges.get(name, pin)
        starts = [s.version for s in range_or_pin.specifier if s.operator == ">="]
        is_oldest = end == "oldest" and starts
        requirements.append(f"{name}=={starts[0]}" if is_oldest else str(range_or_pin))
    return requirements


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
