"""Answer a request: whether a run fits on a cluster, how fast it is, what it costs, and what fits
instead. The command `plan`, its JSON and the jobs that it writes repeat this answer. Of the user's
files, this module reads only the model's config.json. It imports neither torch nor numpy."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from distributed_training.plan.layout import Amount
from distributed_training.plan.plan import Draft
from distributed_training.planner.choose import choose_model
from distributed_training.planner.layouts import Settings, format_settings
from distributed_training.planner.sort import (
    REDUCED,
    as_typed,
    choose_batch_size,
    describe_speed,
    in_gib,
    layout_name,
    layout_settings,
    sort_by_speed,
    sort_layouts,
    suggest,
)
from distributed_training.predict.predict import Cluster, MemoryFit, Prediction
from distributed_training.records.display import describe_amount, format_duration
from distributed_training.settings.config import AUTO, Request
from distributed_training.settings.files import JsonObject, plural

VERSION = 1  # of the fields in JSON; a field that is removed or changes its meaning raises it
FIT_WORDS: dict[MemoryFit, str] = {
    "yes": "fit",
    "tight": "just fit",
    "unlikely": "may not fit",
    "no": "do not fit",
}


class Price(NamedTuple):
    """Price of a GPU-hour, with the text around the number, such as "$" or " USD"."""

    before: str
    per_hour: float
    after: str

    def of(self, gpu_hours: float) -> str:
        return f"{self.before}{gpu_hours * self.per_hour:,.2f}{self.after}"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer to a request."""

    asked: Prediction  # the best layout with the settings that were asked for
    # Layouts that fit or, if none does, all layouts, best first
    fitting: Sequence[Prediction]
    changes: Settings  # settings that were changed because `asked` does not fit without offload
    layouts: Sequence[Prediction]  # all layouts with these changes, best first
    # Settings that would fit if `asked` does not, best first
    suggestions: Sequence[tuple[Settings, Prediction]]
    amount: Amount | str  # work of the run, or the reason why it is unknown
    price: Price | None
    notes: tuple[str, ...]

    @property
    def first(self) -> Prediction:
        return self.fitting[0]

    @property
    def picks(self) -> list[tuple[str, Prediction]]:
        """Return the first choice and the fastest layout, each with its label."""
        fastest = sort_by_speed(self.fitting)[0]
        if fastest is self.first:
            return [("first, fastest", self.first)]
        return [("first", self.first), ("fastest", fastest)]

    @property
    def verdict(self) -> str:
        """Return what becomes of the request, beginning with what was asked."""
        text = describe_verdict(self.asked, self.first, self.changes)
        return text + describe_total(self.first, self.amount, self.price)

    @property
    def options(self) -> list[str]:
        """Options with which the script starts the first choice."""
        return build_options(self.first.plan)

    @property
    def gpu_hours(self) -> float | None:
        """GPU-hours of the run, or None if its work or its speed is unknown."""
        seconds = estimate_run_s(self.first, self.amount)
        return seconds and seconds * self.first.plan.num_processes / 3600

    def as_dict(self) -> JsonObject:
        """Return the answer as JSON."""
        hours = self.gpu_hours
        machine = self.first.plan.machine
        return {
            "version": VERSION,
            "verdict": self.verdict,
            "fits": judge_fit(self.asked, self.first),
            "changes": self.changes,
            "gpu": machine.gpu_name,
            "gpu_memory_bytes": machine.gpu_memory_bytes,
            "num_processes": self.first.plan.num_processes,
            "options": self.options,
            "num_steps": None if isinstance(self.amount, str) else self.amount.num_steps,
            "gpu_hours": hours,
            "cost": None if hours is None or self.price is None else self.price.of(hours),
            "suggestions": [
                {"settings": settings, **describe_layout(choice)}
                for settings, choice in self.suggestions
            ],
            "notes": self.notes,
            "picks": [describe_layout(choice) for _, choice in self.picks],
            "layouts": [describe_layout(choice) for choice in self.layouts],
        }


def count_typed_steps(draft: Draft, notes: list[str]) -> Amount | str:
    """Return the number of steps that the user set, or the advice to set it."""
    if draft.requested.is_set("max_steps"):
        num_steps = draft.config.max_steps
        return Amount(num_samples=0, unit="", epochs=0.0, num_steps=num_steps)
    return "the number of steps is unknown; add --dataset or --tokens"


def answer(
    request: Request,
    cluster: Cluster,
    *,
    num_tokens: float | None = None,
    price: Price | None = None,
    count_work: Callable[[Draft, list[str]], Amount | str] = count_typed_steps,
) -> Answer:
    """Return the answer to a request.

    `num_tokens` sets the number of steps. `count_work` returns the work of a run from its dataset
    and appends notes; without it, only steps that the user set are known. Raises UserError for
    settings that cannot be used."""
    notes: list[str] = []
    config, model = choose_model(request, cluster.machine, notes)
    if request.model == AUTO and request.weights == AUTO:
        notes.append(f"no model was named, so this is for {model.label}; to name one, add --model")

    def find_layouts(request: Request) -> list[Prediction]:
        request = choose_batch_size(request, cluster, [])
        if num_tokens is not None:
            num_sequences = int(request.batch_size) * request.grad_accum_steps
            num_sequences *= cluster.num_processes
            num_steps = math.ceil(num_tokens / (num_sequences * config.max_length))
            request = as_typed(request, max_steps=num_steps)
        return sort_layouts(request, cluster)

    layouts = find_layouts(request)
    asked = layouts[0]
    changes: Settings = {}
    suggestions = []
    is_open = request.strategy == AUTO
    if not asked.fits or (is_open and asked.plan.strategy.offloads):
        suggestions = suggest(replace(asked.plan, requested=request), cluster)
    # Less data per step or more GPUs are for the user to choose.
    if is_open and suggestions and not {*REDUCED, "num_gpus"} & suggestions[0][0].keys():
        changes, _ = suggestions[0]
        request = as_typed(request, **changes | {"strategy": AUTO})
        layouts = find_layouts(request)
    if cluster.machine.num_gpus and request.batch_size != AUTO and not request.is_set("batch_size"):
        notes.append(
            f"batch_size is {request.batch_size}, from CONFIG; to let the planner choose it, "
            "add --batch_size auto"
        )
    fitting = [choice for choice in layouts if choice.memory_fit in ("yes", "tight")] or layouts
    amount = count_work(fitting[0].plan, notes)
    return Answer(
        asked=asked,
        fitting=fitting,
        changes=changes,
        layouts=layouts,
        suggestions=suggestions,
        amount=amount,
        price=price,
        notes=tuple(dict.fromkeys(notes)),
    )


def describe_verdict(asked: Prediction, first: Prediction, changes: Settings) -> str:
    """Return whether the settings that were asked for fit, and the memory and speed of the first
    choice, which has other settings if `changes` is not empty."""
    plan = asked.plan
    verb = FIT_WORDS[judge_fit(asked, first)]
    text = f"{_kind(plan)} of {plan.model.label} {verb} on {_place(plan)}"
    if _kind(first.plan) != _kind(plan):
        text += f". {_kind(first.plan)} do"
    elif first.fits and not asked.fits:
        text += f" with these settings. With {format_settings(changes)}, they do"
    elif first.fits and plan.strategy.offloads:
        text += f" only with {plan.strategy.name}"
    return f"{text}: {_describe_needs(first)}."


def judge_fit(asked: Prediction, first: Prediction) -> MemoryFit:
    """Return whether the settings that were asked for fit. They do not if the first choice trains
    other weights, even if they would fit with offload."""
    return "no" if _kind(first.plan) != _kind(asked.plan) else asked.memory_fit


def estimate_run_s(choice: Prediction, amount: Amount | str) -> float | None:
    """Return the duration of a run in seconds, or None if its work or its speed is unknown."""
    if isinstance(amount, str) or choice.step is None:
        return None
    seconds = amount.num_steps * choice.step.seconds
    if choice.plan.config.has_reference and amount.epochs:  # a pass before the first step
        seconds += amount.num_steps / amount.epochs * choice.step.forward_s
    return seconds


def describe_total(choice: Prediction, amount: Amount | str, price: Price | None = None) -> str:
    """Return the time and cost of a whole run as a sentence, or "" if the time is unknown."""
    seconds = estimate_run_s(choice, amount)
    if isinstance(amount, str) or seconds is None:
        return ""
    work = describe_amount(amount)
    text = format_duration(seconds)
    if price is not None:
        text += f", cost {price.of(seconds * choice.plan.num_processes / 3600)}"
    return f" {work[0].upper()}{work[1:]}: about {text}."


def _kind(plan: Draft) -> str:
    """Return the weights that a plan trains."""
    config = plan.config
    if config.has_bf16_weights:
        return "All weights in bf16"
    if not config.lora_rank:
        return "All weights"
    bases = {"nf4": " on a 4-bit base", "fp8": " on an 8-bit base"}
    return f"LoRA adapters{bases.get(config.base_dtype or '', '')}"


def _place(plan: Draft) -> str:
    """Return a text such as "an RTX-4090", "2 x 8 x H100-80GB" or "2 CPU processes"."""
    count = plan.num_processes
    machine = plan.machine
    if machine.gpu_name is None:
        return plural(count, "CPU process")
    name = machine.gpu_name.removeprefix("NVIDIA ")
    if count == 1:
        is_vowel = name[0].upper() in "AEFHILMNORSX"  # as the letter is pronounced
        return f"{'an' if is_vowel else 'a'} {name}"
    num_nodes = count // plan.processes_here
    nodes = f"{num_nodes} x " if num_nodes > 1 else ""
    return f"{nodes}{plan.processes_here} x {name}"


def _describe_needs(choice: Prediction) -> str:
    """Return a text such as "fsdp, 21.3 of 79.6 GiB, 187,000 tokens/s", or how much a layout lacks
    that does not fit."""
    plan = choice.plan
    machine = plan.machine
    memory = choice.memory
    needs = []
    if machine.num_gpus and (choice.fits or choice.gpu_memory_fit == "no"):
        needs.append(f"{in_gib(memory.needed_bytes)} of {in_gib(machine.gpu_memory_bytes)} GiB")
    if not needs or choice.ram_bytes > machine.ram_bytes:
        needs.append(f"{in_gib(choice.ram_bytes)} of {in_gib(machine.ram_bytes)} GiB of RAM")
    if not choice.fits:
        needs.append(f"{in_gib(choice.missing_bytes)} GiB too much")
    elif choice.tokens_per_s is not None:
        needs.append(describe_speed(choice.tokens_per_s))
    elif machine.num_gpus:
        needs.append("speed unknown")
    texts = [name_with_mode(choice)] if plan.num_processes > 1 else []
    return ", ".join([*texts, *needs])


def build_options(plan: Draft) -> list[str]:
    """Return the options with which the script starts this plan: the preset, the typed keys, the
    keys that the planner set as if they were typed, and the layout."""
    request = plan.requested
    values = request.typed | {"strategy": plan.strategy.name} | layout_settings(plan)
    options = [] if request.preset is None else ["--preset", request.preset]
    options += [f"--{name}" for name in ("force", "strict") if getattr(request, name)]
    for name, value in values.items():
        text = str(value)
        # argparse reads values that begin with a dash as options, except for negative numbers.
        has_dash = text.startswith("-") and text != "-1"
        options += [f"--{name}={text}"] if has_dash else [f"--{name}", text]
    return options


def name_with_mode(choice: Prediction) -> str:
    """Return the name of the layout, followed by the mode of activation checkpointing unless the
    mode is "none", and by the number of blocks that it applies to unless it applies to all."""
    config = choice.plan.config
    name = layout_name(choice.plan)
    if config.activation_checkpointing == "none":
        return name
    name += f" +{config.activation_checkpointing}"
    if config.checkpointed_blocks is not None:
        name += f":{config.checkpointed_blocks}"
    return name


def describe_layout(choice: Prediction) -> JsonObject:
    """Return a layout and its predictions as JSON. `memory_bytes` are those of the rank that needs
    most."""
    plan = choice.plan
    return {
        "name": name_with_mode(choice),
        "strategy": plan.strategy.name,
        "axes": plan.mesh,
        "schedule": plan.config.pipeline_schedule if plan.mesh["pp"] > 1 else None,
        "micro_batch_size": plan.batch.micro_batch_size,
        "num_microbatches": plan.batch.num_microbatches,
        **choice.as_record(),
    }
