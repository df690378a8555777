"""Answer what a training needs in another trainer (`plan --for`), beside what this suite needs for
the same work. The program others/trace.py runs one step of that trainer without a GPU, in a process
of its own, because only that process needs torch and the trainer. This module imports neither."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from distributed_training.planner.answer import answer
from distributed_training.planner.choose import choose_model
from distributed_training.planner.sort import as_typed
from distributed_training.predict.predict import Cluster
from distributed_training.predict.rates import FITTED
from distributed_training.records.display import fold
from distributed_training.settings.config import Request
from distributed_training.settings.errors import UserError, printable
from distributed_training.settings.files import JsonObject, load_json, one_of, shown
from distributed_training.settings.machine import GIB
from distributed_training.tools.jobs import launch_command

OTHERS = Path(__file__).parent.parent / "others"
DIALECTS: JsonObject = load_json(OTHERS / "dialects.json", "the table of trainers")
TRACE_S = 300
# Share by which PyTorch's allocator reserved more than it had allocated, in 8 of 10 of this
# suite's runs that have more than 4 GiB
RESERVED = (0.01, 0.14)
CHECKPOINTING = {"none": False, "full": True}
# CONFIG's keys that a question contains
TRANSLATED = {
    "model", "batch_size", "grad_accum_steps", "max_length", "precision", "lora_rank",
    "activation_checkpointing", "lora_alpha", "lora_dropout", "lora_targets",
}  # fmt: skip


def run(arguments: argparse.Namespace, request: Request, cluster: Cluster, script: Path) -> int:
    """Print what the trainer that `--for` names needs. Return the exit code."""
    if cluster.num_processes > 1 or not cluster.machine.num_gpus:
        why = "what other trainers need is modeled for one GPU only"
        raise UserError("--for needs a cluster of one GPU", why, "add --cluster 4090")
    found = describe(arguments.trainer, request, cluster, script)
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(map(fold, report(found))))
        print(f"  {found['suite']['command']}")
    return int(found["fits"] == "no")


def describe(name: str, request: Request, cluster: Cluster, script: Path) -> JsonObject:
    """Return what a trainer needs on a GPU, and what this suite needs for the same work, as
    JSON."""
    if name not in DIALECTS:
        raise UserError(f"--for {shown(name)} is not a trainer", fix=f"use {one_of([*DIALECTS])}")
    notes: list[str] = []
    config, model = choose_model(request, cluster.machine, notes)
    traced = trace(build_question(DIALECTS[name], config, model.code.to_config(model.size, 0)))
    sizes, used = traced["sizes"], traced["used"]
    machine = cluster.machine
    # PyTorch's default for cuBLAS, once for each of the two threads of a step
    workspaces = 2 * (32 * 2**20 if machine.compute_capability[0] in (9, 10) else 8320 * 2**10)
    state = {key: sizes[key] for key in ("weights", "optimizer")}
    parts = state | {
        "activations, gradients and logits": sizes["peak"] - sum(state.values()),
        "workspaces of cuBLAS": workspaces,
    }
    peak = sum(parts.values())
    context = FITTED.gpu_context_bytes.alone
    needed = [round((1 + share) * peak) + context for share in RESERVED]
    fit_by_limit = zip(needed[::-1], ("yes", "tight"), strict=True)
    available = machine.gpu_memory_bytes
    checkpointing = "full" if used["gradient_checkpointing"] else "none"
    values = {key: used[key] for key in ("batch_size", "grad_accum_steps", "max_length")}
    values |= {"activation_checkpointing": checkpointing}
    changes = {key: value for key, value in values.items() if getattr(request, key) != value}
    ours = answer(as_typed(request, **changes), cluster)
    return {
        "trainer": name,
        "model": model.label,
        "gpu": machine.gpu_name,
        "gpu_memory_bytes": available,
        "memory_bytes": parts,
        "peak_bytes": peak,
        "context_bytes": context,
        "needed_bytes": needed,
        "fits": next((fit for limit, fit in fit_by_limit if limit <= available), "no"),
        "versions": traced["versions"],
        "settings": used,
        "not_modeled": DIALECTS[name]["not_modeled"],
        "not_translated": sorted(request.typed.keys() - TRANSLATED),
        "notes": notes,
        "suite": ours.as_dict() | {"command": launch_command(ours.first.plan, script)},
    }


def build_question(dialect: JsonObject, config: Request, document: JsonObject) -> JsonObject:
    """Return the question that others/trace.py reads. What the user did not set has the trainer's
    own default."""
    values = {
        "per_device_train_batch_size": "batch_size",
        "gradient_accumulation_steps": "grad_accum_steps",
    }
    typed: dict[str, Any] = {
        name: getattr(config, key) for name, key in values.items() if config.is_set(key)
    }
    if config.is_set("activation_checkpointing"):
        mode = config.activation_checkpointing
        if mode not in CHECKPOINTING:
            what = f"other trainers have no activation_checkpointing {mode}"
            raise UserError(what, fix=f"use {one_of([*CHECKPOINTING])}")
        typed["gradient_checkpointing"] = CHECKPOINTING[mode]
    is_fp32 = config.precision == "fp32"
    lora = None
    if config.lora_rank:
        targets = config.lora_targets
        lora = {
            "r": config.lora_rank,
            "lora_alpha": config.lora_alpha,
            "lora_dropout": config.lora_dropout,
            "target_modules": targets.split(",") if targets else "all-linear",
        }
    return {
        "class": dialect["class"],
        "config": document,
        "dtype": "float32" if is_fp32 or not lora else "bfloat16",
        "lora": lora,
        "length": config.max_length if config.is_set("max_length") else dialect["max_length"],
        "arguments": {"bf16": not is_fp32} | typed,
    }


def trace(question: JsonObject, python: str = sys.executable) -> JsonObject:
    """Return the answer of others/trace.py, which runs in a process of its own."""
    try:
        completed = subprocess.run(
            [python, "-I", str(OTHERS / "trace.py")],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=TRACE_S,
        )
        if completed.returncode == 0:
            return json.loads(completed.stdout)  # type: ignore[no-any-return]
        why = completed.stderr.strip().rpartition("\n")[2]
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    fix = ""
    if "ModuleNotFoundError" in why:
        fix = "run: pip install torch transformers peft accelerate"
    raise UserError(f"a step of {question['class']} could not be traced", why[:300], fix)


def report(found: JsonObject) -> list[str]:
    """Return the lines of an answer."""

    def gib(size: float) -> str:
        return f"{size / GIB:.3g}"

    low, high = map(gib, found["needed_bytes"])
    verbs = {"yes": "fits", "tight": "may just fit", "no": "does not fit"}
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    settings = ", ".join(f"{key} {value}" for key, value in found["settings"].items())
    lines = [
        f"{found['model']} {verbs[found['fits']]} with {found['trainer']}: {low} to {high} of "
        f"{gib(found['gpu_memory_bytes'])} GiB ({found['gpu']}).",
        *(f"{size / GIB:8.2f} GiB  {part}" for part, size in found["memory_bytes"].items()),
        f"{found['peak_bytes'] / GIB:8.2f} GiB  peak of all tensors",
        f"The allocator of PyTorch reserves {RESERVED[0]:.0%} to {RESERVED[1]:.0%} more (in 8 of "
        f"10 runs of this suite), and CUDA needs {gib(found['context_bytes'])} GiB.",
        f"Traced without a GPU: {versions}, with {settings}.",
        f"Not modeled: {', '.join(found['not_modeled'])}.",
    ]
    if found["not_translated"]:
        lines.append(f"Not translated: {', '.join(found['not_translated'])}.")
    lines += [f"note: {printable(note)}" for note in found["notes"]]
    return [
        *lines,
        "This suite, for as many tokens per step (its kernels, data order and initial adapters "
        f"differ): {found['suite']['verdict']}",
    ]
