"""What a person sees of a run, on rank 0: header, progress, closing summary. No torch import."""

from __future__ import annotations

import itertools
import os
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from distributed_training.records.record import MEMORY_FILE, TRACE_FILE, Record, plural

GIB = 2**30
NOT_MEASURED = "not measured"
WIDTH = 80  # columns of a terminal; the longest line of a run
_DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


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

    def note(self, text: str) -> None:
        """A choice that was made for the user and why."""
        self.say(textwrap.fill(f"note: {text}", WIDTH, subsequent_indent=6 * " "))

    def sample(self, title: str, text: str) -> None:
        """A generated text; characters that would move the cursor are spaces."""
        self.say(title)
        for line in text.split("\n"):
            shown = "".join(char if char.isprintable() else " " for char in line)
            wrap = textwrap.TextWrapper(WIDTH - 2, drop_whitespace=len(shown) > WIDTH - 2)
            for part in wrap.wrap(shown):
                self.say(f"  {part}")

    def table(self, rows: list[tuple[str, str]]) -> None:
        """Aligned `name  value` lines, long values going on below."""
        width = max(len(name) for name, _ in rows)
        wrap = textwrap.TextWrapper(WIDTH - width - 4, break_long_words=False)
        for name, value in rows:
            for word, line in itertools.zip_longest([name], wrap.wrap(value), fillvalue=""):
                self.say(f"  {word:<{width}}  {line}")

    def start(self, done: int, total: int, compiles: bool) -> None:
        """Training begins at step `done` of `total`."""
        self._total = total
        if compiles:
            self.say("compiling; this is the first step ...")
        if self.enabled and sys.stderr.isatty():
            form = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"
            self._bar = tqdm(total=total, initial=done, dynamic_ncols=True, bar_format=form)

    def progress(
        self,
        step: int,
        *,
        epoch: int,
        loss: float,
        rate: float,
        num_tokens: int,
        seconds: float,
        num_steps: int,
    ) -> None:
        """Training has reached `step`, in its `epoch`th epoch. Lately `num_steps` took `seconds`;
        0: these are those of the first step, which tell nothing of the others."""
        text = f"epoch {epoch}  loss {loss:.4f}  lr {rate:.1e}  "
        if num_steps:
            left_s = (self._total - step) * seconds / num_steps
            left = tqdm.format_interval(round(left_s)).removeprefix("0")
            text += f"{num_tokens / seconds:,.0f} tok/s  {left} left"
        else:
            text += f"first step {seconds:.1f} s"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
        elif time.monotonic() - self._last_line > 5 or step == self._total:
            self._last_line = time.monotonic()
            self.say(f"step {step:>6}/{self._total}  {text}")

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
    blocks = ", ".join(map(str, pipeline["blocks_per_stage"]))
    bubble = pipeline["ideal_bubble"]
    idle = "" if bubble is None else f"; idle {100 * bubble:.0f}% if stages were equal"
    micro = f"{pipeline['num_microbatches']} micro-batches a step"
    return f"{pipeline['schedule']}, {micro}, blocks a stage {blocks}{idle}"


def short_path(path: str | Path) -> str:
    """From where one stands, unless that lies elsewhere."""
    near = os.path.relpath(path)
    return str(path) if near.startswith("..") else near


def _count(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"


def _precision(dtypes: dict[str, str], config: dict[str, Any]) -> str:
    for long, short in _DTYPES.items():
        dtypes = {what: text.replace(long, short) for what, text in dtypes.items()}
    kinds = {dtypes.get(what) for what in ("arithmetic", "parameters", "gradients", "reduction")}
    text = "{arithmetic} arithmetic; parameters {parameters}; gradients {gradients}"
    text = "fp32" if kinds == {"fp32"} else text.format(**dtypes)
    if config["compile"]:
        text += "; compiled (the first step takes a while)"
    if config.get("cuda_graphs"):
        text += "; one CUDA graph a step"
    return text


def header_rows(r: Record) -> list[tuple[str, str]]:
    """The header of a run, from the record it starts with."""
    config = r.config
    data = r.data
    length = config["max_length"]
    tokens = r.batch.global_batch_size * length
    defaults = ", ".join(f"{key}={config[key]}" for key in r.from_strategy_defaults)
    device = r.machine["gpu_name"] or f"CPU ({r.machine['num_cpus']} cores)"
    split = [f"{axis} {size}" for axis, size in r.mesh.items() if size > 1]
    axes = f", {' x '.join(split)}" if len(split) > 1 else ""
    sizes = {where: size for where, size in _state(r).items() if size}
    state = ", ".join(f"{gib(size)} on the {where}" for where, size in sizes.items())
    state_is_told = r.prediction is not None and len(sizes) == 1
    real = data["real_token_share"]
    adapters = f"; {_count(r.num_learning or 0)} of adapters learn"
    rows = [
        ("model", f"{config['model']}, {_count(r.num_parameters)} parameters, "
                  f"{config['weights']} weights{adapters if config.get('lora_rank') else ''}"),
        ("strategy", f"{r.strategy['name']} x {r.world_size} on {device}{axes}: "
                     f"divides {r.strategy['sharding']}"),
        ("options", _options(r)),
        ("defaults", defaults and f"the strategy sets {defaults}"),
        ("pipeline", _cut_of_pipeline(r.pipeline) if r.pipeline else ""),
        ("state", "" if state_is_told else f"{state} of each process, by estimate"),
        ("predicted", describe_prediction(r.prediction, r.num_steps)),
        ("precision", _precision(r.dtypes or {}, config)),
        ("batch", f"{r.batch.describe()}; {tokens:,} tokens a step"),
        ("data", f"{last_part(config['dataset'])}: {data['num_train_samples']} samples of {length} "
                 f"tokens{'' if real == 1 else f' ({100 * real:.1f}% real)'}, "
                 f"{data['num_validation_samples']} to validate"),
        ("steps", f"{r.num_steps} = {data['steps_per_epoch']} an epoch; learning rate "
                  f"{config['learning_rate']:g} ({config['lr_schedule']}, warm-up "
                  f"{config['warmup_steps']})"),
        ("profile", _profile(r)),
        ("run", short_path(r.run_dir)),
    ]  # fmt: skip
    return [row for row in rows if row[1]]


def _options(r: Record) -> str:
    """What an algorithm or compression does to the exchange between processes."""
    kind = r.config.get("gradient_compression", "none")
    keys = {"powersgd": ["compression_rank"], "topk-int8": ["compression_k"]}.get(kind, [])
    words = [] if kind == "none" else [f"{kind} gradients"]
    words += [f"{key} {r.config[key]}" for key in keys]
    words += [f"{name} {value}" for name, value in r.engine_options.items()]
    sent = (r.prediction or {}).get("sent_bytes")
    if words and sent is not None:
        words.append(f"{gib(sum(sent.values()))} a step sent by a process")
    return ", ".join(words)


def _profile(r: Record) -> str:
    """Which files `profile` will write or has written, and what opens them."""
    count = r.config.get("profile", 0)
    wrote = r.profile
    if not count or (r.status != "running" and wrote is None):
        return ""
    if wrote is None:
        which = f"{plural(count, 'step')} after a warm-up"
    else:
        steps = sorted({wrote["first_step"], wrote["last_step"]})
        which = f"step{'s' if len(steps) > 1 else ''} {' to '.join(map(str, steps))}"
    text = f"{which} in {TRACE_FILE.format('*')} of the run's folder, for ui.perfetto.dev"
    if r.machine["gpu_name"]:
        text += f", and {MEMORY_FILE.format('*')}, for pytorch.org/memory_viz"
    return text


def last_part(source: str) -> str:
    """A dataset or weights by name; a path by its last part."""
    return source.rstrip("/").rpartition("/")[2] or source


def describe_prediction(prediction: dict[str, Any] | None, num_steps: int | None) -> str:
    """Memory, time of a step and of all of them, and what most of it is spent on."""
    if prediction is None:
        return ""
    text = f"{gib(prediction['peak_bytes'])} a process"
    seconds = prediction["step_time_s"]
    if seconds is None:
        return f"{text}; time unknown, as this GPU is not in the planner's table"
    text += f", {seconds:.3g} s a step"
    if likely := prediction.get("likely_s"):  # not in early records
        text += " (likely {:.3g} to {:.3g})".format(*likely)
    if num_steps is not None:
        text += f", {tqdm.format_interval(round(num_steps * seconds))} in all"
    return f"{text}; mostly {prediction['bound_by']}"


def describe_memory(prediction: dict[str, Any] | None) -> str:
    """Peak of the fullest process, and its larger components."""
    if prediction is None:
        return NOT_MEASURED
    parts = sorted(prediction["memory_bytes"].items(), key=lambda part: -part[1])
    named = ", ".join(f"{name} {gib(size)}" for name, size in parts[:3])
    ram = gib(prediction["host_bytes"])
    return f"{gib(prediction['peak_bytes'])} a process ({named}), {ram} of RAM"


def _state(r: Record) -> dict[str, int]:
    """Bytes by where they lie."""
    sizes = dict(r.estimated_state_bytes)
    device = "GPU" if r.machine["gpu_name"] else "CPU"
    elsewhere = {where: sizes.pop(where, 0) for where in ("host", "disk")}
    return {device: sum(sizes.values()), **elsewhere}


def summary_rows(r: Record) -> list[tuple[str, str]]:
    """The closing summary of a run, from its record."""
    speed = r.performance
    memory = r.memory
    rows = []
    if len(r.evaluations) > 1:
        values = [r.evaluations[place]["perplexity"] for place in (0, -1)]
        first, last = ("nan" if value is None else f"{value:.2f}" for value in values)
        steps = r.evaluations[-1]["step"]
        rows.append(("perplexity", f"{first} before, {last} after {steps} steps"))
    if speed.get("tokens_per_s"):
        median_ms = 1000 * speed["step_time_s"]["p50"]
        timed = speed["num_timed_steps"]
        mfu = "" if speed["mfu"] is None else f", MFU {100 * speed['mfu']:.1f}%"
        step = f"{median_ms:.1f} ms a step (median of {timed})"
        rows.append(("throughput", f"{speed['tokens_per_s']:,.0f} tokens/s, {step}{mfu}"))
    if (said := r.prediction) and speed.get("tokens_per_s"):
        seconds = said["step_time_s"]
        time = "" if seconds is None else f", {1000 * seconds:.1f} ms a step"
        ram = gib(said["host_bytes"])
        rows.append(("predicted", f"peak {gib(said['peak_bytes'])}, {ram} of RAM{time}"))
    if memory.get("peak_allocated_bytes") is not None:
        allocated = memory["peak_allocated_bytes"]
        reserved = memory["peak_reserved_bytes"]
        rows.append(("GPU memory", f"peak {gib(allocated)} allocated, {gib(reserved)} reserved"))
    rows.append(("host memory", f"peak {gib(memory.get('peak_host_bytes'))} a process"))
    if r.skipped_steps:
        rows.append(("skipped", f"{len(r.skipped_steps)} steps, gradients not finite"))
    if r.config["model"] == "gpt2-tiny" and not r.machine["gpu_name"]:
        better = "train longer (--epochs, --max_steps), or on a GPU, which takes a larger model"
        rows.append(("better text", better))
    if wrote := _profile(r):
        shares = f"overlap {short_path(r.run_dir)} says what communication takes of them"
        rows.append(("profile", f"{wrote}; {shares}"))
    return [*rows, ("record", f"{short_path(r.run_dir)}/record.json")]
