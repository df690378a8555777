# Sourced by strategies/run.sh before training: DeepSpeed's file I/O needs libaio.
source "$(dirname "${BASH_SOURCE[0]}")/libaio.sh"
