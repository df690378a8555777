"""What "auto" becomes on a machine and under a layout, before anything is looked up or downloaded.

No torch import.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from distributed_training.models import ModelSize
from distributed_training.plan.machine import Machine
from distributed_training.settings.config import AUTO, RunConfig, load_preset
from distributed_training.settings.config import replace as with_values
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import user_path
from distributed_training.settings.strategies import Strategy

WORDS = "words"  # the preset for a small text and no GPU, but for these keys
KEPT = {"dataset", "model", "strategy", "generate", "compile", "weights", "tokenizer"}
SMALL_GPU_BYTES = 12 * 2**30  # below this "auto" takes gpt2 instead of gpt2-medium


def choose_model(config: RunConfig, machine: Machine, notes: list[str]) -> RunConfig:
    """Decide an "auto" model by the machine; where that is the smallest, for one's own text, also
    how it is trained."""
    if config.model != AUTO:
        return config
    model = "gpt2-medium"
    decided: dict[str, Any] = {}
    if machine.num_gpus == 0:
        notes.append("no GPU found: training gpt2-tiny on the CPU (a rehearsal, not a result)")
        model = "gpt2-tiny"
        if not config.has_preset and user_path("dataset", config.dataset).exists():
            closed = KEPT.union(config.typed, config.from_defaults)
            decided = {k: v for k, v in load_preset(WORDS).items() if k not in closed}
            notes.append(
                f"what you left open is as in --preset {WORDS}, which makes words of a small text: "
                + ", ".join(f"{key} {value}" for key, value in decided.items())
            )
    elif machine.gpu_memory_bytes < SMALL_GPU_BYTES:
        notes.append("the GPU has less than 12 GiB: model is gpt2 rather than gpt2-medium")
        model = "gpt2"
    return with_values(config, **{**decided, "model": model})


def choose_settings(
    config: RunConfig,
    machine: Machine,
    strategy: Strategy,
    size: ModelSize,
    mesh: Mapping[str, int],
    notes: list[str],
) -> RunConfig:
    """Decide every other "auto" that machine and layout decide; nothing is downloaded.

    Raises UserError where an explicit value is impossible here.
    """
    positions = size.num_positions
    if config.max_length > positions:
        what = f"max_length={config.max_length} is beyond the model: {config.model} has {positions}"
        raise UserError(what, fix=f"set max_length to at most {positions}")
    schedule = config.pipeline_schedule
    precision = _choose_precision(config, machine)
    _check_exchanges(config, precision, strategy, mesh, size)
    _check_loss(config, precision, mesh)
    compiled = _choose_compile(config, machine, strategy, mesh, notes)
    return with_values(
        config,
        pipeline_schedule=strategy.schedule if schedule == AUTO else schedule,
        precision=precision,
        compile=compiled,
        async_tp=_choose_async_tp(config, compiled, machine, mesh),
        cuda_graphs=_choose_cuda_graphs(config, machine, strategy, mesh, notes),
    )


def _check_exchanges(
    config: RunConfig, precision: str, strategy: Strategy, mesh: Mapping[str, int], size: ModelSize
) -> None:
    """Raises UserError for keys of DDP's or FSDP's exchanges where there are none, or not so."""
    divided = {axis for axis in mesh if not strategy.mesh[axis] == mesh[axis] == 1}
    native = strategy.traits.uses_ddp_and_fsdp
    in_ddp = native and divided <= {"dp_replicate"}
    in_fsdp = native and "dp_shard" in divided and "pp" not in divided
    kind = config.gradient_compression
    cap = config.bucket_cap_mb
    asked = f"gradient_compression={kind!r}"
    where = f"strategy={config.strategy!r}"
    if config.fsdp_prefetch != 1 and not in_fsdp:
        what = f"fsdp_prefetch={config.fsdp_prefetch} does not go with {where}"
        raise UserError(what, "it is for FSDP's blocks", "set it to 1, or strategy to fsdp")
    if cap is not None and not in_ddp:
        what = f"bucket_cap_mb={cap:g} does not go with {where}"
        raise UserError(what, "PyTorch's DDP has buckets", "set it to None, or strategy to dp")
    if kind == "none":
        return
    if not in_ddp:
        what = f"{asked} does not go with {where}"
        raise UserError(what, "it works in PyTorch's DDP", "set it to none, or strategy to dp")
    if cap is not None and kind != "bf16":
        what = f"bucket_cap_mb={cap:g} does not go with {asked}"
        raise UserError(what, "it takes a single bucket on CPUs", "set it to None")
    if kind != "bf16" and precision == "fp16":
        why = "an overflow would stay in what is added to later gradients"
        raise UserError(f"{asked} does not go with precision='fp16'", why, "set precision to bf16")
    if kind != "bf16" and config.on_nonfinite == "skip":
        why = "what is not finite would stay in what is added to later gradients"
        fix = "set on_nonfinite to rollback or stop"
        raise UserError(f"{asked} does not go with on_nonfinite='skip'", why, fix)
    if kind == "powersgd" and config.compression_rank > size.hidden_size:
        what = f"compression_rank={config.compression_rank} is above that of any matrix"
        why = f"{config.model}'s have {size.hidden_size} columns or rows"
        raise UserError(what, why, "set it to 32 or less")


def _check_loss(config: RunConfig, precision: str, mesh: Mapping[str, int]) -> None:
    """Raises UserError for a loss in chunks where there is none."""
    if not config.loss_chunk_tokens:
        return
    what = f"loss_chunk_tokens={config.loss_chunk_tokens} does not go with"
    if mesh["tp"] > 1:
        why = f"its {mesh['tp']} processes have a part of every token's logits"
        raise UserError(f"{what} tp={mesh['tp']}", why, "set it to 0")
    if precision == "fp16":
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


def _choose_compile(
    config: RunConfig,
    machine: Machine,
    strategy: Strategy,
    mesh: Mapping[str, int],
    notes: list[str],
) -> bool | str:
    obstacle = ""
    # Where compiled blocks would be wrong or fail.
    if strategy.fetches_parameters:
        obstacle = f"strategy={config.strategy!r}, which fetches parameters while a block runs"
    elif mesh["tp"] > 1 and config.dropout > 0 and not config.sequence_parallel:
        obstacle = "dropout under tp with sequence_parallel=False: it changes generators in a block"
    if config.compile == "whole" and not obstacle:
        count = math.prod(mesh.values())
        if count > 1:
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
    """As asked; "auto" is whether it is `able` here. Raises UserError where an obstacle is in the
    way of what is asked for."""
    if asked == AUTO:
        return able and not obstacle
    if asked and obstacle:
        what = f"{key}={asked!r} does not work with {obstacle}"
        raise UserError(what, fix=f"set {key} to auto or False")
    return asked


def _choose_async_tp(
    config: RunConfig, compiled: bool | str, machine: Machine, mesh: Mapping[str, int]
) -> bool:
    """Whether the compiler overlaps exchanges along tp with matrix products."""
    obstacle = ""
    if mesh["tp"] == 1:
        obstacle = "tp=1, which exchanges nothing"
    elif not config.sequence_parallel:
        obstacle = "sequence_parallel=False, whose sums are not scattered"
    elif not machine.num_gpus:
        obstacle = "a CPU"
    elif not compiled:
        obstacle = "compile=False"
    elif machine.num_gpus % mesh["tp"]:
        obstacle = f"tp={mesh['tp']} over machines of {machine.num_gpus} GPUs"
    if config.async_tp is True and obstacle:
        raise UserError(f"async_tp=True does not work with {obstacle}", fix="set it to auto")
    if config.async_tp != AUTO:
        return bool(config.async_tp)
    return not obstacle and machine.compute_capability == (9, 0)  # where it was measured


def _choose_cuda_graphs(
    config: RunConfig,
    machine: Machine,
    strategy: Strategy,
    mesh: Mapping[str, int],
    notes: list[str],
) -> bool:
    """Whether a step is captured and replayed as one graph, which cannot ask the host anything."""
    obstacle = ""
    if not strategy.traits.replays_steps:
        obstacle = f"strategy={config.strategy!r}, whose engine launches its own kernels"
    elif config.gradient_compression != "none":
        obstacle = "gradient_compression, whose hooks run on the host"
    elif config.dropout > 0 and (mesh["tp"] > 1 or config.activation_checkpointing != "none"):
        obstacle = "dropout under tp or activation checkpointing, which sets random generators"
    if not machine.num_gpus:
        obstacle = obstacle or "a CPU"
    elif config.cuda_graphs == AUTO and obstacle:
        notes.append(f"no CUDA graph: {obstacle}")
    return bool(_switch("cuda_graphs", config.cuda_graphs, obstacle, True))
