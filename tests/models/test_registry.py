"""Test that models are found by name and by the path to a Hugging Face folder."""

import json
from collections import Counter
from pathlib import Path

from distributed_training.models import find_model, folder_label
from tests.planner.helpers import plan_for
from tests.support import CPU_MACHINE, draw_model, refused, save_tiny


def planned(model, tmp_path, **others):
    values = {"strategy": "dp", "tokenizer": "embedded", "dataset": "embedded", **others}
    return plan_for(tmp_path, CPU_MACHINE, 1, model=str(model), **values)


def test_plans_with_model_folders(tmp_path):
    """Make plans with two model folders. One folder has weights. The other has no weights, and its
    config describes a size that no built-in model has."""
    folder = tmp_path / "four"
    folder.mkdir()
    config = {"model_type": "gpt2", "n_layer": 4, "n_head": 2, "n_embd": 16, "vocab_size": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    with refused(str(folder), "weights"):
        planned(folder, tmp_path)
    plan = planned(folder, tmp_path, weights="random")
    spec = plan.model
    assert (spec.label, spec.family, spec.weights_dir) == ("four", "gpt2", folder)
    assert (plan.size.num_layers, plan.size.num_heads, plan.size.num_positions) == (4, 2, 1024)
    assert "-dp-four-x1" in plan.run_dir.name
    assert plan.config.weights == "random"
    save_tiny(tmp_path / "hf")
    assert planned(tmp_path / "hf", tmp_path).weights_dir == tmp_path / "hf"
    assert planned(tmp_path / "hf", tmp_path, weights="random").weights_dir is None


def test_properties_of_sizes_match_the_modules():
    """The planner uses the properties of a model size, and parallel/ shards the parameters that it
    names. Both must match the parameters of the built model."""
    spec = find_model("gpt2-tiny")
    size, model = spec.size, draw_model(spec, seed=0)
    counts = Counter()
    (kind,) = size.kinds
    for name, values in model.named_parameters():
        part = name.split(".", 2)[-1] if name.startswith("blocks.") else name.partition("_")[0]
        counts["split" if part in kind.cuts else part] += values.numel()
    count, width = size.num_layers, size.hidden_size
    rows = size.padded_vocab_size * width
    assert counts.pop("split") == count * kind.split_parameters
    assert counts.pop("attention_out.bias") == counts.pop("mlp_out.bias") == count * width
    assert counts.pop("position") == size.position_parameters
    assert counts.pop("token") + counts.pop("output", 0) == rows * (1 if size.tied else 2)
    assert counts.pop("norm") == size.final_norm_parameters
    assert counts.total() == count * kind.norm_parameters
    assert len(list(model.blocks.parameters())) == count * kind.tensors
    assert model.vocabulary_parameters() == ["token_embedding.weight"]


def test_exported_folders_are_labeled_with_the_model_of_their_run():
    label = {
        "weights/qwen": "qwen",
        "runs/20261125-032748-dp-gpt2-tiny-x2/hf": "gpt2-tiny-hf",
        "runs/20261125-032748-local_sgd-Qwen3-0.6B-x16-3/best": "Qwen3-0.6B-best",
        "made/mine/hf": "mine-hf",
    }
    assert {name: folder_label(Path(name)) for name in label} == label
