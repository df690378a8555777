"""Test LoRA adapters for models that use transformers' blocks: PEFT must load the adapters and
compute the same logits."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from distributed_training.checkpoint.trained import open_trained_folder
from distributed_training.models import HUB_PREFIX, find_model
from distributed_training.models.peft import Adapters, save_adapters
from distributed_training.parallel.lora import apply_lora
from distributed_training.settings.request import build_config
from tests.models.hub_folders import make_folder
from tests.support import fingerprint, read_model


@pytest.mark.parametrize("kind", ["gemma2", "gpt_neox", "opt"])
def test_peft_loads_the_exported_adapters(kind, tmp_path):
    folder = make_folder(kind, tmp_path / "base")
    spec = find_model(f"{HUB_PREFIX}{folder}")
    config = build_config({"lora_rank": 4, "lora_alpha": 8.0, "model": spec.path})
    model = read_model(spec, folder)
    apply_lora(model, spec, config, torch.device("cpu"), {})
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(learning) == 2 * spec.size.num_layers * len(spec.size.hf_matrices)
    with torch.no_grad():
        for name, parameter in learning.items():
            if name.endswith(".b"):
                parameter.normal_()
    state = {name: parameter.detach() for name, parameter in learning.items()}
    adapters = Adapters(
        spec=spec, tensors=state, config=config, origin="",
        base_fingerprint=str(fingerprint(spec, folder)),
    )  # fmt: skip
    save_adapters(adapters, tmp_path / "lora", str(folder))
    ids = torch.randint(spec.size.vocab_size, (2, 12))
    base = AutoModelForCausalLM.from_pretrained(folder)
    expected = PeftModel.from_pretrained(base, tmp_path / "lora").eval()(ids).logits
    logits = model(ids)
    assert (logits - expected).norm() <= 1e-5 * expected.norm()
    base_logits = read_model(spec, folder)(ids)
    trained = open_trained_folder(spec, tmp_path / "lora", folder)
    assert (trained.load(torch.device("cpu"))(ids) - expected).norm() <= 1e-4 * expected.norm()
    assert (base_logits - expected).norm() > 0.01 * expected.norm()
