"""torchrun, leaving a note behind where processes were killed.

    python distributed_training/run/torchrun.py NOTE [torchrun's arguments]

A process that is killed cannot say so, but the launcher sees which it was.
The note: "rank 1: killed by SIGKILL; most often memory ran out".
"""

import sys
from pathlib import Path

# Run as a file this folder would be searched first, and its modules hide others of their names.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from torch.distributed import run  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: E402


def main() -> None:
    note, *arguments = sys.argv[1:]
    try:
        run.main(arguments)
    except ChildFailedError as error:
        # torchrun ends the others with SIGTERM.
        names = {rank: failure.signal_name() for rank, failure in error.failures.items()}
        killed = {rank: name for rank, name in names.items() if name not in ("<N/A>", "SIGTERM")}
        if killed and Path(note).parent.is_dir():
            ranks, name = ", ".join(map(str, sorted(killed))), killed[min(killed)]
            hint = "; most often memory ran out" if name == "SIGKILL" else ""
            Path(note).write_text(f"rank {ranks}: killed by {name}{hint}", encoding="utf-8")
        raise


if __name__ == "__main__":
    main()
