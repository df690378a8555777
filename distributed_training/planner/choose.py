"""Turn CONFIG into a draft plan by resolving "auto" for the machine and the layout.

This module does not import torch."""

import importlib.util
import os
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from distributed_training.data.corpus import split_weights
from distributed_training.models import ModelSpec, find_model
from distributed_training.models.adapters import base_name, is_adapter
from distributed_training.models.config_file import CONFIG_FILE
from distributed_training.models.size import ModelSize
from distributed_training.plan.plan import Draft
from distributed_training.planner.conflicts import check_settings
from distributed_training.planner.layouts import (
    OPEN_BATCH,
    Candidate,
    Settings,
    build_stages,
    fill_mesh,
    split_batch,
)
from distributed_training.predict.predict import Cluster, Prediction
from distributed_training.settings.config import (
    AUTO,
    CAPPED_NUM_SAMPLES,
    Config,
    DraftConfig,
    Request,
    with_values,
)
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import parse_as, plural
from distributed_training.settings.machine import Machine
from distributed_training.settings.request import load_preset

WORDS_PRESET = "words"  # for training on a small amount of text without a GPU
# Keys in WORDS_PRESET that are ignored here
IGNORED_PRESET_KEYS = {
    "dataset",
    "model",
    "strategy",
    "generate",
    "compile",
    "weights",
    "tokenizer",
}
CPU_EVAL_SAMPLES = 50  # evaluation takes 0.5 s on two cores with 512 tokens per sample
SMALL_GPU_BYTES = 12 * 2**30  # with less memory, "auto" chooses gpt2 instead of gpt2-medium
MIN_LOSS_CHUNK = 1024  # tokens; matrix multiplications with fewer tokens are slower
# Values until `_choose_switches` has decided
SWITCHES_OFF: Settings = {
    "compile": False,
    "async_tp": False,
    "cuda_graphs": False,
    "loss_chunk_tokens": 0,
}
LOSS_CHUNK_COST = 0.01  # maximum cost, as a fraction of the step time


def choose_model(request: Request, machine: Machine, notes: list[str]) -> tuple[Request, ModelSpec]:
    """Return CONFIG with a model in place of "auto", and the model's specification.

    If `model` is "auto", the folder that `weights` names determines the model. If `weights` names
    no folder, the machine determines the model. On a machine without GPUs, other keys that the user
    did not set may also change. If a run continues to train adapters, the adapters determine the
    LoRA keys. Raises UserError for an unknown model and if `weights` names no folder."""
    folder = Path(request.weights)
    names_folder = request.weights not in (AUTO, "pretrained", "random")
    if names_folder and not folder.is_dir():
        raise UserError(
            f"weights={request.weights!r} is not a folder",
            fix="set weights to a folder, or to auto",
        )
    continues_adapters = names_folder and is_adapter(folder)
    settings: Settings = {}
    name = request.model
    if name == AUTO:
        name = "gpt2-medium"
        if continues_adapters:
            name = base_name(folder)
        elif names_folder and (folder / CONFIG_FILE).is_file():
            name = str(folder.resolve())
        elif not machine.num_gpus:
            name = "gpt2-tiny"
            settings = _choose_for_cpu(request, notes)
        elif machine.gpu_memory_bytes < SMALL_GPU_BYTES:
            name = "gpt2"
            notes.append(
                "model is gpt2 instead of gpt2-medium, because the GPU has less than 12 GiB"
            )
    model = find_model(name)
    if model.has_own_code:
        notes.append(
            f"the code that {model.label}'s config.json names in auto_map is not run, because "
            "transformers has the same model"
        )
    if model.hub_id and name not in (model.label, model.hub_id):
        notes.append(f"model {name!r} is {model.hub_id}")
    max_length = settings.get("max_length", request.max_length)
    if max_length > model.size.num_positions and not request.is_set("max_length"):
        settings["max_length"] = model.size.num_positions
        notes.append(f"max_length is {model.size.num_positions}, the model's context length")
    elif max_length > model.size.num_positions and request.model == AUTO:
        what = f"no model was named, and {name} has a context of {model.size.num_positions} tokens"
        raise UserError(what, fix="name a model, such as --model Qwen/Qwen3-4B")
    size = model.size
    if request.lora_rank and request.lora_targets and not continues_adapters:
        size.check_targets(request.lora_targets)
    if request.lora_rank:
        targets = request.lora_targets
        adapted = [len(kind.layers) for kind in size.kinds if kind.adapted_matrices(targets)]
        if sum(adapted) < size.num_layers:
            notes.append(
                f"lora_targets adapts only {sum(adapted)} of the model's {size.num_layers} "
                "blocks. The others have matrices with other names"
            )
        note_experts(size, request, notes)
    if size.has_linear_attention and machine.num_gpus and not importlib.util.find_spec("fla"):
        notes.append("the model's linear attention needs: pip install flash-linear-attention")
    if continues_adapters:
        from distributed_training.models.peft import keys_to_continue

        adapter_keys, note = keys_to_continue(request, model, folder)
        settings |= adapter_keys
        notes.append(note)
    return with_values(request, model=name, **settings), model


def _choose_for_cpu(request: Request, notes: list[str]) -> Settings:
    """Return settings for keys that the user did not set, for training gpt2-tiny on a CPU. If the
    dataset is a local path, the settings come from the preset WORDS_PRESET, which is
    for small datasets. Otherwise, training and evaluation use few samples. If CONFIG names a
    preset, no settings are returned."""
    notes.append(
        "no GPU was found, so gpt2-tiny is trained on the CPU. A model of this size learns words, "
        "but not coherent text"
    )
    if request.preset is not None:
        return {}
    if any(map(os.path.exists, split_weights(request.dataset))):
        excluded_keys = IGNORED_PRESET_KEYS.union(request.set_keys)
        if request.is_set("epochs"):  # the preset's limit would end the run before these epochs
            excluded_keys |= {"max_steps"}
        settings = {
            key: v for key, v in load_preset(WORDS_PRESET).items() if key not in excluded_keys
        }
        values = ", ".join(f"{key} {value}" for key, value in settings.items())
        source = f"--preset {WORDS_PRESET}, which is for small datasets"
        notes.append(f"settings that you did not set come from {source}: {values}")
    else:
        defaults = {"eval_samples": CPU_EVAL_SAMPLES, "num_samples": CAPPED_NUM_SAMPLES}
        settings = {key: value for key, value in defaults.items() if key not in request.set_keys}
        if "num_samples" in settings:
            notes.append(
                f"without a GPU, a first run trains on at most {CAPPED_NUM_SAMPLES:,} samples "
                "(num_samples)"
            )
    return settings


def lay_out(candidate: Candidate, cluster: Cluster, notes: list[str] | None = None) -> Draft:
    """Return a draft plan for a candidate, whose CONFIG must have a batch size. An axis of size -1
    gets the remaining processes. Messages for the user are appended to `notes`. Raises UserError if
    the number of processes does not fit the mesh, or if settings are incompatible."""
    notes = [] if notes is None else notes
    machine = cluster.machine
    num_processes = cluster.num_processes
    processes_here = cluster.processes_per_node
    request = candidate.request
    model = candidate.model
    strategy = candidate.strategy
    options = strategy.options(request.engine_options)
    mesh = fill_mesh(candidate, num_processes)
    candidate = replace(candidate, mesh=mesh)
    stages = build_stages(candidate)
    batch = split_batch(candidate)
    resolved: Settings = {key: getattr(batch, key) for key in OPEN_BATCH}
    if request.precision == AUTO:
        dtype_on_gpu = "bf16" if machine.compute_capability >= (8, 0) else "fp16"
        resolved["precision"] = dtype_on_gpu if machine.num_gpus else "fp32"
    if request.pipeline_schedule == AUTO:
        resolved["pipeline_schedule"] = candidate.schedule_name
    # Config's own method leaves out the options of the strategy's engine.
    config = parse_as(DraftConfig, Config.to_key_values(request) | resolved | SWITCHES_OFF)
    output_dir = Path(config.output_dir)
    timestamp = time.strftime("%Y%m%d-%H%M%S")
    run_dir = output_dir / f"{timestamp}-{strategy.name}-{model.label}-x{num_processes}"
    offload_dir = None
    if strategy.swaps_to_disk:
        parent = Path(config.offload_dir or output_dir / ".offload").absolute()
        # The name must be unique to this run.
        offload_dir = parent / f"{run_dir.name}-{uuid.uuid4().hex[:8]}"
    only_copies = candidate.only_copies
    averages_gradients = not strategy.traits.uses_zero and batch.num_replicas * mesh["cp"] > 1
    draft = Draft(
        requested=request,
        config=config,
        strategy=strategy,
        model=model,
        machine=machine,
        num_processes=num_processes,
        processes_here=processes_here,
        mesh=mesh,
        batch=batch,
        stages=stages,
        only_copies=only_copies,
        uses_ddp=averages_gradients and only_copies,
        uses_fsdp=averages_gradients and not only_copies,
        output_dir=output_dir,
        run_dir=run_dir,
        offload_dir=offload_dir,
        engine_options=request.engine_options,
        steps_between_exchanges=options.steps_between_exchanges(),
        engine_bytes_per_parameter=options.bytes_per_parameter(batch.num_replicas),
    )
    return complete(draft, notes)


def with_checkpointing(choice: Prediction, **settings: Any) -> Prediction:
    """Return a layout with other settings for activation checkpointing, on which neither the mesh
    nor the batch depends. Raises UserError if settings are incompatible."""
    draft = choice.plan.with_config(**settings)
    draft = replace(draft, requested=draft.requested.model_copy(update=settings))
    return Prediction(complete(draft, []), choice.rates)


def complete(draft: Draft, notes: list[str]) -> Draft:
    """Return a draft with the switches that follow from its other fields, after checking that its
    settings can be combined."""
    draft = draft.with_config(**_choose_switches(draft, notes))
    tp = draft.mesh["tp"]
    processes_here = draft.processes_here
    if processes_here % tp:
        notes.append(
            f"tp={tp} spans several machines, so every layer waits for the network four times. "
            f"Set tp to a divisor of {processes_here}, and use another axis for the remaining "
            "factor"
        )
    check_settings(draft, notes)
    return draft


def _choose_loss_chunk(plan: Draft) -> int:
    """Return the number of tokens per chunk of the loss, or 0 to compute the loss of all tokens at
    once.

    For each chunk after the first, the gradient of the output layer's weights is read and written
    once more. On a GPU, this takes as long as the layer's three matrix multiplications for about
    150 tokens. This estimate assumes that, for P weights, `4 * P` bytes are read and written at 3
    TB/s. The matrix multiplications need `6 * P` FLOPs per token at 680 TFLOP/s."""
    config = plan.config
    # Under gpipe, m gradients of the output layer would be kept until the backward pass.
    keeps_all_gradients = plan.mesh["pp"] > 1 and config.pipeline_schedule == "gpipe"
    if plan.machine.num_gpus == 0 or keeps_all_gradients:
        return 0
    size = plan.size
    head_parameters = size.padded_vocab_size * size.hidden_size
    head_share = 0.0
    if not config.lora_rank:
        head_share = head_parameters / (head_parameters + size.block_parameters)
    chunk = MIN_LOSS_CHUNK
    while chunk < head_share * 150 / LOSS_CHUNK_COST:
        chunk *= 2
    num_tokens = plan.batch.micro_batch_size * config.max_length // plan.mesh["cp"]
    return chunk if num_tokens >= 2 * chunk else 0


def _choose_switches(plan: Draft, notes: list[str]) -> Settings:
    """Return the values of `compile`, `async_tp`, `cuda_graphs` and `loss_chunk_tokens`, with
    "auto" resolved. Raises UserError if CONFIG enables a switch that cannot be used."""
    request = plan.requested
    capability = plan.machine.compute_capability
    on_gpu = plan.machine.num_gpus > 0
    can_compile = on_gpu and capability >= (7, 0)
    obstacle = ""
    if plan.strategy.fetches_parameters:
        obstacle = f"strategy={plan.config.strategy!r}, which fetches parameters while a block runs"
    compiled = _decide_switch(request, "compile", can_compile, obstacle, notes)
    obstacle = _async_tp_obstacle(plan, compiled)
    async_tp = _decide_switch(request, "async_tp", capability == (9, 0), obstacle, [])
    graphs = _decide_switch(request, "cuda_graphs", on_gpu, _graph_obstacle(plan), notes)
    chunk = request.loss_chunk_tokens
    return {
        "compile": compiled,
        "async_tp": async_tp,
        "cuda_graphs": graphs,
        "loss_chunk_tokens": _choose_loss_chunk(plan) if chunk == AUTO else chunk,
    }


def _decide_switch(
    request: Request, key: str, is_supported: bool, obstacle: str, notes: list[str]
) -> Any:
    """Return the value of `key`. "auto" becomes True if `is_supported` is true and `obstacle` is
    empty. If only the obstacle prevents this, add a note. Raises UserError if CONFIG enables the
    key and `obstacle` is not empty."""
    value = getattr(request, key)
    if value == AUTO:
        if is_supported and obstacle:
            notes.append(f"{key} is off, because it cannot be used with {obstacle}")
        return is_supported and not obstacle
    if value and obstacle:
        raise UserError(
            f"{key}={value!r} cannot be used with {obstacle}", fix=f"set {key} to auto or False"
        )
    return value


def _async_tp_obstacle(plan: Draft, compiled: Any) -> str:
    tp = plan.mesh["tp"]
    num_gpus = plan.machine.num_gpus
    if tp == 1:
        return "tp=1, which has no communication to overlap"
    if num_gpus == 0:
        return "a CPU"
    if not compiled:
        return "compile=False"
    if num_gpus % tp:
        return f"tp={tp} across machines with {plural(num_gpus, 'GPU')} each"
    return ""


def _graph_obstacle(plan: Draft) -> str:
    """Return the reason why a step cannot be captured as one CUDA graph, or "" if there is no such
    reason. For example, a step that waits for the host cannot be captured."""
    config = plan.config
    recomputes = config.activation_checkpointing != "none"
    if not plan.strategy.traits.averages_with_torch:
        return f"strategy={config.strategy!r}, whose engine launches its own kernels"
    if config.gradient_compression != "none":
        return "gradient_compression, which runs hooks on the host"
    has_dropout = config.dropout > 0 or config.lora_dropout > 0
    if has_dropout and (plan.mesh["tp"] > 1 or recomputes):
        return "dropout under tp or activation checkpointing, which sets random generators"
    return "a CPU" if plan.machine.num_gpus == 0 else ""


def note_experts(size: ModelSize, request: Request, notes: list[str]) -> None:
    """Add notes about what is special about LoRA on a mixture of experts."""
    names = size.stack_names()
    if not names:
        return
    if not size.adapted_stack_names(request.lora_targets):
        count = size.num_trained_parameters(request.lora_rank, ",".join(names))
        notes.append(
            f"the experts stay as they are. Adapters of {', '.join(names)} (add them to "
            f"lora_targets) have {count / 1e6:,.0f}M parameters"
        )
    elif not size.separates_experts(request.lora_targets):
        notes.append(
            "vLLM reads adapters of all experts in one tensor only for some models, such as "
            "gpt_oss: serve merged/ for others"
        )
    if request.has_quantized_base:
        notes.append("PEFT does not quantize experts, to which these adapters fit: serve merged/")
