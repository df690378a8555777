from distributed_training.records.display import Display, header_rows
from distributed_training.records.results import summary_rows
from tests.support import made_record


def header(**changes):
    return header_rows(made_record(finished=False, **changes))


def test_header_describes_the_run():
    rows = header()
    for name, words in {
        "model": ["gpt2-medium", "355M", "pretrained"],
        "layout": ["NVIDIA H200", "bf16", "compiled"],
        "batch": ["global 32", "4 replicas", "2 micro-batches", "16,384 tokens"],
        "data": ["1,000 samples per epoch", "2,000 samples in 64", "200", "512", "12.5% padding"],
        "rate": ["5e-05", "cosine", "10 warm-up"],
        "run": ["runs/x"],
    }.items():
        assert [word for word in words if word not in rows[name]] == [], name
    sparse = header(data__real_token_share=0.049)["data"]
    assert "95.1% padding" in sparse
    assert len(rows) <= 6


def test_summary_shows_the_results():
    rows = summary_rows(made_record(prediction={"tokens_per_s": 9e4}))
    assert rows["predicted tokens/s"] == "90,000"
    assert rows["perplexity before"] == "33.12"
    assert rows["validation perplexity"] == "20.1"
    assert (rows["tokens/s"], rows["ms per step"], rows["MFU"]) == ("131,072", "125.0", "31.4%")
    assert (rows["reserved GPU memory"], rows["peak RAM"]) == ("12.00 GiB", "5.00 GiB")
    assert rows["record"] == "runs/x/record.json"


# A record contains None for NaN, and a resumed run reads its earlier rows from the record.
NAN = float("nan")
DIVERGED = [
    {"step": 0, "loss": None, "perplexity": None},
    {"step": 64, "loss": NAN, "perplexity": NAN},
]


def test_summary_of_an_overfitted_run_says_when_it_was_best():
    losses = {0: 7.0, 20: 3.0, 40: 3.2}
    rows = [{"step": s, "loss": loss, "perplexity": 9.0 * loss} for s, loss in losses.items()]
    text = summary_rows(made_record(evaluations=rows))["result"]
    assert "3.000 after step 20" in text
    assert "--keep_best" in text
    assert "best/" in summary_rows(made_record(evaluations=rows, best=rows[1]))["result"]
    assert "result" not in summary_rows(made_record(evaluations=[rows[1], rows[1]]))
    untrained = [{**rows[1], "step": 0}, rows[2]]
    assert "overfitted" not in summary_rows(made_record(evaluations=untrained))["result"]


def test_summary_shows_only_measured_values():
    stopped = {"performance": {"num_timed_steps": 0, "tokens_per_s": None}, "evaluations": []}
    rows = summary_rows(made_record(**stopped, memory__peak_reserved_bytes=None))
    assert list(rows) == ["peak RAM", "training loss", "record"]
    rows = summary_rows(made_record(skipped_steps=[4, 5, 9], evaluations=DIVERGED))
    assert rows["skipped"].startswith("3 steps")
    assert (rows["perplexity before"], rows["validation perplexity"]) == ("nan", "nan")


def test_long_values_are_wrapped_and_paths_are_not(capsys):
    path = "https://huggingface.co/" + "a-name-with-hyphens-" * 5
    display = Display(enabled=True)
    display.table({"a": "word " * 20, "none": "", "run": path})
    display.note(f"the weights of {path} are not here")
    lines = capsys.readouterr().out.splitlines()
    assert [line[:7] for line in lines[:3]] == ["  a    ", "       ", "  run  "]
    assert max(map(len, lines[:2])) <= 80
    assert lines[2][7:] == path
    assert any(path in line for line in lines[3:])


ROW = {"epoch": 0, "loss": 2.0, "learning_rate": 3e-3, "num_tokens": 1234, "step_time_s": 0.5}


def test_progress_is_occasional_lines_and_the_last_one(capsys, monkeypatch):
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    display = Display(enabled=True)
    for rows, now_s in (([1], 100.0), ([2], 101.0), ([1, 2, 3], 106.0), ([100], 107.0)):  # noqa: B007
        rows = [{"step": step, "expert_load": 1.26, **ROW} for step in rows]
        display.progress(rows, 1, 100)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1/100", "3/100", "100/100"]
    assert lines[0].endswith("experts' load 1.3x  first step 0.5 s")
    assert lines[1].endswith("2,468 tok/s  48.5 s left")
