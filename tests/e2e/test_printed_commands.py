"""Use dry runs to test every run.sh and the commands in the documents. Each command runs in warm
processes, with --dry-run added if necessary. A dry run must be fast. It must not import torch,
start processes or create files. test_former_documents.py starts a run.sh itself."""

import functools
import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from distributed_training import cli
from distributed_training.planner.checks import has_libaio
from distributed_training.settings.machine import GPUS
from tests.conftest import SMALL, assert_ok, heavy_pool, light_pool, run_command, settings
from tests.data.test_records import CHAT
from tests.e2e.support import H200, fake_nvidia_smi
from tests.pool import ROOT, SCRIPT
from tests.support import small_pairs, small_text

DOCUMENTS = (
    "README.md", "CLUSTER_QUICKSTART.md", "REAL_MODELS_GUIDE.md", "TRAINING_RESULTS.md",
    "strategies/README.md",
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("strategies/*/README.md")),
)  # fmt: skip
STARTS = re.compile(
    r"((\w+=\S+ )*"
    r"((python|torchrun .*|deepspeed .*) ?real_model_example\.py|bash strategies/\S+/run\.sh|"
    r"(bash|sbatch .*) ?configs/train\.slurm)\b"
    r"[^|`#]*)"
)
STAND_INS = {
    "user/name:config": "notes.txt", "user/name": "held-out.jsonl", "code.jsonl": "chats.jsonl",
    "valid.txt": "notes.txt", "runs/latest/best": "random", ",my-strategy": "",
    "my_zero1.json": str(ROOT / "configs/ds_config_zero1.json"),
}  # fmt: skip
GPU_COMMENT = re.compile(rf"# ((?:\d+x)?(?:{'|'.join(map(re.escape, GPUS))}))\b")
TEXTS = ("notes.txt", "mine.txt")
CHATS = ("chats.jsonl", "held-out.jsonl")
# Commands that test_students_path and test_doctor type
OTHER_COMMANDS = re.compile(r"\.py (doctor|report|generate|export|eval)\b|<run>")

# Options of SLURM, torchrun, deepspeed and accelerate
OTHER_OPTIONS = {
    "--account", "--master_port", "--mem", "--multi_gpu", "--nnodes", "--nproc_per_node",
    "--partition", "--rdzv_id", "--signal", "--standalone",
}  # fmt: skip

# Runs the script like `python SCRIPT ...`, then prints which heavy packages were imported.
WITHOUT_TORCH = """
import atexit, runpy, sys
heavy = {"torch", "deepspeed", "transformers", "datasets"}
atexit.register(lambda: print("HEAVY", sorted(heavy & set(sys.modules))))
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def printed_commands(document: str) -> list[str]:
    """Return the commands that start the script, from a document's code blocks and table cells. If
    the comment above a command begins with the name of a GPU, the command is for that GPU."""
    found, fenced, cluster = [], False, None
    for line in (ROOT / document).read_text().splitlines():
        fenced ^= line.startswith("```")
        cell = re.match(r"\| `(.+?)` \|", line)
        text = cell[1] if cell else line.strip() if fenced or line.startswith("    ") else ""
        match = STARTS.match(text)
        if match and not OTHER_COMMANDS.search(text):
            command = match[1].strip()
            if cluster:
                command = f"{command.replace(' --num_gpus all', '')} --cluster {cluster[1]}"
            found.append(command)
        cluster = GPU_COMMENT.match(text)
    return found


def typed(command: str) -> str:
    """Return the command adapted to this machine.

    Commands for two nodes start all eight processes here, without torchrun. Commands for large
    models use gpt2, because RAM is limited. Random weights replace published weights."""
    for name, stand_in in {**STAND_INS, "gpt2-xl": "gpt2"}.items():
        command = command.replace(name, stand_in)
    if "--nnodes=2" in command:
        arguments = command.partition(".py ")[2]
        command = f"python real_model_example.py --model gpt2 --num_gpus 8 {arguments}"
    if "--num_gpus 8" in command:
        command = command.replace("gpt2-medium", "gpt2")
    if "--weights " not in command:
        command += " --weights random"
    if ".py data " in command:  # the other commands use the embedded tokenizer by themselves
        command += " --tokenizer embedded"
    starts_nothing = "--dry-run" in command or re.search(r"\.py (plan|data)\b", command)
    return command if starts_nothing else f"{command} --dry-run"


COMMANDS = sorted({typed(line) for name in DOCUMENTS for line in printed_commands(name)})


@functools.cache
def as_required() -> bool:
    """Return whether the tests' Python environment meets requirements.txt. If it does not, run.sh
    uses a different Python."""
    check = [sys.executable, ROOT / "strategies/check_requirements.py", ROOT / "requirements.txt"]
    return run_command(check).returncode == 0


@functools.cache
def all_options() -> set[str]:
    helps = [["--help", "all"], *([name, "--help"] for name in cli.COMMANDS)]
    printed = (light_pool().script(words).stdout for words in helps)
    return OTHER_OPTIONS.union(*(re.findall(r"--[\w-]+", text) for text in printed))


def dry_run(command: str, tmp_path: Path) -> str:
    """Run the command on a simulated machine, and return its output. The machine has no GPUs if the
    command has a launcher. Otherwise, it has H200s.

    Warm processes run the script as the command's launcher would. The variables in front of the
    command are set, and the arguments that run.sh adds are included."""
    words = shlex.split(command)
    place = next(i for i, word in enumerate(words) if word.endswith((".py", ".sh", ".slurm")))
    before, program, arguments = words[:place], words[place], words[place + 1 :]
    environment = {"HF_HOME": str(tmp_path / "hf"), "DS_ACCELERATOR": "cpu"}
    while "=" in before[0]:
        name, _, value = before.pop(0).partition("=")
        environment[name] = value
    launcher = re.search(r"(?:--nproc_per_node|--num_gpus)=(\d+)", " ".join(before))
    count = int(launcher[1]) if launcher else 0
    if program.endswith(".sh"):  # strategies/run.sh adds these arguments
        config = json.loads((ROOT / program).with_name("config.json").read_text())
        arguments = ["--strategy", config["name"], "--num_gpus", "all", *arguments]
    if count:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    else:
        asked = re.search(r"--num_gpus (\d+)", command)  # use few by default to save RAM
        gpus = int(asked[1]) if asked else 2 if "infinity" in command else 4
        environment["PATH"] = fake_nvidia_smi(tmp_path / "bin", *[H200] * gpus)
        environment.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    for name in TEXTS:
        (tmp_path / name).write_text(small_text().read_text()[:20_000])
    (tmp_path / "pairs.jsonl").write_text(small_pairs().read_text())
    for name in CHATS:
        (tmp_path / name).write_text(30 * f"{json.dumps(CHAT)}\n")
    # Reading a dataset imports transformers, which the processes of the heavy pool have.
    pool = heavy_pool() if "--dataset" in arguments else light_pool()
    result = pool.script(
        arguments, num_processes=count or 1, launched=count > 0, cwd=tmp_path, **environment
    )
    if re.search(r"^error: the run needs about .* GiB of RAM", result.stderr):
        pytest.skip(result.stderr.strip())
    assert_ok(result)
    return result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_a_printed_command_is_accepted(command, tmp_path):
    if "infinity" in command and not has_libaio():
        pytest.skip("libaio is not installed")
    listed = re.search(r"--strategies (\S+)", command)
    compared = f"strategy={listed[1].rpartition(',')[2] if listed else 'fsdp'}"
    words = {"plan": "--explain", "parity": compared, "compare": compared, "data": "loss"}
    name = next((name for name in words if f".py {name}" in command), None)
    assert words.get(name, "global") in dry_run(command, tmp_path)


@pytest.mark.parametrize("document", [*DOCUMENTS, "results/PREDICTIONS.md", "strategies/LAWS.md"])
def test_options_and_programs_in_sentences_exist(document):
    """Check what no other test types: options in sentences, and programs of the lab."""
    text = (ROOT / document).read_text()
    spans = " ".join(re.findall(r"`([^`\n]+)`", text))
    assert set(re.findall(r"--[a-z_]+\b(?!-)", spans)) <= all_options()
    for file in re.findall(r"\bresults/(?:lab|plans)/[\w/-]+\.(?:py|json)", text):
        assert (ROOT / file).is_file(), file
    for module in re.findall(r"python -m (results[\w.]+)", text):
        assert importlib.util.find_spec(module), module


def test_dry_run_prints_config_command_and_deepspeed_json_without_torch(tmp_path):
    output_dir = tmp_path / "runs"
    # Other texts are tokenized, at least in part, which needs transformers.
    table = tmp_path / "large.csv"
    table.write_text("text\n" + "one more word\n" * 300_000)
    values = {**SMALL, "dataset": table, "strategy": "zero3", "grad_accum_steps": 3}
    values |= {"output_dir": output_dir, "chat_template": "chatml"}
    command = [sys.executable, "-c", WITHOUT_TORCH, SCRIPT, *settings(values), "--dry-run"]
    result = run_command([*command, "--num_gpus", "2", "--explain"])
    assert_ok(result)
    assert result.stderr == ""
    text, _, heavy = re.sub(" +", " ", result.stdout).rpartition("HEAVY ")
    assert heavy == "[]\n"
    assert "\n strategy 'zero3'" in text
    unresolved = re.findall(r"^ (\w+) 'auto'", text, re.MULTILINE)
    assert unresolved == []
    assert "global 12 = 2 replicas x 3 micro-batches x 2" in text
    line = text.partition("launch command\n")[2].splitlines()[0]
    assert line.startswith(" python real_model_example.py ")
    for typed in ("--num_gpus 2", "--chat_template chatml"):
        assert line.count(typed) == 1
    document = json.loads(text.partition("DeepSpeed configuration (from ")[2].partition("\n")[2])
    assert document["zero_optimization"]["stage"] == 3
    assert document["gradient_accumulation_steps"] == 3
    assert not output_dir.exists()


def test_every_strategy_has_a_page_and_a_run_sh_of_one_line_without_settings():
    for config in ROOT.glob("strategies/*/config.json"):
        text = '#!/usr/bin/env bash\nsource "$(dirname "${BASH_SOURCE[0]}")/../run.sh"\n'
        assert config.with_name("README.md").is_file()
        assert config.with_name("run.sh").read_text() == text
        assert config.with_name("run.sh").stat().st_mode & 0o111
