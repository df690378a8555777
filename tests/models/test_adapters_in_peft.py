"""Test that PEFT reads the adapters of all accepted types of models, in a process that does not
import the suite (adapters_in_peft.py)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from distributed_training.models import HUB_PREFIX, find_model
from distributed_training.models.peft import Adapters, read_folder, save_adapters
from distributed_training.parallel.lora import apply_lora
from distributed_training.settings.config import Config
from tests.models.adapters_in_peft import IDS
from tests.models.hub_folders import randomize
from tests.models.test_all_types import ACCEPTED, RESULTS, small_config
from tests.support import read_model

# Mixtures among the configs of types that have no experts by default
MIXTURES = {
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "flint": {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "gemma4_text": {"enable_moe_block": True, "top_k_experts": 2},
}
ACCEPTED_TYPES = [
    name
    for name, result in json.loads(RESULTS.read_text())["types"].items()
    if result == ACCEPTED and name != "openai-gpt"  # which has no linear layers
]
CASES = [*ACCEPTED_TYPES, *(f"{name}-mixture" for name in MIXTURES)]


def save_case(case, folder):
    """Save a tiny model, and several choices of adapters with their logits."""
    model_type, is_mixture, _ = case.partition("-mixture")
    config = small_config(model_type)
    if is_mixture:
        config = type(config)(**{**config.to_dict(), **MIXTURES[model_type]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model)
    model.save_pretrained(folder / "model")
    spec = find_model(f"{HUB_PREFIX}{folder / 'model'}")
    parts, stacks = spec.size.part_names(None), spec.size.stack_names()
    choices = {"default": None}
    if stacks:
        attention = [part for part in parts if "att" in part]
        choices |= {
            "attention": ",".join(attention or parts[:1]),
            "first-stack": f"{parts[0]},{stacks[0]}",
            "all": ",".join(parts + stacks),
        }
    every = Config(lora_rank=4, lora_alpha=8.0, lora_targets=",".join(parts + stacks))
    ours = read_model(spec, folder / "model").eval()
    apply_lora(ours, spec, every, torch.device("cpu"), {})
    adapters = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    drawn = {name: 0.1 * torch.randn_like(p) for name, p in adapters.items()}
    for name, targets in choices.items():
        chosen = every.model_copy(update={"lora_targets": targets})
        tensors = {}
        for layer in range(spec.size.num_layers):
            for adapter in spec.size.kind_of(layer).adapter_shapes(4, targets):
                for key in (f"blocks.{layer}.{adapter}.a", f"blocks.{layer}.{adapter}.b"):
                    tensors[key] = drawn[key]
        with torch.no_grad():
            for key, parameter in adapters.items():
                parameter.copy_(tensors.get(key, torch.zeros(())))
            logits = ours(IDS[:, : spec.size.num_positions])
        saved = Adapters(
            spec=spec, tensors=tensors, config=chosen, base_fingerprint=None, origin=case
        )
        save_adapters(saved, folder / name, str(folder / "model"))
        torch.save(logits, folder / name / "logits.pt")
    again = read_folder(spec, folder / name).tensors
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[key], tensors[key]) for key in tensors), case


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Return the results of all selected cases, because each process takes seconds to start."""
    folder = tmp_path_factory.mktemp("adapters")
    for item in request.session.items:
        if item.path == request.path:
            case = item.callspec.params["case"]
            save_case(case, folder / case)
    program = [sys.executable, "-m", "tests.models.adapters_in_peft", folder]
    subprocess.run(program, cwd=Path(__file__).parents[2], check=True)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.processes
@pytest.mark.timeout(1800)  # the first test builds all models
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_peft_reads_all_adapters(case, results):
    for name, result in results[case].items():
        error, unexpected, missing = result
        assert (unexpected, missing) == ([], []), name
        assert error <= 1e-5, name
