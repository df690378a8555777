"""Build the components of a run from its plan: topology, sampler, extensions, model and engine."""

import time
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from distributed_training.checkpoint.saver import seed_dropout
from distributed_training.data.samples import Data, Sampler
from distributed_training.engines.base import COMPUTE_DTYPES, Engine
from distributed_training.models import peft
from distributed_training.models.decoder import Decoder
from distributed_training.models.initial_weights import Fingerprint, InitialWeights, Slices
from distributed_training.parallel.agree import gather
from distributed_training.parallel.mesh import Topology
from distributed_training.plan.plan import Plan
from distributed_training.planner.checks import required_extensions
from distributed_training.records.display import Display
from distributed_training.supervise.process import Process


def build_topology(plan: Plan, process: Process, device: torch.device) -> Topology:
    """Return this process's position in the plan's mesh."""
    return Topology(
        world_size=process.world_size,
        rank=process.rank,
        local_rank=process.local_rank,
        **plan.mesh,
        device_type=device.type,
    )


def build_sampler(plan: Plan, data: Data, topology: Topology) -> Sampler:
    """Return a sampler that selects this rank's training samples for each step."""
    return Sampler(
        num_samples=len(data.train),
        **plan.batch.model_dump(),
        replica=topology.dp_rank,
        seed=plan.config.seed,
    )


def build_extensions(plan: Plan, topology: Topology, display: Display) -> None:
    """Compile and load the DeepSpeed extensions that the plan's strategy requires, in one process
    per machine. Print how long each extension takes to load. All ranks must call this function."""
    # Import the engine now. Otherwise, other ranks would import it only after local rank 0 has
    # built the extensions.
    plan.strategy.load_engine()
    names = required_extensions(plan.strategy) if topology.local_rank == 0 else ()
    for name in names:
        from deepspeed.ops.op_builder.all_ops import ALL_OPS

        started_at = time.monotonic()
        display.say(f"loading DeepSpeed extension {name} (compiling it takes a minute or more)")
        ALL_OPS[name].load(verbose=False)
        display.say(f"loaded DeepSpeed extension {name} in {time.monotonic() - started_at:.1f} s")
    dist.barrier()


def build_engine(plan: Plan, topology: Topology, random_model: Decoder | None = None) -> Engine:
    """Build the plan's engine and seed dropout. The initial weights are the same under every
    strategy. `random_model` is a model with random initial weights, if the caller has one. All
    ranks must call this function. Raises UserError if adapters do not fit the weights."""
    config = plan.config
    model, weights, fingerprint = build_model(plan, topology, random_model)
    initial_adapters = None
    if plan.adapters_dir is not None:
        initial_adapters = peft.read_initial(plan.model, plan.adapters_dir)
        weights = replace(weights, adapters=initial_adapters.tensors)
    engine = plan.strategy.load_engine()(model, weights, plan, topology)
    if config.lora_rank:
        engine.base_fingerprint = fingerprint.combine(gather(fingerprint.samples))
        if initial_adapters is not None:
            peft.check_base(
                engine.base_fingerprint, initial_adapters.base_fingerprint, plan.adapters_dir
            )
    seed_dropout(plan, topology, 0)
    return engine


def build_model(
    plan: Plan, topology: Topology, random_model: Decoder | None
) -> tuple[Decoder, InitialWeights, Fingerprint]:
    """Return the model on the meta device, its initial weights and a fingerprint of its frozen
    weights. Without LoRA, no weights are frozen and the fingerprint is empty.

    With an NF4 base, this rank's device already holds the whole base model. All weights are rounded
    to the compute dtype. Frozen weights are stored in the compute dtype (or in `base_dtype` for the
    matrices of blocks), and trained weights are stored in fp32."""
    config = plan.config
    compute_dtype = COMPUTE_DTYPES[config.precision]
    model = plan.model.build_meta_model(dropout=config.dropout, seed=config.seed)
    if config.lora_rank and compute_dtype is not None:
        model.to(compute_dtype)
    model.compute_dtype = compute_dtype
    if plan.packing:
        model.max_documents = plan.packing.max_documents
    if plan.weights_dir is not None:
        source = plan.model.weights_source(plan.weights_dir)
    elif random_model is not None:
        source = partial(_read_box, random_model)
    else:
        on_gpu = topology.device_type == "cuda"
        source = model.random_source(config.seed, topology.device, hashed=on_gpu)
    fingerprint = Fingerprint(model)
    if config.lora_rank:
        source = fingerprint.watch(source)
    weights = InitialWeights(source=source, round_to=compute_dtype)
    if config.base_dtype == "nf4":
        from distributed_training.models.nf4 import quantize_matrices

        quantize_matrices(model, source, topology.device)
        weights.fill(model, topology.device)
    return model, weights, fingerprint


def _read_box(model: Decoder, name: str, slices: Slices) -> torch.Tensor:
    return model.get_parameter(name).detach()[slices]
