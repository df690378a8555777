"""Reject settings that cannot be combined, and find settings that have no effect with a layout.
This module does not import torch.

A setting that has no effect causes a note, because several strategies may share CONFIG, a preset or
a command line."""

from collections.abc import Callable, Iterator

from distributed_training.plan.plan import Draft
from distributed_training.settings.errors import UserError
from distributed_training.settings.keys import Options


def _uses_ddp(plan: Draft) -> bool:
    """Return whether PyTorch's DDP averages gradients."""
    return plan.uses_ddp and plan.strategy.traits.averages_with_torch


# (keys, whether a layout uses them, the reason why another layout does not)
CONDITIONS: tuple[tuple[tuple[str, ...], Callable[[Draft], bool], str], ...] = (
    (("fsdp_prefetch",), lambda plan: plan.uses_fsdp and plan.mesh["pp"] == 1,
     "only FSDP gathers parameters by block"),
    (("bucket_cap_mb", "gradient_compression"), _uses_ddp,
     "PyTorch's DDP does not average the gradients"),
    (("pipeline_schedule",), lambda plan: plan.mesh["pp"] > 1,
     "there is no pipeline with pp=1"),
    (("sequence_parallel",), lambda plan: plan.mesh["tp"] > 1,
     "no layers are split with tp=1"),
    (("checkpointed_blocks",), lambda plan: plan.config.activation_checkpointing != "none",
     "no blocks recompute activations"),
    (("offload_dir",), lambda plan: plan.strategy.swaps_to_disk,
     "the strategy keeps no state on disk"),
    (("lora_alpha", "lora_dropout", "lora_targets"),
     lambda plan: plan.config.lora_rank > 0, "without LoRA, there are no adapters"),
)  # fmt: skip


def check_settings(plan: Draft, options: Options, notes: list[str]) -> None:
    """Raise UserError if settings cannot be combined. For every setting that has no effect, add a
    note. Whether a setting has an effect depends on the layout and on the engine's `options`."""
    for applies, key, other, why, fix in _conflicts(plan):
        if applies:
            value = getattr(plan.config, key)
            raise UserError(f"{key}={value!r} cannot be used with {other}", why, fix)
    options.check(plan.config.precision, plan.size.hidden_size)
    reasons = options.idle()
    for keys, uses, why in CONDITIONS:
        if not uses(plan):
            reasons |= dict.fromkeys(keys, why)
    request = plan.requested
    values = request.to_key_values()
    for key, why in reasons.items():
        if request.is_set(key):
            notes.append(f"{key}={values[key]!r} has no effect, because {why}")


def _conflicts(plan: Draft) -> Iterator[tuple[bool, str, str, str, str]]:
    """Yield (whether the conflict exists, key, setting with which the key's value cannot be used,
    reason, fix) for all possible conflicts."""
    config = plan.config
    mesh = plan.mesh
    traits = plan.strategy.traits
    matrices = plan.size.block_matrices
    positions = plan.size.num_positions
    schedule = config.pipeline_schedule
    machine = plan.machine
    gpu = machine.gpu_name or "a CPU"
    strategy, model, precision = (
        f"{key}={getattr(config, key)!r}" for key in ("strategy", "model", "precision")
    )
    yield (
        config.max_length > positions, "max_length", model,
        f"the model has {positions} positions", f"set max_length to {positions} or less",
    )  # fmt: skip
    # Sequence parallelism gives every rank the same number of samples or, if tp does not divide
    # the samples, of tokens.
    tp = mesh["tp"]
    yield (
        config.max_length % plan.tp_parts[1] != 0, "max_length", f"{tp=}",
        f"{tp=} divides neither max_length nor the {plan.batch.micro_batch_size} samples of a "
        "micro-batch, and sequence_parallel gives every rank the same number of them",
        f"set max_length to {config.max_length // tp * tp or tp} or sequence_parallel to False",
    )  # fmt: skip
    for key in ("dropout", "lora_dropout"):
        yield (
            getattr(config, key) > 0 and tp > 1 and not config.sequence_parallel, key,
            f"{tp=} and sequence_parallel=False",
            "the ranks would need equal masks, except in attention",
            f"set sequence_parallel to True or {key} to 0",
        )  # fmt: skip
    yield (
        config.precision == "fp16" and not machine.num_gpus, "precision", gpu,
        "fp16 needs a GPU", "set precision to fp32",
    )  # fmt: skip
    yield (
        config.precision == "bf16" and machine.num_gpus > 0
        and machine.compute_capability < (8, 0), "precision", gpu,
        "bf16 needs compute capability 8.0", "set precision to fp16",
    )  # fmt: skip
    # On a CPU, the swap buffer itself serves as device memory. DeepSpeed reuses the buffer too
    # early, so gradients are wrong. DeepSpeed never swaps shards smaller than its threshold of 1
    # MiB, such as all shards of gpt2-tiny.
    sizes = (rows * columns for rows, columns in matrices)
    largest = max(plan.size.embedding_parameters, *sizes) * 4 / plan.num_processes
    swaps = plan.strategy.offload["param"] == "nvme" and largest >= 2**20
    yield (
        swaps and not machine.num_gpus, "model", f"{strategy} on a CPU",
        "without a GPU, DeepSpeed overwrites parameters that are in use",
        "set model to gpt2-tiny for a smoke test",
    )  # fmt: skip
    yield (
        config.push is not None and not config.export, "push", "export=False",
        "push uploads hf/, which is then not written", "set export to True",
    )  # fmt: skip
    yield (
        config.lora_rank > 0 and plan.strategy.swaps_to_disk and config.precision == "fp32",
        "lora_rank", f"{strategy} and {precision}",
        "DeepSpeed rounds the frozen weights that it stores in files to 16 bits",
        "set precision to bf16, or strategy to offload",
    )  # fmt: skip
    yield (
        mesh["pp"] > 1 and schedule not in traits.schedules, "pipeline_schedule", strategy,
        f"the strategy's engine supports only {', '.join(traits.schedules)}",
        f"set pipeline_schedule to {traits.schedules[0]}, or strategy to pp or 3d",
    )  # fmt: skip
    yield (
        plan.schedule.splits_backward and config.activation_checkpointing != "none",
        "activation_checkpointing", f"pipeline_schedule={schedule!r}",
        "the schedule keeps the activations for the second half of each backward pass",
        "set activation_checkpointing to none, or pipeline_schedule to 1f1b",
    )  # fmt: skip
    yield (
        config.activation_checkpointing != "none"
        and config.checkpointed_blocks is not None and mesh["pp"] > 1,
        "checkpointed_blocks", strategy,
        "its ranks need memory for different numbers of micro-batches",
        "set checkpointed_blocks to None",
    )  # fmt: skip
    for applies, other, why in (
        (not config.compile and machine.num_gpus > 0, "compile=False",
         "without torch.compile, only inputs leave the GPU"),
        ("mlp_in" not in plan.size.hf_matrices, model,
         "this suite does not know which of its matrices form the MLP"),
    ):  # fmt: skip
        yield (
            config.activation_checkpointing == "offload-attention" and applies,
            "activation_checkpointing", other, why, "set activation_checkpointing to offload",
        )  # fmt: skip
    yield (
        config.optimizer != "adamw" and not traits.builds_on_device, "optimizer", strategy,
        "the strategy's engine keeps the optimizer state in fp32",
        "set optimizer to adamw, or strategy to dp, fsdp, tp or pp",
    )  # fmt: skip
    for applies, other, why, fix in (
        (mesh["cp"] * mesh["pp"] > 1 or not traits.averages_with_torch, strategy,
         "only dp, fsdp and tp train weights that have no fp32 copy",
         "set optimizer to adamw-bf16"),
        (config.lora_rank > 0, f"lora_rank={config.lora_rank}",
         "the adapters' fp32 copy is small", "set optimizer to adamw-bf16"),
        (config.precision != "bf16", precision,
         "the weights are in bf16", "set precision to bf16"),
    ):  # fmt: skip
        yield config.has_bf16_weights and applies, "optimizer", other, why, fix
    yield (
        config.gradient_compression != "none" and plan.num_processes > 1 and not _uses_ddp(plan),
        "gradient_compression", strategy,
        "this layout does not use PyTorch's DDP, whose communication hook the key selects",
        "set strategy to dp, or gradient_compression to none",
    )  # fmt: skip
    yield (
        config.on_nonfinite == "skip" and not traits.averages_with_torch, "on_nonfinite", strategy,
        "the strategy's engine updates the weights before it reports the gradient norm",
        "set on_nonfinite to rollback or stop",
    )  # fmt: skip
    divisor = 16 * tp
    odd_sizes = [n for shape in matrices for n in shape if n % divisor]
    odd_columns = [columns for _, columns in matrices if columns % 64]
    for dtypes, applies, other, why, fix in (
        (("bf16", "fp8", "nf4"), config.lora_rank == 0, "lora_rank=0",
         "without LoRA, no weights are frozen", "set lora_rank to 16, or base_dtype to None"),
        (("bf16",), config.precision != "bf16", precision,
         f"frozen weights then have the dtype {config.precision}", "set base_dtype to None"),
        (("fp8",), machine.compute_capability < (8, 9), gpu,
         "fp8 needs a GPU with compute capability 8.9", "set base_dtype to None or nf4"),
        (("fp8",), not traits.builds_on_device, strategy,
         "the strategy's engine does not compute in fp8", "set strategy to dp or fsdp"),
        (("fp8",), bool(odd_sizes), model,
         f"fp8 needs numbers of rows and columns that {divisor} divides, unlike {odd_sizes}",
         "set base_dtype to None"),
        (("nf4",), not traits.builds_on_device or mesh["pp"] * tp > 1, strategy,
         "quantized layers must stay whole or be sharded by FSDP", "set strategy to dp or fsdp"),
        (("nf4",), bool(odd_columns), model,
         f"each group of 64 values shares a scale, but 64 does not divide {odd_columns} columns",
         "set base_dtype to None"),
    ):  # fmt: skip
        yield config.base_dtype in dtypes and applies, "base_dtype", other, why, fix
