"""What a person sees of a run, on rank 0: header, progress, closing summary. No torch import."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm

from distributed_training.records.record import Record

GIB = 2**30
NOT_MEASURED = "not measured"


class Display:
    """Progress on a terminal as a bar, elsewhere (a log file) as a line now and then."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._bar: tqdm | None = None
        self._total = 0
        self._last_line = 0.0

    def say(self, text: str) -> None:
        """One line of output."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        elif self.enabled:
            print(text, flush=True)

    def table(self, rows: list[tuple[str, str]]) -> None:
        """Aligned `name  value` lines."""
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self.say(f"  {name:<{width}}  {value}")

    def start(self, done: int, total: int) -> None:
        """Training begins at step `done` of `total`."""
        self._total = total
        if self.enabled and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True)

    def progress(self, step: int, *, loss: float, tokens_per_s: float, step_time_s: float) -> None:
        """Training has reached `step`."""
        speed = f"{tokens_per_s:>10,.0f} tokens/s  {1000 * step_time_s:>7.1f} ms/step"
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.4f}  {speed}")
            self._bar.update(step - self._bar.n)
        elif time.monotonic() - self._last_line > 5 or step == self._total:
            self._last_line = time.monotonic()
            left_s = round((self._total - step) * step_time_s)
            left = tqdm.format_interval(left_s).removeprefix("0")
            self.say(f"step {step:>6}/{self._total}  loss {loss:.4f}  {speed}  {left} left")

    def stop(self) -> None:
        """Training has ended."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def gib(num_bytes: float | None) -> str:
    """Bytes as GiB text; small amounts as MiB; None as "not measured"."""
    if num_bytes is None:
        return NOT_MEASURED
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"


def _cut_of_pipeline(pipeline: dict[str, Any]) -> str:
    blocks, bubble = ", ".join(map(str, pipeline["blocks_per_stage"])), pipeline["ideal_bubble"]
    idle = "" if bubble is None else f"; idle {100 * bubble:.0f}% if stages were equal"
    micro = f"{pipeline['num_microbatches']} micro-batches a step"
    return f"{pipeline['schedule']}, {micro}, blocks a stage {blocks}{idle}"


def header_rows(r: Record) -> list[tuple[str, str]]:
    """The header of a run, from the record it starts with."""
    config, data, dtypes = r.config, r.data, r.dtypes or {}  # known once the engine is built
    length, tokens = config["max_length"], r.batch.global_batch_size * config["max_length"]
    defaults = ", ".join(f"{key}={config[key]}" for key in r.from_strategy_defaults)
    device = r.machine["gpu_name"] or f"CPU ({r.machine['num_cpus']} cores)"
    axes = " x ".join(f"{axis} {size}" for axis, size in r.mesh.items() if size > 1)
    warmup = f"({config['lr_schedule']}, warm-up {config['warmup_steps']})"
    parts = [f"{part} {gib(size)}" for part, size in r.estimated_state_bytes.items() if size]
    rows = [
        ("model", f"{config['model']}, {r.num_parameters:,} parameters, "
                  f"{config['weights']} weights"),
        ("strategy", "{name}: divides {sharding}".format(**r.strategy)),
        ("defaults", defaults and f"the strategy sets {defaults}"),
        ("processes", f"{r.world_size} on {device}" + (f": {axes}" if axes else "")),
        ("pipeline", _cut_of_pipeline(r.pipeline) if r.pipeline else ""),
        ("precision", "parameters {parameters}; arithmetic {arithmetic}".format(**dtypes)),
        ("", "gradients {gradients}; reduction {reduction}; optimizer state {optimizer_state}"
             .format(**dtypes)),
        ("batch", f"{r.batch.describe()}; {tokens:,} tokens a step"),
        ("data", f"{config['dataset']}: {data['num_train_samples']} samples of {length} tokens "
                 f"({100 * data['real_token_share']:.1f}% real), {data['num_validation_samples']} "
                 f"to validate; tokenizer {config['tokenizer']}"),
        ("steps", f"{r.num_steps} = {data['steps_per_epoch']} an epoch; "
                  f"learning rate {config['learning_rate']:g} {warmup}"),
        ("state", f"expected per process: {', '.join(parts)}"),
        ("compile", "yes (the first step takes a while)" if config["compile"] else "no"),
        ("run", r.run_dir),
    ]  # fmt: skip
    return [row for row in rows if row[1]]


def summary_rows(r: Record) -> list[tuple[str, str]]:
    """The closing summary of a run, from its record."""
    speed, memory, rows = r.performance, r.memory, []
    if r.evaluations:
        values = [r.evaluations[place]["perplexity"] for place in (0, -1)]
        first, last = ("nan" if value is None else f"{value:.2f}" for value in values)
        steps = r.evaluations[-1]["step"]
        rows.append(("perplexity", f"{first} before, {last} after {steps} steps"))
    if speed.get("tokens_per_s"):
        median_ms, timed = 1000 * speed["step_time_s"]["p50"], speed["num_timed_steps"]
        mfu = "" if speed["mfu"] is None else f", MFU {100 * speed['mfu']:.1f}%"
        step = f"{median_ms:.1f} ms a step (median of {timed})"
        rows.append(("throughput", f"{speed['tokens_per_s']:,.0f} tokens/s, {step}{mfu}"))
    if memory.get("peak_allocated_bytes") is not None:
        allocated, reserved = memory["peak_allocated_bytes"], memory["peak_reserved_bytes"]
        rows.append(("GPU memory", f"peak {gib(allocated)} allocated, {gib(reserved)} reserved"))
    rows.append(("host memory", f"peak {gib(memory.get('peak_host_bytes'))} a process"))
    if r.skipped_steps:
        rows.append(("skipped", f"{len(r.skipped_steps)} steps, gradients overflowed"))
    return [*rows, ("record", f"{r.run_dir}/record.json")]
