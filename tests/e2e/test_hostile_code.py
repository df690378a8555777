"""Run every command on untrusted folders whose files refer to code, and check that none of this
code runs."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from distributed_training import cli
from tests.conftest import SMALL, assert_ok, heavy_pool, settings, train
from tests.e2e.support import run_folders
from tests.support import edit_json


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Return a run folder that contains hf/, best/ and a checkpoint."""
    output_dir = tmp_path_factory.mktemp("runs")
    values = {"strategy": "dp", "max_steps": 2, "keep_best": True, "output_dir": output_dir}
    assert_ok(train(values))
    (folder,) = run_folders(output_dir)
    return folder


@pytest.fixture(scope="module")
def hostile(run_dir, tmp_path_factory):
    """Return the paths of untrusted folders and files, keyed by name. If any of their code runs, it
    creates the file at the path "mark"."""
    root = tmp_path_factory.mktemp("hostile")
    mark = root / "code-ran"
    evil = root / "evil"
    evil.mkdir()
    code = f"open({str(mark)!r}, 'w').close()\nclass Engine: ...\n"
    for name in ("__init__.py", "engine.py"):
        (evil / name).write_text(code)

    def copied(name: str, source: Path) -> Path:
        return shutil.copytree(source, root / name, symlinks=True)

    made = {"mark": mark, "evil": evil}
    made["model"] = copied("model", run_dir / "hf")
    for name in ("__init__.py", "modeling_evil.py", "tokenization_evil.py"):
        (made["model"] / name).write_text(code)
    classes = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    edit_json(made["model"] / "config.json", auto_map=classes)
    tokens = {"AutoTokenizer": ["tokenization_evil.Tokenizer", "tokenization_evil.Tokenizer"]}
    edit_json(made["model"] / "tokenizer_config.json", auto_map=tokens, tokenizer_class="Evil")

    made["adapter"] = root / "adapter"
    made["adapter"].mkdir()
    document = {"peft_type": "LORA", "r": 1, "lora_alpha": 1.0}
    base = {"base_model_name_or_path": str(evil), "auto_mapping": {"base_model_class": "Engine"}}
    (made["adapter"] / "adapter_config.json").write_text(json.dumps(document | base))
    save_file({}, made["adapter"] / "adapter_model.safetensors")

    made["named_in_plan"] = copied("named-in-plan", run_dir)
    made["named_in_record"] = copied("named-in-record", run_dir)
    for place in ("config", "requested"):
        edit_json(made["named_in_plan"] / "plan.json", **{f"{place}__model": str(evil)})
    edit_json(made["named_in_plan"] / "plan.json", model__family=str(evil))
    traits = {
        "strategy__traits__build": f"{evil}/engine.py:Engine",
        "strategy__engine": "engine.py",
    }
    edit_json(made["named_in_plan"] / "plan.json", **traits)
    record = {"config__model": str(evil), "config__weights": "pretrained"}
    edit_json(made["named_in_record"] / "record.json", **record)
    made["engine_in_plan"] = copied("engine-in-plan", run_dir)
    edit_json(made["engine_in_plan"] / "plan.json", **traits)

    made["preset"] = root / "preset.json"
    made["preset"].write_text(json.dumps({"model": str(evil)}))
    made["runs"] = root / "runs.json"
    two = [{"strategy": "dp", "model": str(evil)}, {"strategy": "fsdp", "model": str(evil)}]
    made["runs"].write_text(json.dumps({"num_gpus": 1, "runs": two}))
    return made


# Command -> [(arguments, whether the error names the code that was not run), ...]
WALK = {
    "train": [
        ("--model {model} --weights {model} --tokenizer {model}", False),
        ("--resume {named_in_plan}", True),
        ("--resume {engine_in_plan} --max_steps 3", False),
        ("--resume {named_in_record} --max_steps 3", False),
        ("--preset {preset}", True),
        ("--dataset {evil}", False),
        ("--model {adapter}", False),
    ],
    "plan": [("--model {model}", False), ("--preset {preset}", True)],
    "data": [("--model {model} --tokenizer {model}", False), ("--preset {preset}", True)],
    "compare": [("{runs}", True), ("--strategies dp --preset {preset}", True)],
    "parity": [("--strategies dp --preset {preset}", True)],
    "report": [("{named_in_plan} {named_in_record}", False)],
    "generate": [
        ("{adapter} --prompt a", True),
        ("{named_in_plan} --prompt a", True),
        ("{named_in_record} --prompt a --num_tokens 2", False),
        ("{engine_in_plan} --prompt a --num_tokens 2", False),
        ("{model} --prompt a --num_tokens 2", False),
        ("{evil} --prompt a", False),
    ],
    "eval": [
        ("{adapter} --dataset embedded", True),
        ("{named_in_plan} --dataset embedded", True),
    ],
    "export": [
        ("{named_in_plan} --to {to}", True),
        ("{named_in_record} --to {to}-2", False),
        ("{engine_in_plan}/checkpoints/step-00000002 --to {to}-3", False),
    ],
    "doctor": [],  # none of these commands reads such files
}  # fmt: skip


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_code_named_in_files_is_not_executed(command, hostile, tmp_path):
    paths = {"to": tmp_path / "to", **hostile}
    for name in ("named_in_plan", "named_in_record", "engine_in_plan"):  # resuming changes the plan
        paths[name] = shutil.copytree(hostile[name], tmp_path / name)
    for words, is_named in WALK[command]:
        argv = [command, *words.format_map(paths).split()]
        if command in ("train", "plan", "data", "compare", "parity"):
            values = {**SMALL, "max_steps": 2, "output_dir": tmp_path / "runs"}
            del values["model"]
            argv[1:1] = settings(values)
        result = heavy_pool().script(argv, HF_TOKEN="none")
        said = f"{command} {words}\n{result.stdout[-1500:]}\n{result.stderr[-1500:]}"
        assert not hostile["mark"].exists(), said
        assert "Traceback" not in said
        output = result.stdout + result.stderr
        assert (str(hostile["evil"]) in output) or not is_named, said
