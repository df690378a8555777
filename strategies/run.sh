# The run.sh of a strategy's folder sources this script. The script sets up Python if needed, and then
# trains with the strategy in the folder's config.json. It uses all GPUs, or CPU processes if there is
# no GPU. The arguments of run.sh are passed to real_model_example.py (see its --help).
set -euo pipefail
folder=$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd -P)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
source "$root/strategies/setup_env.sh" "$root/requirements.txt"
if [ -e "$folder/setup.sh" ]; then source "$folder/setup.sh"; fi
name=$(python -S -c 'import json, sys; print(json.load(open(sys.argv[1]))["name"])' \
    "$folder/config.json" 2>/dev/null) ||
    { echo "error: $folder has no config.json that names its strategy" >&2; exit 2; }
case " $* " in *" --cluster"*) ;; *) set -- --num_gpus all "$@" ;; esac
exec python "$root/real_model_example.py" --strategy "$name" "$@"
