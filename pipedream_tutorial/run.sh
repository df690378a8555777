#!/usr/bin/env bash
# Runs `python -m pipedream` with the arguments given, in a Python that has what requirements.txt
# lists: an active environment, or the repository's .venv, which is set up where needed.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../strategies/setup_env.sh" "$here/requirements.txt"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
exec python -m pipedream "$@"
