#!/usr/bin/env bash
# Sets up Python where needed, then trains under "tp" on every GPU, or on 2 CPU processes.
# Arguments go to real_model_example.py: --dry-run, --num_gpus N, --model NAME, --set KEY=VALUE ...
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
source "$root/strategies/setup_env.sh" "$root/requirements.txt"
exec python "$root/real_model_example.py" --strategy tp --num_gpus all "$@"
