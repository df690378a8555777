"""Try every type of decoder in transformers with a tiny config: it is refused in one line, or its
loss, gradients and files equal those of transformers.

    python -m tests.models.test_all_types    writes the results to results/model-types.json
"""

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from distributed_training.models import HUB_PREFIX, find_model
from distributed_training.settings.errors import UserError
from tests.models.hub_folders import randomize
from tests.support import read_model, save_model

RESULTS = Path(__file__).parents[2] / "results" / "model-types.json"
TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
ACCEPTED = "accepted"
UNTRIED = "not tried"
# Values of a config's keys, for those keys that a type has
_SMALL = {
    "vocab_size": 67, "hidden_size": 32, "n_embd": 32, "d_model": 32, "intermediate_size": 48,
    "ffn_dim": 48, "n_inner": 48, "decoder_ffn_dim": 48, "num_hidden_layers": 2, "n_layer": 2,
    "n_layers": 2, "num_layers": 2, "decoder_layers": 2, "num_attention_heads": 4, "n_head": 4,
    "n_heads": 4, "attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 96, "n_positions": 96, "max_seq_len": 96,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0, "sliding_window": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 4, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "rotary_dim": 4, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16,
    "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2,
    "state_size": 16, "shared_intermediate_size": 48, "word_embed_proj_dim": 32,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 67, "global_head_dim": 16,
    "num_kv_shared_layers": 0, "attention_chunk_size": 16, "intermediate_size_mlp": 48,
    "ffn_hidden_size": 48, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 8,
}  # fmt: skip
_MAX_PARAMETERS = 20_000_000


def small_config(model_type: str) -> Any:
    """Return a tiny config with one block of each kind, twice if there are two kinds."""
    config_class = CONFIG_MAPPING[model_type]
    defaults = config_class().to_dict()
    keys = defaults.keys() | config_class.attribute_map.keys()
    values = {key: value for key, value in _SMALL.items() if key in keys}
    if "qk_rope_head_dim" in keys:  # the size of heads follows from it
        values.pop("head_dim", None)
        values["num_key_value_heads"] = 4
    kinds = list(dict.fromkeys(defaults.get("layer_types") or []))
    if kinds:
        values["num_hidden_layers"] = max(2, len(kinds))
        values["layer_types"] = (2 * kinds)[: values["num_hidden_layers"]]
    return config_class(**values)


def try_type(model_type: str, folder: Path) -> str:
    """Return ACCEPTED, the reason for which a type is refused, or why transformers itself does not
    run it with tiny values. Raises AssertionError if an accepted type is not exact."""
    try:
        config = small_config(model_type)
        with torch.device("meta"):
            parameters = AutoModelForCausalLM.from_config(config).parameters()
        if sum(parameter.numel() for parameter in parameters) > _MAX_PARAMETERS:
            return f"{UNTRIED}: the config has no keys that make it small"
        torch.manual_seed(0)
        reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        randomize(reference)
        ids = torch.randint(2, 64, (2, 21))
        inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        reference(input_ids=inputs, use_cache=False)
        reference.save_pretrained(folder)
    except Exception as error:  # transformers may raise any exception
        return f"{UNTRIED}: {type(error).__name__}"
    try:
        spec = find_model(f"{HUB_PREFIX}{folder}")
    except UserError as error:
        return str(error).partition("config.json")[2].lstrip(":. ").partition(". ")[0]
    length = min(20, spec.size.num_positions)
    logits = reference(input_ids=inputs[:, :length], use_cache=False).logits
    inputs, targets = inputs[:, :length], targets[:, :length]
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    ours = read_model(spec, folder).eval()
    our_loss = ours(inputs, targets)
    our_loss.backward()
    assert abs(our_loss - loss) <= 1e-6 * loss, model_type
    theirs = dict(reference.named_parameters())
    for name, parameter in ours.named_parameters():
        (their_name,) = spec.code.to_hf(name, parameter, spec.size)
        expected = theirs.pop(their_name).grad
        if expected is None:
            assert parameter.grad is None or not parameter.grad.any()
        else:
            assert (parameter.grad - expected).norm() <= 1e-4 * expected.norm() + 1e-7, name
    save_model(spec, ours.state_dict(), folder / "again")
    before, after = (load_file(path / "model.safetensors") for path in (folder, folder / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(values, after[name]) for name, values in before.items())
    return ACCEPTED


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.filterwarnings("ignore")
def test_a_type_is_exact_or_refused(model_type, tmp_path):
    result = try_type(model_type, tmp_path)
    recorded = json.loads(RESULTS.read_text())
    assert len(result.splitlines()) == 1
    if recorded["transformers"] == transformers.__version__:
        assert result == recorded["types"][model_type]


def main() -> None:
    results = {}
    warnings.simplefilter("ignore")
    for model_type in TYPES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                results[model_type] = try_type(model_type, Path(folder))
            except AssertionError as error:
                results[model_type] = f"WRONG {error}"
        print(model_type, results[model_type], flush=True)
    document = {"transformers": transformers.__version__, "types": results}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
