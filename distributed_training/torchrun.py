"""torchrun, leaving a note behind where processes were killed.

    python distributed_training/torchrun.py NOTE.json [torchrun's arguments]

A process that is killed cannot say so, and the others know only that they lost it; the launcher
sees which it was. NOTE.json: {"ranks": [1], "signal": "SIGKILL"}.
"""

import json
import os
import sys

# Run as a file this folder would be searched first, and its modules hide others of their names.
sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from torch.distributed import run  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: E402


def main() -> None:
    note, *arguments = sys.argv[1:]
    try:
        run.main(arguments)
    except ChildFailedError as error:
        # torchrun ends the others with SIGTERM.
        signals = {rank: failure.signal_name() for rank, failure in error.failures.items()}
        killed = {rank: name for rank, name in signals.items() if name not in ("<N/A>", "SIGTERM")}
        if killed and os.path.isdir(os.path.dirname(note)):
            with open(note, "w", encoding="utf-8") as file:
                json.dump({"ranks": sorted(killed), "signal": killed[min(killed)]}, file)
        raise


if __name__ == "__main__":
    main()
