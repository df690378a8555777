"""Measure the time, RAM and GPU memory of each step of a complete job with an 8B model.

    python results/lab/whole_job.py OUT.json [--model NAME] [--tiny]

The program writes chats about the functions of Python's standard library, and a model folder in the
Hugging Face format with random bf16 weights. Then it trains LoRA adapters on all GPUs and stops the
run halfway with Ctrl-C. After that, it resumes the run on one GPU, generates text, exports the
adapters, and merges them into the model. It loads both exports in transformers and PEFT and
compares the logits. RAM is the largest resident set size of any process in a step, including pages
of mapped files.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import checkout
import torch

from distributed_training.models import find_model
from distributed_training.records.record import provenance, write_json
from distributed_training.settings.keys import Parser
from results.lab.corpus.records import write_records

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SHARD_BYTES = 4 * 10**9
NUM_STEPS = 24
STOP_AFTER = 12
RAM = "RAM GiB of a process"
OPEN_EXPORTS = """
import json, sys, torch
from transformers import AutoModelForCausalLM
from peft import PeftModel
base, adapter, merged = sys.argv[1:]
device = "cuda" if torch.cuda.is_available() else "cpu"
ids = torch.arange(64, device=device)[None] + 300
logits = []
with torch.no_grad():
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", device_map=device)
    before = model(ids).logits.float()
    model = PeftModel.from_pretrained(model, adapter)
    adapted = model(ids).logits.float()
    model = model.merge_and_unload()
    theirs = model(ids).logits.float()
    del model
    whole = AutoModelForCausalLM.from_pretrained(merged, dtype="auto", device_map=device)
    after = whole(ids).logits.float()
print(json.dumps({
    "dtype": str(whole.dtype), "training changed logits by": float((adapted - before).abs().max()),
    "merged differs from adapter by": float((after - adapted).abs().max()),
    "PEFT's own merge does by": float((theirs - adapted).abs().max()),
    "both merges differ by": float((theirs - after).abs().max()),
    "largest logit": float(adapted.abs().max()),
}))
"""


def make_model(name: str, folder: Path) -> dict[str, Any]:
    """Write a model folder with random bf16 weights in several files, and a chat tokenizer. Return
    the size of the weights in GB."""
    spec = find_model(name)
    folder.mkdir(parents=True)
    model = spec.build_meta_model()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight_map: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    total = 0

    def write_shard() -> None:
        from safetensors.torch import save_file

        file = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        tensors.clear()

    for our_name, parameter in model.named_parameters():
        values = torch.ones(parameter.shape, device=device, dtype=torch.bfloat16)
        if parameter.dim() > 1:
            values.normal_(std=0.02)
        for hf_name, part in spec.code.to_hf(our_name, values, spec.size).items():
            tensors[hf_name] = part.reshape(-1, *values.shape[1:]).cpu().contiguous()
            total += tensors[hf_name].nbytes
        if sum(part.nbytes for part in tensors.values()) > SHARD_BYTES:
            write_shard()
    if tensors:
        write_shard()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {**spec.code.to_config(spec.size, 0), "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    assets = checkout.ROOT / "distributed_training/data/assets/bpe-2048"
    for file in assets.iterdir():
        shutil.copy(file, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return {"GB": total / 1e9}


def make_chats(file: Path) -> dict[str, Any]:
    """Write one chat per documented function of Python's standard library. Return the number of
    chats."""
    pairs = file.with_suffix(".pairs")
    write_records(pairs)
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    with file.open("w") as out:
        for row in rows:
            messages = [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["completion"]},
            ]
            out.write(json.dumps({"messages": messages}) + "\n")
    return {"chats": len(rows)}


class CommandResult(NamedTuple):
    """A command's output, and the largest resident set size of its processes in GiB."""

    printed: str
    ram_gib: float


def run(
    arguments: list[str], *, gpus: int, interrupt: Callable[[], bool] | None = None
) -> CommandResult:
    """Run a command. Send Ctrl-C to its processes once `interrupt` returns True. Raises
    RuntimeError if the command fails and `interrupt` is None."""
    visible = ",".join(str(gpu) for gpu in range(gpus))
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": visible}, start_new_session=True,
    )  # fmt: skip
    if interrupt:
        while process.poll() is None and not interrupt():
            time.sleep(0.05)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status and not interrupt:
        raise RuntimeError(printed[-2000:])
    return CommandResult(printed, usage.ru_maxrss / 2**20)


def summarize(record: dict[str, Any]) -> dict[str, Any]:
    """Return the steps, memory, step time and checkpoint saves of one part of the training."""
    memory = record["memory"]
    return {
        "steps": record["step"],
        "world_size": record["world_size"],
        "GPU GiB": (memory["peak_allocated_bytes"] or 0) / 2**30,
        RAM: (memory["peak_host_bytes"] or 0) / 2**30,
        "step_time_s": record["performance"]["step_time_s"]["p50"],
        "saves": record["saves"],
        "status": record["status"],
    }


def newest_record(folder: Path) -> dict[str, Any]:
    files = [file for file in folder.glob("*/record.json") if not file.parent.is_symlink()]
    record: dict[str, Any] = json.loads(max(files, key=os.path.getmtime).read_text())
    return record


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description="Run a complete job with an 8B model and time each step.")
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args(argv)
    num_gpus = torch.cuda.device_count()
    name = "tests/models/grouped" if arguments.tiny else arguments.model
    length = 64 if arguments.tiny else 1024
    document: dict[str, Any] = {
        "what": f"a complete LoRA job with {name}",
        "gpus": [torch.cuda.get_device_name(gpu) for gpu in range(num_gpus)],
        **provenance("python results/lab/whole_job.py OUT.json"),
        "steps": {},
    }

    def step(label: str, action: Callable[[], dict[str, Any]]) -> None:
        began = time.perf_counter()
        measured = action()
        row = {"seconds": time.perf_counter() - began, RAM: None, **measured}
        document["steps"][label] = row
        print(f"{label}: {json.dumps(row)[:600]}", flush=True)
        write_json(arguments.output, document)

    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        chats = Path(folder, "chats.jsonl")
        runs = Path(folder, "runs")
        script = "real_model_example.py"
        common = [
            "--model", str(base), "--dataset", str(chats), "--lora_rank", "16",
            "--batch_size", "4", "--max_length", str(length), "--max_steps", str(NUM_STEPS),
            "--num_samples", "2000", "--epochs", "10", "--checkpoint_every", "6",
            "--generate", "none", "--output_dir", str(runs),
        ]  # fmt: skip

        def reached_stop_step() -> bool:
            files = list(runs.glob("*/metrics.jsonl"))
            return any(f'"step":{STOP_AFTER},' in file.read_text() for file in files)

        def train() -> dict[str, Any]:
            num_ranks = max(num_gpus, 2)
            strategy = ["--strategy", "fsdp", "--num_gpus", str(num_ranks)]
            run([script, *common, *strategy], gpus=num_gpus, interrupt=reached_stop_step)
            return summarize(newest_record(runs))

        def resume() -> dict[str, Any]:
            (first,) = (path for path in runs.iterdir() if path.is_dir() and not path.is_symlink())
            accumulate = ["--grad_accum_steps", str(max(num_gpus, 2))]  # the same global batch
            options = ["--resume", str(first), "--strategy", "dp", "--num_gpus", "1", *accumulate]
            run([script, *common, *options], gpus=1)
            sizes = [file.stat().st_size for file in first.glob("**/*") if file.is_file()]
            return {**summarize(newest_record(runs)), "GB of the run": sum(sizes) / 1e9}

        def finished_run() -> str:
            return str(max(runs.glob("*/record.json"), key=os.path.getmtime).parent)

        def generate() -> dict[str, Any]:
            options = [
                "generate",
                finished_run(),
                "--prompt",
                "def add(a, b):",
                "--num_tokens",
                "32",
            ]
            result = run([script, *options], gpus=1)
            return {"text": result.printed[-200:], RAM: result.ram_gib}

        def export(*merge: str) -> dict[str, Any]:
            to = Path(folder, "merged" if merge else "adapter")
            result = run([script, "export", finished_run(), "--to", str(to), *merge], gpus=1)
            size = sum(file.stat().st_size for file in to.iterdir())
            return {"GB": size / 1e9, RAM: result.ram_gib}

        def open_exports() -> dict[str, Any]:
            folders = [str(base), str(Path(folder, "adapter")), str(Path(folder, "merged"))]
            result = run(["-c", OPEN_EXPORTS, *folders], gpus=1)
            logits: dict[str, Any] = json.loads(result.printed.splitlines()[-1])
            return {**logits, RAM: result.ram_gib}

        step("make the model", lambda: make_model(name, base))
        step("make the chats", lambda: make_chats(chats))
        step("train, Ctrl-C", train)
        step("resume on one GPU", resume)
        step("generate", generate)
        step("export the adapter", export)
        step("export --merge", lambda: export("--merge"))
        step("open both in transformers and PEFT", open_exports)
    return 0


if __name__ == "__main__":
    checkout.run(main)
