# Sourced by the run.sh of a strategy's folder, with its arguments: sets up Python where needed,
# then trains under the strategy that the folder's config.json describes, on every GPU, or on CPU
# processes where there is none. Arguments go to real_model_example.py (see its --help).
set -euo pipefail
folder=$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd -P)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
source "$root/strategies/setup_env.sh" "$root/requirements.txt"
if [ -e "$folder/setup.sh" ]; then source "$folder/setup.sh"; fi
name=$(cd "$root" && python - "$folder" <<'PYTHON'
import sys
from pathlib import Path

from distributed_training.settings.errors import UserError
from distributed_training.settings.strategies import list_strategies

try:
    folders = {path.parent.resolve(): name for name, path in list_strategies().items()}
except UserError as error:
    sys.exit(f"error: {error}")
folder = Path(sys.argv[1])
print(folders.get(folder) or sys.exit(f"error: {folder} has no config.json"))
PYTHON
) || exit 2
exec python "$root/real_model_example.py" --strategy "$name" --num_gpus all "$@"
