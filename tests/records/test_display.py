import pytest

from distributed_training.records.display import Display, header_rows, summary_rows
from tests.support import made_record

MIB, GIB = 2**20, 2**30


def header(**changes):
    return dict(header_rows(made_record(finished=False, **changes)))


def test_header_says_what_runs():
    rows = header()
    assert rows["model"] == "gpt2-medium, 354.8M parameters, pretrained weights"
    assert rows["strategy"] == "zero2 x 4 on NVIDIA H200: divides optimizer state, gradients"
    precision = "bf16 arithmetic; parameters bf16, fp32 master copy; gradients bf16"
    assert rows["precision"] == f"{precision}; compiled (the first step takes a while)"
    assert rows["batch"] == ("global 32 = 4 replicas x 2 micro-batches x 4; 16,384 tokens a step")
    assert "1000 samples of 512 tokens (87.5% real), 200 to validate" in rows["data"]
    assert rows["steps"] == "64 = 32 an epoch; learning rate 5e-05 (cosine, warm-up 10)"
    assert rows["run"] == "runs/x"


def test_header_shows_the_cut_and_what_the_strategy_decided():
    batch = {"global_batch_size": 32, "micro_batch_size": 4, "num_microbatches": 8}
    rows = header(
        batch={**batch, "num_replicas": 1},
        config__pipeline_schedule="gpipe",
        from_strategy_defaults=["pipeline_schedule", "compile"],
    )
    assert rows["batch"].startswith("global 32 = 1 replica x 8 micro-batches x 4;")
    assert rows["defaults"] == "the strategy sets pipeline_schedule=gpipe, compile=True"
    assert "defaults" not in header()


def summary(**changes):
    return dict(summary_rows(made_record(**changes)))


def test_summary_says_what_came_out():
    assert summary() == {
        "perplexity": "33.12 before, 20.06 after 64 steps",
        "throughput": "131,072 tokens/s, 125.0 ms a step (median of 59), MFU 31.4%",
        "GPU memory": "peak 10.00 GiB allocated, 12.00 GiB reserved",
        "host memory": "peak 5.00 GiB a process",
        "record": "runs/x/record.json",
    }


NO_GPU = {"performance__mfu": None, "memory__peak_allocated_bytes": None}
UNTIMED = {"performance": {"num_timed_steps": 0, "tokens_per_s": None}, "evaluations": []}
# A record holds None where the run had NaN; a resumed run reads its beginning from there.
DIVERGED = [{"step": 0, "perplexity": None}, {"step": 64, "perplexity": float("nan")}]


@pytest.mark.parametrize(
    ("changes", "row", "text"),
    [
        (NO_GPU, "GPU memory", None),
        (NO_GPU, "throughput", "131,072 tokens/s, 125.0 ms a step (median of 59)"),
        (UNTIMED, "perplexity", None),  # stopped before its first step
        (UNTIMED, "throughput", None),
        ({"skipped_steps": [4, 5, 9]}, "skipped", "3 steps, gradients not finite"),
        ({"evaluations": DIVERGED}, "perplexity", "nan before, nan after 64 steps"),
    ],
)
def test_summary_says_only_what_was_measured(changes, row, text):
    assert summary(**changes).get(row) == text


def test_a_long_value_goes_on_below_and_a_path_is_not_cut(capsys):
    path = "x" * 100
    Display(enabled=True).table([("a", "word " * 20), ("run", path)])
    lines = capsys.readouterr().out.splitlines()
    assert [line[:7] for line in lines] == ["  a    ", "       ", "  run  "]
    assert max(map(len, lines[:2])) <= 80
    assert lines[2][7:] == path


def test_other_ranks_are_silent(capsys):
    display = Display(enabled=False)
    display.say("a")
    display.table([("a", "b")])
    display.start(0, 10, compiles=True)
    display.progress(10, epoch=1, loss=1.0, rate=1.0, num_tokens=1, seconds=1.0, num_steps=1)
    display.stop()
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_a_log_file_gets_a_line_now_and_then_and_the_last(capsys, monkeypatch):
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    display = Display(enabled=True)
    display.start(0, 100, compiles=True)
    for step, now_s in ((1, 100.0), (2, 101.0), (3, 106.0), (100, 107.0)):  # noqa: B007
        timed = {"num_tokens": 1234, "seconds": 0.5, "num_steps": min(step - 1, 1)}
        display.progress(step, epoch=1, loss=2.0, rate=3e-3, **timed)
    display.stop()
    compiling, *lines = capsys.readouterr().out.splitlines()
    assert compiling.startswith("compiling")
    assert [line.split()[1] for line in lines] == ["1/100", "3/100", "100/100"]
    assert lines[0] == "step      1/100  epoch 1  loss 2.0000  lr 3.0e-03  first step 0.5 s"
    assert lines[1].endswith("loss 2.0000  lr 3.0e-03  2,468 tok/s  0:48 left")
