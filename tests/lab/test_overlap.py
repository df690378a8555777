"""Test how a trace is divided into computation and communication."""

import pytest

from results.lab.overlap import length, main, read_trace
from tests.conftest import SMALL, assert_ok, heavy_pool, settings
from tests.e2e.support import run_folders


def in_us(rank):
    """Return a rank's microseconds: step, computing, communicating, exposed, neither."""
    return [round(1e6 * seconds * rank.steps) for seconds in rank.seconds().values()]


def event(name, span, kind="kernel", thread=7):
    begin, end = span
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": end - begin, "tid": thread}


def test_gpu_communication_is_hidden_by_kernels_of_all_streams():
    events = [
        event("ampere_sgemm", (0, 10)), event("add", (5, 15), thread=9),
        event("Memcpy HtoD", (20, 24), "gpu_memcpy"),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", (12, 22)),
        event("ncclDevKernel_AllGather_RING_LL(x)", (30, 36)),
        event("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", (34, 40)),
        # On a GPU, CPU events are ignored, and step events only determine the number of steps.
        event("aten::mm", (0, 500), "cpu_op"), event("nccl:all_reduce", (0, 500), "x"),
        *(event(f"ProfilerStep#{n}", (0, 9), "user_annotation") for n in (5, 6)),
    ]  # fmt: skip
    rank = read_trace({"traceEvents": events, "baseTimeNanoseconds": 5_000}, 0)
    assert (rank.steps, rank.window[0]) == (2, 5)
    assert in_us(rank) == [40, 19, 20, 15, 6]
    found = {kind: length(spans) for kind, spans in rank.by_kind.items()}
    assert found == {"all-reduce": 10, "all-gather": 6, "send/receive": 6}


def test_each_of_two_processes_writes_a_trace(tmp_path, capsys):
    values = {**SMALL, "strategy": "dp", "profile": 2, "max_steps": 5, "output_dir": tmp_path}
    shown = heavy_pool().script(settings({**values, "export": False}), num_processes=2)
    assert_ok(shown)
    (folder,) = run_folders(tmp_path)
    assert "traced steps from step 4: trace-rank*.json.gz" in shown.stdout
    assert main([str(folder)]) == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines()]
    for rank in ("0", "1"):
        (row,) = (row for row in rows if row[:1] == [rank])
        step, computes, talks, exposed, neither = map(float, row[1:2] + row[2::2])
        assert min(computes, talks) > 0
        assert exposed <= talks
        assert computes + exposed + neither == pytest.approx(step, abs=0.3)  # values are rounded
    assert any(row[:1] == ["all-reduce"] for row in rows)
    assert (folder / "overlap.png").stat().st_size > 5000
