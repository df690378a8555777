"""Check that all packages in the given requirements files are installed in the required versions.
Print each unmet requirement. The exit code is 0 if all requirements are met."""

import sys
from importlib import metadata
from pathlib import Path

try:
    from packaging.requirements import Requirement
except ImportError:
    from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]


def find_unmet(lines: list[str]) -> list[str]:
    """Return each unmet requirement and the reason: its package is not installed or has the wrong
    version."""
    unmet = []
    for line in lines:
        line = line.split("#")[0].strip()
        if not line:
            continue
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            unmet.append(f"{line} (not installed)")
            continue
        if version not in requirement.specifier:
            unmet.append(f"{line} (installed: {version})")
    return unmet


if __name__ == "__main__":
    unmet = [
        text for file in sys.argv[1:] for text in find_unmet(Path(file).read_text().splitlines())
    ]
    for text in unmet:
        print(f"unmet requirement: {text}", file=sys.stderr)
    sys.exit(bool(unmet))
