"""Test uploads to a stub of the Hub on loopback."""

import shutil

import pytest
from huggingface_hub import ModelCard

from tests.conftest import SMALL, assert_ok, hub_pool, only_record, train
from tests.e2e.hub_stub import TOKEN, hub_environment, serve
from tests.e2e.support import assert_refused, run_folders
from tests.pool import free_port

FILES = (
    "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json",
)  # fmt: skip
AT_END = {**SMALL, "strategy": "dp", "max_steps": 1, "push": "user/tiny"}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Return the folder of a two-process run that kept its best weights and uploaded them at the
    end."""
    output_dir = tmp_path_factory.mktemp("push")
    values = {**AT_END, "keep_best": True, "output_dir": output_dir / "runs"}
    with serve({}) as hub:
        where = hub_environment(hub.endpoint, output_dir / "hf", TOKEN)
        result = train(values, num_processes=2, **where)
    assert_ok(result)
    assert f"Uploaded the model to {hub.endpoint}/user/tiny\n" in result.stdout
    assert sorted(hub.pushed) == [f"user/tiny/{name}" for name in FILES]
    assert hub.visibilities == ["private"]
    (folder,) = run_folders(output_dir / "runs")
    return folder


def push(*words, endpoint, home, token=TOKEN):
    return hub_pool().script(["push", *words], **hub_environment(endpoint, home, token))


def test_a_run_is_pushed_with_its_card_and_without_other_files(run_dir, tmp_path):
    secret = run_dir / "best" / ".env"
    secret.write_text("secret")
    (run_dir / "best" / "added_tokens.json").symlink_to(secret)
    words = ("user/tiny", "--best", "--public")
    with serve({}) as hub:
        result = push(run_dir, *words, endpoint=hub.endpoint, home=tmp_path)
    assert_ok(result)
    assert hub.visibilities == ["public"]
    assert result.stdout == f"Uploaded the model to {hub.endpoint}/user/tiny\n"
    assert sorted(hub.pushed) == [f"user/tiny/{name}" for name in FILES]
    for name in FILES[1:]:
        assert hub.pushed[f"user/tiny/{name}"] == (run_dir / "best" / name).read_bytes()
    card = ModelCard(hub.pushed["user/tiny/README.md"].decode())
    assert card.data.library_name == "transformers"
    assert 'from_pretrained("user/tiny")' in card.text
    assert str(run_dir.parent) not in str(card)


def test_a_failed_push_keeps_the_run_and_prints_the_push_command(tmp_path):
    values = {**AT_END, "output_dir": tmp_path / "runs"}
    where = hub_environment(f"http://127.0.0.1:{free_port()}", tmp_path / "hf", TOKEN)
    result = train(values, **where)
    assert result.returncode == 2
    assert "\n  python real_model_example.py push " in result.stderr
    assert result.stderr.count("\n") == 2
    assert only_record(tmp_path / "runs")["status"] == "ok"


def test_push_errors_are_one_line(run_dir, tmp_path):
    with serve({}) as hub:
        where = {"endpoint": hub.endpoint, "home": tmp_path}
        result = push(run_dir, "user/tiny", token="hf_wrong", **where)
        assert_refused(result, "401", f"push {run_dir}/hf user/tiny")
        assert_refused(push(run_dir, "user/tiny", token="", **where), "HF_TOKEN")
        without = shutil.copytree(run_dir, tmp_path / "run")
        shutil.rmtree(without / "best")
        refusal = push(without, "user/tiny", "--best", **where)
        assert_refused(refusal, "best/", "--keep_best True")
        assert hub.pushed == {}
    refusal = push(run_dir, "user/tiny", **where)
    assert_refused(refusal, f"push {run_dir}/hf user/tiny")
