"""Check that all packages in the given requirements files are installed in the required versions.
Print each unmet requirement. The exit code is 0 if all requirements are met.

    python check_requirements.py [--ranges] REQUIREMENTS_FILE ...

With --ranges, the ranges in pyproject.toml replace the files' exact versions."""

import re
import sys
from importlib import metadata
from pathlib import Path

try:
    from packaging.requirements import Requirement
except ImportError:
    from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]


def read_requirements(lines: list[str]) -> dict[str, Requirement]:
    """Return the requirements that apply to this Python, by the name of the package."""
    texts = [line.split("#")[0].strip() for line in lines]
    requirements = [Requirement(text) for text in texts if text]
    return {r.name: r for r in requirements if r.marker is None or r.marker.evaluate()}


def declared_ranges() -> dict[str, Requirement]:
    """Return the requirements in pyproject.toml, including those of the extras. Without that file,
    as beside a copy of strategies/, there are none."""
    file = Path(__file__).parents[1] / "pyproject.toml"
    text = file.read_text() if file.exists() else ""
    project = text.partition("[project]")[2].partition("[tool.")[0]
    return read_requirements(re.findall(r'^  "([^"]+)",', project, re.MULTILINE))


def find_unmet(requirements: list[Requirement]) -> list[str]:
    """Return each unmet requirement and the reason: its package is not installed or has the wrong
    version."""
    unmet = []
    for requirement in requirements:
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            unmet.append(f"{requirement} (not installed)")
            continue
        if version not in requirement.specifier:
            unmet.append(f"{requirement} (installed: {version})")
    return unmet


if __name__ == "__main__":
    uses_ranges = sys.argv[1] == "--ranges"
    ranges = declared_ranges() if uses_ranges else {}
    texts = [Path(file).read_text() for file in sys.argv[1 + uses_ranges :]]
    pins = read_requirements("\n".join(texts).splitlines())
    unmet = find_unmet([ranges.get(name, pin) for name, pin in pins.items()])
    for text in unmet:
        print(f"unmet requirement: {text}", file=sys.stderr)
    sys.exit(bool(unmet))
