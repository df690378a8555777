"""Test what the planner answers, and that it does so without the packages that only training
needs."""

import dataclasses
import json
import subprocess
import sys

import pytest

from distributed_training.plan.layout import Amount
from distributed_training.planner.answer import Price, answer
from distributed_training.planner.sort import describe_suggestion
from distributed_training.predict.predict import parse_cluster
from distributed_training.settings.files import ROOT
from distributed_training.tools.plan import parse_price
from tests.planner.helpers import merged

LLAMA = {"model": "Llama-3.1-8B", "batch_size": 4}


def find(gpus, *overrides, **options):
    return answer(merged(LLAMA, *overrides), parse_cluster(gpus), **options)


@pytest.mark.parametrize(
    ("gpus", "settings", "begin", "changes"),
    [
        ("H200", {}, "All weights of Llama-3.1-8B fit on an H200: ", {}),
        ("RTX-4090", {},
         "All weights of Llama-3.1-8B do not fit on an RTX-4090. LoRA adapters do: ",
         {"lora_rank": 16}),
        ("RTX-3060", {"lora_rank": 8},
         "LoRA adapters of Llama-3.1-8B do not fit on an RTX-3060. LoRA adapters on a 4-bit base "
         "do: ", {"base_dtype": "nf4"}),
        ("2xRTX-4090", {"weights": "random"},
         "All weights of Llama-3.1-8B fit on 2 x RTX-4090 only with infinity: infinity, ", {}),
        ("T4", {"strategy": "dp"}, "All weights of Llama-3.1-8B do not fit on a T4: ", {}),
        # 19 GiB for the GPU and 151 for the optimizer do not share 119 GiB.
        ("GB10", {"strategy": "offload"}, "All weights of Llama-3.1-8B do not fit on a GB10", {}),
        ("GH200", {"strategy": "offload"}, "All weights of Llama-3.1-8B fit on a GH200 only", {}),
    ],
)  # fmt: skip
def test_the_first_line_answers_what_was_asked(gpus, settings, begin, changes):
    found = find(gpus, *(f"{key}={value}" for key, value in settings.items()))
    assert found.verdict.startswith(begin)
    assert changes.items() <= found.changes.items()
    document = json.loads(json.dumps(found.as_dict()))
    assert document["fits"] == ("no" if "do not fit" in begin else "yes")
    assert document["verdict"] == found.verdict
    first = document["picks"][0]
    needed = sum(first["memory_bytes"].values()) + found.first.memory.context_bytes
    assert needed == first["needed_bytes"]


def test_the_verdict_and_what_would_fit_have_the_same_speed():
    found = find("RTX-4090")
    speed = found.verdict.partition(" GiB, ")[2].removesuffix(".")
    assert describe_suggestion(found.changes, found.first).endswith(f" per GPU, {speed})")


def test_a_number_of_steps_gives_hours_and_a_cost():
    found = find("8xH200", "max_steps=100", price=Price("$", 2.0, ""))
    seconds = found.first.step.seconds
    assert found.gpu_hours == pytest.approx(100 * seconds * 8 / 3600)
    cost = found.as_dict()["cost"]
    assert cost == f"${2 * found.gpu_hours:,.2f}"
    assert found.verdict.endswith(f", cost {cost}.")
    chats = Amount(num_samples=50_000, unit="chats", epochs=3, num_steps=100)
    text = dataclasses.replace(found, amount=chats).verdict
    assert f" tokens/s. 50,000 chats, 3 epochs: about {100 * seconds:.3g} s, cost $" in text
    assert find("8xH200").gpu_hours is None


def test_preference_tuning_takes_a_forward_pass_of_an_epoch_and_computes_logits_again():
    pairs = Amount(num_samples=8_000, unit="pairs", epochs=2, num_steps=2_000)
    found = {
        kind: dataclasses.replace(find("H200", f"preference={kind}"), amount=pairs)
        for kind in ("none", "dpo", "simpo")
    }
    dpo = found["dpo"].first.step
    assert 3 < dpo.seconds / dpo.forward_s < 6
    assert found["simpo"].gpu_hours == pytest.approx(2_000 * dpo.seconds / 3600)
    more = found["dpo"].gpu_hours - found["simpo"].gpu_hours
    assert more == pytest.approx(1_000 * dpo.forward_s / 3600)
    logits_s = dpo.seconds - found["none"].first.step.seconds
    assert 0.01 < logits_s / dpo.forward_s < 0.1


@pytest.mark.parametrize(
    ("text", "total"),
    [("2.5", "25.00"), ("$2", "$20.00"), ("2.5 U.S. dollars", "25.00 U.S. dollars")],
)
def test_a_price_keeps_the_text_around_its_number(text, total):
    assert parse_price(text).of(10) == total


ANSWER = """
import sys
from distributed_training.planner.answer import answer
from distributed_training.predict.predict import parse_cluster
from distributed_training.settings.machine import GIB
from distributed_training.settings.request import PRESETS_DIR, build_config
print(answer(build_config({"model": "Llama-3.1-8B", "batch_size": 4}), parse_cluster(GPUS)).verdict)
heavy = "torch numpy safetensors transformers psutil fcntl subprocess distributed_training.start"
print(sorted(set(heavy.split()) & set(sys.modules)))
"""


@pytest.mark.processes
def test_an_answer_needs_none_of_the_packages_of_training():
    code = ANSWER.replace("GPUS", "'2x8xH100-80GB'")
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    verdict, imported = out.splitlines()
    assert verdict == find("2x8xH100-80GB").verdict
    assert imported == "[]"
