#!/usr/bin/env bash
# Runs `python -m pipedream` with the given arguments, in a Python with the packages of
# requirements.txt: an active environment, or the repository's .venv, which is created if needed.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../strategies/setup_env.sh" "$here/requirements.txt"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
exec python -m pipedream "$@"
