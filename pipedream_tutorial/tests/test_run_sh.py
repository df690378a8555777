"""run.sh on copies that need next to nothing: no network is there to install from."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent
# A stand-in for uv: `uv venv` makes a Python that has no package, `uv pip install` one that has
# what the tests' own Python has, and both leave a line in a log.
UV = """#!/bin/bash
echo "$1 $2" >> {log}
for last; do :; done
if [ "$1" = venv ]; then
    mkdir -p "$last/bin" && printf '#!/bin/bash\\nexec {python} -I -S "$@"\\n' > "$last/bin/python"
    chmod +x "$last/bin/python"
else
    sleep 0.3
    [ ! -e {fails} ] || {{ echo "no network" >&2; exit 1; }}
    printf '#!/bin/bash\\nexec {python} "$@"\\n' > "$4"
fi
"""


def link_tools(folder: Path, *more: str) -> Path:
    """A PATH without any Python or uv."""
    folder.mkdir()
    for tool in ("bash", "cat", "dirname", "mkdir", "chmod", "sleep", "flock", "uname", *more):
        found = shutil.which(tool)
        if found:
            (folder / tool).symlink_to(found)
    return folder


@pytest.fixture
def copy(tmp_path):
    """run.sh with a script that prints its arguments, in a folder whose name has a space."""
    folder = tmp_path / "a folder" / "pipedream_tutorial"
    folder.mkdir(parents=True)
    shutil.copy(FOLDER / "run.sh", folder)
    (folder.parent / "strategies").mkdir()
    for name in ("setup_env.sh", "check_requirements.py"):
        shutil.copy(FOLDER.parent / "strategies" / name, folder.parent / "strategies")
    (folder / "requirements.txt").write_text("# what it takes\npytest>=7 # any\n")
    (folder / "pipedream").mkdir()
    (folder / "pipedream" / "__main__.py").write_text(
        "import sys\nprint(sys.argv[1:])\nsys.exit(3 if 'fail' in sys.argv else 0)\n"
    )
    return folder


def environment(path: str, **more: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "CONDA_PREFIX")}
    return {**inherited, "PATH": path, "PYTORCH_CPU_INDEX": "file:///nowhere", **more}


def start(folder: Path, env: dict[str, str], *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        ["bash", str(folder / "run.sh"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd="/",
    )


def run(folder: Path, env: dict[str, str], *arguments: str) -> tuple[int, str, str]:
    process = start(folder, env, *arguments)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.fixture
def with_uv(tmp_path, copy):
    """(environment that has Python and the stand-in for uv, its log, the file that fails it)."""
    tools = link_tools(tmp_path / "tools")
    log, fails = tmp_path / "uv.log", tmp_path / "fails"
    log.touch()
    (tools / "python3").symlink_to(sys.executable)
    (tools / "uv").write_text(UV.format(log=log, fails=fails, python=sys.executable))
    (tools / "uv").chmod(0o755)
    return environment(str(tools)), log, fails


def test_an_active_environment_is_used_as_it_is(tmp_path, copy):
    tools = link_tools(tmp_path / "tools")
    (tools / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    (tools / "python").chmod(0o755)
    env = environment(str(tools), CONDA_PREFIX=sys.prefix)
    assert run(copy, env, "--set", "a=b c") == (0, "['--set', 'a=b c']\n", "")
    assert run(copy, env, "fail")[0] == 3
    assert not (copy.parent / ".venv").exists()


def test_a_venv_is_made_once_and_mended_when_requirements_change(copy, with_uv):
    env, log, _ = with_uv
    code, out, err = run(copy, env, "x")
    assert (code, out) == (0, "['x']\n")
    assert err == (
        f"Setting up {copy.parent}/.venv "
        "(once; a few minutes, most of it downloading PyTorch) ...\n"
    )
    assert log.read_text() == "venv --quiet\npip install\n"
    assert run(copy, env) == (0, "[]\n", "")
    assert log.read_text() == "venv --quiet\npip install\n"
    with open(copy / "requirements.txt", "a") as file:
        file.write('pytest>=99999; python_version < "3"\nno-such-package==1\n')
    code, out, err = run(copy, env)
    assert (code, out) == (2, "")
    assert err.splitlines()[1:] == ["unmet requirement: no-such-package==1 (not installed)"]
    assert log.read_text() == 2 * "venv --quiet\npip install\n"


def test_a_failed_setup_is_an_error_and_is_tried_again(copy, with_uv):
    env, _, fails = with_uv
    fails.touch()
    code, out, err = run(copy, env)
    assert (code, out) == (2, "")
    assert err.splitlines()[1:] == [
        "no network",
        "error: setting up .venv failed; see the message above, then run the same command again",
    ]
    fails.unlink()
    assert run(copy, env)[:2] == (0, "[]\n")


def test_no_python_is_one_line(tmp_path, copy):
    env = environment(str(link_tools(tmp_path / "tools")))
    code, out, err = run(copy, env)
    assert (code, out) == (2, "")
    assert err.startswith("error: no Python 3.10 to 3.13 found; install one")
    assert err.count("\n") == 1
