"""CONFIG, presets and --set merged into one validated, immutable RunConfig. No torch import.

Users write the words of CONFIG (`batch_size`, `max_length`, ...); the rest of the package reads
the fields of RunConfig (`micro_batch_size`, `seq_len`, ...). This module alone translates.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed_training.errors import UserError
from distributed_training.files import load_json, nearest, parse_json, shown, user_path
from distributed_training.sizes import SIZES

AUTO = "auto"
PIPELINE_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What one CONFIG key accepts."""

    kind: type
    """int, float, bool or str."""
    auto: bool = False
    """Whether "auto" is accepted."""
    none: bool = False
    """Whether None is accepted."""
    choices: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    extra: tuple[Any, ...] = ()
    """Single values accepted besides the range, such as -1 for "all"."""

    def check(self, key: str, value: object) -> Any:
        """Return `value` as `kind`; raise UserError naming key, value, rule and fix."""
        if (value is None and self.none) or (value == AUTO and self.auto):
            return value
        if type(value) is self.kind and value in self.extra:
            return value
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            try:
                value = float(value)
            except OverflowError:
                raise self._error(key, value) from None
        if type(value) is not self.kind:
            raise self._error(key, value)
        if self.choices and value not in self.choices:
            hint = nearest(str(value), self.choices)
            raise self._error(key, value, f"did you mean {hint!r}?" if hint else "")
        if isinstance(value, (int, float)) and not self.low <= value <= self.high:
            raise self._error(key, value)
        if isinstance(value, float) and not math.isfinite(value):
            raise self._error(key, value)
        if isinstance(value, str) and (not value.strip() or "\0" in value):
            raise self._error(key, value)
        return value

    def parse(self, key: str, text: str) -> Any:
        """Turn the text of `--set key=text` into a value and check it."""
        if self.none and text.lower() in ("none", "null"):
            return None
        if self.kind is str or (self.auto and text == AUTO):
            return self.check(key, text)
        words = {"true": True, "false": False}
        try:
            value = words[text.lower()] if text.lower() in words else parse_json(text)
        except json.JSONDecodeError:
            value = text
        return self.check(key, value)

    def describe(self) -> str:
        """What is accepted, in words."""
        if self.choices:
            text = "one of " + ", ".join(self.choices)
        else:
            text = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}[
                self.kind
            ]
            if self.low > -math.inf:
                text += f" >= {self.low:g}"
            if self.high < 2**20:  # larger bounds only guard against overflow
                text += f" and <= {self.high:g}"
        others = [repr(value) for value in self.extra]
        others += ['"auto"'] * self.auto + ["None"] * self.none
        return " or ".join([text, *others])

    def _error(self, key: str, value: object, hint: str = "") -> UserError:
        return UserError(
            f"{key}={shown(value)} is not accepted", f"{key} is {self.describe()}", hint
        )


def _key(name: str, default: Any, rule: Rule) -> Any:
    return field(default=default, metadata={"key": name, "rule": rule})


_COUNT = Rule(kind=int, low=1, high=2**31)
_AXIS = Rule(kind=int, none=True, low=1, high=2**20, extra=(-1,))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Everything that decides a run, validated. Each field names its CONFIG key first."""

    model: str = _key("model", AUTO, Rule(kind=str, auto=True, choices=tuple(SIZES)))
    """`model`: which GPT-2."""
    strategy: str = _key("strategy", "zero2", Rule(kind=str))
    """`strategy`: short name of a folder under strategies/; checked by strategy.py."""
    micro_batch_size: int = _key("batch_size", 4, _COUNT)
    """`batch_size`: sequences per GPU and micro-batch."""
    num_epochs: int = _key("epochs", 2, _COUNT)
    """`epochs`: passes over the training samples."""
    seq_len: int = _key("max_length", 512, Rule(kind=int, low=2, high=2**20))
    """`max_length`: tokens per sample."""
    num_samples: int = _key("num_samples", 1000, Rule(kind=int, low=1, high=2**62, extra=(-1,)))
    """`num_samples`: training samples per epoch; -1 for all."""
    seed: int = _key("seed", 42, Rule(kind=int, low=0, high=2**31 - 1))
    """`seed`: initial weights, data order, dropout."""
    deepspeed_config: str | None = _key("deepspeed_config", None, Rule(kind=str, none=True))
    """`deepspeed_config`: path of a DeepSpeed JSON instead of the strategy's own."""
    dataset: str = _key("dataset", AUTO, Rule(kind=str))
    """`dataset`: "auto", "wikitext-2", "embedded" or a path."""
    tokenizer: str = _key("tokenizer", AUTO, Rule(kind=str))
    """`tokenizer`: "auto", "gpt2", "embedded" or a folder."""
    weights: str = _key("weights", AUTO, Rule(kind=str))
    """`weights`: "auto", "pretrained", "random" or a folder in Hugging Face's format."""
    precision: str = _key(
        "precision", AUTO, Rule(kind=str, auto=True, choices=("bf16", "fp16", "fp32"))
    )
    """`precision`: dtype of the arithmetic; master weights are fp32 in every case."""
    grad_accum_steps: int = _key("grad_accum_steps", 1, _COUNT)
    """`grad_accum_steps`: micro-batches per GPU and optimizer step."""
    learning_rate: float | str = _key(
        "learning_rate", AUTO, Rule(kind=float, auto=True, low=0, high=10)
    )
    """`learning_rate`: peak of the schedule."""
    lr_schedule: str = _key(
        "lr_schedule", "cosine", Rule(kind=str, choices=("constant", "linear", "cosine"))
    )
    """`lr_schedule`: shape after the warm-up; linear and cosine end at 0."""
    num_warmup_steps: int = _key("warmup_steps", 10, Rule(kind=int, low=0, high=2**31))
    """`warmup_steps`: optimizer steps over which the rate rises linearly."""
    weight_decay: float = _key("weight_decay", 0.01, Rule(kind=float, low=0, high=10))
    """`weight_decay`: AdamW's, on matrices only (not on biases, norms)."""
    max_grad_norm: float | None = _key(
        "max_grad_norm", 1.0, Rule(kind=float, none=True, low=1e-9, high=1e9)
    )
    """`max_grad_norm`: clip the global gradient norm to this; None for never."""
    dropout: float = _key("dropout", 0.0, Rule(kind=float, low=0, high=0.99))
    """`dropout`: on embeddings, attention and residuals."""
    dp_replicate: int | None = _key("dp_replicate", None, _AXIS)
    """`dp_replicate`: copies of the model; None for what the strategy's JSON says."""
    dp_shard: int | None = _key("dp_shard", None, _AXIS)
    """`dp_shard`: processes that a copy's state is divided over."""
    tp: int | None = _key("tp", None, _AXIS)
    """`tp`: processes that every layer is split over."""
    pp: int | None = _key("pp", None, _AXIS)
    """`pp`: processes that the layers are dealt out to."""
    sequence_parallel: bool = _key("sequence_parallel", True, Rule(kind=bool))
    """`sequence_parallel`: with tp, split what lies between the split layers along the tokens."""
    pipeline_schedule: str = _key(
        "pipeline_schedule", "1f1b", Rule(kind=str, choices=PIPELINE_SCHEDULES)
    )
    """`pipeline_schedule`: with pp, in which order stages work on the micro-batches."""
    pipeline_cut: str | None = _key("pipeline_cut", None, Rule(kind=str, none=True))
    """`pipeline_cut`: blocks of each stage, such as "7,7,7,3"; None for equal estimated cost."""
    activation_checkpointing: str = _key(
        "activation_checkpointing", "none", Rule(kind=str, choices=("none", "full", "selective"))
    )
    """`activation_checkpointing`: what the backward pass computes again."""
    compile: bool | str = _key("compile", AUTO, Rule(kind=bool, auto=True))
    """`compile`: torch.compile."""
    pack: bool = _key("pack", True, Rule(kind=bool))
    """`pack`: full blocks of running text, or one padded line a sample."""
    max_steps: int = _key("max_steps", -1, Rule(kind=int, low=1, high=2**31, extra=(-1,)))
    """`max_steps`: stop after so many optimizer steps; -1 for whole epochs."""
    eval_every: int = _key("eval_every", 0, Rule(kind=int, low=0, high=2**31))
    """`eval_every`: evaluate every so many steps besides each epoch's end; 0 for never."""
    eval_samples: int = _key("eval_samples", 200, Rule(kind=int, low=1, high=2**31, extra=(-1,)))
    """`eval_samples`: validation samples used; -1 for all."""
    generate: str | None = _key("generate", "The ", Rule(kind=str, none=True))
    """`generate`: prompt of the sample that is printed at the end; None for none."""
    output_dir: str = _key("output_dir", "runs", Rule(kind=str))
    """`output_dir`: each run gets a folder of its own in here."""
    offload_dir: str | None = _key("offload_dir", None, Rule(kind=str, none=True))
    """`offload_dir`: where infinity keeps its files; None for `output_dir`/.offload."""
    checkpoint_every: int | None = _key(
        "checkpoint_every", None, Rule(kind=int, none=True, low=1, high=2**31, extra=(0,))
    )
    """`checkpoint_every`: steps; None for each epoch's end, 0 for never."""
    keep_checkpoints: int = _key("keep_checkpoints", 1, Rule(kind=int, low=1, high=1000))
    """`keep_checkpoints`: older ones are deleted."""
    export: bool = _key("export", True, Rule(kind=bool))
    """`export`: write hf/ in Hugging Face's format at the end."""
    resume: str | None = _key("resume", None, Rule(kind=str, none=True))
    """`resume`: None, "auto" (newest unfinished run of the same work) or a run's folder."""
    log_to: str | None = _key(
        "log_to", None, Rule(kind=str, none=True, choices=("tensorboard", "wandb"))
    )
    """`log_to`: further place for the metrics."""

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            spec.metadata["rule"].check(spec.metadata["key"], getattr(self, spec.name))

    def to_user_words(self) -> dict[str, Any]:
        """The same values under CONFIG's keys, in CONFIG's order."""
        return {spec.metadata["key"]: getattr(self, spec.name) for spec in dataclasses.fields(self)}


KEYS: dict[str, tuple[str, Rule]] = {
    spec.metadata["key"]: (spec.name, spec.metadata["rule"])
    for spec in dataclasses.fields(RunConfig)
}

# What does not change the work itself, only where state lives or what is written down.
_NOT_WORK = {
    "strategy", "batch_size", "grad_accum_steps", "deepspeed_config", "dp_replicate", "dp_shard",
    "tp", "pp", "sequence_parallel", "pipeline_schedule", "pipeline_cut",
    "activation_checkpointing",
    "compile", "eval_every", "eval_samples", "generate", "output_dir", "offload_dir",
    "checkpoint_every", "keep_checkpoints", "export", "resume", "log_to",
}  # fmt: skip


def describe_work(config: RunConfig, global_batch_size: int) -> dict[str, Any]:
    """The keys that must agree before two runs may be compared, with the global batch size."""
    words = config.to_user_words()
    work = {key: value for key, value in words.items() if key not in _NOT_WORK}
    return {**work, "global_batch_size": global_batch_size}


def build_config(
    config: Mapping[str, Any], *, preset: str | None = None, overrides: Iterable[str] = ()
) -> RunConfig:
    """Merge CONFIG, a preset file and `key=value` texts, later ones winning.

    Raises UserError for an unknown key, a value that its key does not accept, or a preset that
    is missing or is not a JSON object.
    """
    values: dict[str, Any] = {}
    for key, value in config.items():
        field_name, rule = _lookup(key, "CONFIG")
        values[field_name] = rule.check(key, value)
    if preset is not None:
        for key, value in _load_preset(preset).items():
            field_name, rule = _lookup(key, preset)
            values[field_name] = rule.check(key, value)
    for text in overrides:
        key, equals, raw = text.partition("=")
        if not equals:
            raise UserError(f"--set {shown(text)} has no '='", fix="type --set key=value")
        field_name, rule = _lookup(key.strip(), "--set")
        values[field_name] = rule.parse(key.strip(), raw if rule.kind is str else raw.strip())
    return RunConfig(**values)


def _lookup(key: object, where: str) -> tuple[str, Rule]:
    if isinstance(key, str) and key in KEYS:
        return KEYS[key]
    hint = nearest(key, KEYS) if isinstance(key, str) else None
    raise UserError(
        f"{where} has the unknown key {shown(key)}",
        fix=f"did you mean {hint!r}?" if hint else f"the keys are {', '.join(KEYS)}",
    )


def _load_preset(path: str) -> dict[str, Any]:
    document = load_json(user_path("preset", path), "preset")
    if not isinstance(document, dict):
        raise UserError(f"preset {path} is not a JSON object", fix='write {"key": value, ...}')
    return {key: value for key, value in document.items() if key != "_comment"}
