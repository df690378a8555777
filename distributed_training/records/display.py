"""Print the header, progress and summary of a run on rank 0. This module does not import torch."""

from __future__ import annotations

import contextlib
import os
import textwrap
import time
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from distributed_training.models import folder_label
from distributed_training.plan.layout import Amount, format_axes
from distributed_training.settings.errors import printable
from distributed_training.settings.files import JsonObject, plural
from distributed_training.settings.machine import GIB

if TYPE_CHECKING:
    from distributed_training.records.record import Record

WIDTH = 80  # maximum length of the lines that a run prints
_MAGNITUDES = {"P": 1e15, "T": 1e12, "B": 1e9, "M": 1e6, "k": 1e3}
_SECONDS = {"years": 365.25 * 86400, "days": 86400, "hours": 3600, "min": 60}


@dataclass(kw_only=True)
class Display:
    """Output of a run, on rank 0."""

    enabled: bool
    _last_line: float = 0.0  # time of the last line about progress

    def say(self, text: str) -> None:
        if self.enabled:
            print(text, flush=True)

    def say_in_handler(self, text: str) -> None:
        """Print from a signal handler. Python's streams may be in the middle of a write then, and
        would raise RuntimeError."""
        if self.enabled:
            with contextlib.suppress(OSError):  # nobody reads standard output
                os.write(1, f"\n{text}\n".encode())

    def note(self, text: str) -> None:
        """Print a note that states a choice made for the user and the reason for the choice."""
        self.say(fold(f"note: {printable(text)}", indent=6))

    def sample(self, title: str, text: str) -> None:
        """Print generated text. Control characters are escaped."""
        self.say(title)
        for line in text.split("\n"):
            self.say(fold(printable(line), 2, "  "))

    def table(self, rows: dict[str, str]) -> None:
        """Print aligned lines of names and values. Long values are wrapped, and empty values are
        left out."""
        rows = {name: printable(value) for name, value in rows.items() if value}
        width = max(map(len, rows))
        for name, value in rows.items():
            first = f"  {name:<{width}}  "
            self.say(fold(value, len(first), first))

    def progress(self, rows: list[JsonObject], first_step: int, num_steps: int) -> None:
        """Print the values in the last of `rows` and the average speed over all `rows`, which have
        the same keys as the rows of metrics.jsonl, at most every 5 s and after the last step. The
        average excludes the run's first step (number `first_step`), which is slower than the
        others."""
        last = rows[-1]
        step = last["step"]
        if time.monotonic() - self._last_line <= 5 and step < num_steps:
            return
        self._last_line = time.monotonic()
        warm_rows = [row for row in rows if row["step"] != first_step]
        seconds = sum(row["step_time_s"] for row in warm_rows or rows)
        text = f"step {step:>6}/{num_steps}  epoch {last['epoch'] + 1}  loss {last['loss']:.4f}"
        text += f"  lr {last['learning_rate']:.1e}"
        if "reward_accuracy" in last:
            text += f"  {describe_rewards(last)}"
        if "expert_load" in last:
            text += f"  experts' load {last['expert_load']:.1f}x"
        if warm_rows and seconds > 0:  # the clock of a virtual machine may stand still
            speed = sum(row["num_tokens"] for row in warm_rows) / seconds
            remaining_s = (num_steps - step) * seconds / len(warm_rows)
            text += f"  {speed:,.0f} tok/s  {format_duration(remaining_s)} left"
        else:
            text += f"  first step {seconds:.1f} s"
        self.say(text)


def fold(text: str, indent: int = 0, first: str = "") -> str:
    """Wrap text to WIDTH with indented continuation lines. The first line begins with `first`. URLs
    and paths are not broken."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=indent * " ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def format_bytes(num_bytes: float) -> str:
    """Format a number of bytes in GiB, or in MiB if it is less than 0.1 GiB."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"


def format_perplexity(value: float | None) -> str:
    """Return a perplexity with two decimals, or in scientific notation from one million upward.
    Return "nan" for None, because records store non-finite losses as None."""
    if value is None:
        return "nan"
    return f"{value:.2f}" if value < 1e6 else f"{value:.3e}"


def describe_evaluation(row: JsonObject) -> str:
    """Format an evaluation as a string such as "loss 3.0000 perplexity 20.09 bpb 1.2345"."""
    if "reward_accuracy" in row:
        return f"loss {row['loss']:.4f}  {describe_rewards(row)}"
    text = f"loss {row['loss']:.4f}  perplexity {format_perplexity(row['perplexity'])}"
    bits = row["bits_per_byte"]
    return text if bits is None else f"{text}  bpb {bits:.4f}"


def describe_rewards(row: JsonObject) -> str:
    """Format the comparison of answers in preference tuning as a string such as "accuracy 0.75
    margin 0.1234"."""
    return f"accuracy {row['reward_accuracy']:.2f}  margin {row['reward_margin']:.4f}"


def format_count(number: float) -> str:
    """Format a number with three significant digits and a letter for its magnitude, such as
    1.23M."""
    for letter, size in _MAGNITUDES.items():
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def format_duration(seconds: float) -> str:
    """Format a duration in the largest unit in which its value is at least 2. Durations under 2
    minutes are in seconds."""
    for name, unit in _SECONDS.items():
        if seconds >= 2 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"


def short_path(path: str | Path) -> str:
    """Return a path in printable form. A path inside the current folder is shown as a relative
    path."""
    relative = os.path.relpath(path)
    return printable(str(path) if relative.startswith("..") else relative)


def short_name(source: str) -> str:
    """Return a short name for datasets or weights: the last component of each path or Hub name.
    For weights in a run's folder, the name also contains the run's model."""
    labels = [folder_label(Path(name.rstrip("/"))) or name for name in source.split(" ")]
    return " ".join(labels)


def describe_work(amount: Amount) -> str:
    """Return text such as "8,550 chats in 270 steps"."""
    steps = plural(amount.num_steps, "step")
    if not amount.num_samples:
        return steps
    return f"{round(amount.num_samples * amount.epochs):,} {amount.unit} in {steps}"


def describe_amount(amount: Amount) -> str:
    """Return text such as "2,850 chats, 3 epochs" or "about 50,000 chats (±4%), 1 epoch"."""
    if not amount.num_samples:
        return describe_work(amount)
    text = plural(amount.num_samples, amount.unit.removesuffix("s"))
    if amount.error:
        text = f"about {text} (±{amount.error:.0%})"
    return f"{text}, {amount.epochs:.3g} epoch{'' if amount.epochs == 1 else 's'}"


def amount_of(r: Record) -> Amount:
    """Return the amount of work of a run."""
    data = r.data
    return Amount(
        num_samples=data.get("num_train_records") or data["num_train_samples"],
        unit=data.get("unit", "samples"),
        epochs=r.num_steps / data["steps_per_epoch"],
        num_steps=r.num_steps,
    )


def header_rows(r: Record) -> dict[str, str]:
    """Return the header rows of a run. The rows use only entries that the record contains before
    the first step. If a row has nothing to show, its value is an empty string."""
    config = r.config
    data = r.data
    length = config["max_length"]
    tokens = r.batch.global_batch_size * length
    model = f"{config['model']}, {format_count(r.num_parameters)} parameters, "
    model += f"{config['weights']} weights"
    if config.get("lora_rank"):
        model += f"; {format_count(r.num_learning or 0)} adapter parameters are trained"
    device = r.machine["gpu_name"] or f"CPU ({plural(r.machine['num_cpus'], 'core')})"
    real_share = data["real_token_share"]
    amount = amount_of(r)
    samples = f"{amount.num_samples:,} {amount.unit} per epoch, {describe_work(amount)}"
    if data.get("num_train_records"):
        samples += f", packed into {data['num_train_samples']:,} blocks"
    held_out = data.get("num_validation_records") or data["num_validation_samples"]
    samples += f" of {length:,} tokens; {held_out:,} for validation"
    if real_share < 1:
        samples += f" ({1 - real_share:.1%} padding)"
    pipeline = ""
    entry = r.pipeline
    if entry:
        blocks = ", ".join(map(str, entry["blocks_per_stage"]))
        pipeline = f"{entry['schedule']}, {entry['num_microbatches']} micro-batches per step, "
        pipeline += f"blocks per stage {blocks}"
        if entry["ideal_bubble"] is not None:
            pipeline += f"; {entry['ideal_bubble']:.0%} idle if all stages take the same time"
    axes = format_axes(r.mesh) if r.world_size > 1 else ""
    layout = [axes, device, pipeline, _options(r), _precision(r)]
    return {
        "model": model,
        "layout": "; ".join(filter(None, layout)),
        "data": f"{short_name(config['dataset'])}: {samples}",
        "batch": f"{r.batch.describe()}; {tokens:,} tokens per step",
        "rate": f"{config['learning_rate']:g} ({config['lr_schedule']}, "
        f"{plural(config['warmup_steps'], 'warm-up step')})",
        "run": short_path(r.run_dir),
    }


def _options(r: Record) -> str:
    """Describe gradient compression and the engine's options."""
    compression = r.config.get("gradient_compression", "none")
    texts = [] if compression == "none" else [f"{compression} gradients"]
    texts += [f"{name} {value}" for name, value in r.engine_options.items()]
    return ", ".join(texts)


def describe_prediction(prediction: JsonObject | None, *, on_gpu: bool) -> str:
    """Describe the predicted GPU memory and RAM per process, the time per step and the main
    bottleneck. Without a GPU, the size of the tensors is given instead of the GPU memory. Return ""
    if there is no prediction."""
    if prediction is None:
        return ""
    allocated, needed = prediction["peak_bytes"], prediction["needed_bytes"]
    text = f"{format_bytes(allocated)} of tensors and "
    if on_gpu:
        parts = f"{format_bytes(allocated)} allocated, {format_bytes(needed - allocated)} context"
        text = f"{format_bytes(needed)} of GPU memory ({parts}) and "
    text += f"{format_bytes(prediction['host_bytes'])} of RAM per process"
    seconds = prediction["step_time_s"]
    if seconds is None:
        return f"{text}; time unknown"
    bottleneck = bottleneck_name(prediction["bound_by"])
    return f"{text}; {describe_time(prediction)}; bottleneck: {bottleneck}"


def describe_time(prediction: JsonObject) -> str:
    """Describe the predicted time of a step, its range and the nearest measured run."""
    text = f"{prediction['step_time_s']:.3g} s per step ("
    if prediction["likely_s"] is not None:
        text += "80% range {:.3g} to {:.3g} s; ".format(*prediction["likely_s"])
    return f"{text}{prediction['evidence']})"


def bottleneck_name(bound_by: str) -> str:
    """Return the display name of a step's main bottleneck."""
    display_names = {"arithmetic": "compute", "memory": "memory bandwidth", "host": "CPU overhead"}
    return display_names.get(bound_by, bound_by)


def _precision(r: Record) -> str:
    text = r.config["precision"]
    if r.config["compile"]:
        text += "; compiled (the first step takes a while)"
    if r.config.get("cuda_graphs"):
        text += "; one CUDA graph per step"
    return text


def describe_overfitting(r: Record) -> str:
    """Describe the last and the lowest validation loss of a run that overfitted, or return "". A
    run has overfitted if its last loss is more than 1% higher than its lowest loss."""
    finite_rows = [row for row in r.comparable_evaluations if row["loss"] is not None]
    if not finite_rows or r.evaluations[-1]["loss"] is None:  # the last loss was not finite
        return ""
    best = min(finite_rows, key=itemgetter("loss"))
    last = finite_rows[-1]
    if last["loss"] <= 1.01 * best["loss"]:
        return ""
    result = "overfitted" if best["step"] else "did not learn"
    text = f"{result}: its validation loss was {best['loss']:.3f} after step {best['step']}"
    return f"{text} and {last['loss']:.3f} at the end"
