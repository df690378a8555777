#!/usr/bin/env bash
# Sets up Python where needed, then trains under "3d" on every GPU, or on 4 CPU processes.
# Arguments go to real_model_example.py: --dry-run, --num_gpus N, --model NAME, --set KEY=VALUE ...
# The micro-batches of a step fill the pipeline: there are 8 unless you set another number.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
source "$root/strategies/setup_env.sh" "$root/requirements.txt"
exec python "$root/real_model_example.py" --strategy 3d --num_gpus all \
    --set grad_accum_steps=8 "$@"
