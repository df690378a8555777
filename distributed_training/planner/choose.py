"""From CONFIG to a draft: "auto" as machine and layout decide it. No torch import."""

import math
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from distributed_training.models import find_model
from distributed_training.plan.orders import time_orders
from distributed_training.plan.plan import Plan
from distributed_training.plan.schedules import SCHEDULES
from distributed_training.planner import layouts
from distributed_training.planner.data import continue_adapters
from distributed_training.planner.deepspeed_sections import fill_sizes
from distributed_training.planner.layouts import Candidate
from distributed_training.planner.search import search_orders
from distributed_training.predict.predict import Cluster
from distributed_training.predict.rates import rates_of
from distributed_training.predict.speed import Work
from distributed_training.settings.config import AUTO, RunConfig, load_preset, with_values
from distributed_training.settings.errors import UserError
from distributed_training.settings.machine import Machine, known_gpu
from distributed_training.settings.strategies import load_strategy

WORDS = "words"  # the preset for a small text and no GPU, but for these keys
KEPT = {"dataset", "model", "strategy", "generate", "compile", "weights", "tokenizer"}
CPU_EVAL_SAMPLES = 50  # of 512 tokens: half a second on two cores
SMALL_GPU_BYTES = 12 * 2**30  # below this "auto" takes gpt2 instead of gpt2-medium


def choose_model(
    config: RunConfig, machine: Machine, num_processes: int, notes: list[str]
) -> RunConfig:
    """Decide an "auto" model; for one's own text and no GPU how it is trained, too. Adapters that
    training continues decide their own keys."""
    config = continue_adapters(config, notes)
    if config.model != AUTO:
        return config
    if machine.num_gpus and machine.gpu_memory_bytes >= SMALL_GPU_BYTES:
        return with_values(config, model="gpt2-medium")
    if machine.num_gpus:
        notes.append("the GPU has less than 12 GiB: model is gpt2 rather than gpt2-medium")
        return with_values(config, model="gpt2")
    model = "gpt2-tiny"
    if _num_stages(config, num_processes) > find_model(model).size.num_layers:
        model = "gpt2-tiny-4-blocks"
    notes.append(f"no GPU found: training {model} on the CPU (a rehearsal, not a result)")
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
    return with_values(config, model=model, **decided)


def _num_stages(config: RunConfig, num_processes: int) -> int:
    """Of the pipeline that is asked for; 1 where the planner will choose the strategy."""
    if config.strategy == AUTO:
        return 1
    strategy = load_strategy(config)
    pp = strategy.mesh["pp"]
    if pp < 1:
        pp = num_processes // math.prod(size for size in strategy.mesh.values() if size > 0)
    return pp * SCHEDULES[strategy.schedule].stages_per_rank if pp > 1 else 1


def lay_out(
    given: RunConfig,
    machine: Machine,
    num_processes: int,
    processes_here: int,
    *,
    mesh: dict[str, int] | None = None,
) -> Plan:
    """A draft for a CONFIG whose model, strategy and batch size are known; `mesh`: another than
    the strategy's own. Raises UserError where the processes make no such mesh, or a setting does
    not go with it."""
    notes = list[str]()
    strategy = load_strategy(given)
    model = find_model(given.model)
    document = fill_sizes(strategy.document, model.size.hidden_size)
    strategy = replace(strategy, document=document)
    asked = Candidate(config=given, strategy=strategy, model=model, mesh=mesh or strategy.mesh)
    if mesh is None:
        mesh = layouts.fill_mesh(asked, num_processes)
    decided = {"precision": _choose_precision(asked.config, machine)}
    if given.pipeline_schedule == AUTO:
        decided["pipeline_schedule"] = strategy.schedule
    asked = replace(asked, mesh=mesh, config=with_values(given, **decided))
    _check_pairs(asked)
    config = _choose_switches(asked, machine, notes)
    layout = layouts.build_layout(asked)
    batch = layouts.cut_batch(asked)
    tp = mesh["tp"]
    if processes_here % tp:
        notes.append(
            f"tp={tp} reaches across machines, so every layer waits for the network four times: "
            f"give tp a divisor of {processes_here} and the rest to another axis"
        )
    output_dir = Path(config.output_dir)
    began = time.strftime("%Y%m%d-%H%M%S")
    run_dir = output_dir / f"{began}-{strategy.name}-{model.label}-x{num_processes}"
    offload_dir = None
    if strategy.swaps_to_disk:
        place = Path(config.offload_dir or output_dir / ".offload").absolute()
        offload_dir = place / f"{run_dir.name}-{uuid.uuid4().hex[:8]}"  # no other run's
    only_copies = mesh["dp_replicate"] == num_processes
    averages = not strategy.traits.rounded_weights and batch.num_replicas > 1
    plan = Plan(
        requested=given,
        config=with_values(config, **batch.model_dump(include=set(layouts.OPEN_BATCH))),
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


def _check_pairs(candidate: Candidate) -> None:
    """Raises UserError for a key whose value does not go with another's, strategy or model."""
    config = candidate.config
    size = candidate.model.size
    asked = candidate.strategy.mesh
    mesh = candidate.mesh
    tp = mesh["tp"]
    native = candidate.strategy.traits.uses_ddp_and_fsdp
    divided = {axis for axis in mesh if not asked[axis] == mesh[axis] == 1}
    in_ddp = native and divided <= {"dp_replicate"}
    in_fsdp = native and "dp_shard" in divided and "pp" not in divided
    fp16 = config.precision == "fp16"
    rounds = candidate.strategy.swaps_to_disk and config.precision == "fp32"
    powersgd = config.gradient_compression == "powersgd"
    own_buckets = config.bucket_cap_mb is not None
    adds_errors = config.gradient_compression in ("powersgd", "topk-int8")
    chunks = config.loss_chunk_tokens > 0
    here = f"strategy={config.strategy!r}"
    named = f"model={config.model!r}"
    kind = f"gradient_compression={config.gradient_compression!r}"
    stays = "what is not finite would stay in what is added to later gradients"
    skips = config.on_nonfinite == "skip"
    for refused, key, other, why, fix in (
        (config.max_length > size.num_positions, "max_length", named,
         f"it has {size.num_positions} positions", f"set it to {size.num_positions} or less"),
        (config.lora_rank > 0 and rounds, "lora_rank", f"{here} and precision='fp32'",
         "DeepSpeed rounds frozen weights in files to 16 bits",
         "set precision to bf16, or strategy to offload"),
        (config.fsdp_prefetch != 1 and not in_fsdp, "fsdp_prefetch", here,
         "it is for FSDP's blocks", "set it to 1, or strategy to fsdp"),
        (own_buckets and not in_ddp, "bucket_cap_mb", here,
         "PyTorch's DDP has buckets", "set it to None, or strategy to dp"),
        (config.gradient_compression != "none" and not in_ddp, "gradient_compression", here,
         "it works in PyTorch's DDP", "set it to none, or strategy to dp"),
        (adds_errors and own_buckets, "bucket_cap_mb", kind,
         "it takes a single bucket on CPUs", "set it to None"),
        (adds_errors and fp16, "gradient_compression", "precision='fp16'",
         stays, "set precision to bf16"),
        (adds_errors and skips, "gradient_compression", "on_nonfinite='skip'",
         stays, "set on_nonfinite to rollback or stop"),
        (skips and not candidate.strategy.traits.leaves_out_updates, "on_nonfinite", here,
         "its engine updates before the norm of the gradients is known here",
         "set it to rollback or stop"),
        (chunks and tp > 1, "loss_chunk_tokens", f"tp={tp}",
         f"its {tp} processes have a part of every token's logits", "set it to 0"),
        (chunks and fp16, "loss_chunk_tokens", "precision='fp16'",
         "gradients would be computed before they are scaled", "set precision to bf16, or it to 0"),
        (powersgd and config.compression_rank > size.hidden_size, "compression_rank", named,
         f"its matrices have {size.hidden_size} columns or rows",
         f"set it to {min(32, size.hidden_size)} or less"),
    ):  # fmt: skip
        if refused:
            raise UserError(f"{key}={getattr(config, key)!r} does not go with {other}", why, fix)


def _choose_switches(candidate: Candidate, machine: Machine, notes: list[str]) -> RunConfig:
    """Whether blocks are compiled, exchanges along tp overlap products, a step is one graph."""
    config = candidate.config
    traits = candidate.strategy.traits
    tp = candidate.mesh["tp"]
    count = math.prod(candidate.mesh.values())
    strategy = f"strategy={config.strategy!r}"
    whole = config.compile == "whole"
    drops = max(config.dropout, config.lora_dropout) > 0
    recomputes = config.activation_checkpointing != "none"
    capability = machine.compute_capability
    num_gpus = machine.num_gpus

    def decide(key: str, able: bool, obstacles: dict[str, bool], said: str = "") -> Any:
        """As asked, or UserError with what is in the way; "auto" is whether the machine is `able`
        and nothing is: what is, is noted after what is `said`."""
        asked = getattr(config, key)
        obstacle = next((words for words, is_there in obstacles.items() if is_there), "")
        if asked == AUTO:
            if said and able and obstacle:
                notes.append(f"{said}: {obstacle}")
            return able and not obstacle
        if asked and obstacle:
            what = f"{key}={asked!r} does not work with {obstacle}"
            raise UserError(what, fix=f"set {key} to auto or False")
        return asked

    # Where compiled blocks would be wrong or fail.
    fetches = f"{strategy}, which fetches parameters while a block runs"
    in_a_block = "dropout under tp with sequence_parallel=False: it changes generators in a block"
    mode = f"activation_checkpointing={config.activation_checkpointing!r}"
    compiled = decide("compile", num_gpus > 0 and capability >= (7, 0), {
        fetches: candidate.strategy.fetches_parameters,
        in_a_block: tp > 1 and drops and not config.sequence_parallel,
        f"{count} processes, whose exchanges begin with each block": whole and count > 1,
        f"{strategy}: DeepSpeed's hooks are between blocks": whole and traits.takes_deepspeed_json,
        mode: whole and recomputes,
    }, "not compiled")  # fmt: skip
    async_tp = decide("async_tp", capability == (9, 0), {
        "tp=1, which exchanges nothing": tp == 1,
        "sequence_parallel=False, whose sums are not scattered": not config.sequence_parallel,
        "a CPU": num_gpus == 0,
        "compile=False": not compiled,
        f"tp={tp} over machines of {num_gpus} GPUs": num_gpus % tp > 0,
    })  # fmt: skip
    # A graph cannot ask the host anything.
    host = f"{strategy}, whose engine launches its own kernels"
    hooks = "gradient_compression, whose hooks run on the host"
    sets = "dropout under tp or activation checkpointing, which sets random generators"
    graphs = decide("cuda_graphs", num_gpus > 0, {
        host: not traits.replays_steps,
        hooks: config.gradient_compression != "none",
        sets: drops and (tp > 1 or recomputes),
        "a CPU": num_gpus == 0,
    }, "no CUDA graph")  # fmt: skip
    return with_values(config, compile=compiled, async_tp=async_tp, cuda_graphs=graphs)


def lay_out_on(cluster: Cluster, config: RunConfig, mesh: dict[str, int] | None = None) -> Plan:
    """A draft for the cluster's processes (`lay_out`). If its schedule depends on durations, it has
    the orders for the durations that the cluster's rates mean, or an H200's if it has no rates.
    Durations go with the orders: processes that put messages in different orders
    would deadlock."""
    here = cluster.processes_a_node
    plan = lay_out(config, cluster.machine, cluster.num_processes, here, mesh=mesh)
    if not plan.schedule.timed:
        return plan
    work = Work(plan, cluster.rates or rates_of(known_gpu("H200")))
    costs = {key: float(cost.sum()) for key, cost in work.operations().items()}
    blocks = plan.layout.blocks_per_stage
    seconds = tuple((costs["F", s], costs["I", s], costs["W", s]) for s in range(len(blocks)))
    m = plan.batch.num_microbatches
    if plan.schedule.searched:
        orders = search_orders(seconds, blocks, m, work.message())
    else:
        orders = time_orders(seconds, m, work.message())
    return replace(plan, orders=orders)
