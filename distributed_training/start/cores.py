"""Measure how fast a process computes on this machine's CPU cores. Planning does not import torch,
so it starts `python -m distributed_training.start.cores`."""

import contextlib
import json
import os
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from distributed_training.settings.cache import cache_folder
from distributed_training.settings.detect import threads_per_process
from distributed_training.settings.files import replace_file

PACKAGES = Path(__file__).parents[2]  # folder that contains distributed_training/
FRESH_S = 600.0


def recent_cores(num_processes: int, num_cpus: int) -> dict[str, float] | None:
    """Return the result of `measure_cores`, which takes seconds, or its result within the last ten
    minutes."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    file = cache_folder() / f"core-rates-{num_processes}-{threads}.json"
    with contextlib.suppress(OSError):
        if time.time() - file.stat().st_mtime < FRESH_S:
            return json.loads(file.read_text())  # type: ignore[no-any-return]
    if rates := measure_cores(num_processes, num_cpus):
        with contextlib.suppress(OSError):  # a folder that is not writable
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, json.dumps(rates).encode())
    return rates


def measure_cores(num_processes: int, num_cpus: int) -> dict[str, float] | None:
    """Return the mean rates of the processes of a run if all compute at once, or None without
    torch. More processes than cores share what as many as there are cores achieve. The names are
    those of `cpu_core` in predict/constants.json."""
    if find_spec("torch") is None:
        return None
    environment = {"OMP_NUM_THREADS": str(threads_per_process(num_processes)), **os.environ}
    command = [sys.executable, "-m", __name__]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, cwd=PACKAGES)
        for _ in range(min(num_processes, num_cpus))
    ]
    measured = [json.loads(process.communicate()[0]) for process in processes]
    return {name: sum(rates[name] for rates in measured) / num_processes for name in measured[0]}


def seconds(act: Callable[[], object]) -> float:
    """Return the mean duration of a call over at least 0.2 s, so that it includes the time in which
    other programs use the core."""
    act()  # the first call starts threads
    number, total_s = timeit.Timer(act).autorange()
    return total_s / number


def main() -> None:
    """Print the FLOP/s of matrix multiplications, the bytes/s of element-wise operations, and how
    often per second Python calls a small operation."""
    import torch
    from torch.nn.functional import gelu

    inputs, weights = torch.randn(512, 768), torch.randn(768, 3072)
    rounded = inputs.bfloat16(), weights.bfloat16()
    hidden = torch.randn(512, 1536, requires_grad=True)
    small = torch.randn(8, requires_grad=True)
    flops = 2 * 512 * 768 * 3072
    rates = {
        "gemm_flops": flops / seconds(lambda: rounded[0] @ rounded[1]),
        "fp32_gemm_flops": flops / seconds(lambda: inputs @ weights),
        # GELU reads or writes two fp32 tensors forward and three backward.
        "memory_bytes": (20 * 512 * 1536)
        / seconds(lambda: torch.autograd.grad(gelu(hidden), hidden, hidden)),
        "calls": 1 / seconds(lambda: torch.autograd.grad((small * small).sum(), small)),
    }
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
