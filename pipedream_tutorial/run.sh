#!/usr/bin/env bash
# Runs pipedream_simple.py with the arguments given, in a Python that has what requirements.txt lists.
#
# An active virtual or conda environment that has it all is used as it is. Otherwise .venv is made
# in this folder, once, and mended when requirements.txt changes. uv is used where it is installed.
# Needs no root.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
listed=$here/requirements.txt
venv=$here/.venv
fail() { echo "error: $*" >&2; exit 2; }

# satisfied PYTHON: whether it has every package at a version that requirements.txt allows.
satisfied() {
    "$1" - "$listed" 2>/dev/null <<'PYTHON'
import sys
from importlib.metadata import version
try:
    from packaging.requirements import Requirement
except ImportError:
    from pip._vendor.packaging.requirements import Requirement
lines = [line.split("#")[0].strip() for line in open(sys.argv[1])]
needs = [Requirement(line) for line in lines if line]
sys.exit(any(version(need.name) not in need.specifier
             for need in needs if need.marker is None or need.marker.evaluate()))
PYTHON
}

find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11 python3.10 python; do
        "$name" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' \
            2>/dev/null && command -v "$name" && return
    done
    fail "no Python 3.10 to 3.13 found; install one (Debian, Ubuntu: apt-get install python3-venv)"
}

install() { # with the Python at $1
    if command -v uv >/dev/null; then
        { "$venv/bin/python" -c "" 2>/dev/null || { rm -rf "$venv" && uv venv -q -p "$1" "$venv"; }; } &&
            uv pip install -q -p "$venv/bin/python" -r "$listed"
    else
        { "$venv/bin/python" -m pip -V >/dev/null 2>&1 || { rm -rf "$venv" && "$1" -m venv "$venv"; }; } &&
            "$venv/bin/python" -m pip install --disable-pip-version-check -r "$listed"
    fi >&2
}

if [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && satisfied python; then
    exec python "$here/pipedream_simple.py" "$@"
fi
exec 9>"$here/.venv.lock" # runs that start together set up one after the other
! command -v flock >/dev/null || flock 9
if ! satisfied "$venv/bin/python"; then
    python=$(find_python) || exit
    echo "Setting up $venv (once; a few minutes, most of it downloading PyTorch) ..." >&2
    install "$python" || fail "setting up $venv failed; see above, then run the same again"
    satisfied "$venv/bin/python" || fail "$venv still lacks a package; delete it and run this again"
fi
exec 9>&-
exec "$venv/bin/python" "$here/pipedream_simple.py" "$@"
