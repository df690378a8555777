"""Measure the speed and memory of a run, and send the measurements to the tracker that `log_to`
names. The names of times, sizes and speeds contain the unit, such as `step_time_s`."""

import importlib
import itertools
import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distributed_training.settings.files import JsonObject
from distributed_training.settings.machine import find_gpu

MAX_WARMUP_STEPS = 5
PROJECT = "distributed-training"


class StepTimer:
    """Timer for training steps. It uses `time.perf_counter` on CPUs and non-blocking CUDA events
    on GPUs."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def restart(self) -> None:
        """Begin the next step now. The time since the last call to `mark` is not attributed to any
        step."""
        self._marks.clear()
        self.mark()

    def mark(self) -> None:
        if not self._cuda:
            self._marks.append(time.perf_counter())
            return
        self._marks.append(torch.cuda.Event(enable_timing=True))
        self._marks[-1].record()

    def durations_s(self) -> list[float]:
        """Return the duration in seconds of each step since this method or `restart` was last
        called. On a GPU, wait until the last step has finished."""
        pairs = [*itertools.pairwise(self._marks)]
        self._marks = self._marks[-1:]
        if not self._cuda:
            return [end - begin for begin, end in pairs]
        self._marks[-1].synchronize()
        return [begin.elapsed_time(end) / 1000 for begin, end in pairs]


def summarize_performance(
    durations_s: list[float],
    *,
    tokens_per_step: float,
    flops_per_token: int,
    world_size: int,
    device_name: str | None,
) -> JsonObject:
    """Return the record's `performance`: percentiles of the step time, and tokens/s and MFU of the
    median step.

    The first MAX_WARMUP_STEPS steps, or the first third of a short run, are excluded.
    `tokens_per_step` is the number of tokens in a global batch, excluding padding."""
    warmup = min(MAX_WARMUP_STEPS, len(durations_s) // 3)
    timed = np.array([seconds for seconds in durations_s[warmup:] if seconds > 0])
    if len(timed) == 0:
        return {"num_timed_steps": 0, "tokens_per_s": None, "mfu": None}
    tokens_per_s = tokens_per_step / float(np.median(timed))
    percentiles = np.percentile(timed, (10, 50, 90, 99)).tolist()
    gpu = find_gpu(device_name)  # None for unknown GPUs and for partial GPUs (MIG)
    return {
        "num_timed_steps": len(timed),
        "step_time_s": dict(zip(("p10", "p50", "p90", "p99"), percentiles, strict=True)),
        "tokens_per_s": tokens_per_s,
        "mfu": tokens_per_s * flops_per_token / (gpu.flops * world_size) if gpu else None,
    }


class PeakMemory:
    """Peak memory of a rank. GPU memory is measured only during training steps, and RAM over the
    life of the process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._allocated_bytes: int | None = None
        self._reserved_bytes: int | None = None

    def begin(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)

    def end(self) -> None:
        if self._cuda:
            allocated = torch.cuda.max_memory_allocated(self._device)
            reserved = torch.cuda.max_memory_reserved(self._device)
            self._allocated_bytes = max(self._allocated_bytes or 0, allocated)
            self._reserved_bytes = max(self._reserved_bytes or 0, reserved)

    def as_dict(self) -> dict[str, int | None]:
        """Return this rank's peak memory in bytes. The GPU memory values are None on a CPU."""
        return {
            "peak_allocated_bytes": self._allocated_bytes,
            "peak_reserved_bytes": self._reserved_bytes,
            "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


@dataclass(frozen=True)
class Tracker:
    """Destination for per-step values. The default functions drop all values."""

    send: Callable[[dict[str, float], int], object] = lambda values, step: None
    end: Callable[[], object] = lambda: None

    def log(self, group: str, row: JsonObject) -> None:
        """Send the numbers in a row of metrics.jsonl or in an entry of the record's `evaluations`.
        Their names begin with `group`."""
        values = {f"{group}/{name}": value for name, value in row.items() if value is not None}
        self.send(values, row["step"])


def evaluation(loss_sum: float, num_targets: int, num_bytes: int) -> JsonObject:
    """Return an entry for the record's `evaluations`. The caller adds the step number.

    `loss_sum` is the sum of the losses of all targets, in nats. `num_bytes` is the length of the
    targets' text in UTF-8 bytes. `bits_per_byte` is `loss_sum / (ln(2) * num_bytes)`, or None if
    there is no text. In a conversation, the targets are the answers and their end tokens. Special
    tokens count toward the loss, because the model has to predict them, but not toward the text."""
    loss = loss_sum / num_targets
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),  # exp(710) overflows
        "bits_per_byte": loss_sum / math.log(2) / num_bytes if num_bytes else None,
        "num_targets": num_targets,
        "num_bytes": num_bytes,
    }


def build_tracker(log_to: str, run_dir: Path, tracker_config: JsonObject, step: int) -> Tracker:
    """Return the tracker that `log_to` names. `tracker_config` contains the settings that the
    tracker stores as the configuration of its run. TensorBoard does not store them.

    The trackers are:
    - TensorBoard: `tensorboard --logdir runs` shows the values.
    - wandb: WANDB_MODE=offline is supported.
    - trackio: `trackio show` shows the values. TRACKIO_SPACE_ID names a Space that stores them.

    The folder's name identifies the run. A run that resumes after `step` therefore continues the
    same run in the tracker."""
    if log_to == "tensorboard":
        return _build_tensorboard(run_dir, step)
    module = importlib.import_module(log_to)
    name = run_dir.name
    # trackio has wandb's interface, but identifies a run by its name
    own_options = {"id": name, "dir": str(run_dir)} if log_to == "wandb" else {}
    module.init(project=PROJECT, name=name, config=tracker_config, resume="allow", **own_options)
    return Tracker(module.log, module.finish)


def _build_tensorboard(run_dir: Path, step: int) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    # TensorBoard then drops later steps, which an earlier process of the run wrote.
    purge_step = step + 1 if step else None
    writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step)

    def send(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker(send, writer.close)
