"""Test `plan --for`: what another trainer needs, beside what this suite needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from distributed_training.settings.files import ROOT
from distributed_training.tools import plan_for
from tests.planner.test_command import CONFIG, main, plan  # noqa: F401
from tests.support import refused

# Keys and values of examples in public repositories, in their versions of the named commits
PUBLIC = json.loads(Path(__file__).with_name("public_files.json").read_text())
LORA = "--model", "Qwen/Qwen3-0.6B", "--lora_rank", "16"
ALL = "--lora_targets", "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
TINY = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    "tie_word_embeddings": True, "max_position_embeddings": 512,
    "hidden_act": "gelu_new",  # computes powers in fp32 under CUDA's autocast
}  # fmt: skip


@pytest.mark.processes
def test_the_peak_of_a_trainer_is_the_measured_one(plan):  # noqa: F811
    shape = "--batch_size", "8", "--max_length", "1024", "--for", "trainer"
    found = json.loads(plan(*LORA, *ALL, *shape, "--cluster", "H100-80GB", "--json"))
    assert found["peak_bytes"] / 2**30 == pytest.approx(30.60, rel=0.002)  # on an H100
    assert sum(found["memory_bytes"].values()) == found["peak_bytes"]
    assert found["memory_bytes"]["optimizer"] == 8 * 10_092_544 + 4 * 392  # with steps of tensors
    assert found["fits"] == "yes"
    assert found["settings"]["optim"] == "adamw_torch_fused"
    assert {"8", "1024", "dp"} <= set(found["suite"]["command"].split())


@pytest.mark.processes
def test_a_file_with_4_bits_is_traced(plan, tmp_path):  # noqa: F811
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"vocab_size": 8192}))
    file = tmp_path / "qlora.yaml"
    file.write_text(
        f"model_name_or_path: {tmp_path}\nquantization_bit: 4\nlora_rank: 4\noptim: adamw_8bit\n"
        "cutoff_len: 64\nper_device_train_batch_size: 2\nwarp_drive: 9\ndeepspeed: z3.json\n"
    )
    found = json.loads(plan("--for", "llamafactory", str(file), "--cluster", "4090", "--json"))
    blocks = 8 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)  # matrices of the blocks, in 4 bits
    quantized = blocks // 2 + blocks // 64 * (1 + 4 / 256)
    others = 8192 * 64 + 64 + 8 * (2 * 64 + 2 * 16)  # LLaMA-Factory leaves them in bf16
    adapters = 4 * 8 * (4 * 64 + 64 * 4 + 2 * 32 + 3 * 192)
    weights = quantized + 2 * others + 4 * adapters
    rounding = 512 * 8 * 30
    assert found["memory_bytes"]["weights"] == pytest.approx(weights, abs=rounding)
    assert found["unknown_keys"] == ["warp_drive"]
    assert found["not_modeled"][0].startswith("deepspeed")
    assert found["settings"]["gradient_checkpointing"] is True  # LLaMA-Factory's default
    assert "--base_dtype nf4" in found["suite"]["command"]


# Prints trace_step's own answer to the first of several questions, and the sizes of a step of each.
PROGRAM = """
import io, json, sys, trace_step
questions = json.load(sys.stdin)
trace_step.pretend_gpu()
sizes = [trace_step.trace(q, q["config"]["num_hidden_layers"])[0] for q in questions]
trace_step.pretend_gpu = int
sys.stdin = io.StringIO(json.dumps(questions[0]))
trace_step.main()
print(json.dumps(sizes))
"""
STEP = {"class": "Trainer", "dtype": "bfloat16", "lora": None, "nf4": None, "length": 64}


@pytest.mark.processes
def test_many_blocks_and_dropout_change_the_peak_as_computed():
    """With 4 blocks, the head needs most; with 12, the gradients of all blocks do, and few blocks
    tell this peak. Dropout keeps a byte per element of the matrices that PEFT chooses."""
    deep = TINY | {"num_hidden_layers": 12, "vocab_size": 8192, "intermediate_size": 1024}
    arguments = {"per_device_train_batch_size": 1, "gradient_checkpointing": True}
    questions = [STEP | {"config": deep, "arguments": arguments, "fp32": ["norm", "embed_tokens"]}]
    for p in (0.0, 0.1):
        lora = {"r": 4, "lora_alpha": 8, "target_modules": None, "lora_dropout": p}
        config = TINY | {"num_hidden_layers": 3, "vocab_size": 8192}
        arguments = {"bf16": True, "per_device_train_batch_size": 2}
        questions.append(STEP | {"config": config, "arguments": arguments, "lora": lora})
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=plan_for.OTHERS, input=json.dumps(questions),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    answer, sizes = map(json.loads, completed.stdout.splitlines()[-2:])
    peaks = [{key: n for key, n in each.items() if key.startswith("peak")} for each in sizes]
    assert max(peaks[0], key=peaks[0].__getitem__) == "peak: first block"
    many, without, kept = (max(each.values()) for each in peaks)
    assert answer["sizes"]["peak"] == pytest.approx(many, rel=1e-3)
    # Blocks after the first, whose input needs no gradient; tokens; inputs of q_proj and v_proj
    assert kept - without == 2 * 128 * 2 * 64
    matrices = 12 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 1024)
    in_fp32 = 8192 * 64 + 64 + 12 * (2 * 64 + 2 * 16)
    found = answer["sizes"]["weights"]
    assert found == pytest.approx(2 * matrices + 4 * in_fp32, abs=512 * 12 * 6)


@pytest.mark.parametrize(
    ("trainer", "document", "expected"),
    [
        ("trl", {"use_peft": False, "lora_r": 8}, {"lora_rank": 0, "dtype": "float32"}),
        ("trl", {"use_peft": True, "torch_dtype": "auto"}, {"lora_rank": 16, "dtype": "bfloat16"}),
        ("trl", {}, {"lora_dropout": 0.05}),
        ("llamafactory", {"lora_target": "all"}, {"lora_rank": 8, "targets": "all-linear"}),
        ("axolotl", {"lora_target_modules": ["q", 1]}, {"lora_targets": "q,1", "batch_size": 1}),
        (
            "axolotl",
            {"adapter": "qlora", "lora_r": 32, "load_in_4bit": True, "optimizer": "adamw_8bit"},
            {"lora_rank": 32, "base_dtype": "nf4", "=optim": "adamw_8bit"},
        ),
    ],
)
def test_keys_of_other_trainers_are_translated(trainer, document, expected):
    values, unknown, _ = plan_for.translate(plan_for.DIALECTS[trainer], document | {"new": 1})
    assert expected.items() <= values.items()
    assert "lora_targets" in expected or "lora_targets" not in values
    assert unknown == ["new"]


@pytest.mark.parametrize(
    ("path", "expected", "not_modeled"),
    [
        (
            "llama-3/qlora-1b.yml",
            {"r": 32, "lora_dropout": 0.05, "double": True, "prepare": False, "length": 2048,
             "optim": "adamw_bnb_8bit", "per_device_train_batch_size": 2,
             "gradient_accumulation_steps": 4, "gradient_checkpointing": True,
             "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            [],
        ),
        (
            "llama-3/lora-8b.yml",
            {"r": 32, "target_modules": "all-linear", "nf4": None, "length": 4096},
            ["load_in_8bit", "lora_modules_to_save"],
        ),
        ("mistral/qlora.yml", {"length": 8192, "bf16": True, "lora_alpha": 16.0}, []),
        (
            "llama3_lora_sft_otfq.yaml",
            {"r": 8, "target_modules": "all-linear", "double": True, "prepare": False,
             "gradient_accumulation_steps": 8, "gradient_checkpointing": True},
            [],
        ),
        ("llama3_full_sft.yaml", {"lora": None, "dtype": "float32", "fp32": []}, ["deepspeed"]),
        ("llama3_lora_dpo.yaml", {"r": 8}, ["stage: 'dpo'", "pref_beta", "pref_loss"]),
        (
            "sft/config_qlora.yaml",
            {"class": "SFTTrainer", "dtype": "bfloat16", "double": False, "r": 16, "length": 2048,
             "gradient_checkpointing_kwargs": {"use_reentrant": False}},
            [],
        ),
        (
            "sft/config_full.yaml",
            {"lora": None, "per_device_train_batch_size": 16, "length": 2048},
            [],
        ),
        ("example_config.yaml", {"lora": None, "dtype": "float32", "length": None}, []),
    ],
)  # fmt: skip
def test_public_files_are_answered(path, expected, not_modeled, plan, monkeypatch, tmp_path):  # noqa: F811
    (public,) = [file for file in PUBLIC if file["path"].endswith(path)]
    questions = []

    def trace(question, python):
        questions.append(question)
        used = {"batch_size": 1, "max_length": 512, "grad_accum_steps": 1}
        used |= {"gradient_checkpointing": True, "lora_targets": "q_proj"}
        return {"sizes": {"weights": 1, "optimizer": 1, "peak": 2}, "used": used, "versions": {}}

    monkeypatch.setattr(plan_for, "trace", trace)
    file = tmp_path / "public.yaml"
    file.write_text(yaml.safe_dump(public["keys"]))
    found = json.loads(plan("--for", public["trainer"], str(file), "--cluster", "H200", "--json"))
    (question,) = questions
    flat = question | question["arguments"] | (question["lora"] or {}) | (question["nf4"] or {})
    assert expected.items() <= flat.items()
    named = found["not_modeled"][: -len(plan_for.DIALECTS[public["trainer"]]["not_modeled"])]
    assert [text.partition(" (")[0] for text in named] == not_modeled
    assert found["unknown_keys"] == []


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\nb: 2\na: 1",
        "a: \0",
        "a: !!set {b}\n--- 1",
        "a: !!timestamp x",
        "a: &x [1]\nb: *x",
        "- 1",
        "a: [",
        "[" * 9999,
        f"a: {'9' * 2**20}",
        "a: !!python/name:os.a",
    ],
)
def test_hostile_files_are_refused(text, tmp_path):
    file = tmp_path / "hostile.yaml"
    file.write_text(text)
    with refused("hostile.yaml"):
        plan_for.read_yaml(file)


@pytest.mark.processes
def test_a_trainer_that_cannot_be_traced_is_an_error():
    with refused("config"):
        plan_for.trace({"class": "Trainer"}, "python")
    with refused("missing/python"):
        plan_for.trace({"class": "Trainer"}, "missing/python")


@pytest.mark.parametrize(
    ("settings", "cluster", "gib"),
    [
        # Peaks that were measured on an H200, and a card with less free memory, not measured
        ("Llama-3.1-8B 1 4096 none none", "H200", 30.57),
        ("Qwen3-14B 2 2048 nf4 full", "H200", 11.57),
        ("Qwen3-0.6B 8 1024 none none", "H200", 11.2),
        ("Qwen3-0.6B 8 1024 none none", "3060", 9.93),
    ],
)
def test_unsloth_is_near_the_measured_peaks(settings, cluster, gib, plan):  # noqa: F811
    keys = ("model", "batch_size", "max_length", "base_dtype", "activation_checkpointing")
    options = [f"--{key}={value}" for key, value in zip(keys, settings.split(), strict=True)]
    found = json.loads(plan("--for", "unsloth", *options, "--cluster", cluster, "--json"))
    assert found["peak_bytes"] / 2**30 == pytest.approx(gib, rel=0.05)


def test_a_card_without_free_memory_for_unsloths_loss_is_too_small(monkeypatch, capsys):
    options = "--for unsloth --json --cluster 4090 --model Llama-3.1-8B --base_dtype none"
    shape = "--batch_size 1 --max_length 4096 --activation_checkpointing none"
    monkeypatch.setattr("sys.argv", ["x", "plan", *options.split(), *shape.split()])
    assert main(CONFIG, "About.", str(ROOT / "real_model_example.py")) == 1
    assert json.loads(capsys.readouterr().out)["fits"] == "no"


@pytest.mark.parametrize(
    ("trainer", "cluster", "word"),
    [("trainr", "4090", "llamafactory"), ("trainer", "2x4090", "one GPU")],
)
def test_what_cannot_be_answered_is_refused(trainer, cluster, word, monkeypatch, capsys):
    arguments = ["x", "plan", "--for", trainer, "--cluster", cluster, *LORA]
    monkeypatch.setattr("sys.argv", arguments)
    assert main(CONFIG, "About.", str(ROOT / "real_model_example.py")) == 2
    assert word in capsys.readouterr().err
