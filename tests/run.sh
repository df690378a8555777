#!/usr/bin/env bash
# This script sets up Python if needed, checks style and types, and runs all tests that do not need
# a GPU. With arguments, it runs only pytest with these arguments:
#     bash tests/run.sh tests/data -k sampler
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
source strategies/setup_env.sh requirements.txt tests/requirements.txt
source strategies/6_zero_infinity/libaio.sh
if [ $# -gt 0 ]; then
    exec python -m pytest "$@"
fi
# The tutorial's explorer is tested in a browser and in Node.js, the planner's page in a browser, and the job script in
# SLURM. Outside CI, these tests are skipped if a program is missing.
missing=()
command -v chromium chromium-browser google-chrome google-chrome-stable >/dev/null ||
    missing+=(chromium)
command -v node >/dev/null || missing+=(nodejs)
command -v slurmctld >/dev/null || missing+=(slurmctld slurmd slurm-client munge)
if [ ${#missing[@]} -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get -q update && apt-get -q install -y --no-install-recommends "${missing[@]}"; } >&2 ||
        echo "note: could not install ${missing[*]} for tests" >&2
fi
if command -v npm >/dev/null; then
    bash results/lab/planner_page/build.sh build/page || echo "note: could not build the planner's page for tests" >&2
fi
ruff check .
ruff format --check .
mypy & # on one core, while the compiler uses the other
types=$!
lint-imports
git ls-files -z | xargs -0 codespell # pyproject.toml excludes training data
export TORCH_EXTENSIONS_DIR="$root/.venv/torch_extensions"
python tests/build_extensions.py
python -m tests.real.make_model || echo "note: tests with a real model are skipped" >&2
wait "$types"
unset PYTHONDONTWRITEBYTECODE # otherwise hundreds of processes would compile the same modules again
export OMP_NUM_THREADS=1 # the tests' processes share the cores
# Three workers keep two cores busy, because a worker often waits for a process to end or for a save.
exec python -m pytest -m "not gpu" -n 3 --dist loadfile --no-loadscope-reorder
