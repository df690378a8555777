"""Test that the commands that `plan` prints, the jobs that it writes and strategy=auto result in
the ranked plans."""

import dataclasses
import json
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

import distributed_training.planner.make_plan as planning
from distributed_training import cli
from distributed_training.plan.layout import Amount
from distributed_training.plan.plan import Draft
from distributed_training.planner.answer import answer
from distributed_training.planner.sort import describe_suggestion
from distributed_training.predict.predict import parse_cluster
from distributed_training.settings.config import RunConfig
from distributed_training.settings.request import PRESETS_DIR, build_config
from distributed_training.settings.strategies import MESH_AXES
from distributed_training.tools import dry_run, jobs
from distributed_training.tools import plan as command
from real_model_example import CONFIG
from tests.pool import ROOT, SCRIPT
from tests.support import small_text

FOLDERS = {"tokenizer_dir": Path(), "weights_dir": None, "adapters_dir": None}
PRESETS = sorted(path.stem for path in PRESETS_DIR.glob("*.json"))
# Fields that may differ between two plans for the same layout: names that contain the time, and
# sources of settings
OTHERWISE = {
    "run_dir", "offload_dir", "requested", "notes", "command", "prediction", "output_dir",
}  # fmt: skip
OPTIONS = {
    "model": ["gpt2", "gpt2-medium", "gpt2-xl-20-heads", "Llama-3.2-1B", "Qwen3-0.6B"],
    "batch_size": ["1", "4", "16", "auto"],
    "batch-size": ["2", "auto"],
    "grad_accum_steps": ["2"],
    "strategy": ["auto", "fsdp", "pp", "3d", "zero2", "local_sgd"],
    "activation_checkpointing": ["none", "full"],
    "tp": ["1", "2"],
    "pp": ["2"],
    "dp_shard": ["-1"],
    "pipeline_schedule": ["1f1b", "gpipe", "interleaved"],
    "micro_batch_size": ["1", "auto"],
    "num_microbatches": ["4"],
    "lora_rank": ["8"],
    "loss_chunk_tokens": ["1024"],
    "max_length": ["256"],
    "max_steps": ["100", "-1"],
    "precision": ["bf16"],
    "network_gbit": ["25"],
    "generate": ["--what now?", "it's", ""],
    "preset": PRESETS,
    "dataset": [str(small_text())],
}


def random_words(number):
    """Return arguments for a random cluster, a model and up to four random options. An option's
    value is the next argument or follows `=`."""
    draw = random.Random(number)
    words = ["--cluster", draw.choice(["H200", "4xH100-80GB", "2x2xH200", "2x1xL4"])]
    for name in ["model", *draw.sample(sorted(OPTIONS.keys() - {"model"}), k=draw.randint(0, 4))]:
        value = draw.choice(OPTIONS[name])
        one_word = value.startswith("--") or draw.random() < 0.3
        words += [f"--{name}={value}"] if one_word else [f"--{name}", value]
    return words


def find_nothing(draft, *_, **__):
    return draft.with_config(learning_rate=1e-3), FOLDERS


@pytest.fixture
def call(monkeypatch):
    """Return a function that runs the script without looking for tokenizers, weights or data. The
    function returns the exit code, the predictions for the picked layouts, and the plans that a dry
    run describes."""

    def run(words):
        picked, printed = [], []
        find_answer, describe = command.answer, dry_run.describe_plan

        def find(*arguments, **options):
            found = find_answer(*arguments, **options | {"count_work": lambda *_: "unknown"})
            picked[:] = [choice for _, choice in found.picks]
            return found

        monkeypatch.setattr(planning, "find_sources", find_nothing)
        monkeypatch.setattr(dry_run, "peek_data", lambda *_: None)
        with monkeypatch.context() as patch:
            patch.setattr(command, "answer", find)
            patch.setattr(
                dry_run,
                "describe_plan",
                lambda plan, *a, **k: printed.append(plan) or describe(plan, *a, **k),
            )
            patch.setattr(sys, "argv", [str(SCRIPT), *words])
            code = cli.main(CONFIG, "About.", str(SCRIPT))
        return code, picked, printed

    return run


def comparable(plan):
    """Return the fields that must be equal for two plans for the same layout."""
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(Draft)}
    compared_fields = {name: value for name, value in fields.items() if name not in OTHERWISE}
    # `mesh` already contains the axes, a job sets `resume`, and a draft leaves these values open.
    open_keys = RunConfig.__annotations__.keys()
    planned_keys = (*MESH_AXES, "resume", *open_keys)
    compared_fields["config"] = {
        k: v for k, v in plan.config.to_key_values().items() if k not in planned_keys
    }
    compared_fields["strategy"] = dataclasses.replace(plan.strategy, mesh={}, named_axes=())
    return compared_fields


def assert_equal(plan, ranked, typed):
    found, expected = comparable(plan), comparable(ranked)
    assert {name for name in found if found[name] != expected[name]} == set(), typed


def test_plan_replaces_only_jobs_that_nobody_has_changed(call, tmp_path, capsys):
    job = tmp_path / "job.slurm"
    words = ["plan", "--model", "gpt2", "--write", str(job), "--cluster"]
    for cluster in ("2xH100-80GB", "2x8xH100-80GB"):
        assert call([*words, cluster])[0] == 0
    changed = job.read_text().replace("\n", "\n#SBATCH --account=mine\n", 1)
    job.write_text(changed)
    assert call([*words, cluster])[0] == 2
    assert str(job) in capsys.readouterr().err
    assert job.read_text() == changed
    assert call(["plan", "--model", "gpt2", "--write", "job.yaml", "--cluster", "H200"])[0] == 2
    assert "configs/skypilot.yaml" in capsys.readouterr().err


HOSTILE = "x: [\n#SBATCH --mem=9\ntouch PWNED\n#'\"$(touch PWNED)`touch PWNED`\u2028- train-gpt2"


def test_no_text_of_a_user_leaves_its_string(call, tmp_path, monkeypatch):
    """HOSTILE is an option, the name of the job and its folder. Jobs include the user's lines."""
    folder = tmp_path / HOSTILE
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / "configs/site.slurm").write_text("#SBATCH --account=a\n#SBATCH --qos=q\n")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    python.chmod(0o755)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(jobs, "ROOT", folder)
    words = ["--model", "gpt2", "--weights", "random", f"--generate={HOSTILE}"]
    file = f"{HOSTILE}.slurm"
    assert call(["plan", "--cluster", "2x8xH100-80GB", *words, "--write", file])[0] == 0
    job = Path(file).read_text()
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CONDA_PREFIX": "x"}
    options = subprocess.check_output(["bash", file], env=environment, text=True).split("\0")
    directives = job.partition("\n\nset -euo")[0].splitlines()
    assert {line[0] for line in directives} == {"#"}
    assert directives[-2:] == ["#SBATCH --account=a", "#SBATCH --qos=q"]
    assert "#SBATCH --cpus-per-task=32" in directives
    assert "#SBATCH --mem=9" not in directives
    assert HOSTILE in options
    assert not [*tmp_path.rglob("PWNED")]


def assert_same_plans(call, capsys, words, tmp_path):
    """Check that the printed commands and the job result in the picked plans, and that the run with
    the same words has the first one. If all weights fit only with offload, or not at all, this run
    is refused, and the error suggests the first one. Return the number of picked plans and whether
    the run was refused."""
    job = tmp_path / "job.slurm"
    capsys.readouterr()
    code, picked, _ = call(["plan", *words])
    out, err = capsys.readouterr()
    if code:
        assert call([*words, "--dry-run"])[0] == 2
        why = capsys.readouterr().err
        assert (why[:7], why.count("\n")) == ("error: ", 1), why
        assert (code, err) in ((2, why), (1, "")), words  # 1: no layout fits
        return 0, True
    cluster = words[words.index("--cluster") + 1]
    call(["plan", *words, "--write", str(job)])
    starts = ("  python ", "  torchrun ")
    commands = [shlex.split(line) for line in out.splitlines() if line.startswith(starts)]
    run = next(line for line in job.read_text().splitlines() if line.startswith("run=("))
    commands.append(shlex.split(run.removeprefix("run=(").removesuffix(' "$@")')))
    for choice, typed in zip([*picked, picked[0]], commands, strict=True):
        typed = typed[next(i for i, word in enumerate(typed) if word.endswith(".py")) + 1 :]
        if typed[0] == "--num_gpus":
            typed = typed[2:]
        code, _, printed = call([*typed, "--cluster", cluster, "--dry-run"])
        assert code == 0, (typed, capsys.readouterr().err)
        assert_equal(printed[0], choice.plan, typed)
    if {"--strategy", "--preset"} & {word.partition("=")[0] for word in words}:
        return len(picked), False
    capsys.readouterr()
    code, _, printed = call([*words, "--dry-run"])
    if code:
        advice = capsys.readouterr().err.partition("Set ")[2].partition(", or ")[0]
        assert advice.endswith(describe_suggestion({}, picked[0]).strip()), words
    else:
        assert_equal(printed[0], picked[0].plan, words)
    return len(picked), code != 0


@pytest.mark.parametrize("preset", PRESETS)
def test_planning_a_preset_gives_the_presets_run(preset, call, capsys, tmp_path):
    words = ["--cluster", "2xH200", "--preset", preset]
    assert assert_same_plans(call, capsys, words, tmp_path)[0]


def test_printed_commands_give_the_ranked_plans(call, capsys, tmp_path):
    found = [assert_same_plans(call, capsys, random_words(n), tmp_path) for n in range(40)]
    assert sum(count > 0 for count, _ in found) >= 20


@pytest.mark.parametrize(
    "words",
    [
        "T4 --model gpt2-xl", "T4 --model gpt2-xl --batch_size auto",
        "A10G --model gpt2-xl --grad_accum_steps 8", "RTX-4090 --model Qwen/Qwen3-8B",
    ],
)  # fmt: skip
def test_a_run_that_does_not_fit_is_refused_with_the_first_choice(words, call, capsys, tmp_path):
    words = ["--cluster", *words.split()]
    assert assert_same_plans(call, capsys, words, tmp_path)[1]


def test_a_job_runs_in_the_folder_of_its_relative_paths(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("text")
    (tmp_path / "own.json").write_text('{"validation_dataset": "mine.txt", "output_dir": "out"}')
    words = ["--preset", "own.json", "--dataset", "mine.txt", "--model", "gpt2"]
    assert call(["plan", "--cluster", "H200", *words, "--write", "job.slurm"])[0] == 0
    job = (tmp_path / "job.slurm").read_text()
    options = "--strict --resume auto --preset own.json --dataset "
    assert f"\ncd {tmp_path}\nrun=({SCRIPT} {options}" in job
    assert "# Submit:  sbatch job.slurm\n" in job


def test_a_job_has_time_for_the_reference_of_preference_tuning():
    pairs = Amount(num_samples=400_000, unit="pairs", epochs=1, num_steps=100_000)
    run_minutes = {}
    for kind in ("dpo", "simpo"):
        request = build_config({"model": "Llama-3.1-8B", "lora_rank": 8, "preference": kind})
        found = dataclasses.replace(answer(request, parse_cluster("H200")), amount=pairs)
        job = jobs.build_batch_script(
            found, Path("job.slurm"), SCRIPT, machine_options=[], plan_command=""
        )
        minutes = re.search(r"^#SBATCH --time=(\d+)$", job, re.MULTILINE)
        run_minutes[kind] = int(minutes[1]) - jobs.OVERHEAD_S / 60
    step = found.first.step
    longer = run_minutes["dpo"] / run_minutes["simpo"]
    assert longer == pytest.approx(1 + step.forward_s / step.seconds, rel=0.01)


@pytest.mark.parametrize("name", ["skypilot", "kubeflow-trainjob"])
def test_templates_for_clouds_agree_with_published_schemas(name, tmp_path):
    schemas = json.loads(Path(__file__).with_name("job_schemas.json").read_text())
    document = yaml.safe_load((ROOT / f"configs/{name}.yaml").read_text())
    jsonschema.validate(document, schemas[name])
    if name == "skypilot":  # run its script on the second node
        (tmp_path / "strategies").mkdir()
        (tmp_path / "strategies/setup_env.sh").write_text('torchrun() { echo "$@"; }')
        environment = {
            "TRAIN": "--generate 'a b'", "HOME": str(tmp_path), "PATH": "/usr/bin:/bin",
            "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1",
            "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        }  # fmt: skip
        script = ["bash", "-euc", document["run"]]
        words = subprocess.check_output(script, cwd=tmp_path, env=environment, text=True)
        assert words == (
            "--nnodes=2 --node_rank=1 --nproc_per_node=8 --master_addr=10.0.0.1 "
            "--master_port=29500 --rdzv_conf=timeout=1800 real_model_example.py --strict "
            "--resume auto --generate a b --output_dir /runs\n"
        )
        assert "/runs" in document["volumes"]
