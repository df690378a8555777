""" "auto" becomes what this machine and its network can do. No torch import."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from distributed_training import hub
from distributed_training.config import AUTO, RunConfig
from distributed_training.corpus import EMBEDDED, WIKITEXT
from distributed_training.errors import UserError
from distributed_training.files import check_unicode, user_path
from distributed_training.layout_rules import SCHEDULE_RULES
from distributed_training.machine import Machine
from distributed_training.sizes import SIZES
from distributed_training.strategy import Strategy
from distributed_training.tokenizer import EMBEDDED_DIR, Tokenizer
from distributed_training.topology import Topology

SMALL_GPU_BYTES = 12 * 2**30  # below this "auto" takes gpt2 instead of gpt2-medium


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A RunConfig without "auto", the folders it refers to, and what to tell the user."""

    config: RunConfig
    tokenizer_dir: Path
    weights_dir: Path | None
    """Hugging Face folder with the initial weights; None for random ones."""
    notes: tuple[str, ...]
    """Choices that were made for the user and why, one sentence each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """A RunConfig in which "auto" is left only where the network has a say (`fetch` decides)."""

    config: RunConfig
    notes: tuple[str, ...]


def settle(
    config: RunConfig,
    machine: Machine,
    strategy: Strategy,
    topology: Topology,
    *,
    processes_here: int,
) -> Settled:
    """Decide every "auto" that the machine decides; nothing is downloaded.

    Raises UserError where an explicit value is impossible here.
    """
    notes: list[str] = []
    model = _resolve_model(config, machine, notes)
    size = SIZES[model]
    if config.seq_len > size.num_positions:
        raise UserError(
            f"max_length={config.seq_len} is beyond the model",
            f"{model} has {size.num_positions} positions",
            f"set max_length to at most {size.num_positions}",
        )
    if config.generate is not None:
        check_unicode("generate", config.generate)
    settled = dataclasses.replace(
        config,
        checkpoint_every=_resolve_checkpoints(config, strategy, notes),
        model=model,
        precision=_resolve_precision(config, machine),
        compile=_resolve_compile(config, machine, strategy, topology, notes),
    )
    if processes_here % topology.tp:
        notes.append(
            f"tp={topology.tp} REACHES ACROSS MACHINES ({processes_here} processes on this one): "
            "every layer waits for the network four times; give tp a divisor of "
            f"{processes_here} and the rest to another axis"
        )
    return Settled(config=settled, notes=tuple(notes))


def fetch(settled: Settled) -> Resolved:
    """Decide what is left, tokenizer, weights and dataset; download what is asked for by name.

    Raises UserError where an explicit value is not to be had.
    """
    config, notes = settled.config, list(settled.notes)
    model = config.model
    tokenizer, tokenizer_dir = _resolve_tokenizer(config, model, notes)
    num_tokens, known = Tokenizer(tokenizer_dir).num_tokens, SIZES[model].vocab_size
    if num_tokens > known:
        raise UserError(
            f"tokenizer={tokenizer!r} has {num_tokens} tokens",
            f"{model} knows {known}",
            'set tokenizer to "embedded" or choose a larger model',
        )
    weights, weights_dir = _resolve_weights(config, model, tokenizer, notes)
    dataset = _resolve_dataset(config, notes)
    rate = config.learning_rate
    if rate == AUTO:
        tiny = model == "gpt2-tiny"
        rate = 5e-5 if weights_dir is not None else (3e-3 if tiny else 3e-4)
    resolved = dataclasses.replace(
        config, tokenizer=tokenizer, weights=weights, dataset=dataset, learning_rate=rate
    )
    return Resolved(
        config=resolved, tokenizer_dir=tokenizer_dir, weights_dir=weights_dir, notes=tuple(notes)
    )


def with_model(config: RunConfig, machine: Machine) -> RunConfig:
    """`config` with its "auto" model decided, which layouts are refused by."""
    return dataclasses.replace(config, model=_resolve_model(config, machine, []))


def _resolve_checkpoints(config: RunConfig, strategy: Strategy, notes: list[str]) -> int | None:
    """State on files is not checkpointed: DeepSpeed copies the files but not Adam's step count
    nor what was not swapped out, so a resumed run would silently differ.
    """
    if not strategy.needs_async_io:
        return config.checkpoint_every
    if config.checkpoint_every or config.resume not in (None, AUTO):
        raise UserError(
            f"strategy={config.strategy!r} cannot be resumed exactly",
            "DeepSpeed does not save all of the state that it keeps in files",
            "set checkpoint_every to 0 and resume to None; hf/ is exported at the end all the same",
        )
    if config.checkpoint_every is None:
        notes.append(f"no checkpoints: {config.strategy} cannot be resumed exactly")
    return 0


def _resolve_model(config: RunConfig, machine: Machine, notes: list[str]) -> str:
    if config.model != AUTO:
        return config.model
    if machine.num_gpus == 0:
        notes.append("no GPU found: training gpt2-tiny on the CPU (a rehearsal, not a result)")
        return "gpt2-tiny"
    if machine.gpu_memory_bytes < SMALL_GPU_BYTES:
        notes.append("the GPU has less than 12 GiB: model is gpt2 rather than gpt2-medium")
        return "gpt2"
    return "gpt2-medium"


def _resolve_precision(config: RunConfig, machine: Machine) -> str:
    bf16 = machine.compute_capability >= (8, 0)
    if config.precision == AUTO:
        return "fp32" if machine.num_gpus == 0 else "bf16" if bf16 else "fp16"
    if config.precision == "fp16" and machine.num_gpus == 0:
        raise UserError(
            "precision='fp16' needs a GPU", "CPUs here compute in fp32 or bf16", "set fp32"
        )
    if config.precision == "bf16" and machine.num_gpus and not bf16:
        raise UserError(
            f"precision='bf16' is not supported by {machine.gpu_name}",
            "it needs compute capability 8.0",
            "set fp16",
        )
    return config.precision


def _resolve_compile(
    config: RunConfig,
    machine: Machine,
    strategy: Strategy,
    topology: Topology,
    notes: list[str],
) -> bool:
    obstacle = _obstacle_to_compile(config, strategy, topology)
    if config.compile == AUTO:
        able = machine.num_gpus > 0 and machine.compute_capability >= (7, 0)
        if able and obstacle is not None:
            notes.append(f"not compiled: {obstacle[0]} {obstacle[1]}")
        return able and obstacle is None
    if config.compile and obstacle is not None:
        raise UserError(
            f"compile=True does not work with {obstacle[0]}",
            f"that {obstacle[1]}",
            "set compile to auto or False",
        )
    return bool(config.compile)


def _obstacle_to_compile(
    config: RunConfig, strategy: Strategy, topology: Topology
) -> tuple[str, str] | None:
    """(setting, what it does) where compiled blocks would be wrong or fail."""
    if strategy.offload_device("param") != "none":
        return (
            f"strategy={config.strategy!r}",
            "fetches parameters from offload while a block runs, which a graph cannot hold",
        )
    pipelined = strategy.engine == "native" and topology.pp > 1
    if pipelined and SCHEDULE_RULES[config.pipeline_schedule].splits_backward:
        return (
            f"pipeline_schedule={config.pipeline_schedule!r}",
            "computes the two halves of a backward pass apart, and a compiled one is whole",
        )
    if topology.tp > 1 and config.dropout and not config.sequence_parallel:
        return (
            "dropout under tp with sequence_parallel=False",
            "switches random number generators inside a block, which a graph cannot hold",
        )
    return None


def _resolve_tokenizer(config: RunConfig, model: str, notes: list[str]) -> tuple[str, Path]:
    if config.tokenizer == EMBEDDED or (config.tokenizer == AUTO and model == "gpt2-tiny"):
        return EMBEDDED, EMBEDDED_DIR
    if config.tokenizer not in (AUTO, "gpt2"):
        folder = user_path("tokenizer", config.tokenizer)
        if not folder.is_dir():
            raise UserError(
                f"tokenizer={config.tokenizer!r} is not a folder",
                fix='give one with vocab.json and merges.txt, or "auto", "gpt2", "embedded"',
            )
        return str(folder), folder
    try:
        return "gpt2", hub.fetch_gpt2_tokenizer()
    except OSError as error:
        if config.tokenizer != AUTO or config.weights == "pretrained":
            raise hub.cannot_fetch("tokenizer", "gpt2", error, hub.tokenizer_commands()) from None
        notes.append(
            "GPT-2's TOKENIZER IS NOT TO BE HAD "
            f"({error}): using the small one that is shipped; perplexities compare only with runs "
            "that do the same"
        )
        return EMBEDDED, EMBEDDED_DIR


def _resolve_weights(
    config: RunConfig, model: str, tokenizer: str, notes: list[str]
) -> tuple[str, Path | None]:
    if config.weights == "random":
        return "random", None
    if config.weights not in (AUTO, "pretrained"):
        return config.weights, user_path("weights", config.weights)
    published = model in hub.HUB_IDS
    if not published or tokenizer == EMBEDDED:
        why = f"{model} is not published" if not published else "they need GPT-2's tokenizer"
        if config.weights == "pretrained":
            raise UserError(
                f"weights='pretrained' is impossible with model={model!r}, tokenizer={tokenizer!r}",
                why,
                "set weights to random, or model to gpt2 and tokenizer to gpt2",
            )
        notes.append(f"weights are random: {why}")
        return "random", None
    try:
        return "pretrained", hub.fetch_weights(model)
    except OSError as error:
        if config.weights == "pretrained":
            raise hub.cannot_fetch(
                "weights", f"pretrained ({model})", error, hub.weight_commands(model)
            ) from None
        notes.append(
            f"PRETRAINED WEIGHTS ARE NOT TO BE HAD ({error}): weights are random, so this trains "
            "from scratch instead of fine-tuning"
        )
        return "random", None


def _resolve_dataset(config: RunConfig, notes: list[str]) -> str:
    if config.dataset == AUTO:
        try:
            hub.fetch_wikitext()
            return WIKITEXT
        except OSError as error:
            notes.append(
                f"WIKITEXT-2 IS NOT TO BE HAD ({error}): training on the embedded corpus, the "
                "sources and help topics of this Python"
            )
            return EMBEDDED
    if config.dataset == WIKITEXT:
        try:
            hub.fetch_wikitext()
        except OSError as error:
            raise hub.cannot_fetch("dataset", WIKITEXT, error, hub.WIKITEXT_COMMANDS) from None
    return config.dataset
