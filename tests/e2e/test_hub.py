"""Test access to the Hub with a stub on loopback. In different tests, the stub serves files,
never answers, or is no longer running."""

import io
import json
import socket
import time

import pyarrow.parquet
import pytest

from distributed_training.data.hub import TOKENIZER_ID, WIKITEXT_FILES, WIKITEXT_ID
from distributed_training.data.tokenizer import EMBEDDED_DIR
from tests.conftest import assert_ok, hub_pool, only_record, train
from tests.data.test_tokenizer import folder  # noqa: F401
from tests.e2e.hub_stub import hub_environment, serve
from tests.e2e.support import assert_refused
from tests.support import save_tiny, small_text

AUTO_LIMIT_S = 60  # three seconds per probe of the Hub, with a margin for a busy machine


def parquet(rows: list[dict]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


@pytest.fixture(scope="module")
def wikitext():
    """Return the files of a small imitation of WikiText-2, keyed by their paths on the Hub. The
    text has headings, paragraphs and blank rows."""
    lines = [f" {line} \n" for line in small_text().read_text().splitlines()]
    texts = ["", " = An article = \n", "", " = = Use = = \n", "", *lines]
    rows = [{"text": text} for text in texts]
    content = {"train": parquet(rows[:500]), "validation": parquet(rows[:200])}
    prefix = f"datasets/{WIKITEXT_ID}/resolve/main"
    return {f"{prefix}/{name}": content[split] for split, name in WIKITEXT_FILES.items()}


@pytest.fixture(scope="module")
def own_dataset():
    """Return the files of three datasets, keyed by their paths on the Hub. The dataset me/chats has
    a validation split, me/cards has two configs, and me/splits has splits with other names."""
    said = [("user", "What comes after one?"), ("assistant", "After one comes two.")]
    messages = [{"role": role, "content": text} for role, text in said]
    chats = [{"number": n, "messages": messages} for n in range(120)]
    data_files = [{"split": split, "path": f"{split}.jsonl"} for split in ("train_sft", "test_sft")]
    splits = [{"config_name": "default", "data_files": data_files}]
    configs = [{"config_name": name, "data_files": f"{name}.jsonl"} for name in ("a", "b")]
    cards = [json.dumps({"prompt": f"{n}:", "completion": f" card {n}"}) for n in range(60)]
    content = {
        "chats/resolve/main/data/train-00000-of-00002.parquet": parquet(chats[:60]),
        "chats/resolve/main/data/train-00001-of-00002.parquet": parquet(chats[60:]),
        "chats/resolve/main/data/validation-00000-of-00001.parquet": parquet(chats[:20]),
        "cards/resolve/main/README.md": f"---\n{json.dumps({'configs': configs})}\n---\n".encode(),
        "splits/resolve/main/README.md": f"---\n{json.dumps({'configs': splits})}\n---\n".encode(),
        "splits/resolve/main/train_sft.jsonl": "\n".join(cards[:40]).encode(),
        "splits/resolve/main/test_sft.jsonl": "\n".join(cards[40:]).encode(),
        "evil/resolve/main/README.md": b"""---
configs: [{config_name: default, data_files: "ftp://127.0.0.1:1/x"}]
---""",
        "cards/resolve/main/a.jsonl": "\n".join(cards).encode(),
        "cards/resolve/main/b.jsonl": "\n".join(cards[:50]).encode(),
    }
    return {f"datasets/me/{name}": text for name, text in content.items()}


@pytest.fixture
def run(tmp_path):
    """Return a function that runs the script against a Hub stub at a given address. Downloads and
    runs are stored in the test's folder."""

    def start(endpoint, values, *arguments, **options):
        values = {"strategy": "dp", "output_dir": tmp_path / "runs", **values}
        options |= hub_environment(endpoint, tmp_path / "hf")
        return train(values, *arguments, **options)

    return start


def assert_decided(result, **values):
    """Check that a dry run resolved CONFIG to these values."""
    assert_ok(result)
    found = [line.split()[:2] for line in result.stdout.splitlines()]
    for key, value in values.items():
        assert [key, value] in found, result.stdout


def test_wikitext_is_fetched_once_and_then_comes_from_the_cache(wikitext, run):
    with serve(wikitext) as hub:
        assert_ok(run(hub.endpoint, {"dataset": "wikitext-2"}, "--dry-run"))
        fetched = [text for text in hub.requests if text.startswith("GET") and "resolve" in text]
        assert len(fetched) == len(WIKITEXT_FILES), hub.requests
    result = run(hub.endpoint, {"dataset": "auto"}, "--dry-run", "--explain")  # without the stub
    assert_decided(result, dataset="'wikitext-2'")


def test_a_model_is_fetched_with_its_weights_and_a_tokenizer(wikitext, run, tmp_path):
    """The stub serves a small tokenizer in place of GPT-2's tokenizer."""
    save_tiny(tmp_path / "hub")
    names = ("vocab.json", "merges.txt")
    gpt2 = {f"{TOKENIZER_ID}/resolve/main/{name}": EMBEDDED_DIR / name for name in names}
    names = ("config.json", "model.safetensors")
    gpt2[f"{TOKENIZER_ID}/resolve/main/config.json"] = tmp_path / "hub" / "config.json"
    gpt2 |= {f"me/tiny/resolve/main/{name}": tmp_path / "hub" / name for name in names}
    gpt2 = {name: file.read_bytes() for name, file in gpt2.items()}
    auto = {"model": "me/tiny", "dataset": "auto", "learning_rate": "auto", "tokenizer": "gpt2"}
    with serve({**wikitext, **gpt2}) as hub:
        result = run(hub.endpoint, auto, "--dry-run", "--explain")
    assert_decided(result, tokenizer="'gpt2'", weights="'pretrained'", learning_rate="5e-05")
    assert result.stdout.count("note:") == result.stdout.count("note: the run has") == 1
    assert not (tmp_path / "runs").exists()


def test_a_tokenizer_is_fetched_with_all_of_its_templates(folder, tmp_path):  # noqa: F811
    content = {file.name: file.read_bytes() for file in folder.iterdir()}
    content |= {"model.safetensors": b"", "onnx/tokenizer.json": b"", "config.json": b"{}"}
    content |= {"chat_template.jinja": b"a", "additional_chat_templates/tool_use.jinja": b"b"}
    (tmp_path / "a.txt").write_text("a word " * 200)
    command = ["data", "--model", "gpt2-tiny", "--tokenizer", "me/chat"]
    command += ["--dataset", tmp_path / "a.txt"]
    with serve({f"me/chat/resolve/main/{name}": text for name, text in content.items()}) as hub:
        where = hub_environment(hub.endpoint, tmp_path / "hf")
        assert_ok(hub_pool().script(command, **where))
    fetched = {asked.rpartition("/")[2] for asked in hub.requests if asked.startswith("GET")}
    assert {"tokenizer.json", "chat_template.jinja", "tool_use.jinja"} <= fetched
    assert not any("safetensors" in asked or "onnx" in asked for asked in hub.requests)


def test_auto_falls_back_within_seconds_with_a_note(run):
    begin = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as hub:  # never accepts a connection
        endpoint = f"http://127.0.0.1:{hub.getsockname()[1]}"
        result = run(endpoint, {"dataset": "auto"}, "--dry-run", "--explain")
    assert time.monotonic() - begin < AUTO_LIMIT_S
    assert_decided(result, dataset="'embedded'")
    assert "note: WikiText-2" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr


def test_a_hub_dataset_is_trained_on_by_name(own_dataset, run, tmp_path):
    """Only rank 0 sends requests to the Hub, so the ranks cannot get different data. A second run
    uses the cache of the datasets library."""
    values = {"dataset": "me/chats", "max_steps": 2, "num_samples": -1, "pack": False}
    with serve(own_dataset) as hub:
        result = run(hub.endpoint, values, num_processes=2)
        assert_ok(result)
        assert result.stderr == ""  # no library prints anything
        asked = [text for text in hub.requests if ".parquet" in text and text.startswith("GET")]
        assert len(asked) == 3
    record = only_record(tmp_path / "runs")
    assert record["data"]["num_train_samples"] == 120
    assert record["data"]["num_validation_samples"] == 8  # eval_samples
    assert record["data"]["unit"] == "chats"
    values["output_dir"] = tmp_path / "second"  # the stub no longer runs
    assert_ok(run(hub.endpoint, values))
    again = only_record(tmp_path / "second")
    assert again["work"]["data_fingerprint"] == record["work"]["data_fingerprint"]


def test_splits_of_a_hub_dataset_are_named(own_dataset, run, tmp_path):
    values = {"dataset": "me/splits::train_sft", "validation_dataset": "me/splits:default:test_sft"}
    values |= {"max_steps": 1, "num_samples": -1, "eval_samples": -1, "pack": False}
    with serve(own_dataset) as hub:
        assert_ok(run(hub.endpoint, values))
        for name in ("me/splits", "me/splits:default:train"):
            words = f"dataset='{name}'", "train_sft, test_sft", ":train_sft"
            assert_refused(run(hub.endpoint, {**values, "dataset": name}), *words)
    data = only_record(tmp_path / "runs")["data"]
    assert (data["num_train_samples"], data["num_validation_samples"]) == (40, 20)


def test_one_config_of_a_hub_dataset_is_loaded(own_dataset, run, tmp_path):
    values = {"num_samples": -1, "pack": False}

    def ask(name):
        return run(hub.endpoint, {**values, "dataset": name}, "--dry-run", "--explain")

    with serve(own_dataset) as hub:
        assert_ok(ask("me/cards:b"))
        assert not any("b.jsonl" in text for text in hub.requests if text.startswith("GET"))
        assert not (tmp_path / "runs").exists()
        assert_refused(ask("me/cards"), "dataset='me/cards'", "config", "a", "b")
        assert_refused(ask("me/cards:c"), "'c'")
        assert_refused(ask("me/none"), "'me/none'")
        assert_refused(ask("me/evil"), "README.md refers to 'ftp://127.0.0.1:1/x'")
