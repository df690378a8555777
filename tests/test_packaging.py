"""Test that imported packages are declared and pinned, and test import rules that import-linter
does not cover."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from distributed_training.planner.checks import TESTED
from distributed_training.settings.files import ROOT
from distributed_training.settings.strategies import list_strategies

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# CUDA builds of torch install Triton, matplotlib installs Pillow, pydantic installs the matching
# pydantic-core, DeepSpeed installs py-cpuinfo, ipykernel's IPython installs pexpect, and
# flash-linear-attention installs fla.
TRANSITIVE = {"triton", "pillow", "pydantic-core", "py-cpuinfo", "pexpect", "fla"}
TRACED = {"peft", "trl", "liger-kernel"}  # the user's, of which `plan --for` traces a step


def requirements(lines: Iterable[str]) -> list[Requirement]:
    texts = (line.split("#")[0].strip() for line in lines)
    return [Requirement(text) for text in texts if text]


def names(lines: Iterable[str]) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in requirements(lines)}


def read_requirements(file: str) -> list[Requirement]:
    return requirements((ROOT / file).read_text().splitlines())


def find_imported_packages(*patterns: str) -> set[str]:
    """Return the packages that matching files import, except the standard library and the modules
    in the checkout. A module that is not installed counts as a package with the same name."""
    packages = set()
    for file in (path for pattern in patterns for path in ROOT.glob(pattern)):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                packages |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                packages.add(node.module.split(".")[0])
    own_roots = (ROOT, ROOT / "pipedream_tutorial", ROOT / "results/lab")
    tops = {path.stem for folder in own_roots for path in folder.iterdir()}
    helpers = {path.stem for path in ROOT.glob("**/tests/**/*.py") if ".venv" not in path.parts}
    owners = packages_distributions()
    modules = packages - set(sys.stdlib_module_names) - tops - helpers
    return {canonicalize_name(owners.get(module, [module])[0]) for module in modules}


@pytest.mark.parametrize(
    ("patterns", "declared"),
    [
        (
            ("distributed_training/**/*.py", "real_model_example.py"),
            [*EXTRAS["train"], *EXTRAS["tracking"], *EXTRAS["low-bit"]],
        ),
        (("tests/**/*.py", "pipedream_tutorial/tests/*.py"), [*EXTRAS["train"], *EXTRAS["dev"]]),
    ],
)
def test_imported_packages_are_declared(patterns, declared):
    packages = find_imported_packages(*patterns)
    assert (
        packages - names(PROJECT["dependencies"]) - names(declared) - TRANSITIVE - TRACED == set()
    )
    assert {"torch", "numpy"} <= packages


def test_imports_of_the_tutorial_are_pinned_as_in_the_suite():
    file = "pipedream_tutorial/requirements.txt"
    packages = find_imported_packages(
        "pipedream_tutorial/pipedream/**/*.py", "pipedream_tutorial/*.py"
    )
    assert (
        packages
        - {canonicalize_name(requirement.name) for requirement in read_requirements(file)}
        - TRANSITIVE
        == set()
    )
    pinned = {str(pin) for pin in read_requirements(file) if len(pin.specifier)}
    assert pinned <= {
        str(p) for f in ("requirements.txt", "tests/requirements.txt") for p in read_requirements(f)
    }


@pytest.mark.parametrize(
    ("declared", "file"),
    [
        ([*PROJECT["dependencies"], *EXTRAS["train"]], "requirements.txt"),
        (EXTRAS["dev"], "tests/requirements.txt"),
    ],
)
@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_declared_packages_are_pinned_once_within_their_range(declared, file, python):
    environment = {"python_version": python}
    wanted, pinned = (
        [
            requirement
            for requirement in all_requirements
            if not requirement.marker or requirement.marker.evaluate(environment)
        ]
        for all_requirements in (requirements(declared), read_requirements(file))
    )
    ranges = {canonicalize_name(requirement.name): requirement.specifier for requirement in wanted}
    assert sorted(canonicalize_name(pin.name) for pin in pinned) == sorted(ranges)
    for pin in pinned:
        (exact,) = pin.specifier
        assert exact.operator == "=="
        assert exact.version in ranges[canonicalize_name(pin.name)], pin


def test_upper_bounds_are_the_tested_versions():
    bounds = {r.name: str(r.specifier) for r in requirements(EXTRAS["train"]) if r.name in TESTED}
    for name, version in TESTED.items():
        major, minor = map(int, version.split("."))
        assert f"<{major}.{minor + 1}" in bounds[name]


FENCES = {"private.py", "private_pipelining.py", "trace_step.py"}
# Public interfaces whose names begin with an underscore, argparse's table of options, and a
# script that runs before anything is installed
PUBLIC = {"_exit", "_replace", "_option_string_actions", "_vendor"}


def find_private_names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the names with a leading underscore that a module (uses, defines)."""
    used: list[str] = []
    defined: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            used += [part for alias in node.names for part in alias.name.split(".")]
        if isinstance(node, ast.ImportFrom) and node.module:
            used += node.module.split(".")
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.append(node.name)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.append(node.id)
        if isinstance(node, ast.Attribute):
            (defined if isinstance(node.ctx, ast.Store) else used).append(node.attr)
    return tuple({name for name in names if re.match("_[^_]", name)} for names in (used, defined))


def test_private_names_of_other_packages_stand_in_fenced_files():
    fenced, used, defined = set(), set(), set()
    for file in (*ROOT.glob("distributed_training/**/*.py"), *ROOT.glob("strategies/**/*.py")):
        names_used, names_defined = find_private_names(ast.parse(file.read_text()))
        if file.name in FENCES:
            fenced |= names_used
        else:
            used |= names_used
            defined |= names_defined
    assert {"_scaled_mm", "_init_weights", "_subclasses", "_apply"} <= fenced
    assert used - defined - PUBLIC == set()
    assert fenced & defined == set()  # such as a method that replaces nn.Module._apply


def test_the_loop_names_no_strategy():
    text = (ROOT / "distributed_training/train/loop.py").read_text().lower()
    # This pattern does not match topology.tp, which is an axis.
    names = [*list_strategies(), "ddp", "zero", "deepspeed", "native"]
    assert [name for name in names if re.search(rf"(?<![.\w]){name}\b", text)] == []


@pytest.mark.processes
def test_a_wheel_plans_in_any_folder_without_the_packages_of_the_extra_train(tmp_path):
    copied = shutil.ignore_patterns("__pycache__", "*.pyc")
    source = tmp_path / "source"
    for folder in ("distributed_training", "trainplan", "strategies", "configs"):
        shutil.copytree(ROOT / folder, source / folder, ignore=copied)
    for file in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, source)
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", tmp_path / "lib"]
    subprocess.run(build, cwd=source, check=True, capture_output=True, timeout=120)
    shutil.rmtree(source)
    hidden = {requirement.name for requirement in requirements(EXTRAS["train"])}
    for name in (*hidden, "command"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError(name={name!r})")
    (tmp_path / "command.py").write_text("from distributed_training.cli import command; command()")

    def run(*arguments):
        paths = f"{tmp_path}:{tmp_path / 'lib'}"
        command = [sys.executable, "-c", "import command", *arguments]
        environment = {**os.environ, "PYTHONPATH": paths}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )

    answer = run("plan", "--cluster", "2x3060", "--model", "Qwen3-8B", "--preset", "lora-12gb")
    assert answer.stdout.startswith("LoRA adapters on a 4-bit base of Qwen3-8B "), answer.stderr
    assert "\n  trainplan --num_gpus 2 --preset lora-12gb " in answer.stdout
    assert run("plan", "--cluster", "L4", "--write", "job.slurm").stderr.startswith(
        "error: --write "
    )
    assert "\ntrainplan COMMAND [OPTIONS]\n" in run("--help").stdout
    planned = subprocess.run(
        [sys.executable, "-c", "import trainplan; print(trainplan.plan('T4', 'Qwen3-8B')['fits'])"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{tmp_path}:{tmp_path / 'lib'}"},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert planned.stdout == "no\n"
    assert run("report", "records").stderr.endswith("Run:\n  trainplan report FOLDER\n")
    training = run("--model", "gpt2-tiny")
    assert training.stderr.endswith("Run:\n  pip install 'trainplan[train]'\n")
    assert training.stderr.count("\n") == 2
