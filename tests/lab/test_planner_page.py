"""Test the planner's page in a headless Chromium. It must have been built (`make page`)."""

import functools
import http.server
import json
import re
import shlex
import subprocess
import sys
import threading

import pytest
from pydantic_core import to_jsonable_python

from distributed_training.models.hub import measure_size
from distributed_training.models.table import read_table
from distributed_training.settings.files import ROOT
from pipedream_tutorial.tests import browser as tutorial

BUILT = ROOT / "build/page"
VERDICT = "document.getElementById('verdict').textContent"
ONLY_THIS_HOST = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
CONFIG = """{
  "model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096,
  "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
  "hidden_size": 2048, "intermediate_size": 5632
}"""
QUESTIONS = """\
--cluster 3060 --model Qwen/Qwen3-4B
--cluster '4060 laptop' --model Llama-3.2-3B --lora_rank 16
--cluster RTX-4090 --model Qwen/Qwen3-8B --max_length 2048 --batch_size auto
--cluster RTX-4090 --model Qwen/Qwen3-8B --lora_rank 16 --base_dtype nf4
--cluster RTX-3090 --model mistralai/Mistral-7B-v0.3 --tokens 100M
--cluster 2x3090 --model Llama-3.1-8B --batch_size auto
--cluster RTX-5090 --model Qwen/Qwen3.5-9B --tokens 50M --price $0.9
--cluster RTX-5090 --model Qwen/Qwen3.5-27B
--cluster RTX-3060 --model openai/gpt-oss-20b
--cluster H100-80GB --model openai/gpt-oss-20b --lora_rank 16
--cluster 8xH100-80GB --model openai/gpt-oss-120b
--cluster 8xH100-80GB --model Qwen/Qwen3-30B-A3B
--cluster 8xH100-80GB --model Qwen/Qwen3-8B --tokens 1B
--cluster 2x8xH100-80GB --model Llama-3.1-8B
--cluster A100-80GB --model google/gemma-4-31B-it --batch_size auto
--cluster 4xA100-40GB --model google/gemma-3-12b-it
--cluster L4 --model microsoft/phi-4 --lora_rank 16
--cluster T4 --model gpt2-medium
--cluster T4 --model gpt2-xl --max_length 1024
--cluster V100-16GB --model SmolLM2-360M --batch_size 32
--cluster H200 --model Qwen/Qwen2.5-7B --max_length 32768
--cluster 8xH200 --model Qwen/Qwen2.5-7B --max_length 32768
--cluster GB200 --model Qwen/Qwen3-8B --strategy dp
--cluster 4xL40S --model Qwen/Qwen3-1.7B --strategy fsdp --activation_checkpointing full
--cluster RTX-4090 --model my-model
--cluster RTX-4090 --model my-model --lora_rank 8 --tokens 2B --price 0.5
--cluster RTX-4090 --model no-such-model
--cluster 5090ti --model Qwen/Qwen3-4B
--cluster 3060 --model Qwen/Qwen3-4B --tokens lots
--cluster 'DGX Spark' --model Qwen/Qwen3-8B --lora_rank 16
--cluster 'dual 3090' --model 'kimi k2.5'
--cluster 'T4 x2' --max_length 1024
--cluster 3060 --model Qwen/Qwen3-4B --max_length 1000000
"""
# Answers in a folder like the page's: with the script and the pasted config, without torch
NATIVE = """
import json, pathlib, shutil, sys
root, questions, config = sys.argv[1:]
shutil.copy(f"{root}/real_model_example.py", ".")
pathlib.Path("my-model").mkdir()
pathlib.Path("my-model/config.json").write_text(config)
sys.path.append(root)
sys.modules |= dict.fromkeys(["torch", "transformers"])
from results.lab.planner_page.ask import ask
print(json.dumps([ask(*question) for question in json.loads(questions)]))
"""
IN_PAGE = """
new Promise(resolve => {
  const texts = [], worker = new Worker("worker.js", { type: "module" });
  worker.onmessage = ({ data }) => {
    if (data.ready) return;
    texts.push(data.text);
    if (texts.length === questions.length) resolve(texts);
  };
  questions.forEach((options, id) => worker.postMessage({ id, options, config }));
})
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    if tutorial.find_browser() is None or not BUILT.is_dir():
        pytest.skip("Chromium is not installed, or the page is not built: make page")
    tutorial.FLAGS.append(ONLY_THIS_HOST)  # the tutorial's own pages ask no host
    browser = tutorial.Browser(tmp_path_factory.mktemp("profile"))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=BUILT)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        browser.url = f"http://127.0.0.1:{server.server_port}/index.html"
        yield browser
        server.shutdown()
    browser.close()
    assert browser.errors == []


def visit(browser, url):
    browser.send("Page.navigate", url="about:blank")
    browser.send("Page.navigate", url=url)
    browser.wait("document.readyState === 'complete' && window.ask !== undefined")


def test_answers_are_those_of_the_planner(page, tmp_path):
    questions = list(map(shlex.split, QUESTIONS.splitlines()))
    command = [sys.executable, "-c", NATIVE, ROOT, json.dumps(questions), CONFIG]
    expected = json.loads(subprocess.check_output(command, cwd=tmp_path))
    visit(page, page.url)
    page.js(f"questions = {json.dumps(questions)}; config = {json.dumps(CONFIG)}")
    assert page.js(IN_PAGE) == expected


@pytest.mark.parametrize("width", [390, 1280])
def test_page_shows_the_table_and_then_the_planner(page, width):
    page.send(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=844,
        deviceScaleFactor=1,
        mobile=False,
    )
    visit(page, f"{page.url}#model=Qwen%2FQwen3-4B&gpu=RTX-3060")
    from_table = page.js(VERDICT)
    page.wait("document.documentElement.dataset.answered")
    assert page.js(VERDICT) == from_table
    assert page.js(
        "[document.querySelectorAll('svg').length, document.scrollingElement.scrollWidth]"
    ) == [2, width]


@pytest.mark.parametrize(
    ("question", "patterns"),
    [
        ("model=Qwen3-8B&gpu=DGX+Spark&method=--lora_rank+16",
         ["fit on a GB10", "A step of [0-9,]+ tokens"]),
        ("model=Qwen3-8B&gpu=dual+3090&method=--lora_rank+16",
         ["2 x RTX-3090", "sharded over the GPUs"]),
        ("model=&gpu=3060", ["LoRA adapters on a 4-bit base\n\n.*V2-Lite"]),
        ("model=Qwen3-8B&gpu=H200&max_length=1000000", ["Tokens per sample”.*40960"]),
        ("model=falcon+h1+34b&gpu=T4", ["choose my-model as the model, and paste this file"]),
    ],
)  # fmt: skip
def test_fields_take_any_name_and_answers_use_the_pages_words(page, question, patterns):
    visit(page, f"{page.url}#{question}")
    page.wait("document.documentElement.dataset.answered")
    text = page.js("document.querySelector('main').innerText")
    for pattern in patterns:
        assert re.search(pattern, text, re.DOTALL), text
    assert not re.search("--(?!lora|num|model|max|batch|strategy|local)|max_length=", text)
    home = page.js("document.querySelector('#home a').textContent")
    assert home == "trainplan"


@pytest.mark.parametrize(
    ("question", "patterns"),
    [
        ("model=Qwen3-8B&gpu=RTX-4090&method=--lora_rank+16&trainer=trl",
         ["does not fit with TRL: .* of 23.5 GiB", "1 sample of 2,048 tokens", "weights float32",
          "allocator, at most", "A step takes [0-9.]+ to ", "trl 1.16.0", "--lora_targets q_proj"]),
        ("model=Llama-3.2-1B&gpu=H100-80GB&trainer=axolotl&checkpointing=full",
         ["fits with axolotl", "4 samples of 2,048 tokens, gradient checkpointing on"]),
        ("model=Qwen3-14B&gpu=3060&method=--lora_rank+16+--base_dtype+nf4&trainer=unsloth",
         ["with Unsloth: ", "time of a step is not known", "By a formula"]),
        ("model=Qwen3-14B&gpu=RTX-4090&trainer=llamafactory",
         ["was not traced", "trainplan plan --for llamafactory .*--batch_size 1"]),
        ("model=&gpu=RTX-4090&trainer=trl", ["Choose the model that you train with TRL"]),
    ],
)  # fmt: skip
def test_page_says_what_another_trainer_needs(page, question, patterns):
    visit(page, f"{page.url}#{question}")
    if "model=&" not in question:
        page.wait("document.documentElement.dataset.answered")
    text = page.js("document.querySelector('main').innerText")
    for pattern in patterns:
        assert re.search(pattern, text), text


def test_steps_of_other_trainers_are_in_the_table(monkeypatch):
    from distributed_training.tools import plan_for
    from results.lab.planner_page import ask, trace

    monkeypatch.setattr(plan_for, "trace", plan_for.trace)  # which asking replaces
    missing = trace.find_steps().keys() ^ json.loads(ask.TRACED.read_text())["rows"].keys()
    assert not missing, "run: PYTHON -m results.lab.planner_page.trace"


def test_table_answers_from_a_folder(page):
    visit(page, (ROOT / "results/lab/planner_page/index.html").as_uri())
    text = page.js("document.querySelector('main').innerText")
    assert re.match("(?s)All weights of Qwen3-8B .*python -m http.server", text)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "google/gemma-2-2b"])
def test_shipped_sizes_are_measured(name):
    size = read_table()[name]["size"]
    measured = measure_size(size["config"]["document"])
    assert to_jsonable_python(measured) == size
