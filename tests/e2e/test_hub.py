"""The Hub's path, for real, against a stub on loopback: served, refused, cut off, mute, gone."""

from __future__ import annotations

import functools
import io
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed_training.data.hub import TOKENIZER_ID, WIKITEXT_FILES, WIKITEXT_ID
from distributed_training.data.tokenizer import EMBEDDED_DIR
from distributed_training.models.gpt2 import SIZES
from tests.conftest import HIDDEN_HUB, SMALL, assert_ok, only_record, script, train
from tests.e2e.hub_stub import serve
from tests.e2e.support import assert_refused
from tests.ports import free_port

AUTO_LIMIT_S = 60  # three seconds a probe; the rest is for a busy machine
PRE_DOWNLOAD = "hf download Salesforce/wikitext --repo-type dataset"
TOPICS = ("river", "bridge", "engine", "forest", "letter", "market", "signal", "winter")


def articles(first: int, count: int) -> list[str]:
    """Rows as WikiText stores them: a heading, sections, paragraphs, blank rows between."""
    rows = []
    for number in range(first, first + count):
        topic = TOPICS[number % len(TOPICS)]
        rows += ["", f" = The {topic} of {number} = \n", ""]
        for section in ("History", "Use"):
            rows += [f" = = {section} = = \n", ""]
            rows += [
                f" The {topic} was described in {1700 + number} , and its {section.lower()} "
                f"is told in {part} ways by those who saw the {topic} themselves . \n"
                for part in range(6)
            ]
    return rows


def parquet(rows: list[str]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), file)
    return file.getvalue()


@pytest.fixture(scope="module")
def wikitext():
    """Paths on the Hub -> content of a small WikiText-2."""
    content = {"train": parquet(articles(0, 40)), "validation": parquet(articles(100, 8))}
    prefix = f"datasets/{WIKITEXT_ID}/resolve/main"
    return {f"{prefix}/{name}": content[split] for split, name in WIKITEXT_FILES.items()}


@pytest.fixture(scope="module")
def gpt2():
    """Paths on the Hub -> content of gpt2: a small tokenizer and a config of the right size."""
    size = SIZES["gpt2"]
    config = {
        "model_type": "gpt2",
        "vocab_size": size.vocab_size,
        "n_positions": size.num_positions,
        "n_layer": size.num_layers,
        "n_head": size.num_heads,
        "n_embd": size.hidden_size,
    }
    content = {name: (EMBEDDED_DIR / name).read_bytes() for name in ("vocab.json", "merges.txt")}
    content["config.json"] = json.dumps(config).encode()
    content["model.safetensors"] = (2).to_bytes(8, "little") + b"{}"  # a header without tensors
    return {f"{TOKENIZER_ID}/resolve/main/{name}": text for name, text in content.items()}


def run(
    endpoint: str, home: Path, values: dict, *arguments: str, start: Callable = script
) -> subprocess.CompletedProcess[str]:
    """The script with the Hub at `endpoint` and its cache in `home`."""
    values = {**SMALL, "strategy": "dp", **values}
    hub = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    return start(values, *arguments, unset=[HIDDEN_HUB], **hub)


def test_wikitext_is_fetched_once_and_then_comes_from_the_cache(wikitext, tmp_path):
    """Rank 0 alone asks, so that no two ranks can end up with different data."""
    values = {"dataset": "wikitext-2", "max_steps": 2, "output_dir": tmp_path / "first"}
    with serve(wikitext) as hub:
        two = functools.partial(train, num_processes=2)
        assert_ok(run(hub.endpoint, tmp_path / "hf", values, start=two))
        fetched = [text for text in hub.requests if text.startswith("GET") and "resolve" in text]
        assert len(fetched) == len(WIKITEXT_FILES), hub.requests
    first = only_record(tmp_path / "first")
    assert first["config"]["dataset"] == "wikitext-2"
    values = {"dataset": "auto", "output_dir": tmp_path / "second"}  # the stub has gone
    result = run(hub.endpoint, tmp_path / "hf", values, "--dry-run")
    assert_ok(result)
    assert any(
        line.split()[:2] == ["dataset", "'wikitext-2'"] for line in result.stdout.splitlines()
    )


def test_gpt2_is_fetched_with_its_tokenizer_and_weights(wikitext, gpt2, tmp_path):
    auto = {"dataset": "auto", "learning_rate": "auto", "output_dir": tmp_path / "runs"}
    with serve({**wikitext, **gpt2}) as hub:
        result = run(hub.endpoint, tmp_path / "hf", auto, "--model", "gpt2", "--dry-run")
    assert_ok(result)
    for key, value in {
        "tokenizer": "'gpt2'",
        "weights": "'pretrained'",
        "dataset": "'wikitext-2'",
        "learning_rate": "5e-05",
    }.items():
        assert any(line.split()[:2] == [key, value] for line in result.stdout.splitlines()), key
    assert "note:" not in result.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("behaviour", ["refuses", "mute", "gone", "no scheme"])
def test_auto_falls_back_within_seconds_and_says_so(behaviour, wikitext, tmp_path):
    values = {"dataset": "auto", "output_dir": tmp_path / "runs"}
    arguments = (tmp_path / "hf", values, "--dry-run")
    begin = time.monotonic()
    if behaviour == "gone":
        result = run(f"http://127.0.0.1:{free_port()}", *arguments)
    elif behaviour == "no scheme":
        result = run("hub.example", *arguments)
    else:
        with serve(wikitext, behaviour) as hub:
            result = run(hub.endpoint, *arguments)
    elapsed_s = time.monotonic() - begin
    assert_ok(result)
    assert "note: WikiText-2 is not available" in result.stdout
    assert "embedded corpus" in result.stdout
    assert any(line.split()[:2] == ["dataset", "'embedded'"] for line in result.stdout.splitlines())
    assert "Traceback" not in result.stdout + result.stderr
    assert elapsed_s < AUTO_LIMIT_S


def test_download_that_was_cut_off_is_not_taken_for_the_file(wikitext, tmp_path):
    values = {"dataset": "wikitext-2", "output_dir": tmp_path / "runs"}
    arguments = (tmp_path / "hf", values, "--dry-run")
    with serve(wikitext, "cuts off") as hub:
        assert_refused(run(hub.endpoint, *arguments), "dataset='wikitext-2'", PRE_DOWNLOAD)
    with serve(wikitext) as hub:
        assert_ok(run(hub.endpoint, *arguments))
        assert any(text.startswith("GET /datasets") for text in hub.requests)


NUMBERS = ("one", "two", "three", "four", "five", "six")


def chats(first: int, count: int) -> list[dict]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"What comes after {n} and {NUMBERS[n % 6]}?"},
                {"role": "assistant", "content": f"After {NUMBERS[n % 6]} comes the next."},
            ]
        }
        for n in range(first, first + count)
    ]


def table(rows: list[dict]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


@pytest.fixture(scope="module")
def own_dataset():
    """Paths on the Hub -> content of me/chats, with a split, and of me/cards, with configs."""
    chat, cards = "datasets/me/chats/resolve/main", "datasets/me/cards/resolve/main"
    front = {
        "configs": [{"config_name": name, "data_files": f"{name}.jsonl"} for name in ("a", "b")]
    }
    lines = [json.dumps({"prompt": f"{n}:", "completion": f" card {n}"}) for n in range(60)]
    return {
        f"{chat}/data/train-00000-of-00002.parquet": table(chats(0, 60)),
        f"{chat}/data/train-00001-of-00002.parquet": table(chats(60, 60)),
        f"{chat}/data/validation-00000-of-00001.parquet": table(chats(3, 20)),
        f"{cards}/README.md": f"---\n{json.dumps(front)}\n---\n".encode(),
        f"{cards}/a.jsonl": "\n".join(lines).encode(),
        f"{cards}/b.jsonl": "\n".join(lines[:50]).encode(),
    }


def test_a_dataset_of_the_hub_is_trained_on_by_its_name(own_dataset, tmp_path):
    """Rank 0 alone asks; later the library's cache is enough."""
    values = {"dataset": "me/chats", "max_steps": 2, "num_samples": "auto", "pack": False}
    values["output_dir"] = tmp_path / "runs"
    with serve(own_dataset) as hub:
        two = functools.partial(train, num_processes=2)
        result = run(hub.endpoint, tmp_path / "hf", values, start=two)
        assert_ok(result)
        assert result.stderr == ""  # no library's words
        asked = [text for text in hub.requests if ".parquet" in text and text.startswith("GET")]
        assert len(asked) == 3
    record = only_record(tmp_path / "runs")
    assert record["data"]["num_train_samples"] == 120
    assert record["data"]["num_validation_samples"] == 8  # eval_samples
    assert any("only the answers are learnt" in note for note in record["notes"])
    values["output_dir"] = tmp_path / "second"  # the stub has gone
    assert_ok(run(hub.endpoint, tmp_path / "hf", values, start=train))
    again = only_record(tmp_path / "second")
    assert again["work"]["data_fingerprint"] == record["work"]["data_fingerprint"]


def test_a_config_of_a_dataset_of_the_hub(own_dataset, tmp_path):
    values = {"num_samples": -1, "pack": False, "output_dir": tmp_path / "runs"}
    with serve(own_dataset) as hub:
        ask = functools.partial(run, hub.endpoint, tmp_path / "hf")
        assert_ok(ask({**values, "dataset": "me/cards:b"}, "--dry-run"))
        assert not any("b.jsonl" in text for text in hub.requests if text.startswith("GET"))
        assert not (tmp_path / "runs").exists()
        words = ["dataset='me/cards'", "config", "a", "b"]
        assert_refused(ask({**values, "dataset": "me/cards"}, "--dry-run"), *words)
        assert_refused(ask({**values, "dataset": "me/cards:c"}, "--num_gpus", "2"), "'c'")
        assert_refused(
            ask({**values, "dataset": "me/none"}), "'me/none'", "load_dataset('me/none')"
        )
