"""Compare this suite with transformers' Trainer on models with 1B to 8B parameters.

    python -m results.lab.baselines.large OUT.json [--rows NAME ...] [--tiny]

The rows are in results/plans/large.json. Each measurement runs in separate processes. Our suite
runs as users run it: `real_model_example.py` with the row's CONFIG. The run's record contains the
prediction that was made before the first step. The Trainer's model has the same configuration, with
random weights created on the GPU. The Trainer uses bf16, Liger kernels, fused AdamW and PEFT
adapters. Rows without "trainer" measure only our suite. --tiny is a smoke test for CPUs.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from distributed_training.models import find_model
from distributed_training.records.record import provenance, write_json
from distributed_training.settings.files import ROOT, load_json
from distributed_training.settings.keys import Parser
from results.lab import checkout
from results.lab.corpus.records import write_records

PLAN = load_json(ROOT / "results/plans/large.json", "plan")
ROWS: dict[str, dict[str, Any]] = PLAN["runs"]
RECORDS = "records.jsonl"  # written by train_with_suite into the folder of the run
TINY = {"model": "tests/models/grouped", "batch_size": 2, "max_length": 32, "precision": "fp32"}
MAX_STEPS = 32
TRAINER_WARMUP = 8
TRAINER_STEPS = 12
LIMIT_S = 300


def train_with_suite(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run real_model_example.py with a row's CONFIG. Return the run's record, with its wall time in
    seconds as `wall_s`."""
    settings = {key: value for key, value in row.items() if key not in ("gpus", "trainer")}
    config = {**PLAN["common"], **settings, "max_steps": MAX_STEPS, "output_dir": str(folder)}
    if config["dataset"] == RECORDS:
        config["dataset"] = folder / RECORDS
        write_records(config["dataset"])
    arguments = []
    for key, value in config.items():
        arguments += [f"--{key}", "none" if value is None else str(value)]
    command = [sys.executable, "real_model_example.py", *arguments]
    if (gpus := row.get("gpus", 1)) > 1:
        command += ["--num_gpus", str(gpus)]
    began = time.perf_counter()
    run(command, gpus)
    (path,) = (file for file in folder.glob("*/record.json") if not file.parent.is_symlink())
    return {"wall_s": time.perf_counter() - began, **json.loads(path.read_text())}


def train_with_trainer(row: dict[str, Any]) -> dict[str, float]:
    """Train with transformers' Trainer in this process. Return the time per step in seconds, the
    tokens per second and, on a GPU, the peak memory in bytes."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    options = row["trainer"]
    on_gpu = torch.cuda.is_available()
    spec = find_model(row["model"])
    frozen = bool(row.get("lora_rank"))
    dtype = torch.bfloat16 if frozen and on_gpu else torch.float32
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if on_gpu else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        document = spec.code.to_config(spec.size, 0)
        (Path(folder) / "config.json").write_text(json.dumps(document))
        config = AutoConfig.from_pretrained(folder, use_cache=False)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if frozen:
            from peft import LoraConfig, get_peft_model

            lora = LoraConfig(
                r=row["lora_rank"], lora_alpha=row["lora_alpha"], target_modules="all-linear",
                task_type="CAUSAL_LM",
            )  # fmt: skip
            model = get_peft_model(model, lora)  # type: ignore[assignment]
            model.enable_input_require_grads()
        times: list[float] = []

        class Ticks(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                if on_gpu:
                    torch.cuda.synchronize()
                times.append(time.perf_counter())

        steps = TRAINER_WARMUP + TRAINER_STEPS
        batch = row["batch_size"]
        ids = torch.randint(spec.size.vocab_size, (4 * batch, row["max_length"]))
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=batch, max_steps=steps, bf16=on_gpu,
            optim="adamw_torch_fused", learning_rate=1e-4, max_grad_norm=1.0, report_to="none",
            use_liger_kernel=on_gpu, save_strategy="no", logging_strategy="no", disable_tqdm=True,
            gradient_checkpointing=options.get("checkpointing", False), use_cpu=not on_gpu,
            fsdp=options.get("fsdp"),
        )  # fmt: skip
        rows = [{"input_ids": tokens, "labels": tokens} for tokens in ids]
        Trainer(model, arguments, train_dataset=rows, callbacks=[Ticks()]).train()
    timed = torch.tensor(times).diff()[-TRAINER_STEPS:]
    step_time_s = float(timed.median())
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    measured = {
        "step_time_s": step_time_s,
        "tokens_per_s": batch * row["max_length"] * world_size / step_time_s,
    }
    if on_gpu:
        measured["peak_allocated_bytes"] = float(torch.cuda.max_memory_allocated())
    return measured


def run(command: list[str], gpus: int) -> str:
    """Run a command on the given number of GPUs and return its output."""
    gpu_ids = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    gpu_environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpu_ids[:gpus])}
    completed = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, **gpu_environment},
    )
    if completed.returncode:
        raise RuntimeError((completed.stdout + completed.stderr)[-1500:])
    return completed.stdout


def measure_trainer(row: dict[str, Any]) -> dict[str, float]:
    """Measure the Trainer on a row's configuration, in separate processes."""
    gpus = row.get("gpus", 1)
    start = [sys.executable]
    if gpus > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]
    module = ["-m", "results.lab.baselines.large", "--one", json.dumps(row)]
    measured: dict[str, float] = json.loads(run([*start, *module], gpus).splitlines()[-1])
    return measured


def summarize(record: dict[str, Any], trainer: dict[str, float] | None) -> dict[str, Any]:
    """Return one row of the published table, with memory in GiB and times in seconds. The Trainer
    columns are None if `trainer` is None."""
    performance, memory, predicted = (
        record[key] for key in ("performance", "memory", "prediction")
    )
    gib = 2**30
    row = {
        "tokens/s": performance["tokens_per_s"],
        "MFU": performance["mfu"],
        "GiB": (memory["peak_allocated_bytes"] or 0) / gib,
        "predicted GiB": predicted["peak_bytes"] / gib,
        "step_time_s": performance["step_time_s"]["p50"],
        "predicted step_time_s": predicted["step_time_s"],
        "RAM GiB": (memory["peak_host_bytes"] or 0) / gib,
        "wall_s": record["wall_s"],
    }
    if trainer is None:
        return {**row, **dict.fromkeys(("Trainer tokens/s", "Trainer GiB", "ours / Trainer"))}
    row["Trainer tokens/s"] = trainer["tokens_per_s"]
    row["Trainer GiB"] = trainer.get("peak_allocated_bytes", 0) / gib
    row["ours / Trainer"] = row["tokens/s"] / trainer["tokens_per_s"]
    return row


def show(name: str, result: dict[str, Any]) -> str:
    """Return a row's figures on one line. If the row failed, append the end of its error."""
    figures = (f"{key} {value:.4g}" for key, value in result.items() if isinstance(value, float))
    error = f" ERROR {result['error'][-700:]}" if "error" in result else ""
    return f"{name}: {', '.join(figures)}{error}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        description="Compare this suite with transformers' Trainer on models with 1B to 8B "
        "parameters."
    )
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one")
    arguments = parser.parse_args(argv)
    if arguments.one:
        print(json.dumps(train_with_trainer(json.loads(arguments.one))))
        return 0
    rows = arguments.rows or list(ROWS)
    result: dict[str, Any] = {
        "what": "models with 1B to 8B parameters in bf16: this suite, and transformers' Trainer "
        "with PEFT and Liger",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        **provenance(f"python -m results.lab.baselines.large OUT.json --rows {shlex.join(rows)}"),
        "rows": {},
    }
    for name in rows:
        row = {**ROWS[name], **(TINY if arguments.tiny else {})}
        measured: dict[str, Any] = {}
        try:
            with tempfile.TemporaryDirectory() as folder:
                record = train_with_suite(row, Path(folder))
            measured = {**summarize(record, None), "record": record}
            if "trainer" in row:
                measured |= summarize(record, measure_trainer(row))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            measured["error"] = str(error)
        result["rows"][name] = measured
        print(show(name, measured), flush=True)
        write_json(arguments.output, result)
    return 0


if __name__ == "__main__":
    checkout.run(main)
