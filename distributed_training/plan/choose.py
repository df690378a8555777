"""From CONFIG to a draft: "auto" as machine and layout decide it. No torch import."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distributed_training.models import find_model
from distributed_training.plan.layouts import Candidate, build_layout, cut_batch
from distributed_training.plan.machine import Machine
from distributed_training.plan.mesh import OPEN_BATCH, fill_mesh
from distributed_training.plan.plan import Plan
from distributed_training.records.record import new_run_dir
from distributed_training.settings.config import AUTO, RunConfig, load_preset, with_values
from distributed_training.settings.errors import UserError
from distributed_training.settings.strategies import load_strategy

WORDS = "words"  # the preset for a small text and no GPU, but for these keys
KEPT = {"dataset", "model", "strategy", "generate", "compile", "weights", "tokenizer"}
CPU_EVAL_SAMPLES = 50  # of 512 tokens: half a second on two cores
SMALL_GPU_BYTES = 12 * 2**30  # below this "auto" takes gpt2 instead of gpt2-medium


def choose_model(config: RunConfig, machine: Machine, notes: list[str]) -> RunConfig:
    """Decide an "auto" model; for one's own text and no GPU how it is trained, too."""
    if config.model != AUTO:
        return config
    if machine.num_gpus and machine.gpu_memory_bytes >= SMALL_GPU_BYTES:
        return with_values(config, model="gpt2-medium")
    if machine.num_gpus:
        notes.append("the GPU has less than 12 GiB: model is gpt2 rather than gpt2-medium")
        return with_values(config, model="gpt2")
    notes.append("no GPU found: training gpt2-tiny on the CPU (a rehearsal, not a result)")
    closed = KEPT.union(config.typed, config.from_defaults)
    decided: dict[str, Any] = {}
    if not config.has_preset and Path(config.dataset).exists():
        decided = {key: v for key, v in load_preset(WORDS).items() if key not in closed}
        notes.append(
            f"what you left open is as in --preset {WORDS}, which makes words of a small text: "
            + ", ".join(f"{key} {value}" for key, value in decided.items())
        )
    elif not config.has_preset and "eval_samples" not in closed:
        decided = {"eval_samples": CPU_EVAL_SAMPLES}
    return with_values(config, model="gpt2-tiny", **decided)


def lay_out(
    given: RunConfig,
    machine: Machine,
    num_processes: int,
    processes_here: int,
    *,
    mesh: dict[str, int] | None = None,
    requested: RunConfig | None = None,
    notes: Sequence[str] = (),
) -> Plan:
    """A draft for a CONFIG whose model, strategy and batch size are known; `mesh`: another than
    the strategy's own; `requested`, `notes`: CONFIG before these were decided, and what was said.

    Raises UserError where the processes make no such mesh, or a setting does not go with it.
    """
    notes = list(notes)
    strategy = load_strategy(given)
    model = find_model(given.model)
    asked = Candidate(config=given, strategy=strategy, model=model, mesh=mesh or strategy.mesh)
    if mesh is None:
        mesh = fill_mesh(asked, num_processes)
        asked = replace(asked, mesh=mesh)
    config = _choose_settings(asked, machine, notes)
    asked = replace(asked, config=config)
    layout = build_layout(asked)
    batch = cut_batch(asked)
    tp = mesh["tp"]
    if processes_here % tp:
        notes.append(
            f"tp={tp} reaches across machines, so every layer waits for the network four times: "
            f"give tp a divisor of {processes_here} and the rest to another axis"
        )
    output_dir = Path(config.output_dir)
    run_dir = new_run_dir(output_dir, strategy.name, model.label, num_processes)
    offload_dir = None
    if strategy.swaps_to_disk:
        offload_dir = Path(config.offload_dir or output_dir / ".offload").absolute() / run_dir.name
    only_copies = mesh["dp_replicate"] == num_processes
    averages = not strategy.traits.rounded_weights and batch.num_replicas > 1
    plan = Plan(
        requested=requested or given,
        config=with_values(config, **{key: getattr(batch, key) for key in OPEN_BATCH}),
        strategy=strategy,
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
        notes=notes,
    )
    length = config.max_length
    if length % plan.tp_parts[1]:
        size = batch.micro_batch_size
        what = f"neither max_length={length} nor a micro-batch of {size} is a multiple of tp={tp}"
        why = "sequence_parallel deals out samples or tokens evenly"
        fix = f"set max_length to {length // tp * tp or tp} or sequence_parallel to False"
        raise UserError(what, why, fix)
    return plan


def _choose_settings(candidate: Candidate, machine: Machine, notes: list[str]) -> RunConfig:
    """Decide every other "auto"; UserError where an explicit value is impossible here."""
    config = candidate.config
    positions = candidate.model.size.num_positions
    if config.max_length > positions:
        what = f"max_length={config.max_length} is beyond the model: {config.model} has {positions}"
        raise UserError(what, fix=f"set max_length to at most {positions}")
    config = with_values(config, precision=_choose_precision(config, machine))
    if config.pipeline_schedule == AUTO:
        config = with_values(config, pipeline_schedule=candidate.strategy.schedule)
    candidate = replace(candidate, config=config)
    if config.lora_rank and candidate.strategy.swaps_to_disk and config.precision == "fp32":
        what = (
            f"lora_rank={config.lora_rank} with strategy={config.strategy!r} and precision='fp32'"
        )
        why = "DeepSpeed rounds frozen weights in files to 16 bits"
        raise UserError(what, why, "set precision to bf16, or strategy to offload")
    _check_exchanges(candidate)
    _check_loss(candidate)
    compiled = _choose_compile(candidate, machine, notes)
    return with_values(
        config,
        compile=compiled,
        async_tp=_choose_async_tp(candidate, machine, compiled),
        cuda_graphs=_choose_cuda_graphs(candidate, machine, notes),
    )


def _check_exchanges(candidate: Candidate) -> None:
    """Raises UserError for keys of DDP's or FSDP's exchanges where there are none, or not so."""
    config = candidate.config
    strategy = candidate.strategy
    mesh = candidate.mesh
    divided = {axis for axis in mesh if not strategy.mesh[axis] == mesh[axis] == 1}
    native = strategy.traits.uses_ddp_and_fsdp
    in_ddp = native and divided <= {"dp_replicate"}
    in_fsdp = native and "dp_shard" in divided and "pp" not in divided
    for key, off, fits, why, other in (
        ("fsdp_prefetch", 1, in_fsdp, "it is for FSDP's blocks", "fsdp"),
        ("bucket_cap_mb", None, in_ddp, "PyTorch's DDP has buckets", "dp"),
        ("gradient_compression", "none", in_ddp, "it works in PyTorch's DDP", "dp"),
    ):
        if getattr(config, key) != off and not fits:
            what = f"{_said(config, key)} does not go with strategy={config.strategy!r}"
            raise UserError(what, why, f"set it to {off}, or strategy to {other}")
    kind = config.gradient_compression
    if kind in ("none", "bf16"):
        return
    asked = _said(config, "gradient_compression")
    why = "what is not finite would stay in what is added to later gradients"
    if config.bucket_cap_mb is not None:
        what = f"{_said(config, 'bucket_cap_mb')} does not go with {asked}"
        raise UserError(what, "it takes a single bucket on CPUs", "set it to None")
    if config.precision == "fp16":
        raise UserError(f"{asked} does not go with precision='fp16'", why, "set precision to bf16")
    if config.on_nonfinite == "skip":
        fix = "set on_nonfinite to rollback or stop"
        raise UserError(f"{asked} does not go with on_nonfinite='skip'", why, fix)
    if kind == "powersgd" and config.compression_rank > candidate.model.size.hidden_size:
        what = f"compression_rank={config.compression_rank} is above that of any matrix"
        why = f"{config.model}'s have {candidate.model.size.hidden_size} columns or rows"
        raise UserError(what, why, "set it to 32 or less")


def _said(config: RunConfig, key: str) -> str:
    return f"{key}={getattr(config, key)!r}"


def _check_loss(candidate: Candidate) -> None:
    """Raises UserError for a loss in chunks where there is none."""
    config = candidate.config
    tp = candidate.mesh["tp"]
    if not config.loss_chunk_tokens:
        return
    what = f"loss_chunk_tokens={config.loss_chunk_tokens} does not go with"
    if tp > 1:
        why = f"its {tp} processes have a part of every token's logits"
        raise UserError(f"{what} tp={tp}", why, "set it to 0")
    if config.precision == "fp16":
        why = "gradients would be computed before they are scaled"
        raise UserError(f"{what} precision='fp16'", why, "set precision to bf16, or it to 0")


def _choose_precision(config: RunConfig, machine: Machine) -> str:
    on_gpu = machine.num_gpus > 0
    has_bf16 = machine.compute_capability >= (8, 0)
    if config.precision == AUTO:
        if not on_gpu:
            return "fp32"
        return "bf16" if has_bf16 else "fp16"
    if config.precision == "fp16" and not on_gpu:
        raise UserError("precision='fp16' needs a GPU", fix="set fp32")
    if config.precision == "bf16" and on_gpu and not has_bf16:
        what = f"precision='bf16' is not supported by {machine.gpu_name}"
        raise UserError(what, "it needs compute capability 8.0", "set fp16")
    return config.precision


def _choose_compile(candidate: Candidate, machine: Machine, notes: list[str]) -> bool | str:
    config = candidate.config
    strategy = candidate.strategy
    count = math.prod(candidate.mesh.values())
    obstacle = ""
    # Where compiled blocks would be wrong or fail.
    if strategy.fetches_parameters:
        obstacle = f"strategy={config.strategy!r}, which fetches parameters while a block runs"
    elif candidate.mesh["tp"] > 1 and _drops(config) and not config.sequence_parallel:
        obstacle = "dropout under tp with sequence_parallel=False: it changes generators in a block"
    elif config.compile != "whole":
        pass
    elif count > 1:
        obstacle = f"{count} processes, whose exchanges begin with each block"
    elif strategy.traits.takes_deepspeed_json:
        obstacle = f"strategy={config.strategy!r}: DeepSpeed's hooks are between blocks"
    elif config.activation_checkpointing != "none":
        obstacle = f"activation_checkpointing={config.activation_checkpointing!r}"
    able = machine.num_gpus > 0 and machine.compute_capability >= (7, 0)
    if config.compile == AUTO and able and obstacle:
        notes.append(f"not compiled: {obstacle}")
    return _switch("compile", config.compile, obstacle, able)


def _switch(key: str, asked: Any, obstacle: str, able: bool) -> Any:
    """As asked, or UserError with what is in the way; "auto" is whether it is `able` here."""
    if asked == AUTO:
        return able and not obstacle
    if asked and obstacle:
        what = f"{key}={asked!r} does not work with {obstacle}"
        raise UserError(what, fix=f"set {key} to auto or False")
    return asked


def _choose_async_tp(candidate: Candidate, machine: Machine, compiled: bool | str) -> bool:
    """Whether the compiler overlaps exchanges along tp with matrix products."""
    config = candidate.config
    tp = candidate.mesh["tp"]
    obstacle = ""
    if tp == 1:
        obstacle = "tp=1, which exchanges nothing"
    elif not config.sequence_parallel:
        obstacle = "sequence_parallel=False, whose sums are not scattered"
    elif not machine.num_gpus:
        obstacle = "a CPU"
    elif not compiled:
        obstacle = "compile=False"
    elif machine.num_gpus % tp:
        obstacle = f"tp={tp} over machines of {machine.num_gpus} GPUs"
    measured = machine.compute_capability == (9, 0)
    return bool(_switch("async_tp", config.async_tp, obstacle, measured))


def _drops(config: RunConfig) -> bool:
    return max(config.dropout, config.lora_dropout) > 0


def _choose_cuda_graphs(candidate: Candidate, machine: Machine, notes: list[str]) -> bool:
    """Whether a step is captured and replayed as one graph, which cannot ask the host anything."""
    config = candidate.config
    split = candidate.mesh["tp"] > 1 or config.activation_checkpointing != "none"
    obstacle = ""
    if not candidate.strategy.traits.replays_steps:
        obstacle = f"strategy={config.strategy!r}, whose engine launches its own kernels"
    elif config.gradient_compression != "none":
        obstacle = "gradient_compression, whose hooks run on the host"
    elif _drops(config) and split:
        obstacle = "dropout under tp or activation checkpointing, which sets random generators"
    if not machine.num_gpus:
        obstacle = obstacle or "a CPU"
    elif config.cuda_graphs == AUTO and obstacle:
        notes.append(f"no CUDA graph: {obstacle}")
    return bool(_switch("cuda_graphs", config.cuda_graphs, obstacle, True))
