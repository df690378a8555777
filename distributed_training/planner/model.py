"""Choose the model for a run, and the settings that depend on the model.

This module does not import torch."""

import math
from pathlib import Path
from typing import Any

from distributed_training.models import ModelSpec, find_model
from distributed_training.models.adapters import base_name, is_adapter, read_adapters
from distributed_training.models.config_file import CONFIG_FILE
from distributed_training.plan.schedules import SCHEDULES
from distributed_training.settings.config import AUTO, Request, with_values
from distributed_training.settings.errors import UserError
from distributed_training.settings.machine import Machine
from distributed_training.settings.request import load_preset
from distributed_training.settings.strategies import Strategy

WORDS_PRESET = "words"  # for training on a small amount of text without a GPU
# Keys in WORDS_PRESET that are ignored here
PRESET_KEEPS = {"dataset", "model", "strategy", "generate", "compile", "weights", "tokenizer"}
CPU_EVAL_SAMPLES = 50  # evaluation takes 0.5 s on two cores with 512 tokens per sample
SMALL_GPU_BYTES = 12 * 2**30  # with less memory, "auto" chooses gpt2 instead of gpt2-medium


def choose_model(
    config: Request,
    machine: Machine,
    num_processes: int,
    strategy: Strategy | None,
    notes: list[str],
) -> tuple[Request, ModelSpec]:
    """Return CONFIG, with a model chosen if `model` is "auto", and the model's specification. If
    the model is chosen for a CPU, also choose training settings for a local dataset. If training
    continues adapters, the adapters determine the LoRA keys. `strategy` is None if the planner
    still has to choose the strategy. Raises UserError for an unknown model."""
    decided = _continue_adapters(config, notes)
    if decided.get("model", config.model) != AUTO:
        pass
    elif machine.num_gpus and machine.gpu_memory_bytes >= SMALL_GPU_BYTES:
        decided["model"] = "gpt2-medium"
    elif machine.num_gpus:
        decided["model"] = "gpt2"
        notes.append("model is gpt2 instead of gpt2-medium, because the GPU has less than 12 GiB")
    else:
        decided |= _choose_for_cpu(config, num_processes, strategy, notes)
    config = with_values(config, **decided)
    return config, find_model(config.model)


def _choose_for_cpu(
    config: Request, num_processes: int, strategy: Strategy | None, notes: list[str]
) -> dict[str, Any]:
    """Return the model for a CPU, and settings for a local dataset or for a short evaluation."""
    model = "gpt2-tiny"
    num_stages = _num_stages(config, strategy, num_processes) if strategy else 1
    if num_stages > find_model(model).size.num_layers:
        model = "gpt2-tiny-4-blocks"
    notes.append(f"no GPU found: training {model} on the CPU (a smoke test, not a result)")
    closed = PRESET_KEEPS.union(config.set_by)
    settings: dict[str, Any] = {}
    if config.preset is None and Path(config.dataset).exists():
        settings = {key: v for key, v in load_preset(WORDS_PRESET).items() if key not in closed}
        values = ", ".join(f"{key} {value}" for key, value in settings.items())
        source = f"--preset {WORDS_PRESET}, which is for small texts"
        notes.append(f"settings that you did not give come from {source}: {values}")
    elif config.preset is None and "eval_samples" not in closed:
        settings = {"eval_samples": CPU_EVAL_SAMPLES}
    return {"model": model, **settings}


def _num_stages(config: Request, strategy: Strategy, num_processes: int) -> int:
    """Return the number of pipeline stages."""
    pp = strategy.mesh["pp"]
    if pp < 1:
        pp = num_processes // math.prod(size for size in strategy.mesh.values() if size > 0)
    name = config.pipeline_schedule
    supported = strategy.traits.schedules
    schedule = SCHEDULES[name if name in supported else supported[0]]
    return pp * schedule.stages_per_rank if pp > 1 else 1


def _continue_adapters(config: Request, notes: list[str]) -> dict[str, Any]:
    """Return the key values that a folder in `weights` determines. A folder determines the model if
    CONFIG does not name one. An adapter folder also determines the rank, alpha, targets and
    dropout. Raises UserError if CONFIG sets a different rank, alpha or targets."""
    folder = Path(config.weights)
    decided: dict[str, Any] = {}
    if config.weights in (AUTO, "pretrained", "random") or not folder.is_dir():
        return decided
    if not is_adapter(folder):
        if config.model == AUTO and (folder / CONFIG_FILE).is_file():
            decided["model"] = str(folder.resolve())
        return decided
    from distributed_training.models.peft import read_initial

    adapters = read_adapters(folder)
    if config.model == AUTO:
        decided["model"] = base_name(folder)
    spec = find_model(decided.get("model", config.model))
    initial = read_initial(spec, folder)
    targets = None if initial.targets == spec.size.matrix_names else ",".join(initial.targets)
    theirs = {
        "lora_rank": (adapters.r, initial.rank),
        "lora_alpha": (adapters.lora_alpha, initial.alpha),
        "lora_targets": (targets, targets),
    }
    for key, (shown_value, value) in theirs.items():
        given = getattr(config, key)
        if config.is_set(key) and given not in (shown_value, value):
            what = f"{key}={given!r} does not match the adapters in {folder}"
            fix = f"leave out {key}, or merge the adapters with PEFT and train new ones"
            raise UserError(what, f"the adapters have {key}={shown_value!r}", fix)
        decided[key] = value
    if not config.is_set("lora_dropout"):
        decided["lora_dropout"] = adapters.lora_dropout
    note = f"training continues the adapters in {folder}, of rank {adapters.r}, on "
    note += adapters.base_model_name_or_path
    if initial.rank != adapters.r:
        note += f". They use the memory of rank {initial.rank}, because q, k and v (or gate "
        note += "and up) each have their own A matrix"
    notes.append(note)
    return decided
