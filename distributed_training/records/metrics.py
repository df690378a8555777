"""Speed and memory of a run, and the program that `log_to` sends them to. Units end names."""

import importlib
import itertools
import json
import math
import resource
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from distributed_training.records.record import Record, write_json
from distributed_training.settings.machine import GIB, find_gpu

MAX_WARMUP_STEPS = 5
PROJECT = "distributed-training"
TRACKERS_FILE = ".trackers.json"  # in a run's folder: tracker -> the run's id there


class StepTimer:
    """Durations of steps: CUDA events on a GPU (nothing waits for them), a clock on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def restart(self) -> None:
        """Begin counting now; what happened since the last mark counts for no step."""
        self._marks.clear()
        self.mark()

    def mark(self) -> None:
        if not self._cuda:
            self._marks.append(time.perf_counter())
            return
        self._marks.append(torch.cuda.Event(enable_timing=True))
        self._marks[-1].record()

    def durations_s(self) -> list[float]:
        """Seconds of each step since they were asked for last; waits for the GPU."""
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
) -> dict[str, Any]:
    """Percentiles of step time with warm-up (MAX_WARMUP_STEPS, or a third where a run is short)
    left out, and what follows from the median. `tokens_per_step` are real, of the global batch."""
    warmup = min(MAX_WARMUP_STEPS, len(durations_s) // 3)
    timed = np.array([seconds for seconds in durations_s[warmup:] if seconds > 0])
    if len(timed) == 0:
        return {"num_timed_steps": 0, "tokens_per_s": None, "mfu": None}
    tokens_per_s = tokens_per_step / float(np.median(timed))
    gpu = find_gpu(device_name)
    peak = gpu.flops if gpu else None  # as of a part of a chip (MIG)
    return {
        "num_warmup_steps": warmup,
        "num_timed_steps": len(timed),
        "step_time_s": {f"p{q}": float(np.percentile(timed, q)) for q in (10, 50, 90, 99)},
        "tokens_per_step": tokens_per_step,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_process": tokens_per_s / world_size,
        "flops_per_token": flops_per_token,
        "peak_flops_per_gpu": peak,
        "mfu": None if peak is None else tokens_per_s * flops_per_token / (peak * world_size),
    }


class PeakMemory:
    """Highest memory while training; evaluation and export are left out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._peaks = dict[str, int | None](peak_allocated_bytes=None, peak_reserved_bytes=None)

    def begin(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)

    def end(self) -> None:
        if self._cuda:
            counters = torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved
            for name, counter in zip(self._peaks, counters, strict=True):
                self._peaks[name] = max(self._peaks[name] or 0, counter(self._device))

    def as_dict(self) -> dict[str, int | None]:
        """This rank's peaks; null for a device without a counter."""
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {**self._peaks, "peak_host_bytes": host}


def disk_bytes() -> dict[str, int]:
    """Bytes this process has caused to be read from and written to storage, direct I/O (libaio)
    included, page-cache hits not; empty where the system does not count them."""
    try:
        counters = psutil.Process().io_counters()
    except (AttributeError, psutil.Error):
        return {}
    return {"read_bytes": counters.read_bytes, "write_bytes": counters.write_bytes}


@dataclass(frozen=True)
class Tracker:
    """Receives numbers by step, and at the end those that sum the run up; this one drops them."""

    send: Callable[..., object] = lambda values, step=None: None  # no step: of the whole run
    end: Callable[[], object] = lambda: None

    def log_step(self, row: dict[str, Any]) -> None:
        """A row of metrics.jsonl."""
        values = {f"train/{name}": row[name] for name in ("loss", "learning_rate", "grad_norm")}
        values["train/perplexity"] = perplexity(row["loss"])
        values |= {f"speed/{name}": row[name] for name in ("tokens_per_s", "step_time_s")}
        self.send({name: x for name, x in values.items() if x is not None}, row["step"])

    def log_evaluation(self, row: dict[str, Any], peaks: dict[str, int | None]) -> None:
        """An entry of the record's `evaluations`, and rank 0's peaks of memory so far."""
        names = ("loss", "perplexity", "bits_per_byte")
        values = {f"eval/{name}": row[name] for name in names if row.get(name) is not None}
        memory = {name.replace("_bytes", "_gib"): size for name, size in peaks.items()}
        values |= {f"memory/{name}": size / GIB for name, size in memory.items() if size}
        self.send(values, row["step"])

    def close(self, r: Record) -> None:
        """What sums the run up, as far as it was measured."""
        evaluation = r.evaluations[-1] if r.evaluations else {}
        sizes = r.memory.get("peak_reserved_bytes") or r.memory.get("peak_host_bytes")
        found = {
            "loss": r.loss_curve[-1][1] if r.loss_curve else None,
            "validation_loss": evaluation.get("loss"),
            "perplexity": evaluation.get("perplexity"),
            "bits_per_byte": evaluation.get("bits_per_byte"),
            "tokens_per_s": r.performance.get("tokens_per_s"),
            "peak_memory_gib": sizes and sizes / GIB,
        }
        self.send({f"final/{name}": value for name, value in found.items() if value is not None})
        self.end()


def perplexity(loss: float) -> float:
    """exp(loss), without overflow."""
    return math.exp(min(loss, 700.0))


def evaluation(loss_sum: float, num_targets: int, num_bytes: int) -> dict[str, Any]:
    """Return an entry of the record's `evaluations` but for its step. `loss_sum`: nats of all
    targets. `bits_per_byte` divides it by ln 2 and by the UTF-8 bytes of the text that the targets
    stand for. Of conversations the targets are the answers and the tokens that end them; special
    tokens count in the loss, as a model has to predict them, but are no text. None: no text."""
    loss = loss_sum / num_targets
    return {
        "loss": loss,
        "perplexity": perplexity(loss),
        "bits_per_byte": loss_sum / math.log(2) / num_bytes if num_bytes else None,
        "num_targets": num_targets,
        "num_bytes": num_bytes,
    }


def describe_evaluation(row: dict[str, Any]) -> str:
    """ "loss 3.0000  perplexity 20.09  bpb 1.2345"."""
    text = f"loss {row['loss']:.4f}  perplexity {row['perplexity']:.2f}"
    bits = row["bits_per_byte"]
    return text if bits is None else f"{text}  bpb {bits:.4f}"


def build_tracker(
    log_to: str | None, run_dir: Path, about: dict[str, Any], step: int = 0
) -> Tracker:
    """The tracker that CONFIG's `log_to` names, told `about` the run: TensorBoard
    (`tensorboard --logdir runs`), MLflow (MLFLOW_TRACKING_URI says where), wandb
    (WANDB_MODE=offline applies), trackio (`trackio show`; TRACKIO_SPACE_ID names a Space). A run
    that goes on after `step` goes on in the tracker, too, by the id in its folder."""
    if log_to is None:
        return Tracker()
    if log_to == "tensorboard":
        return _build_tensorboard(run_dir, about, step)
    module = importlib.import_module(log_to)
    file = run_dir / TRACKERS_FILE
    ids: dict[str, str] = json.loads(file.read_bytes()) if step and file.is_file() else {}
    begun = log_to in ids
    if log_to == "mlflow":
        module.set_experiment(PROJECT)
        if begun:
            module.start_run(run_id=ids[log_to])
        else:
            ids[log_to] = module.start_run(run_name=run_dir.name).info.run_id
            module.log_params(about)
        tracker = Tracker(module.log_metrics, module.end_run)
    elif log_to == "wandb":
        ids.setdefault(log_to, uuid.uuid4().hex)
        own = {"dir": str(run_dir), "id": ids[log_to], "resume": "allow"}
        module.init(project=PROJECT, name=run_dir.name, config=about, **own)
        tracker = Tracker(module.log, module.finish)
    else:  # trackio has wandb's interface, and knows a run by its name
        ids.setdefault(log_to, run_dir.name)
        module.init(project=PROJECT, name=ids[log_to], config=about, resume="allow")
        tracker = Tracker(module.log, module.finish)
    if not begun:
        write_json(file, ids)
    return tracker


def _build_tensorboard(run_dir: Path, about: dict[str, Any], step: int) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    # Readers drop what an earlier process of the run wrote of later steps.
    purge = {"purge_step": step + 1} if step else {}
    writer = SummaryWriter(str(run_dir / "tensorboard"), **purge)
    kinds = (bool, int, float, str)
    hparams = {k: v if isinstance(v, kinds) else str(v) for k, v in about.items()}

    def send(values: dict[str, float], step: int | None = None) -> None:
        if step is None:
            writer.add_hparams(hparams, values, run_name=".")  # in the same folder
        else:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

    return Tracker(send, writer.close)
