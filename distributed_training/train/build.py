"""Build what a plan says: this process's place in the mesh, samples, extensions, engine."""

import threading
import time
import zlib

import torch
import torch.distributed as dist

from distributed_training.checkpoint.saver import seed_dropout
from distributed_training.data.samples import Data, Sampler
from distributed_training.engines.base import COMPUTE_DTYPES, Engine
from distributed_training.models import peft
from distributed_training.models.decoder import Decoder, is_block_matrix, sample_bytes
from distributed_training.parallel.mesh import Topology
from distributed_training.plan.plan import Plan
from distributed_training.planner.checks import built_extensions
from distributed_training.records.display import Display
from distributed_training.supervise.process import Process


def build_topology(plan: Plan, process: Process, device: torch.device) -> Topology:
    own = {name: getattr(process, name) for name in ("world_size", "rank", "local_rank")}
    return Topology(**own, **plan.mesh, device_type=device.type)


def build_sampler(plan: Plan, data: Data, topology: Topology) -> Sampler:
    """The order in which this rank sees the training samples."""
    own = {"replica": topology.dp_rank, "seed": plan.config.seed}
    return Sampler(num_samples=len(data.train), **plan.batch.model_dump(), **own)


def build_extensions(plan: Plan, topology: Topology, display: Display) -> None:
    """Compile DeepSpeed's extensions before the run, one process a machine, and say so."""
    plan.strategy.load_engine()  # all import the engine now, not one while the others wait
    names = built_extensions(plan.strategy) if topology.local_rank == 0 else ()
    for name in names:
        from deepspeed.ops.op_builder.all_ops import ALL_OPS

        began = time.monotonic()
        display.say(f"DeepSpeed extension {name}: loading (compiling takes a minute or more) ...")
        ALL_OPS[name].load(verbose=False)
        display.say(f"DeepSpeed extension {name}: loaded in {time.monotonic() - began:.1f} s")
    dist.barrier()


def build_engine(plan: Plan, topology: Topology, drawn: Decoder | None = None) -> Engine:
    """Put initial weights, equal on every rank and under every strategy, into the plan's engine;
    then start the random numbers of dropout. `drawn`: a model with the random weights. Collective.
    """
    config = plan.config
    model, fingerprint = build_model(plan, topology, drawn)
    if plan.adapters_dir is not None:
        initial = peft.read_initial(plan.model, plan.adapters_dir)
        peft.check_base(fingerprint, initial.base, plan.adapters_dir)
        model.initial_adapters = initial.tensors
    engine = plan.strategy.load_engine()(model, plan, topology)
    engine.base_fingerprint = fingerprint if config.lora_rank else 0
    seed_dropout(plan, topology, 0)
    return engine


def build_model(plan: Plan, topology: Topology, drawn: Decoder | None) -> tuple[Decoder, int]:
    """Return the model with its initial weights, rounded to the compute dtype, and `fingerprint` of
    the weights before rounding. Weights under LoRA stay in the compute dtype (matrices of blocks in
    `base_dtype`), others are fp32. What PyTorch's parallelism takes is on this rank's device, and
    only what its stages hold is kept."""
    config = plan.config
    on_device = plan.strategy.traits.builds_on_device
    device = topology.device if on_device else torch.device("cpu")
    compute_dtype = COMPUTE_DTYPES[config.precision]
    samples: dict[str, bytes] = {}
    scales: dict[str, torch.Tensor] = {}
    one_at_a_time = threading.Lock()  # so that only one matrix that is not quantized is on the GPU
    own = own_blocks(plan, topology) if on_device else None

    def place(name: str, values: torch.Tensor) -> torch.Tensor | None:
        values = values.float() if compute_dtype is None else values
        samples[name] = sample_bytes(values)
        block = name.split(".")[1] if name.startswith("blocks.") else None
        if own is not None and block is not None and int(block) not in own:
            return None
        kept = values if compute_dtype is None else values.to(compute_dtype)
        if config.base_dtype == "nf4" and is_block_matrix(name, plan.size):
            from distributed_training.models import nf4

            with one_at_a_time:
                codes, scales[name] = nf4.quantize(kept.to(device))
            return codes
        return kept.to(device, kept.dtype if config.lora_rank else torch.float32)

    source = None
    if plan.weights_dir is not None:
        source = plan.model.weights_source(plan.weights_dir)
    elif drawn is not None:
        source = lambda name: drawn.get_parameter(name).detach().clone()  # noqa: E731
    with device:
        model = plan.model.build(
            dropout=config.dropout, seed=config.seed, source=source, place=place
        )
    model.compute_dtype = compute_dtype
    names = [name for name, _ in model.named_parameters()]
    if scales:
        from distributed_training.models import nf4

        nf4.attach_scales(model, scales)
    return model, zlib.crc32(b"".join(samples[name] for name in names))


def own_blocks(plan: Plan, topology: Topology) -> set[int]:
    """Return the indices of the blocks that this rank's stages hold."""
    stages = zip(plan.layout.stages, plan.layout.ranks, strict=True)
    return {block for blocks, rank in stages if rank == topology.pp_rank for block in blocks}
