# strategies/run.sh sources this script before training, because DeepSpeed's file I/O needs libaio.
source "$(dirname "${BASH_SOURCE[0]}")/libaio.sh"
