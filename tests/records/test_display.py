import pytest

from distributed_training.records.display import Display, gib, header_rows, summary_rows
from tests.support import made_record

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (None, "not measured"),
        (0, "0.0 MiB"),
        (MIB, "1.0 MiB"),
        (GIB // 10 - 1, "102.4 MiB"),
        (GIB // 10 + 1, "0.10 GiB"),
        (1.5 * GIB, "1.50 GiB"),
        (1200 * GIB, "1200.00 GiB"),
    ],
)
def test_bytes_are_shown_in_a_unit_that_suits(num_bytes, text):
    assert gib(num_bytes) == text


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


def test_header_leaves_out_state_that_is_nowhere():
    assert header()["state"] == "2.00 GiB on the GPU of each process, by estimate"
    more = header(estimated_state_bytes__disk=3 * GIB)["state"]
    assert more == "2.00 GiB on the GPU, 3.00 GiB on the disk of each process, by estimate"


def test_header_of_a_machine_without_gpus():
    rows = header(machine__gpu_name=None, machine__num_cpus=2, config__compile=False)
    assert rows["strategy"].startswith("zero2 x 4 on CPU (2 cores): divides ")
    assert "compiled" not in rows["precision"]


def test_header_of_a_run_in_one_format():
    dtypes = dict.fromkeys(("arithmetic", "parameters", "gradients", "reduction"), "torch.float32")
    assert header(dtypes=dtypes, config__compile=False)["precision"] == "fp32"


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
TRACED = {"config__profile": 3, "profile": {"first_step": 6, "last_step": 8}}
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
        (
            TRACED,
            "profile",
            "steps 6 to 8 in trace-rank*.json.gz of the run's folder, for "
            "ui.perfetto.dev, and memory-rank*.pickle, for pytorch.org/memory_viz; overlap "
            "runs/x says what communication takes of them",
        ),
        ({**TRACED, "profile": None}, "profile", None),
        ({"evaluations": DIVERGED}, "perplexity", "nan before, nan after 64 steps"),
    ],
)
def test_summary_says_only_what_was_measured(changes, row, text):
    assert summary(**changes).get(row) == text


def test_rows_are_aligned(capsys):
    Display(enabled=True).table([("a", "one"), ("long name", "two"), ("", "three")])
    assert capsys.readouterr().out == "  a          one\n  long name  two\n             three\n"


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
    display.start(0, 10)
    display.progress(10, epoch=1, loss=1.0, rate=1.0, tokens_per_s=1.0, left_s=1.0)
    display.stop()
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_a_log_file_gets_a_line_now_and_then_and_the_last(capsys, monkeypatch):
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    display = Display(enabled=True)
    display.start(0, 100)
    for step, now_s in ((1, 100.0), (2, 101.0), (3, 106.0), (100, 107.0)):  # noqa: B007
        left_s = (100 - step) * 0.5
        display.progress(step, epoch=1, loss=2.0, rate=3e-3, tokens_per_s=1234.5, left_s=left_s)
    display.stop()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1/100", "3/100", "100/100"]
    expected = "step      1/100  epoch 1  loss 2.0000  lr 3.0e-03  1,234 tok/s  0:50 left"
    assert lines[0] == expected


def test_the_header_shows_the_pipeline():
    pipeline = {
        "schedule": "1f1b",
        "num_microbatches": 8,
        "blocks_per_stage": [7, 7, 7, 3],
        "stage_ranks": [0, 1, 2, 3],
        "ideal_bubble": 3 / 11,
    }
    rows = dict(header_rows(made_record(pipeline=pipeline)))
    assert rows["pipeline"] == (
        "1f1b, 8 micro-batches a step, blocks a stage 7, 7, 7, 3; idle 27% if stages were equal"
    )
    assert "pipeline" not in dict(header_rows(made_record()))
