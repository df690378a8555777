"""What a person sees of a run, on rank 0: header, progress, closing summary. No torch import."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm

GIB = 2**30


class Display:
    """Progress on a terminal as a bar, elsewhere (a log file) as a line now and then."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._bar: tqdm | None = None
        self._total = 0
        self._last_line = 0.0

    def say(self, text: str = "") -> None:
        """One line of output."""
        if self.enabled:
            if self._bar is not None:
                self._bar.write(text, file=sys.stdout)
            else:
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
        if not self.enabled:
            return
        left_s = (self._total - step) * step_time_s
        if self._bar is not None:
            self._bar.set_postfix_str(
                f"loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s, {1000 * step_time_s:.0f} ms/step"
            )
            self._bar.update(step - self._bar.n)
        elif time.monotonic() - self._last_line > 5 or step == self._total:
            self._last_line = time.monotonic()
            self.say(
                f"step {step:>6}/{self._total}  loss {loss:.4f}  {tokens_per_s:>10,.0f} tokens/s  "
                f"{1000 * step_time_s:>7.1f} ms/step  {_duration(left_s)} left"
            )

    def stop(self) -> None:
        """Training has ended."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def gib(num_bytes: float | None) -> str:
    """Bytes as GiB text; small amounts as MiB; None as "not measured"."""
    if num_bytes is None:
        return "not measured"
    if num_bytes >= GIB / 10:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"


def header_rows(values: dict[str, Any]) -> list[tuple[str, str]]:
    """The header of a run, from the entries its record starts with."""
    config, batch, data = values["config"], values["batch"], values["data"]
    dtypes, state = values["dtypes"], values["estimated_state_bytes"]
    machine = values["machine"]
    device = machine["gpu_name"] or f"CPU ({machine['num_cpus']} cores)"
    rows = [
        ("model", f"{config['model']}, {values['num_parameters']:,} parameters, "
                  f"{config['weights']} weights"),
        ("strategy", f"{config['strategy']}: divides {values['strategy']['sharding']}"),
        ("processes", f"{values['world_size']} on {device}: " + " x ".join(
            f"{axis} {size}" for axis, size in values["topology"].items() if size > 1)
            if values["world_size"] > 1 else f"1 on {device}"),
        *pipeline_rows(values["pipeline"]),
        ("precision", f"parameters {dtypes['parameters']}; arithmetic {dtypes['arithmetic']}"),
        ("", f"gradients {dtypes['gradients']}; reduction {dtypes['reduction']}; "
             f"optimizer state {dtypes['optimizer_state']}"),
        ("batch", f"global {batch['global_batch_size']} = micro {batch['micro_batch_size']} x "
                  f"accum {batch['grad_accum_steps']} x data-parallel {batch['dp_size']}; "
                  f"{batch['global_batch_size'] * config['max_length']:,} tokens a step"),
        ("data", f"{config['dataset']}: {data['num_train_samples']} samples of "
                 f"{config['max_length']} tokens ({100 * data['real_token_share']:.1f}% real), "
                 f"{data['num_validation_samples']} to validate; tokenizer {config['tokenizer']}"),
        ("steps", f"{values['num_steps']} = {data['steps_per_epoch']} an epoch; learning rate "
                  f"{config['learning_rate']:g} ({config['lr_schedule']}, warm-up "
                  f"{config['warmup_steps']})"),
        ("state", "expected per process: " + ", ".join(
            f"{part} {gib(size)}" for part, size in state.items() if size)),
        ("compile", "yes (the first step takes a while)" if config["compile"] else "no"),
        ("run", values["run_dir"]),
    ]  # fmt: skip
    return rows


def pipeline_rows(pipeline: dict[str, Any] | None) -> list[tuple[str, str]]:
    """The header's line on the pipeline, where there is one."""
    if pipeline is None:
        return []
    blocks = ", ".join(map(str, pipeline["blocks_per_stage"]))
    bubble = pipeline["ideal_bubble"]
    idle = "" if bubble is None else f"; idle {100 * bubble:.0f}% if stages were equal"
    return [
        (
            "pipeline",
            f"{pipeline['schedule']}, {pipeline['num_microbatches']} micro-batches a step, blocks "
            f"a stage {blocks}{idle}",
        )
    ]


def _perplexity(evaluation: dict[str, Any]) -> str:
    value = evaluation["perplexity"]
    return "nan" if value is None else f"{value:.2f}"  # a record holds null for what has diverged


def summary_rows(values: dict[str, Any]) -> list[tuple[str, str]]:
    """The closing summary of a run, from its record."""
    speed, memory = values["performance"], values["memory"]
    rows = []
    if values["evaluations"]:
        first, last = values["evaluations"][0], values["evaluations"][-1]
        rows.append(
            (
                "perplexity",
                f"{_perplexity(first)} before, {_perplexity(last)} after {last['step']} steps",
            )
        )
    if speed.get("tokens_per_s"):
        mfu = "" if speed["mfu"] is None else f", MFU {100 * speed['mfu']:.1f}%"
        rows.append(
            (
                "throughput",
                f"{speed['tokens_per_s']:,.0f} tokens/s, {1000 * speed['step_time_s']['p50']:.1f} "
                f"ms a step (median of {speed['num_timed_steps']}){mfu}",
            )
        )
    allocated, reserved = memory["peak_allocated_bytes"], memory["peak_reserved_bytes"]
    if allocated is not None:
        rows.append(("GPU memory", f"peak {gib(allocated)} allocated, {gib(reserved)} reserved"))
    rows.append(("host memory", f"peak {gib(memory['peak_host_bytes'])} a process"))
    if values["num_skipped_steps"]:
        rows.append(("skipped", f"{values['num_skipped_steps']} steps, gradients overflowed"))
    rows.append(("record", f"{values['run_dir']}/record.json"))
    return rows
