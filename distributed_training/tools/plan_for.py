"""Answer what a training needs in another trainer (`plan --for`), beside what this suite needs for
the same work. The program others/trace_step.py runs one step of that trainer without a GPU, in a
process of its own, because only that process needs torch and the trainer. This module imports
neither.

others/dialects.json describes each trainer. A rule in `keys` is a key of its files, what it means
here and, if not every value is kept as it is, the meaning of each value. A meaning that begins with
"=" is an argument of the trainer, and the others are CONFIG's keys, "dtype" (of the weights),
"double" (quantization), "prepare" (whether PEFT converts what has no 4 bits to fp32), "fp32" (parts
of modules' names that are in fp32 if all weights are trained) and "targets" (all-linear, or else
PEFT chooses the matrices)."""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from distributed_training.planner.answer import answer
from distributed_training.planner.choose import choose_model
from distributed_training.planner.sort import as_typed
from distributed_training.predict.predict import Cluster
from distributed_training.predict.rates import FITTED, Rates
from distributed_training.records.display import fold
from distributed_training.settings.config import AUTO, KEYS, Request
from distributed_training.settings.errors import UserError, first_line, printable
from distributed_training.settings.files import (
    JsonObject,
    load_json,
    one_of,
    require_regular,
    shown,
)
from distributed_training.settings.machine import GIB
from distributed_training.tools.jobs import launch_command
from distributed_training.tools.unsloth import estimate_step

OTHERS = Path(__file__).parent.parent / "others"
DIALECTS: JsonObject = load_json(OTHERS / "dialects.json", "the table of trainers")
TRACE_S = 300
MAX_FILE_BYTES = 2**20
MAX_BRACKETS = 1000
# Share by which PyTorch's allocator reserved more than it had allocated, in 8 of 10 of this
# suite's runs that have more than 4 GiB
RESERVED = (0.01, 0.14)
# Shares of the rates in predict/rates.py that other trainers' kernels reach, and seconds of Python
# for each kernel. They are fitted to the measured steps in records/trainers.json and
# records/h200-2026/beside-plan.json, four of five of which are inside the ranges.
GEMM_SHARE = 0.8
ATTENTION_SHARE = 0.95
MEMORY_SHARE = 0.7
KERNEL_S = 35e-6
GPU_RANGE = (0.85, 1.15)
PYTHON_RANGE = (0.9, 1.9)  # of the GPU's time, and of the longer one, if Python may be slower
# Arguments of transformers' Trainer that CONFIG's keys set
ARGUMENTS = {
    "batch_size": "per_device_train_batch_size",
    "grad_accum_steps": "gradient_accumulation_steps",
    "activation_checkpointing": "gradient_checkpointing",
}
TRANSLATED = {
    *ARGUMENTS, "model", "max_length", "precision", "base_dtype",
    "lora_rank", "lora_alpha", "lora_dropout", "lora_targets",
}  # fmt: skip


def run(
    arguments: argparse.Namespace,
    configure: Callable[[dict[str, str]], Request],
    cluster: Cluster | None,
    script: Path,
) -> int:
    """Print what the trainer that `--for` names needs. Return the exit code."""
    if cluster is None or cluster.num_processes > 1:
        why = "what other trainers need is modeled for one GPU, which need not be here"
        raise UserError("--for needs a cluster of one GPU", why, "add --cluster 4090")
    name, *files = arguments.trainer
    if name not in DIALECTS or len(files) > 1:
        what = f"--for {shown(' '.join(arguments.trainer))} is not accepted"
        raise UserError(what, fix=f"write {one_of([*DIALECTS])}, and at most one YAML file of it")
    document = read_yaml(Path(files[0])) if files else {}
    values, unknown, ignored = translate(DIALECTS[name], document)
    keys = {key: str(value) for key, value in values.items() if key in KEYS}
    if (keys | arguments.overrides).get("lora_rank", "0") == "0":
        keys.pop("lora_dropout", None)
    request = configure(keys | arguments.overrides)
    if request.batch_size == AUTO:
        raise UserError("--for needs a number for batch_size", fix="add --batch_size 4")
    notes: list[str] = []
    config, model = choose_model(request, cluster.machine, notes)
    question = build_question(DIALECTS[name], config, values)
    question["config"] = model.code.to_config(model.size, 0)
    if name == "unsloth":
        free_bytes = cluster.machine.gpu_memory_bytes - FITTED.gpu_context_bytes.alone
        traced = estimate_step(question["config"], config, free_bytes)
    else:
        traced = trace(question, arguments.python or sys.executable)
    if question["lora"] and not question["lora"]["target_modules"]:
        request = as_typed(request, lora_targets=traced["used"]["lora_targets"])
    found = {"trainer": name, "model": model.label} | describe(traced, request, cluster, script)
    found["settings"] = {"weights": question["dtype"], **traced["used"]}
    found["not_modeled"] = [*ignored, *DIALECTS[name]["not_modeled"]]
    found["unknown_keys"] = unknown
    file_only = document.keys() & {*DIALECTS[name]["no_effect"].split()}
    found["not_translated"] = sorted(file_only | arguments.overrides.keys() - TRANSLATED)
    found["notes"] = notes
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(map(fold, report(found))))
        print(f"  {found['suite']['command']}")
    return int(found["fits"] == "no")


def read_yaml(file: Path) -> JsonObject:
    """Return the keys of a trainer's YAML file, which may come from anywhere."""
    import yaml  # which the planner's page does not have

    require_regular(file, "the file")
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ValueError("it is larger than 1 MiB")
        text = file.read_text(encoding="utf-8-sig")
        if text.count("[") + text.count("{") > MAX_BRACKETS:  # each is compared with all
            raise ValueError(f"it has more than {MAX_BRACKETS:,} brackets")
        if any(isinstance(token, (yaml.AliasToken, yaml.TagToken)) for token in yaml.scan(text)):
            raise ValueError("it has aliases or tags, whose meaning no trainer needs")
        document = yaml.safe_load(text)
        if not isinstance(document, dict):
            raise ValueError("it has no keys")
        if len(yaml.compose(text, yaml.SafeLoader).value) > len(document):
            raise ValueError("it has a key twice")
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{file} cannot be read as YAML", first_line(error)) from None
    return {str(key): value for key, value in document.items()}


def translate(dialect: JsonObject, document: JsonObject) -> tuple[JsonObject, list[str], list[str]]:
    """Return the meanings of a file's keys, completed with the trainer's defaults, the unknown
    keys, and what is not modeled. The first rule that gives a meaning a value is used."""
    values: JsonObject = {}
    ignored = []
    known = {*dialect["no_effect"].split(), *dialect["not_modeled_keys"]}
    for key, meaning, *choices in dialect["keys"]:
        known.add(key)
        value = document.get(key)
        if value is None:
            continue
        if choices:
            if str(value).lower() not in choices[0]:
                ignored.append(f"{key}: {shown(value)}")
                continue
            value = choices[0][str(value).lower()]
        elif meaning == "lora_targets":
            value = ",".join(map(str, value)) if isinstance(value, list) else value
            if value in ("all", "all-linear"):
                meaning, value = "targets", "all-linear"
        if value is not None:
            values.setdefault(meaning, value)
    for key, why in dialect["not_modeled_keys"].items():
        if document.get(key):
            ignored.append(f"{key} ({why})")
    unknown = sorted(document.keys() - known)
    return dialect["defaults"] | values, unknown, ignored


def build_question(dialect: JsonObject, config: Request, values: JsonObject) -> JsonObject:
    """Return the question that others/trace_step.py reads, except for the model's config. What the
    user did not set has the trainer's own default."""
    arguments = {key[1:]: value for key, value in values.items() if key.startswith("=")}
    typed = {ARGUMENTS[key]: getattr(config, key) for key in ARGUMENTS if key in config.typed}
    if "gradient_checkpointing" in typed:
        modes = {"none": False, "full": True}
        if config.activation_checkpointing not in modes:
            what = f"other trainers have no activation_checkpointing {typed.popitem()[1]}"
            raise UserError(what, fix=f"use {one_of([*modes])}")
        typed["gradient_checkpointing"] = modes[config.activation_checkpointing]
    targets = config.lora_targets
    lora = {
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "target_modules": targets.split(",") if targets else values.get("targets"),
    }
    is_fp32 = config.precision == "fp32"
    is_bf16 = config.lora_rank and not is_fp32
    return {
        "class": dialect["class"],
        "dtype": values.get("dtype", "bfloat16" if is_bf16 else "float32"),
        "lora": lora if config.lora_rank else None,
        "nf4": {"double": values.get("double", False)} if config.base_dtype == "nf4" else None,
        "prepare": values.get("prepare", True),
        "fp32": [] if config.lora_rank else values.get("fp32", []),
        "length": config.max_length if "max_length" in config.typed else None,
        "arguments": {"bf16": not is_fp32} | arguments | typed,
    }


def trace(question: JsonObject, python: str) -> JsonObject:
    """Return the answer of others/trace_step.py, which runs in a process of its own."""
    fix = ""
    try:
        completed = subprocess.run(
            [python, "-I", str(OTHERS / "trace_step.py")],
            input=json.dumps(question, default=str),  # YAML also has dates and sets
            capture_output=True,
            text=True,
            timeout=TRACE_S,
        )
        if completed.returncode == 0:
            return json.loads(completed.stdout)  # type: ignore[no-any-return]
        errors = re.findall(r"^[\w.]+(?:Error|Exception).*", completed.stderr, re.MULTILINE)
        why = errors[-1] if errors else completed.stderr[-300:]
        if "ModuleNotFoundError" in why:
            fix = "install it, or name the Python that you train with: --python FILE"
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    raise UserError(f"a step of {question['class']} could not be traced", why[:300], fix)


def describe(traced: JsonObject, request: Request, cluster: Cluster, script: Path) -> JsonObject:
    """Return the memory of a traced step on the cluster's GPU, and what this suite needs for as
    many tokens per step."""
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
    fits = [size <= machine.gpu_memory_bytes for size in needed]
    checkpointing = "full" if used["gradient_checkpointing"] else "none"
    same = {key: used[key] for key in ("batch_size", "grad_accum_steps", "max_length")}
    same["activation_checkpointing"] = checkpointing
    changes = {key: value for key, value in same.items() if getattr(request, key) != value}
    ours = answer(as_typed(request, **changes), cluster)
    times: dict[str, object] = {"step_time_s": None}
    if cluster.rates is not None and "kernels" in sizes:
        seconds, is_slow = estimate_times(sizes, cluster.rates)
        times = {"step_time_s": seconds, "python_may_be_slower": is_slow}
    return times | {
        "gpu": machine.gpu_name,
        "gpu_memory_bytes": machine.gpu_memory_bytes,
        "memory_bytes": parts,
        "peak_bytes": peak,
        "context_bytes": context,
        "needed_bytes": needed,
        "fits": "yes" if all(fits) else "tight" if any(fits) else "no",
        "versions": traced["versions"],
        "suite": ours.as_dict() | {"command": launch_command(ours.first.plan, script)},
    }


def estimate_times(sizes: JsonObject, rates: Rates) -> tuple[list[float], bool]:
    """Return the range of a step's seconds, and whether Python may be slower than the GPU."""
    gpu_s = (
        sizes["flops"] / (GEMM_SHARE * rates.gemm_flops)
        + sizes["fp32_flops"] / (GEMM_SHARE * rates.fp32_gemm_flops)
        + sizes["attention_flops"] / (ATTENTION_SHARE * rates.attention_flops)
        + sizes["bytes"] / (MEMORY_SHARE * rates.memory_bytes_per_s)
    )
    python_s = sizes["kernels"] * KERNEL_S
    if python_s < 0.8 * gpu_s:
        return [share * gpu_s for share in GPU_RANGE], False
    low, high = PYTHON_RANGE
    return [low * gpu_s, high * max(gpu_s, python_s)], True


def time_line(found: JsonObject) -> str:
    """Return the line about a step's time."""
    if found["step_time_s"] is None:
        return "The time of a step is not known."
    low, high = (f"{seconds:.2g}" for seconds in found["step_time_s"])
    why = ": Python may be slower than the GPU" if found["python_may_be_slower"] else ""
    return f"A step takes {low} to {high} s{why}."


def report(found: JsonObject) -> list[str]:
    """Return the lines of an answer."""
    low, high = (f"{size / GIB:.3g}" for size in found["needed_bytes"])
    verbs = {"yes": "fits", "tight": "may just fit", "no": "does not fit"}
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    settings = ", ".join(f"{key} {value}" for key, value in found["settings"].items())
    lines = [
        f"{found['model']} {verbs[found['fits']]} with {found['trainer']}: {low} to {high} of "
        f"{found['gpu_memory_bytes'] / GIB:.3g} GiB ({found['gpu']}).",
        *(f"{size / GIB:8.2f} GiB  {part}" for part, size in found["memory_bytes"].items()),
        f"{found['peak_bytes'] / GIB:8.2f} GiB  peak of all tensors",
        f"The allocator of PyTorch reserves {RESERVED[0]:.0%} to {RESERVED[1]:.0%} more (in 8 of "
        f"10 runs of this suite), and CUDA needs {found['context_bytes'] / GIB:.2g} GiB.",
        time_line(found),
        f"{'By a formula' if found['trainer'] == 'unsloth' else 'Traced without a GPU'}: "
        f"{versions}, with {settings}.",
    ]
    titles = {
        "not_modeled": "Not modeled",
        "unknown_keys": "Unknown keys, which may need memory",
        "not_translated": "Not translated",
    }
    for key, title in titles.items():
        if found[key]:
            lines.append(f"{title}: {', '.join(map(printable, found[key]))}.")
    lines += [f"note: {printable(note)}" for note in found["notes"]]
    return [
        *lines,
        "This suite, for as many tokens per step (its kernels, data order and initial adapters "
        f"differ): {found['suite']['verdict']}",
    ]
