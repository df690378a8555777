"""Test the `plan` command: its table, JSON output, batch script and errors."""

import json
import re
import sys

import pytest

from distributed_training.cli import main
from distributed_training.models import find_model
from distributed_training.predict.predict import parse_cluster
from distributed_training.settings.files import ROOT
from real_model_example import CONFIG
from tests.conftest import heavy_pool, light_pool
from tests.e2e.support import assert_refused
from tests.support import refused

OWN = '{"memory_gib": 48, "tflops": 150, "memory_gb_s": 700}'
FIELDS = [
    "name", "strategy", "axes", "schedule", "micro_batch_size", "num_microbatches", "fits",
    "peak_bytes", "memory_bytes", "needed_bytes", "host_bytes", "step_time_s", "tokens_per_s",
    "bound_by", "likely_s", "evidence", "likely_bytes", "sent_bytes",
]  # fmt: skip
ANSWER_FIELDS = [
    "version", "verdict", "fits", "changes", "gpu", "gpu_memory_bytes", "num_processes", "options",
    "num_steps", "gpu_hours", "cost", "suggestions", "notes", "picks", "layouts", "command",
]  # fmt: skip


@pytest.fixture
def plan(monkeypatch, capsys):
    """Return a function that runs `plan`, checks that it succeeds, and returns its output."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["real_model_example.py", "plan", *arguments])
        assert main(CONFIG, "About.", str(ROOT / "real_model_example.py")) == 0
        return capsys.readouterr().out

    return run


def test_plan_prints_ten_rows_and_a_command_for_each_pick(plan):
    arguments = "--cluster", "2x8xH100-80GB", "--model", "gpt2-xl", "--batch_size", "4"
    outputs = []
    for explain in ([], ["--explain"]):
        outputs.append(plan(*arguments, *explain))
        for line in ("gpt2-xl fit on 2 x 8 x H100-80GB: ", "steps of 64 x 512 tokens"):
            assert line in " ".join(outputs[-1].split())
    assert "s/step" not in outputs[0]
    lines = outputs[1].splitlines()
    rows = [line for line in lines if "  unknown  " in line]
    assert len(rows) == 10
    assert rows[0].startswith("first")
    commands = [line for line in lines if line.startswith("  torchrun --nnodes=2 ")]
    assert len(commands) == sum(not row.startswith(" ") for row in rows)
    assert all("--model gpt2-xl --batch_size 4 --strategy " in line for line in commands)
    assert all(re.search(r" --rdzv_id=[0-9a-f]{16} ", line) for line in commands)


@pytest.mark.parametrize("gbit", ["400", "25"])
def test_ranking_for_two_nodes_matches_the_strategies_page(plan, gbit):
    """For a fast and for a slow network, strategies/README.md names the kind of the first layout,
    and one of the fastest, which take equally long."""
    arguments = ["--cluster", "2x4xH200", "--network_gbit", gbit, "--model", "gpt2-xl"]
    arguments += ["--max_length", "1024", "--batch_size", "4", "--grad_accum_steps", "8"]
    rows = plan(*arguments, "--explain").partition("\npick ")[2].splitlines()[1:]
    assert rows[0].startswith("first    dp m8 " if gbit == "400" else "first, fastest  pp ")
    assert any(" pp pp=2 dp_shard=4 zb-v m16 " in row for row in rows[:3])


def test_open_values_are_searched_and_typed_values_are_kept(plan):
    """The planner searches for the best batch size and the best activation checkpointing mode,
    unless they are given on the command line."""
    arguments = "--cluster", "1xH100-80GB", "--model", "gpt2-xl", "--max_length", "1024"
    out = " ".join(plan(*arguments).split())
    assert " of 4 x 1,024 tokens" in out
    assert "add --batch_size auto" in out
    out = plan(*arguments, "--batch_size", "auto")
    assert re.search(r"--batch_size (8|16|32) .*--strategy dp", out)
    out = " ".join(plan(*arguments, "--batch_size", "64", "--micro_batch_size", "64").split())
    assert " of 64 x 1,024 tokens" in out
    assert re.search(r"--activation_checkpointing (selective|full)", out)


def test_a_run_that_cannot_be_has_a_table_and_what_would_fit_but_no_speed(monkeypatch, capsys):
    arguments = "--cluster 3060 --model Llama-3.1-8B --lora_rank 16 --batch_size 1"
    arguments = [*arguments.split(), "--max_length", "32768", "--explain"]
    monkeypatch.setattr(sys, "argv", ["real_model_example.py", "plan", *arguments])
    assert main(CONFIG, "About.", str(ROOT / "real_model_example.py")) == 1
    out = capsys.readouterr().out
    assert " GiB too much." in " ".join(out.split())
    assert re.search(r"^  num_gpus=4 ", out, re.M)
    assert "base_dtype=nf4 max_length=16384" in out
    assert "base_dtype=nf4 num_gpus=2" in out
    assert re.search(r"^first, fastest +dp \+offload +no 2\d\.\d +- ", out, re.M)
    assert "real_model_example.py" not in out


def test_strategy_option_filters_the_layouts(plan):
    arguments = "--cluster", "4xH200", "--model", "gpt2", "--strategy", "fsdp", "--json"
    layouts = json.loads(plan(*arguments))["layouts"]
    assert {layout["strategy"] for layout in layouts} == {"fsdp"}


def test_offload_on_cpus_is_ranked_only_when_asked_for(plan):
    for arguments, is_ranked in (([], False), (["--strategy", "offload"], True)):
        layouts = json.loads(plan("--json", "--model", "gpt2-tiny", *arguments))["layouts"]
        assert ("offload" in {layout["strategy"] for layout in layouts}) is is_ranked


def test_tokens_become_steps_hours_and_a_price(plan):
    arguments = ["--cluster", "2xH200", "--model", "gpt2", "--batch_size", "8", "--tokens", "1B"]
    out = " ".join(plan(*arguments, "--price", "2 U.S. dollars").split())
    assert " 122,071 steps of 16 x 512 tokens" in out
    hours, cost = (float(re.search(rf"([\d.]+) {unit}", out)[1]) for unit in ("GPU-hours", "U.S."))
    assert cost == pytest.approx(2 * hours, rel=0.01)
    assert "--max_steps 122071" in out


@pytest.mark.processes
def test_steps_for_a_small_text_on_a_cpu_match_the_run(plan, tmp_path):
    """On a CPU, training on a small text uses a preset whose max_steps is only an upper limit."""
    text = tmp_path / "mine.txt"
    text.write_text("one more word " * 800)
    options = "--dataset", str(text), "--output_dir", str(tmp_path), "--num_gpus", "2"
    planned = " ".join(plan(*options).split())
    assert "--preset words" in planned  # the note that lists the preset's values
    printed = heavy_pool().script([*options, "--strategy", "dp", "--dry-run"]).stdout
    work = re.search(r"\n  work: (.+)\n", printed)[1]
    assert f" trains on {work} of " in planned
    assert re.search(r" tokens/s\. .*\d s per step \(", planned)


def test_json_has_the_fields_that_programs_read(plan):
    found = json.loads(plan("--cluster", "4xH200", "--json", "--model", "gpt2"))
    assert list(found) == ANSWER_FIELDS
    layouts = found["layouts"]
    schedules = {None, "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"}
    assert {layout["schedule"] for layout in layouts} == schedules
    assert all(list(layout) == FIELDS for layout in layouts)
    assert {layout["strategy"] for layout in layouts} > {"dp", "zero3", "fsdp", "tp", "pp", "3d"}
    for layout in layouts:
        assert (layout["schedule"] is None) == (layout["axes"]["pp"] == 1)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--cluster", "4xH200", "--model", "nobody/nothing"], ["model='nobody/nothing'"]),
        (["--cluster", "4xH2000"], ["'H2000'", "H200", "--gpu '{"]),
        (["--cluster", "0x8xH200"], ["NxMxGPU", "8xH200"]),
        (["--cluster", "8xH200", "--price", "-1"], ["--price", "'-1'"]),
        (["--cluster", "1000000000x8xH200"], ["'1000000000x8xH200'", "GPU"]),
        (["--cluster", "8xH200", "--tokens", "many"], ["--tokens", "'many'", "300M"]),
        (["--cluster", "8xH200", "--num_gpus", "4"], ["--num_gpus", "--cluster"]),
        (["--cluster", "2x8", "--gpu", '{"memory_gib": 48}'], ["tflops is missing"]),
        (["--cluster", "2x8", "--gpu", "{"], ["is not valid JSON"]),
        (["--cluster", "8xH200", "--gpu", OWN], ["8xH200", "--gpu"]),
        (["--cluster", "1xT4", "--model", "gpt2-xl", "--batch_size", "1", "--max_length", "4096"],
         ["1024"]),
    ],
)  # fmt: skip
def test_bad_input_gives_a_one_line_error(arguments, messages):
    assert_refused(light_pool().script(["plan", *arguments]), *messages)


def test_clusters_are_parsed():
    for text, expected in {
        "2x8xH100-80GB": (16, 8, "H100-80GB"),
        "2x8 H100-80GB": (16, 8, "H100-80GB"),
        "2 x 8 x H100-80GB": (16, 8, "H100-80GB"),
        "8xh200": (8, 8, "H200"),
        "3060": (1, 1, "RTX-3060"),
        "2x3090": (2, 2, "RTX-3090"),
        "T4 x2": (2, 2, "T4"),
        "4090x2": (2, 2, "RTX-4090"),
        "A100-80GBx8": (8, 8, "A100-80GB"),
        "RTX 2080 Ti x 2": (2, 2, "RTX-2080-Ti"),
        "4090 (2)": (2, 2, "RTX-4090"),
        "H100 (8x)": (8, 8, "H100-80GB"),
        "dual 3090": (2, 2, "RTX-3090"),
        "2\u00d7 RTX 3090": (2, 2, "RTX-3090"),
        "two nodes of 8 H100s": (16, 8, "H100-80GB"),
        "8xH100 x 2 nodes": (16, 8, "H100-80GB"),
        "NVIDIA GH200 480GB": (1, 1, "GH200"),
        "dual rtx8000": (2, 2, "Quadro-RTX-8000"),
        "GB200 NVL72": (72, 4, "GB200"),
        "DGX H100": (8, 8, "H100-80GB"),
        "2x p4d.24xlarge": (16, 8, "A100-40GB"),
        "Standard_NC48ads_A100_v4": (2, 2, "A100-80GB-PCIe"),
        "a2-highgpu-8g": (8, 8, "A100-40GB"),
        "HGX H200": (1, 1, "H200"),
        "kaggle": (2, 2, "T4"),
        "colab": (1, 1, "T4"),
    }.items():
        cluster = parse_cluster(text)
        found = (cluster.num_processes, cluster.processes_per_node, cluster.machine.gpu_name)
        assert found == expected
    with refused("7900xtx", "needs CUDA"):  # not 7900 GPUs of a kind "tx"
        parse_cluster("7900xtx")
    with refused("'Ryzen AI Max 395'", "needs CUDA"):
        parse_cluster("Ryzen AI Max 395")
    with refused("'12 GB card'"):
        parse_cluster("12 GB card")


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ([], [{}, {"optimizer": "adamw-bf16-weights"}, {"lora_rank": 16},
              {"lora_rank": 16, "base_dtype": "nf4"}]),
        (["--lora_rank", "8", "--max_length", "2k"], [{}, {"base_dtype": "nf4"}]),
    ],
)  # fmt: skip
def test_a_card_without_a_model_names_the_largest_that_it_trains(words, settings):
    arguments = ["plan", "--cluster", "3060", *words]
    models = json.loads(light_pool().script([*arguments, "--json"]).stdout)["models"]
    assert [each["settings"] for each in models[::3]] == settings
    sizes = [find_model(each["model"]).size.num_parameters for each in models]
    for first in range(0, len(models), 3):
        assert sizes[first : first + 3] == sorted({*sizes[first : first + 3]}, reverse=True)
    assert sizes[0] < 14e9 < sizes[-3]  # nf4 needs the least
    assert all(each["needed_bytes"] < 11.7 * 2**30 and each["tokens_per_s"] for each in models)
    assert f"  {models[-3]['model']} (" in light_pool().script(arguments).stdout
