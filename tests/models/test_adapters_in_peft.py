"""Test that PEFT reads the adapters of all accepted types of models."""

import pytest
import torch

from distributed_training.models import find_model
from distributed_training.models.peft import Adapters, read_folder, save_adapters
from distributed_training.parallel.lora import apply_lora
from distributed_training.settings.config import Config
from tests.models.hub_folders import random_model
from tests.models.test_all_types import ACCEPTED_TYPES
from tests.models.theirs import adapted_logits, small_config
from tests.reference import call_reference
from tests.support import read_model

# Mixtures among the configs of types that have no experts by default
MIXTURES = {
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "flint": {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "gemma4_text": {"enable_moe_block": True, "top_k_experts": 2},
}
CASES = [*ACCEPTED_TYPES, *(f"{name}-mixture" for name in MIXTURES)]
pytestmark = [
    pytest.mark.usefixtures("run_if_changed"), pytest.mark.filterwarnings("ignore"),
]  # fmt: skip
IDS = torch.randint(2, 64, (2, 20), generator=torch.Generator().manual_seed(0))


_tried: set[str] = set()  # names of modules whose adapters PEFT has read


@pytest.mark.processes  # of references
@pytest.mark.parametrize("case", CASES)
def test_peft_reads_all_adapters(case, tmp_path):
    model_type, is_mixture, _ = case.partition("-mixture")
    config = small_config(model_type)
    if is_mixture:
        config = type(config)(**{**config.to_dict(), **MIXTURES[model_type]})
    base = tmp_path / "model"
    random_model(config).save_pretrained(base)
    spec = find_model(str(base))
    parts, stacks = spec.size.part_names(None), spec.size.stack_names()
    names = [kind.hf_matrices for kind in spec.size.kinds]
    described = str((spec.size.config["blocks"], names, stacks))
    if described in _tried:
        pytest.skip("its modules have the names of another type's")
    _tried.add(described)
    choices = {"default": None}
    if stacks:
        attention = [part for part in parts if "att" in part]
        choices |= {
            "attention": ",".join(attention or parts[:1]),
            "first-stack": f"{parts[0]},{stacks[0]}",
            "all": ",".join(parts + stacks),
        }
    every = Config(lora_rank=4, lora_alpha=8.0, lora_targets=",".join(parts + stacks))
    ours = read_model(spec, base).eval()
    apply_lora(ours, spec, every, torch.device("cpu"), {})
    adapters = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    drawn = {name: 0.1 * torch.randn_like(p) for name, p in adapters.items()}
    ids = IDS[:, : spec.size.num_positions]
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
            expected = ours(ids)
        saved = Adapters(
            spec=spec, tensors=tensors, config=chosen, base_fingerprint=None, origin=case
        )
        save_adapters(saved, tmp_path / name, str(base))
        found, lost = call_reference(adapted_logits, base, tmp_path / name, ids)
        assert not lost, name
        # Transformers sets the padding row of Youtu's embedding, which has id 1, to 0.
        assert (found - expected)[..., 2:].norm() <= 1e-5 * expected.norm(), name
    again = read_folder(spec, tmp_path / name).tensors
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[key], tensors[key]) for key in tensors)
