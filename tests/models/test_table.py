"""Test that published models are found by any spelling of their names, from models/table.json."""

import json
import re
from dataclasses import replace

import pytest

from distributed_training import models
from distributed_training.models import find_model
from distributed_training.models.hub import UnsupportedError, measure_size
from distributed_training.models.table import TABLE, read_table
from distributed_training.planner.answer import answer
from distributed_training.planner.data import find_sources
from distributed_training.predict.predict import parse_cluster
from tests.planner.helpers import merged
from tests.support import refused

SPELLINGS = """\
llama 3.1 8b = meta-llama/Llama-3.1-8B
Llama-3.1-70B = meta-llama/Llama-3.1-70B
meta-llama/Llama-3.1-70B = meta-llama/Llama-3.1-70B
llama-3.3-70b = meta-llama/Llama-3.3-70B-Instruct
Llama 3 8B = meta-llama/Meta-Llama-3-8B
llama3-70b = meta-llama/Meta-Llama-3-70B
llama3.2:1b = meta-llama/Llama-3.2-1B
Llama-2-7B = meta-llama/Llama-2-7b-hf
meta-llama/Llama-2-13B = meta-llama/Llama-2-13b-hf
llama2 70b chat = meta-llama/Llama-2-70b-chat-hf
llama 70b = meta-llama/Llama-3.1-70B
tinyllama = TinyLlama/TinyLlama-1.1B-Chat-v1.0
codellama 34b = codellama/CodeLlama-34b-hf
qwen3-32b = Qwen/Qwen3-32B
Qwen3 32B = Qwen/Qwen3-32B
QWEN_3_32B = Qwen/Qwen3-32B
qwen/qwen3-14b = Qwen/Qwen3-14B
Qwen3 30B A3B = Qwen/Qwen3-30B-A3B
qwen3 30b = Qwen/Qwen3-30B-A3B
qwen 7b = Qwen/Qwen2.5-7B
Qwen2.5 72B Instruct = Qwen/Qwen2.5-72B-Instruct
qwen2.5-coder-7b = Qwen/Qwen2.5-Coder-7B
qwq 32b = Qwen/QwQ-32B
qwen3.5 27b = Qwen/Qwen3.5-27B
R1-Distill-Qwen-7B = deepseek-ai/DeepSeek-R1-Distill-Qwen-7B
deepseek r1 distill llama 70b = deepseek-ai/DeepSeek-R1-Distill-Llama-70B
DeepSeek-V2-Lite = deepseek-ai/DeepSeek-V2-Lite
mistral 7b = mistralai/Mistral-7B-v0.3
Mistral-7B-v0.1 = mistralai/Mistral-7B-v0.1
mistral small 24b = mistralai/Mistral-Small-24B-Base-2501
Mistral-Nemo = mistralai/Mistral-Nemo-Base-2407
mixtral 8x7b = mistralai/Mixtral-8x7B-v0.1
OLMoE-1B-7B = allenai/OLMoE-1B-7B-0924
gemma 2 9b = google/gemma-2-9b
gemma-3-27b = google/gemma-3-27b-it
gemma3 1b = google/gemma-3-1b-it
gemma 4 e4b = google/gemma-4-E4B-it
gemma4 26b = google/gemma-4-26B-A4B-it
gpt-oss-20b = openai/gpt-oss-20b
GPT OSS 120B = openai/gpt-oss-120b
phi-4 = microsoft/phi-4
phi4 mini = microsoft/Phi-4-mini-instruct
Phi 3.5 mini = microsoft/Phi-3.5-mini-instruct
granite 3.1 2b = ibm-granite/granite-3.1-2b-base
olmo 2 7b = allenai/OLMo-2-1124-7B
smollm2 1.7b = HuggingFaceTB/SmolLM2-1.7B
SmolLM3 = HuggingFaceTB/SmolLM3-3B
falcon3 10b = tiiuae/Falcon3-10B-Base
yi 34b = 01-ai/Yi-34B
glm 4 9b chat = zai-org/glm-4-9b-chat-hf
kimi k2.5 = moonshotai/Kimi-K2.5
minimax m2.7 = MiniMaxAI/MiniMax-M2.7
Nemotron 3 Nano = nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16
Command-R = CohereForAI/c4ai-command-r-v01
glm-4-9b-0414 = zai-org/GLM-4-9B-0414
falcon 40b instruct = tiiuae/falcon-40b-instruct
phi-2 = microsoft/phi-2
qwen2.5 math 7b = Qwen/Qwen2.5-Math-7B
unsloth/Qwen3-8B = unsloth/Qwen3-8B
pythia 70m = EleutherAI/pythia-70m
phi-1.5 = microsoft/phi-1_5
mistral nemo 12b = mistralai/Mistral-Nemo-Base-2407
phi4-mini 3.8b = microsoft/Phi-4-mini-instruct
GLM 4.5 355b = zai-org/GLM-4.5
opt 1.3b = facebook/opt-1.3b
opt 13b = facebook/opt-13b
bloom 7b1 = bigscience/bloom-7b1
stablelm 2 1.6b = stabilityai/stablelm-2-zephyr-1_6b
exaone 4 32b = LGAI-EXAONE/EXAONE-4.0-32B
deepseek v2 = deepseek-ai/DeepSeek-V2
Granite 3.3 8B = ibm-granite/granite-3.3-8b-instruct
olmo 2 1b = allenai/OLMo-2-0425-1B
granite 4.0 tiny = ibm-granite/granite-4.0-h-tiny
command r7b = CohereLabs/c4ai-command-r7b-12-2024
exaone 3.5 32b = LGAI-EXAONE/EXAONE-3.5-32B-Instruct
mistral small 3.2 = mistralai/Mistral-Small-3.2-24B-Instruct-2506
glm 4.6 = zai-org/GLM-4.6
qwen3.8 27b = Qwen/Qwen3.8-27B
gpt2 medium = openai-community/gpt2-medium
"""


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    def fetch(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(models, "fetch_folder", fetch)
    models._fetch_config.cache_clear()


@pytest.mark.parametrize("line", SPELLINGS.splitlines())
def test_models_are_found_by_any_spelling(line):
    spelling, hub_id = line.split(" = ")
    assert find_model(spelling).hub_id == hub_id


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama 3.1", ("Llama-3.1-8B", "Llama-3.1-405B")),
        ("Qwen3-40B", ("config.json of model='Qwen3-40B' is needed", "35B-A3B", "hf download")),
        ("Qwen3.5-9B-Math", ("Did you mean Qwen/Qwen3.5-9B-Base or Qwen/Qwen3.5-9B?",)),
        ("deepseek-ai/DeepSeek-R1-Zero", ("no network", "Did you mean deepseek-ai/DeepSeek-R1 or")),
        ("Command R+", ("config.json of model='Command R+' is needed", "c4ai-command-r-v01")),
        ("cogito v2 70b", ("is needed. To get this file",)),  # "v" names no family
        ("Qwen2.5-VL-3B", ("Qwen/Qwen2.5-3B?",)),
        ("qwem3 32b", ("Qwen/Qwen3-32B",)),
        ("mistrall 7b", ("Did you mean mistralai/Mistral-7B-v0.1 or mistralai/Mistral-7B-v0.3?",)),
        ("llama 3.1 8b q4", ("meta-llama/Llama-3.1-8B?", "set base_dtype to nf4")),
        ("janus pro 7b", ("is needed. To get this file",)),
        ("mini 8b", ("is needed. To get this file",)),
        ("deepseek v3.2", ("model_type 'deepseek_v32' has sparse attention", "Use a decoder")),
        ("google/flan-t5-xl", ("model_type 't5' is an encoder-decoder",)),
        ("qwen3-vl 8b", ("model_type 'qwen3_vl' is not a decoder that transformers supports",)),
        ("nobody/nothing", ("no network", "hf download nobody/nothing config.json")),
        ("gpt2-mediun", ("gpt2-medium",)),
        ("?", ("config.json",)),
    ],
)
def test_other_names_are_refused(name, words):
    with refused(*words):
        find_model(name)


def test_entries_name_their_sources_and_no_name_occurs_twice():
    table = json.loads(TABLE.read_text())
    names = [name for key, entry in table.items() for name in (key, *entry["also"])]
    assert len(names) == len(set(names)) == len(read_table()) + len(read_table(refused=True))
    for name, entry in table.items():
        assert {*entry} - {"also", "source"} in (
            {"parameters", "size"}, {"parameters", "config"}, {"refused", "config"}
        )  # fmt: skip
        assert entry["source"], name
        for repository, file, commit in (*entry["source"], *entry["also"].values()):
            assert re.fullmatch(r"[\w.-]+/[\w.-]+ [\w./-]+ ([0-9a-f]{40}|v5.24.0)",
                                f"{repository} {file} {commit}"), name  # fmt: skip


def test_sizes_in_names_are_those_of_the_shapes():
    """A name may round, and leave out embeddings."""
    for name, entry in read_table().items():
        assert find_model(name).size.num_parameters == entry["parameters"]
        # Not 17B-16E and 1B-7B, which count active parameters
        for billions in re.findall(r"-([\d.]+)b(?![a-z\d]|-\d+[be])", name.lower()):
            assert 0.9 < entry["parameters"] / 1e9 / float(billions) < 1.7, name


@pytest.mark.parametrize(
    "name", ["deepseek-ai/DeepSeek-V4-Pro", "zai-org/GLM-5", "openai/whisper-tiny"]
)
def test_refusals_are_those_of_training(name):
    entry = read_table(refused=True)[name]
    with pytest.raises(UnsupportedError, match=re.escape(entry["refused"])):
        measure_size(entry["config"])


def test_a_model_that_is_trained_reads_its_own_config(tmp_path, monkeypatch):
    """The table has the shape of a sibling, whose context may be longer."""
    config = read_table()["Qwen/Qwen2.5-7B"]["config"] | {"max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    request = merged({"model": "Qwen2.5-7B-Instruct", "weights": "random", "tokenizer": "gpt2"})
    draft = answer(request, parse_cluster("8xH200")).first.plan
    with refused("Qwen/Qwen2.5-7B-Instruct", "no network"):
        find_sources(draft, [])
    monkeypatch.setattr(models, "fetch_folder", lambda *_, **__: tmp_path)
    models._fetch_config.cache_clear()
    with refused("max_length=512", "256"):
        find_sources(draft, [])
    assert replace(draft.model, has_own_config=True) != draft.model


def test_plans_say_which_model_they_are_for(tmp_path):
    found = answer(merged({"model": "qwen3 8b"}), parse_cluster("H200"))
    assert "Qwen3-8B" in found.verdict
    assert "Qwen/Qwen3-8B" in "".join(found.notes)
    assert "gpt2-medium" in "".join(answer(merged({}), parse_cluster("H200")).notes)
    with refused("no model was named", "1024"):
        answer(merged({"max_length": 2048}), parse_cluster("H200"))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(read_table()["Qwen/Qwen3-0.6B"]["config"]))
    request = merged({"model": str(file)}, "max_length=32k")
    assert request.max_length == 32768
    plan = answer(request, parse_cluster("H200")).first.plan
    assert plan.size == find_model("Qwen3-0.6B").size
