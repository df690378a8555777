"""What is imported is declared in pyproject.toml, and what is declared is pinned."""

import ast
import sys
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from distributed_training.settings.files import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# matplotlib always brings Pillow, pydantic the one pydantic-core that it works with, and DeepSpeed
# py-cpuinfo.
BROUGHT_ALONG = {"pillow", "pydantic-core", "py-cpuinfo"}


def requirements(lines: Iterable[str]) -> list[Requirement]:
    texts = (line.split("#")[0].strip() for line in lines)
    return [Requirement(text) for text in texts if text]


def names(lines: Iterable[str]) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in requirements(lines)}


def pins(file: str) -> list[Requirement]:
    return requirements((ROOT / file).read_text().splitlines())


def imported(files: Iterable[Path]) -> set[str]:
    """Top-level modules that are neither Python's nor in the checkout."""
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    ours = (ROOT, ROOT / "pipedream_tutorial", ROOT / "results/lab")
    tops = {path.stem for folder in ours for path in folder.iterdir()}
    helpers = {path.stem for path in ROOT.glob("**/tests/**/*.py") if ".venv" not in path.parts}
    return found - set(sys.stdlib_module_names) - tops - helpers


def distributions(modules: set[str]) -> set[str]:
    """Packages that the modules come from; a module that is not installed stands for itself."""
    owners = packages_distributions()
    return {canonicalize_name(owners.get(module, [module])[0]) for module in modules}


def test_what_the_package_imports_is_declared():
    files = [*ROOT.glob("distributed_training/**/*.py"), ROOT / "real_model_example.py"]
    found = distributions(imported(files))
    assert (
        found - names(PROJECT["dependencies"]) - names(EXTRAS["tracking"]) - BROUGHT_ALONG == set()
    )
    assert {"torch", "numpy", "tokenizers", "pyarrow"} <= found


def test_what_the_tutorial_imports_is_in_its_requirements():
    folder = ROOT / "pipedream_tutorial"
    files = [*folder.glob("pipedream/**/*.py"), *folder.glob("*.py")]
    found = distributions(imported(files))
    listed = names((folder / "requirements.txt").read_text().splitlines())
    assert found - listed - BROUGHT_ALONG == set()


def test_what_the_tests_import_is_declared():
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("pipedream_tutorial/tests/*.py")]
    found = distributions(imported(files))
    assert found - names(PROJECT["dependencies"]) - names(EXTRAS["dev"]) - BROUGHT_ALONG == set()


@pytest.mark.parametrize(
    ("declared", "file"),
    [(PROJECT["dependencies"], "requirements.txt"), (EXTRAS["dev"], "tests/requirements.txt")],
)
@pytest.mark.parametrize("python", PYTHONS)
def test_what_is_declared_is_pinned_once_within_its_range(declared, file, python):
    ranges = {
        canonicalize_name(wanted.name): wanted.specifier
        for wanted in requirements(declared)
        if wanted.marker is None or wanted.marker.evaluate({"python_version": python})
    }
    pinned = [
        pin
        for pin in pins(file)
        if pin.marker is None or pin.marker.evaluate({"python_version": python})
    ]
    assert sorted(canonicalize_name(pin.name) for pin in pinned) == sorted(ranges)
    for pin in pinned:
        (exact,) = pin.specifier
        assert exact.operator == "=="
        assert exact.version in ranges[canonicalize_name(pin.name)], pin


def test_the_tutorial_pins_the_same_versions():
    listed = pins("pipedream_tutorial/requirements.txt")
    pinned = [pin for pin in listed if len(pin.specifier)]
    ours = [*pins("requirements.txt"), *pins("tests/requirements.txt")]
    assert {str(pin) for pin in pinned} <= {str(pin) for pin in ours}
