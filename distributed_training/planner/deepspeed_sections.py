"""Decide which sections of a user's DeepSpeed configuration are passed on and which are rejected.

Sections that do not affect results, such as the settings of DeepSpeed's timers, are passed on.
Sections that would change results, memory or speed without appearing in the record are rejected.
Sections that DeepSpeed does not know are also rejected. DeepSpeed's own classes check unusual
values. These classes run in a child process, because importing DeepSpeed takes seconds. This module
does not import torch."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from distributed_training.settings.errors import UserError, nearest
from distributed_training.settings.files import ROOT, shown

# Sections that CONFIG replaces: section name -> advice for the user
REPLACEMENTS = {
    "activation_checkpointing": "remove it and set activation_checkpointing in CONFIG",
    "amp": "remove it and set precision in CONFIG",
    "autotuning": "remove it and use the plan command, which ranks layouts and batch sizes",
    "bfloat16": "rename it to bf16",
    "checkpoint": "remove it and set resume and checkpoint_every in CONFIG",
    "comet": "remove it and set log_to in CONFIG",
    "compile": "remove it and set compile in CONFIG",
    "csv_monitor": "remove it and read metrics.jsonl in the run's folder",
    "elasticity": "remove it and set batch_size and grad_accum_steps in CONFIG",
    "flops_profiler": "remove it and set profile in CONFIG; the summary shows the MFU",
    "tensorboard": "remove it and set log_to in CONFIG",
    "tensor_parallel": "remove it and set strategy to tp or 3d",
    "torch_autocast": "remove it and set precision in CONFIG",
    "wandb": "remove it and set log_to in CONFIG",
}
# Other sections and values that would change training. No strategy in this suite uses them.
REJECTED_SECTIONS = {
    "compression_training", "curriculum_learning", "data_efficiency", "data_types", "datastates",
    "eigenvalue", "expert_parallel", "hybrid_engine", "managed_gradient_accumulation", "nebula",
    "progressive_layer_drop", "quantize_training", "sparse_attention", "weight_quantization",
    "use_data_before_expert_parallelism",
}  # fmt: skip
# Section -> values that have no effect. Other values would change sums, batches or communication.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "communication_data_type": (None,),
    "seq_parallel_communication_data_type": (None, "fp32"),
    "prescale_gradients": (False,),
    "gradient_predivide_factor": (1.0,),
    "gradient_allreduce_op": ("mean", "avg"),
    "fp32_allreduce": (False,),
    "sparse_gradients": (False,),
    "disable_allgather": (False,),
    "dataloader_drop_last": (False,),
    "managed_gradient_accumulation": (True,),
    "vocabulary_size": (None,),
}
# Settings for DeepSpeed's messages, timers and disk access
PASSED_SECTIONS = {
    "aio", "comms_logger", "disable_python_gc", "dump_state", "log_level", "memory_breakdown",
    "steps_per_print", "timers", "wall_clock_breakdown", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
}  # fmt: skip
FILLED_SECTIONS = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "gradient_clipping", "bf16", "fp16", "optimizer", "scheduler", "pipeline", "zero_optimization",
}  # fmt: skip
KNOWN_SECTIONS = {
    *REPLACEMENTS,
    *REJECTED_SECTIONS,
    *NEUTRAL_VALUES,
    *PASSED_SECTIONS,
    *FILLED_SECTIONS,
}
# Keys whose usual values are whole numbers (INTEGER_KEYS) or booleans (BOOLEAN_KEYS)
INTEGER_KEYS = {
    "reduce_bucket_size", "allgather_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "buffer_count", "buffer_size",
    "max_in_cpu", "stage", "stage3_module_granularity_threshold", "loss_scale",
    "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale", "block_size",
    "queue_depth", "intra_op_parallelism", "thread_count", "steps_per_print",
}  # fmt: skip
BOOLEAN_KEYS = {
    "contiguous_gradients", "reduce_scatter", "use_multi_rank_bucket_allreduce", "enabled",
    "allgather_partitions", "overlap_comm", "load_from_fp32_weights", "round_robin_gradients",
    "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
    "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "pin_memory",
    "ignore_unused_parameters", "parameter_alignment", "memory_efficient_linear", "fast_init",
    "pipeline_read", "pipeline_write", "log_trace_cache_warnings", "consecutive_hysteresis",
    "enable_sanity_checks", "override_module_apply", "synchronized", "single_submit",
    "overlap_events", "use_gds",
    *PASSED_SECTIONS.difference({"aio", "comms_logger", "log_level", "timers"}),
}  # fmt: skip
_MAY_BE_ZERO = {"stage", "loss_scale"}
_BUFFER_SIZE_KEYS = {"reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"}
_MAX_BUFFER_SIZE = 2**32
_TEXT_KEYS = {"device", "nvme_path"}
_CHECKED_SECTIONS = {"zero_optimization", "bf16", "fp16", *PASSED_SECTIONS}
# Keys for which only one value is accepted. Any other value would make computation, memory use or
# communication differ from the plan.
REQUIRED_VALUES: dict[str, Any] = {
    "cpu_offload": False,
    "cpu_offload_param": False,
    "cpu_offload_use_pin_memory": False,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
    "zeropp_loco_param": None,
    "zero_hpz_partition_size": 1,
    "mics_shard_size": -1,
    "mics_hierarchical_params_gather": False,
    "zenflow": None,
    "compute_grad_norm": True,
    "elastic_checkpoint": False,
    "legacy_stage1": False,
    "ratio": 1.0,
    "super_offload": False,
    "auto_cast": False,
    "fp16_master_weights_and_grads": False,
    "bf16_master_weights_and_grads": False,
    "bf16_optimizer_states": False,
    "leaf_module": {},
}
_CHECK_SCRIPT = """
import json, os, sys
os.environ.setdefault("DS_ACCELERATOR", "cpu")
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # send the output of imports to stderr
from deepspeed.runtime.config import DeepSpeedConfig
try:
    DeepSpeedConfig(json.load(sys.stdin))
except Exception as error:
    first = error.errors()[0] if hasattr(error, "errors") else {"loc": (), "msg": str(error)}
    print(json.dumps([".".join(map(str, first["loc"])), first["msg"]]), file=answer)
"""
CHECK_TIMEOUT_S = 120


def check_sections(document: dict[str, Any], source: str) -> list[str]:
    """Remove sections that have no effect from `document`, in place. Return the dotted paths of
    values that only DeepSpeed can check. Raises UserError for a section or value that this suite
    does not accept."""
    for name, section in list(document.items()):
        is_object = isinstance(section, dict)
        is_off = is_object and (section.get("enabled") is False or not any(section.values()))
        if name not in FILLED_SECTIONS and (is_off or section in NEUTRAL_VALUES.get(name, ())):
            del document[name]
            continue
        shown_name = name if is_object else f"{name}={shown(section)}"
        if name in ("offload_optimizer", "offload_param"):
            what = f"{source}: {name} has no effect outside zero_optimization"
            raise UserError(what, fix="move it into zero_optimization")
        if name not in KNOWN_SECTIONS:
            what = f"{source}: neither DeepSpeed nor this suite reads {name}"
            close = nearest(name, KNOWN_SECTIONS, cutoff=0.85)
            raise UserError(what, fix=f"did you mean {close!r}?" if close else "remove it")
        if name in REPLACEMENTS:
            raise UserError(f"{source}: {name} is not accepted in the JSON", fix=REPLACEMENTS[name])
        if name in REJECTED_SECTIONS or name in NEUTRAL_VALUES:
            what = f"{source}: {shown_name} would change what is computed"
            raise UserError(
                what, "all strategies must compute the same training steps", "remove it"
            )
    unusual_paths = []
    for path, value in _leaves(document):
        section, _, name = path.rpartition(".")
        if name in REQUIRED_VALUES and value != REQUIRED_VALUES[name]:
            what = (
                f"{source}: {path}={shown(value)} would change computation, memory or communication"
            )
            fix = "remove it" + ", and set strategy to offload" * ("offload" in name)
            raise UserError(what, "neither the plan nor the record would show this change", fix)
        if (
            name in _BUFFER_SIZE_KEYS
            and isinstance(value, int | float)
            and value > _MAX_BUFFER_SIZE
        ):
            what = f"{source}: {path}={shown(value)} is not accepted"
            why = "DeepSpeed allocates a buffer with this many elements"
            raise UserError(what, why, f"write at most {_MAX_BUFFER_SIZE:,}")
        if (
            not section
            and name in PASSED_SECTIONS
            and (accepted_values := _accepted_values(name, value))
        ):
            what = f"{source}: {name}={shown(value)} is not accepted"
            raise UserError(what, f"it must be {accepted_values}")
        is_count = isinstance(value, int | float) and not isinstance(value, bool)
        is_count = is_count and (value > 0 or (value == 0 and name in _MAY_BE_ZERO))
        is_usual = name in REQUIRED_VALUES or (name in _TEXT_KEYS and isinstance(value, str))
        is_usual |= name in INTEGER_KEYS and is_count and float(value).is_integer()
        is_usual |= name in BOOLEAN_KEYS and isinstance(value, bool)
        is_usual |= value in (None, "auto") and name in {*INTEGER_KEYS, *BOOLEAN_KEYS, *_TEXT_KEYS}
        if not is_usual and path.partition(".")[0] in _CHECKED_SECTIONS:
            unusual_paths.append(path)
    return unusual_paths


def _accepted_values(name: str, value: Any) -> str:
    """If `value` is not valid for the top-level key `name`, return a description of the accepted
    values. Otherwise, return "". DeepSpeed does not check the values of top-level keys."""
    if value is None:
        return ""
    if name in INTEGER_KEYS:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return "" if is_number and value > 0 else "a number greater than 0"
    if name in BOOLEAN_KEYS and not isinstance(value, bool):
        return "true or false"
    return ""


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of each leaf. The value of a key in REQUIRED_VALUES
    is a leaf even if it is a dict."""
    if isinstance(node, dict) and node and path.rpartition(".")[2] not in REQUIRED_VALUES:
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, node


def check_with_deepspeed(document: Mapping[str, Any], source: str) -> None:
    """Raise UserError if DeepSpeed's own classes reject `document`, a DeepSpeed configuration
    without "auto" values. The check takes seconds. The document is accepted if DeepSpeed is not
    installed or if the check takes longer than CHECK_TIMEOUT_S seconds."""
    command = [sys.executable, "-c", _CHECK_SCRIPT]
    text = json.dumps(document)
    try:
        output = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S,
            check=False, cwd=ROOT,  # `python -c` would import modules from the current folder first
        ).stdout  # fmt: skip
    except subprocess.TimeoutExpired:
        return
    if output.strip():
        name, message = json.loads(output.splitlines()[-1])
        what = (
            f"{source}: DeepSpeed does not accept {name}"
            if name
            else f"{source}: DeepSpeed does not accept this JSON"
        )
        raise UserError(what, message, "see https://www.deepspeed.ai/docs/config-json")
