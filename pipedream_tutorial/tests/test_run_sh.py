"""Test copies of run.sh. The requirements of each copy are minimal, because tests have no network
access."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent
TOOLS = ("bash", "cat", "dirname", "mkdir", "chmod", "sleep", "flock", "uname")
PYTHON = f'#!/bin/bash\nexec {sys.executable} "$@"\n'
# Replacement for uv. `uv venv` creates a Python without packages, and `uv pip install` creates a
# Python that has the same packages as the tests' Python. Both commands write a line to a log.
UV = """#!/bin/bash
echo "$1 $2" >> {log}
for last; do :; done
if [ "$1" = venv ]; then
    mkdir -p "$last/bin" && printf '#!/bin/bash\\nexec {python} -I -S "$@"\\n' > "$last/bin/python"
    chmod +x "$last/bin/python"
else
    [ ! -e {fails} ] || {{ echo "no network" >&2; exit 1; }}
    printf '#!/bin/bash\\nexec {python} "$@"\\n' > "$4"
fi
"""
SETUP_LOG = "venv --quiet\npip install\n"


@pytest.fixture
def script_dir(tmp_path):
    """Create a folder whose path contains a space, with a copy of run.sh and a program that prints
    its arguments."""
    folder = tmp_path / "a folder" / "pipedream_tutorial"
    (folder / "pipedream").mkdir(parents=True)
    shutil.copy(FOLDER / "run.sh", folder)
    shutil.copytree(FOLDER.parent / "strategies", folder.parent / "strategies")
    (folder / "requirements.txt").write_text("# what it takes\npytest>=7 # any\n")
    (folder / "pipedream" / "__main__.py").write_text(
        "import sys\nprint(sys.argv[1:])\nsys.exit(3 if 'fail' in sys.argv else 0)\n"
    )
    return folder


@pytest.fixture
def run(tmp_path, script_dir):
    """Return a function that runs the copy with the given scripts and returns its exit code, stdout
    and stderr. PATH contains only these scripts and TOOLS."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in TOOLS:
        (tools / tool).symlink_to(shutil.which(tool))

    def run(*arguments: str, scripts: dict[str, str], **more: str) -> tuple[int, str, str]:
        for name, text in scripts.items():
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        env = {"PATH": str(tools), "PYTORCH_CPU_INDEX": "file:///nowhere", **more}
        done = subprocess.run(
            ["bash", str(script_dir / "run.sh"), *arguments],
            capture_output=True, text=True, env=env, cwd="/", timeout=120,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    return run


def test_an_active_environment_is_used_as_it_is(script_dir, run):
    active = {"scripts": {"python": PYTHON}, "CONDA_PREFIX": sys.prefix}
    assert run("--set", "a=b c", **active) == (0, "['--set', 'a=b c']\n", "")
    assert run("fail", **active)[0] == 3
    assert not (script_dir.parent / ".venv").exists()


def test_venv_is_created_once_and_updated_if_requirements_change(tmp_path, script_dir, run):
    """A failed setup gives an error, and the next run repeats the setup."""
    log, fails = tmp_path / "uv.log", tmp_path / "fails"
    uv = UV.format(log=log, fails=fails, python=sys.executable)
    scripts = {"python3": PYTHON, "uv": uv}
    fails.touch()
    code, out, err = run(scripts=scripts)
    assert (code, out) == (2, "")
    assert err.splitlines()[1:] == [
        "no network",
        "error: Setting up .venv failed. See the message above, then run the same command again.",
    ]
    fails.unlink()
    log.unlink()
    code, out, err = run("x", scripts=scripts)
    assert (code, out) == (0, "['x']\n")
    assert err == (
        f"Setting up {script_dir.parent}/.venv. "
        "This happens once and takes a few minutes, mostly to download PyTorch ...\n"
    )
    assert run(scripts=scripts) == (0, "[]\n", "")
    assert log.read_text() == SETUP_LOG
    with open(script_dir / "requirements.txt", "a") as file:
        file.write('pytest>=99999; python_version < "3"\nno-such-package==1\n')
    code, out, err = run(scripts=scripts)
    assert (code, out) == (2, "")
    assert err.splitlines()[1:] == ["unmet requirement: no-such-package==1 (not installed)"]
    assert log.read_text() == 2 * SETUP_LOG


def test_missing_python_gives_a_one_line_error(run):
    code, out, err = run(scripts={})
    assert (code, out) == (2, "")
    assert err.startswith("error: No Python 3.10 to 3.14 was found. Install one")
    assert err.count("\n") == 1
