"""What a person sees of a run, on rank 0: header, progress, summary; pages. No torch import."""

import os
import re
import shlex
import sys
import textwrap
import time
from operator import itemgetter
from pathlib import Path
from typing import Any

from tqdm import tqdm

from distributed_training.records.record import BEST, Record
from distributed_training.settings.errors import printable
from distributed_training.settings.files import folder_label, plural
from distributed_training.settings.machine import GIB

MUCH_PADDING = 0.5  # below this share of real tokens, the header says what to set
WIDTH = 80  # columns of a terminal; the longest line of a run


class Display:
    """Progress on a terminal as a bar, elsewhere (a log file) as a line now and then."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._bar: tqdm | None = None
        self._total = 0
        self._last_line = 0.0

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        elif self.enabled:
            print(text, flush=True)

    def note(self, text: str) -> None:
        """A choice that was made for the user and why."""
        self.say(fold(f"note: {printable(text)}", indent=6))

    def sample(self, title: str, text: str) -> None:
        """A generated text; characters that would move the cursor are spaces."""
        self.say(title)
        for line in text.split("\n"):
            shown = "".join(char if char.isprintable() else " " for char in line)
            for part in textwrap.wrap(shown, WIDTH - 2, drop_whitespace=len(shown) > WIDTH - 2):
                self.say(f"  {part}")

    def table(self, rows: dict[str, str]) -> None:
        """Aligned `name  value` lines, long values going on below; none for an empty value."""
        rows = {name: printable(value) for name, value in rows.items() if value}
        width = max(map(len, rows))
        for name, value in rows.items():
            first = f"  {name:<{width}}  "
            wrap = textwrap.TextWrapper(
                WIDTH, first, " " * len(first), break_long_words=False, break_on_hyphens=False
            )
            self.say(wrap.fill(value))

    def commands(self, title: str, *commands: str) -> None:
        """A line, then commands to type next, each on lines of its own that can be pasted."""
        self.say("\n".join([title, *map(pasteable, commands)]))

    def start(self, done: int, total: int, compiles: bool) -> None:
        self._total = total
        if compiles:
            self.say("compiling; this is the first step ...")
        if self.enabled and sys.stderr.isatty():
            form = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"
            self._bar = tqdm(total=total, initial=done, dynamic_ncols=True, bar_format=form)

    def progress(self, rows: list[dict[str, Any]], first: int) -> None:
        """Rows of metrics.jsonl; the run's `first` says nothing of how long others take."""
        last = rows[-1]
        step = last["step"]
        warm = [row for row in rows if row["step"] != first]
        seconds = sum(row["step_time_s"] for row in warm or rows)
        text = f"epoch {last['epoch'] + 1}  loss {last['loss']:.4f}  lr {last['learning_rate']:.1e}"
        if seconds <= 0:
            text += "  no speed: the clock stands still"
        elif warm:
            speed = sum(row["num_tokens"] for row in warm) / seconds
            left_s = (self._total - step) * seconds / len(warm)
            left = tqdm.format_interval(round(left_s)).removeprefix("0")
            text += f"  {speed:,.0f} tok/s  {left} left"
        else:
            text += f"  first step {seconds:.1f} s"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
        elif time.monotonic() - self._last_line > 5 or step == self._total:
            self._last_line = time.monotonic()
            self.say(f"step {step:>6}/{self._total}  {text}")

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def fold(text: str, width: int = WIDTH, indent: int = 0) -> str:
    """Text in lines of `width`, those below indented; addresses and paths stay whole."""
    return textwrap.fill(
        text, width, subsequent_indent=indent * " ", break_long_words=False, break_on_hyphens=False
    )


def pasteable(command: str) -> str:
    """The command, indented; a long one goes on below after a backslash, an option with its
    value."""
    parts: list[str] = []
    for word in map(shlex.quote, shlex.split(command)):
        is_value = parts and re.fullmatch(r"--\w+", parts[-1]) and not word.startswith("--")
        if is_value:
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    lines = [" "]
    for part in parts:
        if len(lines[-1]) + len(part) > WIDTH - 3 and lines[-1].strip():
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {part}"
    return "\n".join(lines)


def gib(num_bytes: float) -> str:
    """Bytes as GiB text; small amounts as MiB."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"


def duration(seconds: float | None) -> str:
    """A predicted time, rounded, in words."""
    if seconds is None:
        return "time unknown"
    if seconds < 90:
        return f"about {seconds:.0f} s"
    minutes = seconds / 60
    return f"about {minutes:.0f} minutes" if minutes < 90 else f"about {minutes / 60:.1f} hours"


def short_path(path: str | Path) -> str:
    """From where one stands, unless that lies elsewhere; for printing."""
    near = os.path.relpath(path)
    return printable(str(path) if near.startswith("..") else near)


def last_part(source: str) -> str:
    """A dataset or weights by name; a path by its last part."""
    return folder_label(Path(source.rstrip("/"))) or source


def in_markdown(text: str) -> str:
    """Escape characters that Markdown would read as a link, HTML, code or a cell's end."""
    return re.sub(r"([\\`*\[\]<>|#!&])", r"\\\1", printable(text))


def fill(template: str, **values: Any) -> str:
    """A template of pages/ with these values, which are escaped where it is HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # slow to import

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("pages")), autoescape=".html" in template,
        undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return templates.get_template(template).render(values)


def header_rows(r: Record) -> dict[str, str]:
    """The header of a run, from the record it starts with; empty where there is nothing to say."""
    config = r.config
    data = r.data
    length = config["max_length"]
    tokens = r.batch.global_batch_size * length
    model = f"{config['model']}, {_count(r.num_parameters)} parameters, {config['weights']} weights"
    if config.get("lora_rank"):
        model += f"; {_count(r.num_learning or 0)} of adapters learn"
    device = r.machine["gpu_name"] or f"CPU ({r.machine['num_cpus']} cores)"
    split = [f"{axis} {size}" for axis, size in r.mesh.items() if size > 1]
    axes = f", {' x '.join(split)}" if len(split) > 1 else ""
    defaults = ", ".join(f"{key}={config[key]}" for key in r.from_strategy_defaults)
    real = data["real_token_share"]
    filled = "" if real == 1 else f" ({100 * real:.1f}% real)"
    samples = f"{data['num_train_samples']} samples of {length} tokens{filled}"
    validation = data["num_validation_samples"]
    if records := data.get("num_train_records"):
        blocks = data["num_train_samples"]
        samples = f"{records} records in {plural(blocks, 'block')} of {length} tokens "
        samples += f"({records / blocks:.1f} records per block, {100 * real:.0f}% real)"
        validation = data["num_validation_records"]
    advice = ""
    if real < MUCH_PADDING:
        fix = "a smaller --max_length" if records else "--pack auto or a smaller --max_length"
        advice = f"; {fix} pads less"
    pipeline = ""
    if cut := r.pipeline:
        blocks = ", ".join(map(str, cut["blocks_per_stage"]))
        pipeline = f"{cut['schedule']}, {cut['num_microbatches']} micro-batches per step, "
        pipeline += f"blocks per stage {blocks}"
        if cut["ideal_bubble"] is not None:
            pipeline += f"; idle {cut['ideal_bubble']:.0%} if stages were equal"
    return {
        "model": model,
        "strategy": f"{r.strategy['name']} x {r.world_size} on {device}{axes}: "
                    f"shards {r.strategy['sharding']}",
        "options": _options(r),
        "defaults": defaults and f"the strategy sets {defaults}",
        "pipeline": pipeline,
        "state": _state(r),
        "predicted": describe_prediction(
            r.prediction, r.num_steps, on_gpu=bool(r.machine["gpu_name"])
        ),
        "precision": _precision(r),
        "batch": f"{r.batch.describe()}; {tokens:,} tokens per step",
        "data": f"{last_part(config['dataset'])}: {samples}, {validation} for validation"
                f"{advice}",
        "steps": f"{r.num_steps} = {data['steps_per_epoch']} per epoch; learning rate "
                 f"{config['learning_rate']:g} ({config['lr_schedule']}, warm-up "
                 f"{config['warmup_steps']})",
        "run": short_path(r.run_dir),
    }  # fmt: skip


def _count(number: int) -> str:
    if number < 1e5:
        return f"{number:,}"
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"


def _options(r: Record) -> str:
    """What an algorithm or compression does to the exchange between processes."""
    kind = r.config.get("gradient_compression", "none")
    words = [] if kind == "none" else [f"{kind} gradients"]
    if key := {"powersgd": "compression_rank", "topk-int8": "compression_k"}.get(kind):
        words.append(f"{key} {r.config[key]}")
    words += [f"{name} {value}" for name, value in r.engine_options.items()]
    sent = (r.prediction or {}).get("sent_bytes")
    if words and sent is not None:
        words.append(f"{gib(sum(sent.values()))} per step sent by each process")
    return ", ".join(words)


def _state(r: Record) -> str:
    """What a process keeps where, unless that is one place."""
    sizes = dict(r.estimated_state_bytes)
    elsewhere = {where: sizes.pop(where, 0) for where in ("host", "disk")}
    places = {"GPU" if r.machine["gpu_name"] else "CPU": sum(sizes.values()), **elsewhere}
    found = [f"{gib(size)} on the {where}" for where, size in places.items() if size]
    return f"{', '.join(found)} of each process, by estimate" if len(found) > 1 else ""


def describe_prediction(
    prediction: dict[str, Any] | None, num_steps: int | None, *, on_gpu: bool
) -> str:
    """Memory and RAM per process, time per step and of all steps, and the main bottleneck."""
    if prediction is None:
        return ""
    where = "GPU memory" if on_gpu else "tensors"
    text = f"{gib(prediction['peak_bytes'])} of {where} and {gib(prediction['host_bytes'])} of RAM "
    text += "per process"
    seconds = prediction["step_time_s"]
    if seconds is None:
        return f"{text}; time unknown, as this GPU is not in the planner's table"
    least, most = prediction["likely_s"]
    text += f"; {seconds:.3g} s per step (likely {least:.3g} to {most:.3g})"
    if num_steps is not None:
        text += f", {tqdm.format_interval(round(num_steps * seconds))} in all"
    return f"{text}; bottleneck: {prediction['bound_by']}"


def _precision(r: Record) -> str:
    dtypes = {
        what: text.replace("torch.bfloat", "bf").replace("torch.float", "fp")
        for what, text in (r.dtypes or {}).items()
    }
    kinds = {dtypes.get(what) for what in ("arithmetic", "parameters", "gradients", "reduction")}
    text = "{arithmetic} arithmetic; parameters {parameters}; gradients {gradients}"
    text = "fp32" if kinds == {"fp32"} else text.format(**dtypes)
    if r.config["compile"]:
        text += "; compiled (the first step takes a while)"
    if r.config.get("cuda_graphs"):
        text += "; one CUDA graph per step"
    return text


def best_before(r: Record) -> dict[str, Any] | None:
    """Of a run that overfitted the evaluation with the lowest loss: the last is 1% above it."""
    seen = [row for row in r.evaluations if row["loss"] is not None]
    if not seen or r.evaluations[-1]["loss"] is None:  # it was not finite
        return None
    best = min(seen, key=itemgetter("loss"))
    return best if seen[-1]["loss"] > 1.01 * best["loss"] else None


def summary_rows(r: Record) -> dict[str, str]:
    """The closing summary of a run, from its record; empty where nothing was measured."""
    speed = r.performance
    memory = r.memory
    rows = dict[str, str]()
    if len(r.evaluations) > 1:
        after = f"after {r.evaluations[-1]['step']} steps"
        for name, digits in (("perplexity", 2), ("bits_per_byte", 4)):
            if name in r.evaluations[-1]:
                values = [r.evaluations[place].get(name) for place in (0, -1)]
                first, last = ("nan" if x is None else f"{x:.{digits}f}" for x in values)
                rows[name.replace("_", " ")] = f"{first} before, {last} {after}"
    if (best := best_before(r)) and best["step"]:
        kept = f"{BEST}/ holds" if r.best else "--keep_best True keeps"
        what = f"perplexity {best['perplexity']:.2f} after {best['step']} steps"
        rows["overfitted"] = f"{what}; {kept} that model"
    if speed.get("tokens_per_s"):
        median_ms = 1000 * speed["step_time_s"]["p50"]
        step = f"{median_ms:.1f} ms per step (median of {speed['num_timed_steps']})"
        mfu = "" if speed["mfu"] is None else f", MFU {100 * speed['mfu']:.1f}%"
        rows["throughput"] = f"{speed['tokens_per_s']:,.0f} tokens/s, {step}{mfu}"
    if (allocated := memory.get("peak_allocated_bytes")) is not None:
        reserved = gib(memory["peak_reserved_bytes"])
        rows["GPU memory"] = f"peak {gib(allocated)} allocated, {reserved} reserved"
    rows["RAM"] = f"peak {gib(memory['peak_host_bytes'])} per process"
    if not r.machine["gpu_name"]:
        rows["RAM"] += ", tensors and libraries"
    if r.skipped_steps:
        rows["skipped"] = f"{len(r.skipped_steps)} steps, gradients not finite"
    if wrote := r.profile:
        where = f"{wrote['traces']} of the run's folder, for ui.perfetto.dev"
        if wrote["memory"]:
            where += f", and {wrote['memory']}, for pytorch.org/memory_viz"
        steps = f"steps {wrote['first_step']} to {wrote['last_step']}"
        program = f"python results/lab/overlap.py {short_path(r.run_dir)}"
        shares = f"{program} says what communication takes of them"
        rows["profile"] = f"{steps} in {where}; {shares}"
    rows["record"] = f"{short_path(r.run_dir)}/record.json"
    return rows
