"""Build what a plan says: this process's place in the mesh, samples, extensions, engine."""

import time

import torch
import torch.distributed as dist

from distributed_training.checkpoint.saver import seed_dropout
from distributed_training.data.samples import Data, Sampler
from distributed_training.engines.base import COMPUTE_DTYPES, Engine
from distributed_training.models import peft
from distributed_training.models.decoder import Decoder
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


def build_engine(plan: Plan, topology: Topology, model: Decoder | None = None) -> Engine:
    """Initial weights (equal on every rank and under every strategy) into the right engine; then
    the random numbers of dropout start. `model`: with these weights drawn already. Collective."""
    config = plan.config
    if model is None:
        # A stage, and DeepSpeed's parts, take less of a GPU than the model.
        whole = plan.strategy.traits.uses_ddp_and_fsdp and topology.pp == 1
        device = topology.device if whole and not config.lora_rank else torch.device("cpu")
        with device:
            model = plan.model.build(dropout=config.dropout, seed=config.seed)
    model.compute_dtype = COMPUTE_DTYPES[config.precision]
    if plan.weights_dir is not None:
        plan.model.load(model, plan.weights_dir)
    fingerprint = model.fingerprint() if config.lora_rank else 0
    if plan.adapters_dir is not None:
        initial = peft.read_initial(plan.model, plan.adapters_dir)
        peft.check_base(model, initial.base, plan.adapters_dir)
        model.initial_adapters = initial.tensors
    if model.compute_dtype is not None:
        # DeepSpeed makes its fp32 master copy from weights already rounded: so do all.
        for parameter in model.parameters():
            rounded = parameter.data.to(model.compute_dtype)
            parameter.data = rounded if config.lora_rank else rounded.float()
    engine = plan.strategy.load_engine()(model, plan, topology)
    engine.base_fingerprint = fingerprint
    seed_dropout(plan, topology, 0)
    return engine
