"""Test how a trace is divided into computation and communication. The tests use traces from a
two-process run and random traces. Sets of ticks give the expected results for random traces."""

import gzip
import json
import random

import pytest

from results.lab.overlap import kind_of, length, main, read_trace
from tests.conftest import SMALL, assert_ok, heavy_pool, only_record, settings
from tests.e2e.support import run_folders
from tests.support import refused

TICKS = 80


def event(name, span, kind="kernel", thread=7):
    begin, end = span
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": end - begin, "tid": thread}


def drawn(rng, most=9):
    starts = [rng.randrange(TICKS - 12) for _ in range(rng.randrange(most))]
    return [(start, start + rng.randrange(1, 12)) for start in starts]


def ticks(spans):
    return {tick for begin, end in spans for tick in range(begin, end)}


def check(rank, computing, talking, step):
    """Check a rank's seconds per step against `computing` and `talking`, which are sets of ticks. A
    tick is one microsecond."""
    assert {name: round(1e6 * each * rank.steps) for name, each in rank.seconds().items()} == {
        "step": step,
        "computing": len(computing),
        "communicating": len(talking),
        "exposed": len(talking - computing),
        "neither": step - len(computing | talking),
    }


@pytest.mark.parametrize("seed", range(50))
def test_gpu_communication_is_hidden_by_kernels_of_all_streams(seed):
    rng = random.Random(seed)
    work, copies, sums, gathers = ([*drawn(rng), (0, 1)] for _ in range(4))
    events = [event("ampere_sgemm", span, thread=rng.choice((7, 9))) for span in work]
    events += [event("Memcpy HtoD", span, "gpu_memcpy") for span in copies]
    events += [event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", span) for span in sums]
    events += [event("ncclDevKernel_AllGather_RING_LL(x)", span) for span in gathers]
    # On a GPU, CPU events are ignored, and step events only determine the number of steps.
    events += [event("aten::mm", (0, 500), "cpu_op"), event("nccl:all_reduce", (0, 500), "x")]
    events += [event(f"ProfilerStep#{n}", (0, 9), "user_annotation") for n in (5, 6)]
    rng.shuffle(events)
    rank = read_trace({"traceEvents": events, "baseTimeNanoseconds": 5_000}, 0)
    computing, talking = ticks(work + copies), ticks(sums + gathers)
    check(rank, computing, talking, max(computing | talking) + 1)
    found = {kind: length(spans) for kind, spans in rank.by_kind.items()}
    assert found == {"all-reduce": len(ticks(sums)), "all-gather": len(ticks(gathers))}
    assert rank.window[0] == 5


@pytest.mark.parametrize("seed", range(50))
def test_cpu_communication_is_hidden_by_operators_of_all_threads(seed):
    rng = random.Random(seed)
    here, there, compiled, waits, sums = (drawn(rng) for _ in range(5))
    events = [event("aten::addmm", span, "cpu_op", 1) for span in here]
    events += [event("aten::mm", span, "cpu_op", 2) for span in there]
    events += [event("## Call CompiledFxGraph f0", span, "cpu_op", 3) for span in compiled]
    events += [event("_c10d_functional::wait_tensor", span, "cpu_op", 3) for span in waits]
    events += [event("gloo:all_reduce", span, "user_annotation", 4) for span in sums]
    events += [event("autograd::engine::evaluate_function", (0, 70), "cpu_op", 1)]
    events += [event("ProfilerStep#5", (10, 60), "user_annotation", 1), {"ph": "M"}]
    step = set(range(10, 60))
    computing = (ticks(here + there) | (ticks(compiled) - ticks(waits))) & step
    check(read_trace({"traceEvents": events}, 0), computing, ticks(sums) & step, 50)


def test_communication_is_classified_by_kernel_name():
    for name, kind in {
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgs)": "reduce-scatter",
        "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t": "send/receive",
        "gloo:all_gather": "all-gather", "gloo:recvAnySource": "send/receive",
        "gloo:all_to_all": "all-to-all", "gloo:barrier": "other",
    }.items():  # fmt: skip
        assert kind_of(name) == kind


def test_each_of_two_processes_writes_a_trace(tmp_path, capsys):
    values = {**SMALL, "strategy": "dp", "profile": 2, "max_steps": 5, "output_dir": tmp_path}
    shown = heavy_pool().script(settings({**values, "export": False}), num_processes=2)
    assert_ok(shown)
    run = only_record(tmp_path)
    (folder,) = run_folders(tmp_path)
    traces = "trace-rank*.json.gz in the run's folder (open at ui.perfetto.dev)"
    assert f"profile steps 4 to 5, in {traces}" in " ".join(shown.stdout.split())
    assert "USDT" not in shown.stderr
    with gzip.open(folder / "trace-rank0.json.gz") as file:
        names = [str(event.get("name")) for event in json.load(file)["traceEvents"]]
    steps = {name for name in names if name.startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#3", "ProfilerStep#4"}  # names count steps from 0
    assert sum(name.startswith("Optimizer.step#") for name in names) == 2
    assert run["profile"] == {
        "first_step": 4, "last_step": 5, "traces": "trace-rank*.json.gz", "memory": None,
    }  # fmt: skip
    assert main([str(folder)]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines()[:-1])) <= 80
    rows = [line.split() for line in text.splitlines()]
    for rank in ("0", "1"):
        (row,) = (row for row in rows if row[:1] == [rank])
        step, computes, talks, exposed, neither = map(float, row[1:2] + row[2::2])
        assert min(computes, talks) > 0
        assert exposed <= talks
        assert computes + exposed + neither == pytest.approx(step, abs=0.3)  # values are rounded
    assert any(row[:1] == ["all-reduce"] for row in rows)
    assert (folder / "overlap.png").stat().st_size > 5000


def test_unreadable_traces_are_refused(tmp_path):
    with refused("has no trace-rank*.json.gz", "--profile"):
        main([str(tmp_path)])
    (tmp_path / "trace-rank0.json.gz").write_text("no gzip")
    with refused("trace-rank0.json.gz is not a trace"):
        main([str(tmp_path)])
    with refused("rank 3 has no steps"):
        read_trace({"traceEvents": [event("gemm", (0, 1))]}, 3)
