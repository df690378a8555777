"""Ask other calculators for the memory of twelve measured runs on one GPU, and write what they say
beside the measurement: `python results/lab/rivals.py OUT.json`.

It installs them into an environment of its own. They would ask the Hub for a model's config.json;
they get the one in models/table.json instead. What they cannot describe is null."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

PACKAGES = {  # with what they import
    "fitcheck-llm==0.3.1": ("click", "rich", "huggingface-hub"),
    "ftuneai==0.4.1": ("pyyaml",),
    "llm-analysis==0.2.2": ("fire<0.6",),
}
RUNS = (  # [page, row], or a record
    ("h100-large/one-gpu", "Llama-3.1-8B LoRA 1 x 4096, full"),
    ("h100-large/one-gpu", "Llama-3.1-8B LoRA 2 x 8192, full"),
    ("h100-large/one-gpu", "Llama-3.1-8B LoRA 1 x 4096, full, nf4"),
    ("h100-large/one-gpu", "Qwen3-8B LoRA 1 x 1024, full"),
    ("h100-large/one-gpu", "Qwen3-8B LoRA 1 x 1024, full, nf4"),
    ("h100-large/one-gpu", "Qwen3-4B LoRA 2 x 4096, full"),
    ("h200-large/one-gpu", "Llama-3.2-3B LoRA 4 x 2048, full"),
    ("h200-large/one-gpu", "Mistral-7B LoRA 1 x 8192, full, nf4"),
    ("h100-large/one-gpu", "Llama-3.2-1B 4 x 2048"),
    ("h200-x1-llama/Qwen3-0.6B-dp-bf16-b8-x1", None),
    ("h200-x1-llama/Qwen3-0.6B-dp-bf16-b16-x1", None),
    ("h200-x1-llama/Qwen3-0.6B-dp-bf16-b16-x1-2", None),
)


def ask_fitcheck(run: dict[str, Any], folder: Path) -> float:
    """Return GiB. Its targets for LoRA are those of the run: all linear layers."""
    from fitcheck import TrainingConfig, config_parser, estimate, get_gpu
    from fitcheck.memory.lora import LORA_TARGETS_FULL

    file = str(folder / "config.json")
    with (
        mock.patch.object(config_parser, "hf_hub_download", return_value=file),
        mock.patch.object(config_parser, "_reported_param_count", return_value=None),
    ):
        model = config_parser.fetch_model_config(run["model"])
    training = TrainingConfig(
        quantization=run["base_dtype"] or "none",
        batch_size=run["batch_size"],
        seq_len=run["max_length"],
        lora_rank=run["lora_rank"] or None,
        lora_targets=list(LORA_TARGETS_FULL),
        grad_checkpoint=run["checkpoints"],
        flash_attn=True,
    )
    return float(estimate(model, training, get_gpu("h200")).total_mib) / 1024


def ask_ftune(run: dict[str, Any], folder: Path) -> float:
    from ftuneai import Estimator, estimator, hub

    config = json.loads((folder / "config.json").read_text())
    with (
        mock.patch.object(hub, "fetch_model_config", return_value=config),
        mock.patch.object(estimator, "get_model", hub.resolve_model_from_hub),
    ):
        method = "lora" if run["lora_rank"] else "full"
        asked = Estimator(
            run["model"],
            method="qlora" if run["base_dtype"] else method,
            quantization="4bit" if run["base_dtype"] else "none",
            batch_size=run["batch_size"],
            seq_length=run["max_length"],
            gradient_checkpointing=run["checkpoints"],
            lora_rank=run["lora_rank"] or 16,
            lora_target="all_linear",
            flash_attention=True,
        )
    return float(asked.estimate_memory().total_gb)


def ask_llm_analysis(run: dict[str, Any], folder: Path) -> float | None:
    """Return GiB, or None for LoRA, which it does not know."""
    from llm_analysis.analysis import train

    if run["lora_rank"]:
        return None
    config = json.loads((folder / "config.json").read_text())
    names = {
        "num_layers": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "hidden_dim": "hidden_size",
        "vocab_size": "vocab_size",
        "max_seq_len": "max_position_embeddings",
        "num_key_value_heads": "num_key_value_heads",
        "ffn_embed_dim": "intermediate_size",
    }
    file = folder / "llm-analysis.json"
    file.write_text(json.dumps({"name": "model", **{k: config[v] for k, v in names.items()}}))
    answer = train(
        str(file),
        "h100-sxm-80gb",
        log_level="ERROR",
        batch_size_per_gpu=run["batch_size"],
        gradient_accumulation_steps=1,
        seq_len=run["max_length"],
        total_num_tokens=10**9,
        total_num_gpus=1,
        dp_size=1,
        activation_recomputation=2 if run["checkpoints"] else 0,
        mlp_gated_linear_units=True,
        flops_efficiency=0.5,
        output_dir=None,
    )
    return float(answer["(weight+op_state+grad+act)_memory_per_gpu"]) / 2**30


ASK = {"fitcheck-llm": ask_fitcheck, "ftuneai": ask_ftune, "llm-analysis": ask_llm_analysis}


def ask_all(runs: list[dict[str, Any]]) -> list[dict[str, float | None]]:
    """Return the answers to each run, in the environment that has the calculators."""
    answers = []
    for run in runs:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(run["document"]))
            answers.append({name: ask(run, Path(folder)) for name, ask in ASK.items()})
    return answers


def read_runs() -> list[dict[str, Any]]:
    """Return the settings, config.json and memory of each run. What was measured and predicted is
    torch's allocated memory, to which CUDA's context is added, as other calculators do."""
    from distributed_training.models.table import read_table
    from distributed_training.settings.files import ROOT
    from distributed_training.settings.machine import GIB
    from trainplan import plan

    first = plan("H200", "gpt2")["picks"][0]
    context_bytes = first["needed_bytes"] - first["peak_bytes"]
    runs = []
    for page, name in RUNS:
        record = json.loads((ROOT / "results/records" / f"{page}.json").read_text())
        record = record["rows"][name]["record"] if name else record
        config = record["config"]
        names = [n for n in read_table() if n.endswith(config["model"].rpartition("/")[2])]
        checkpoints = config["activation_checkpointing"] == "full"
        label = name or f"{config['model']} {config['batch_size']} x {config['max_length']}"
        if name is None and checkpoints:
            label += ", full"
        measured = record["memory"]["peak_allocated_bytes"] + context_bytes
        predicted = record["prediction"]["peak_bytes"] + context_bytes
        keys = ("batch_size", "max_length", "lora_rank", "base_dtype")
        runs.append(
            {
                "label": label,
                "gpu": record["machine"]["gpu_name"],
                "record": page,
                "model": names[0],
                **{key: config.get(key) for key in keys},
                "checkpoints": checkpoints,
                "document": read_table()[names[0]]["config"],
                "measured GiB": measured / GIB,
                "ours": predicted / GIB,
            }
        )
    return runs


def main() -> int:
    import checkout

    from distributed_training.records.record import provenance

    parser = checkout.Parser(description=__doc__)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    runs = read_runs()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = str(Path(folder) / "bin" / "python")
        needed = [package for packages in PACKAGES.values() for package in packages]
        for words in (["--no-deps", *PACKAGES], needed):
            subprocess.run([python, "-m", "pip", "install", "-qq", *words], check=True)
        result = subprocess.run(
            [python, __file__, "--inside"],
            input=json.dumps(runs),
            capture_output=True,
            text=True,
            check=True,
        )
    answers = json.loads(result.stdout.splitlines()[-1])
    rows = {
        run.pop("label"): {key: value for key, value in run.items() if key != "document"} | answer
        for run, answer in zip(runs, answers, strict=True)
    }
    command = "python results/lab/rivals.py OUT.json"
    document = {**provenance(command), "packages": list(PACKAGES), "rows": rows}
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--inside"]:
        print(json.dumps(ask_all(json.loads(sys.stdin.read()))))
    else:
        import checkout

        checkout.run(main)
