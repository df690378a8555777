"""Turn CONFIG into a draft plan by resolving "auto" for the machine and the layout.

This module does not import torch."""

import contextlib
import math
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from distributed_training.models import HUB_PREFIX, find_model
from distributed_training.plan.orders import time_orders
from distributed_training.plan.plan import Draft
from distributed_training.plan.schedules import FoundOrders
from distributed_training.planner.idle import check_settings
from distributed_training.planner.layouts import OPEN_BATCH, Candidate, Settings, divide
from distributed_training.planner.search import search_orders
from distributed_training.predict.costs.pp import message_s
from distributed_training.predict.predict import Cluster
from distributed_training.predict.rates import rates_of
from distributed_training.predict.speed import Work
from distributed_training.settings.config import AUTO, KEYS, RunConfig, validate
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import plural
from distributed_training.settings.machine import Machine, known_gpu
from distributed_training.settings.strategies import strategy_options

MIN_LOSS_CHUNK = 1024  # tokens; matrix multiplications with fewer tokens are slower
LOSS_CHUNK_COST = 0.01  # maximum cost, as a fraction of the step time
# Values for "auto" as functions of the hidden size d, as in the Hugging Face Trainer
SIZES = {
    "reduce_bucket_size": lambda d: d * d,
    "stage3_prefetch_bucket_size": lambda d: int(0.9 * d * d),
    "stage3_param_persistence_threshold": lambda d: 10 * d,
}


def lay_out(candidate: Candidate, cluster: Cluster, notes: list[str] | None = None) -> Draft:
    """Return a draft plan for a candidate, whose CONFIG must have a batch size. If the candidate
    has its strategy's mesh, an axis of size -1 gets the remaining processes. Messages for the user
    are appended to `notes`. Raises UserError if the number of processes does not fit the mesh, or
    if settings are incompatible."""
    notes = [] if notes is None else notes
    machine = cluster.machine
    num_processes = cluster.num_processes
    processes_here = cluster.processes_a_node
    given = candidate.config
    model = candidate.model
    hidden_size = model.size.hidden_size
    mesh, layout, batch = divide(candidate, num_processes)
    document = _fill_sizes(candidate.strategy.document, hidden_size)
    strategy = replace(candidate.strategy, document=document)
    resolved: Settings = {"precision": _choose_precision(given.precision, machine)}
    if given.pipeline_schedule == AUTO:
        resolved["pipeline_schedule"] = candidate.schedule_name
    if given.base_dtype == AUTO:
        resolved["base_dtype"] = None
    config = given.model_copy(update=resolved)
    candidate = Candidate(config=config, strategy=strategy, model=model, mesh=mesh)
    _check_model(candidate)
    _check_strategy(candidate)
    _check_base(candidate)
    _check_loss_chunks(candidate)
    options = strategy_options(strategy.name)(**given.engine_options)
    check_settings(given, candidate, options, notes)
    options.check(config.precision, hidden_size)
    decided = {name: getattr(config, name) for name in KEYS}
    decided |= _choose_switches(candidate, machine, notes)
    decided |= batch.model_dump(include=set(OPEN_BATCH))
    if given.loss_chunk_tokens == AUTO:
        chunk = _choose_loss_chunk(candidate, machine, batch.micro_batch_size)
        decided["loss_chunk_tokens"] = chunk
    decided_config = validate(RunConfig, decided, KEYS)
    tp = mesh["tp"]
    if processes_here % tp:
        notes.append(
            f"tp={tp} spans several machines, so every layer waits for the network four times. "
            f"Set tp to a divisor of {processes_here}, and use another axis for the remaining "
            "factor"
        )
    output_dir = Path(decided_config.output_dir)
    began = time.strftime("%Y%m%d-%H%M%S")
    run_dir = output_dir / f"{began}-{strategy.name}-{model.label}-x{num_processes}"
    offload_dir = None
    if strategy.swaps_to_disk:
        parent = Path(decided_config.offload_dir or output_dir / ".offload").absolute()
        # The name must be unique to this run.
        offload_dir = parent / f"{run_dir.name}-{uuid.uuid4().hex[:8]}"
    only_copies = mesh["dp_replicate"] == num_processes
    averages = not strategy.traits.rounds_weights and batch.num_replicas > 1
    draft = Draft(
        requested=given,
        config=decided_config,
        strategy=strategy,
        model=model,
        machine=machine,
        num_processes=num_processes,
        processes_here=processes_here,
        mesh=mesh,
        batch=batch,
        layout=layout,
        only_copies=only_copies,
        uses_ddp=averages and only_copies,
        uses_fsdp=averages and not only_copies,
        output_dir=output_dir,
        run_dir=run_dir,
        offload_dir=offload_dir,
        from_defaults=tuple(key for key, who in given.set_by.items() if who == "strategy"),
        engine_options=given.engine_options,
        steps_between_exchanges=options.steps_between_exchanges(),
        engine_bytes_per_parameter=options.bytes_per_parameter(batch.num_replicas),
    )
    length = decided_config.max_length
    if length % draft.tp_parts[1]:
        size = batch.micro_batch_size
        what = f"neither max_length={length} nor a micro-batch of {size} is a multiple of tp={tp}"
        why = "sequence_parallel gives every rank the same number of samples or tokens"
        fix = f"set max_length to {length // tp * tp or tp} or sequence_parallel to False"
        raise UserError(what, why, fix)
    return replace(draft, orders=_time_orders(draft, cluster)) if draft.schedule.timed else draft


def _fill_sizes(document: Mapping[str, Any], hidden_size: int) -> dict[str, Any]:
    """Return the JSON after replacing each "auto" ZeRO size with the value that the Hugging Face
    Trainer uses."""
    zero = document.get("zero_optimization", {})
    sizes = {name: size(hidden_size) for name, size in SIZES.items() if zero.get(name) == AUTO}
    return {**document, "zero_optimization": {**zero, **sizes}} if sizes else dict(document)


def _choose_precision(precision: str, machine: Machine) -> str:
    on_gpu = machine.num_gpus > 0
    has_bf16 = machine.compute_capability >= (8, 0)
    if precision == AUTO:
        if not on_gpu:
            return "fp32"
        return "bf16" if has_bf16 else "fp16"
    if precision == "fp16" and not on_gpu:
        raise UserError("precision='fp16' needs a GPU", fix="set precision to fp32")
    if precision == "bf16" and on_gpu and not has_bf16:
        what = f"precision='bf16' is not supported by {machine.gpu_name}"
        raise UserError(what, "bf16 needs compute capability 8.0", "set precision to fp16")
    return precision


def _refuse(candidate: Candidate, key: str, other: str, why: str, fix: str) -> NoReturn:
    value = getattr(candidate.config, key)
    raise UserError(f"{key}={value!r} cannot be used with {other}", why, fix)


def _check_model(candidate: Candidate) -> None:
    config = candidate.config
    size = candidate.model.size
    named = f"model={config.model!r}"
    if config.max_length > size.num_positions:
        why = f"the model has {size.num_positions} positions"
        fix = f"set max_length to {size.num_positions} or less"
        # transformers' implementation has sliding-window attention, so longer samples are possible.
        hub_name = f"{HUB_PREFIX}{config.model}"
        with contextlib.suppress(UserError):
            if config.max_length <= find_model(hub_name).size.num_positions:
                fix += f", or model to {hub_name!r}"
        _refuse(candidate, "max_length", named, why, fix)
    if config.lora_rank:
        size.adapted(config.lora_targets)


def _check_strategy(candidate: Candidate) -> None:
    config = candidate.config
    strategy = candidate.strategy
    here = f"strategy={config.strategy!r}"
    if config.lora_rank > 0 and strategy.swaps_to_disk and config.precision == "fp32":
        other = f"{here} and precision='fp32'"
        why = "DeepSpeed rounds the frozen weights that it stores in files to 16 bits"
        _refuse(candidate, "lora_rank", other, why, "set precision to bf16, or strategy to offload")
    if config.optimizer != "adamw" and not strategy.traits.compacts_moments:
        fix = "set optimizer to adamw, or strategy to dp, fsdp, tp or pp"
        why = "the strategy's engine keeps the optimizer state in fp32"
        _refuse(candidate, "optimizer", here, why, fix)
    if config.on_nonfinite == "skip" and not strategy.traits.leaves_out_updates:
        why = "the strategy's engine updates the weights before it reports the gradient norm"
        _refuse(candidate, "on_nonfinite", here, why, "set on_nonfinite to rollback or stop")


def _check_base(candidate: Candidate) -> None:
    """Raise UserError if the requested dtype for frozen weights cannot be used."""
    config = candidate.config
    key = "base_dtype"
    if config.base_dtype is None:
        return
    if config.lora_rank == 0:
        why = "without LoRA, no weights are frozen"
        _refuse(candidate, key, "lora_rank=0", why, "set lora_rank to 16, or base_dtype to None")
    if config.base_dtype == "bf16":
        if config.precision != "bf16":
            other = f"precision={config.precision!r}"
            why = f"frozen weights then have the dtype {config.precision}"
            _refuse(candidate, key, other, why, "set base_dtype to None")
        return
    split = {axis: size for axis, size in candidate.mesh.items() if axis in ("pp", "tp")}
    if not candidate.strategy.traits.builds_on_device or set(split.values()) != {1}:
        here = f"strategy={config.strategy!r}"
        why = "quantized layers must stay whole or be sharded by FSDP"
        _refuse(candidate, key, here, why, "set strategy to dp or fsdp")
    matrices = candidate.model.size.block_matrices
    if odd := [columns for _, columns in matrices if columns % 64]:
        why = f"each group of 64 values shares a scale, but a matrix has {odd[0]} columns, "
        why += "which is not a multiple of 64"
        _refuse(candidate, key, f"model={config.model!r}", why, "set base_dtype to None")


def _check_loss_chunks(candidate: Candidate) -> None:
    config = candidate.config
    if config.loss_chunk_tokens not in (0, AUTO) and config.precision == "fp16":
        why = "gradients of chunks would be computed before the loss is scaled"
        fix = "set precision to bf16, or loss_chunk_tokens to 0"
        _refuse(candidate, "loss_chunk_tokens", "precision='fp16'", why, fix)


def _choose_loss_chunk(candidate: Candidate, machine: Machine, micro_batch_size: int) -> int:
    """Return the number of tokens whose logits are in memory at the same time. 0 means all tokens.

    For each chunk after the first, the gradient of the output layer's weights is read and written
    once more. On a GPU, this takes as long as the layer's three matrix multiplications for about
    150 tokens. For P weights in the output layer, these times correspond to 4 P bytes at 3 TB/s and
    6 P FLOPs per token at 680 TFLOP/s."""
    config = candidate.config
    # Under gpipe, m gradients of the output layer would be kept until the backward pass.
    waits = candidate.mesh["pp"] > 1 and config.pipeline_schedule == "gpipe"
    if machine.num_gpus == 0 or config.precision == "fp16" or waits:
        return 0
    size = candidate.model.size
    rows = size.padded_vocab_size * size.hidden_size
    share = 0.0 if config.lora_rank else rows / (rows + size.num_layers * size.block_parameters)
    chunk = MIN_LOSS_CHUNK
    while chunk < share * 150 / LOSS_CHUNK_COST:
        chunk *= 2
    return chunk if micro_batch_size * config.max_length >= 2 * chunk else 0


def _choose_switches(candidate: Candidate, machine: Machine, notes: list[str]) -> dict[str, Any]:
    """Return the values of `compile`, `async_tp` and `cuda_graphs`, with "auto" resolved. Raises
    UserError if CONFIG enables a switch that cannot be used."""
    config = candidate.config
    on_gpu = machine.num_gpus > 0

    obstacle = _compile_obstacle(candidate)
    can_compile = on_gpu and machine.compute_capability >= (7, 0)
    compiled = _decide_switch(config, "compile", can_compile, obstacle)
    if config.compile == AUTO and can_compile and obstacle:
        notes.append(f"not compiled: {obstacle}")

    obstacle = _async_tp_obstacle(candidate, machine, compiled)
    async_tp = _decide_switch(config, "async_tp", machine.compute_capability == (9, 0), obstacle)

    obstacle = _graph_obstacle(candidate, machine)
    graphs = _decide_switch(config, "cuda_graphs", on_gpu, obstacle)
    if config.cuda_graphs == AUTO and on_gpu and obstacle:
        notes.append(f"no CUDA graph: {obstacle}")
    return {"compile": compiled, "async_tp": async_tp, "cuda_graphs": graphs}


def _decide_switch(config: RunConfig, key: str, able: bool, obstacle: str) -> Any:
    """Return the value of `key`. "auto" becomes True if `able` is true and `obstacle` is empty.
    Raises UserError if CONFIG enables the key although `obstacle` is not empty."""
    value = getattr(config, key)
    if value == AUTO:
        return able and not obstacle
    if value and obstacle:
        what = f"{key}={value!r} cannot be used with {obstacle}"
        raise UserError(what, fix=f"set {key} to auto or False")
    return value


def _drops(config: RunConfig) -> bool:
    return max(config.dropout, config.lora_dropout) > 0


def _compile_obstacle(candidate: Candidate) -> str:
    """Return the reason why compiled blocks would fail or give wrong results. Return "" if there is
    none."""
    config = candidate.config
    strategy = candidate.strategy
    named = f"strategy={config.strategy!r}"
    num_processes = math.prod(candidate.mesh.values())
    if strategy.fetches_parameters:
        return f"{named}, which fetches parameters while a block runs"
    if candidate.mesh["tp"] > 1 and _drops(config) and not config.sequence_parallel:
        return (
            "dropout under tp with sequence_parallel=False, which changes the state of random "
            "generators inside a block"
        )
    if config.compile != "whole":
        return ""
    if num_processes > 1:
        return f"{num_processes} processes, which communicate before each block"
    if strategy.traits.hooks_between_blocks:
        return f"{named}, which runs hooks between blocks"
    if config.activation_checkpointing != "none":
        return f"activation_checkpointing={config.activation_checkpointing!r}"
    return ""


def _async_tp_obstacle(candidate: Candidate, machine: Machine, compiled: Any) -> str:
    tp = candidate.mesh["tp"]
    if tp == 1:
        return "tp=1, which has no communication to overlap"
    if not candidate.config.sequence_parallel:
        return "sequence_parallel=False, which has no reduce-scatter to overlap"
    if machine.num_gpus == 0:
        return "a CPU"
    if not compiled:
        return "compile=False"
    if machine.num_gpus % tp:
        return f"tp={tp} across machines with {plural(machine.num_gpus, 'GPU')} each"
    return ""


def _graph_obstacle(candidate: Candidate, machine: Machine) -> str:
    """Return the reason why a step cannot be captured as one CUDA graph. Return "" if there is
    none. A CUDA graph cannot wait for the host."""
    config = candidate.config
    recomputes = config.activation_checkpointing != "none"
    skips = config.on_nonfinite == "skip" or config.precision == "fp16"
    if not candidate.strategy.traits.replays_steps:
        return f"strategy={config.strategy!r}, whose engine launches its own kernels"
    if config.optimizer == "adamw-8bit" and skips:
        return "optimizer='adamw-8bit', which needs the host to skip an update"
    if config.gradient_compression != "none":
        return "gradient_compression, which runs hooks on the host"
    if _drops(config) and (candidate.mesh["tp"] > 1 or recomputes):
        return "dropout under tp or activation checkpointing, which sets random generators"
    return "a CPU" if machine.num_gpus == 0 else ""


def _time_orders(plan: Draft, cluster: Cluster) -> FoundOrders:
    """Find orders of a pipeline's operations that suit the predicted durations. The durations are
    for the cluster's rates or, if these rates are unknown, for an H200. The plan stores the orders,
    because ranks with different orders would deadlock."""
    work = Work(plan, cluster.rates or rates_of(known_gpu("H200")))
    costs = {key: float(cost.sum()) for key, cost in work.operations().items()}
    blocks = plan.layout.blocks_per_stage
    seconds = tuple((costs["F", s], costs["I", s], costs["W", s]) for s in range(len(blocks)))
    m = plan.batch.num_microbatches
    if plan.schedule.searched:
        return search_orders(seconds, blocks, m, message_s(work))
    return time_orders(seconds, m, message_s(work))
