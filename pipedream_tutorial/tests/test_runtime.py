"""Test the runtime. Under every schedule, the trained weights must be bitwise equal to the weights
from training in a single process."""

import json
import sys
import time
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from pipedream.errors import UserError
from pipedream.runtime.session import build_cases
from pipedream.runtime.stage import Clock, Peer, set_up_device
from pipedream.schedules.ops import Op
from pipedream.schedules.orders import schedule_for_training
from pipedream.schedules.policies import weight_use
from pipedream.train.models import Workload, build_stages
from pipedream.train.oracle import train
from pipedream_runtime import read_config
from starting import FAST, no_process_is_left, run  # noqa: F401

from results.lab.tutorial.benchmark import arguments

# Every schedule with one copy of the model
SCHEDULES = [
    "pipedream", "pipedream-vertical", "pipedream-2bw", "1f1b", "gpipe",
    "pipedream-no-stash", "naive", "zb-h1", "zb-h2", "interleaved", "zb-v", "v-half", "v-min",
    "eager-1f1b",
]  # fmt: skip
MICROBATCHES = [3, 8]
TRAINING = {"layers_per_stage": 2, "num_batches": 2, "seed": 5, "learning_rate": 0.2}


@pytest.mark.timeout(180)
def test_weights_equal_one_process_bitwise(tmp_path):
    p = 4
    weights, record = tmp_path / "weights.pt", tmp_path / "record.json"
    settings = [f"--{key}={value}" for key, value in TRAINING.items()]
    done = run(
        [
            *FAST, *settings, f"--num_stages={p}", "--warmups=0",
            f"--schedule={','.join(SCHEDULES)}",
            f"--num_microbatches={','.join(map(str, MICROBATCHES))}",
            "--weights", str(weights), "--record", str(record),
        ]
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = torch.load(weights)
    cases = json.loads(record.read_text())["cases"]
    versions = {
        (c["schedule"], c["num_microbatches"]): c["measured"]["peak_versions"] for c in cases
    }
    assert found.keys() == versions.keys() == set(product(SCHEDULES, MICROBATCHES))
    # The processes also use one thread. With more threads, the order of summation may differ.
    torch.set_num_threads(1)
    for (name, m), stages in found.items():
        reference = train(name, num_stages=p, num_microbatches=m, **TRAINING)
        schedule, policy = schedule_for_training(name, p, m, TRAINING["num_batches"])
        v = schedule.stages_per_rank
        initial = build_stages(p * v, TRAINING["layers_per_stage"] // v, seed=TRAINING["seed"])
        for ours, theirs, module in zip(stages, reference.weights, initial, strict=True):
            before = dict(module.named_parameters())
            assert ours.keys() == theirs.keys() == before.keys()
            for key, tensor in ours.items():
                assert torch.equal(tensor, theirs[key]), (name, m, key)
                assert not torch.equal(tensor, before[key]), f"training did not change {key}"
        uses = weight_use(schedule, policy, m)
        expected = [uses[stage].peak_versions for stage in range(p * v)]
        assert versions[name, m] == reference.peak_versions == expected


@pytest.mark.timeout(120)
def test_benchmark_on_a_tiny_model(tmp_path):
    """Run the GPU benchmark on a CPU with a tiny GPT-2. Check the record."""
    done = run(
        [*arguments("flushes"), "--device=cpu", "--model=gpt2-tiny", "--num_stages=2",
         "--num_batches=2", "--num_microbatches=2,4", "--calibrate_on=2", "--check_weights=True",
         "--record", str(tmp_path / "record.json")]
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "gpt2-tiny, 4 blocks of hidden size 64 per stage" in done.stdout
    assert "emulated" not in done.stdout
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["emulated_ms"] == {"forward": 0, "backward": 0}
    assert record["calibration"]["num_microbatches"] == 2
    assert record["workload"] in done.stdout
    names = [(case["schedule"], case["num_microbatches"]) for case in record["cases"]]
    assert names == [(s, m) for s in ("gpipe", "1f1b", "pipedream") for m in (2, 4)]
    for case in record["cases"]:
        spans = case["measured"]["repeat_makespans_ms"]
        assert case["measured"]["makespan_ms"] == sorted(spans)[1]
        assert case["measured"]["weights_equal"] is True
        assert case["measured"]["peak_versions"] == case["predicted"]["peak_versions"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.timeout(240)
def test_two_gpus_equal_one_gpu_bitwise(tmp_path):
    done = run(
        ["--device=cuda", "--num_stages=2", "--schedule=gpipe,1f1b,pipedream",
         "--record", str(tmp_path / "record.json")],
        start=[sys.executable, "pipedream_runtime.py"], limit_s=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for case in json.loads((tmp_path / "record.json").read_text())["cases"]:
        assert case["measured"]["weights_equal"] is True
        assert case["measured"]["received_before_sent"] == 0
        assert min(case["measured"]["peak_memory_mib"]) > 0


def test_schedule_all_skips_schedules_that_do_not_fit_with_a_note(capsys):
    given = ["--num_stages=2", "--schedule=all", "--num_microbatches=5", "--num_batches=1"]
    schedules = read_config(given)["schedule"]
    assert {"1f1b", "pipedream"} < set(schedules)
    assert "interleaved" not in schedules
    notes = capsys.readouterr().err.splitlines()
    assert any(line.startswith("note: left out: interleaved: ") for line in notes)
    assert [case.name for case in build_cases(read_config(given))] == schedules


def test_blocks_are_partitioned_evenly_or_refused():
    config = read_config(["--model=gpt2-tiny", "--microbatch_size=3"])
    device = torch.device("cpu")
    built = Workload(config, device)
    stages = built.build_modules(1)
    assert [len(module) for module in stages] == [2, 2, 2, 2]
    x, target = built.task.microbatch(5)
    assert x.shape == target.shape == (3, 32, 64)
    halves = Workload(config | {"num_stages": 2}, device).build_modules(1)
    assert torch.equal(torch.nn.Sequential(*stages)(x), torch.nn.Sequential(*halves)(x))
    with pytest.raises(UserError, match="set num_stages to one of 1, 2, 4, 8"):
        Workload(config | {"num_stages": 3}, device)


def test_stages_run_on_gpus_if_there_is_one_per_stage(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    config = {"check_weights": False}
    cases = [("auto", 5, "cuda"), ("auto", 6, "cpu"), ("cuda", 4, "cuda"), ("cpu", 2, "cpu")]
    for device, stages, expected in cases:
        assert set_up_device(config | {"device": device, "num_stages": stages}, 1).type == expected
    with pytest.raises(
        UserError, match="a GPU for each of 6 stages, and this machine has 5; use a machine"
    ):
        set_up_device(config | {"device": "cuda", "num_stages": 6}, 1)


def test_event_clock_measures_execution_and_not_launches(monkeypatch):
    """Simulate a host clock that advances by one microsecond per reading, and a device with queued
    work."""
    host = device = 0  # current time of the host; time when the device becomes idle

    def read_host_clock():
        nonlocal host
        host += 1000
        return host

    class Event:
        def record(self):
            self.at_ns = max(device, host)

        def synchronize(self):
            nonlocal host
            host = max(device, host)

        def elapsed_time(self, later):
            return (later.at_ns - self.at_ns) / 1e6

    monkeypatch.setattr(time, "perf_counter_ns", read_host_clock)
    for _ in range(2):  # each Clock measures the clocks' offset again
        clock = Clock(Event)
        launched, marks = host, []
        for ns in (50_000_000, 3_000_000, 5_000_000):
            device = max(device, host) + ns
            marks.append(clock.mark())
        ends = [launched + ns for ns in (50_000_000, 53_000_000, 58_000_000)]
        assert [clock.read(mark) for mark in marks] == pytest.approx(ends, abs=1000)
        assert clock.read(marks[0]) - marks[0][0] > 49_000_000  # launched at once, then 50 ms


@pytest.mark.parametrize("depth", [0, 1, 2, 9])
def test_receives_are_posted_ahead_in_the_senders_order(depth, monkeypatch):
    log = []

    def irecv(buffer, source, group):
        number = sum(1 for event, _ in log if event == "post")
        buffer.fill_(number)
        log.append(("post", number))
        return SimpleNamespace(wait=lambda: log.append(("wait", number)))

    monkeypatch.setattr("pipedream.runtime.stage.dist.irecv", irecv)
    peer = Peer(1)
    sent = [Op("F", 1, i) for i in (3, 0, 2, 1)]
    peer.post_receives(sent, torch.zeros(2, dtype=torch.float64), depth)
    assert len(log) == min(depth, 4)
    for microbatch in (0, 3, 1, 2):  # differs from the sender's order
        op = Op("F", 1, microbatch)
        assert peer.receive(op).tolist() == [sent.index(op)] * 2
        ahead = sum(1 if event == "post" else -1 for event, _ in log)
        assert ahead == min(depth, 4 - sum(event == "wait" for event, _ in log))
    assert [number for event, number in log if event == "wait"] == [0, 1, 2, 3]
    assert [number for event, number in log if event == "post"] == [0, 1, 2, 3]
