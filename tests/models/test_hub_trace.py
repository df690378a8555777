"""Compare a block's traced costs with the formulas for native models, and test which strategies
reject traced models."""

import json

import pytest

from distributed_training.models import HUB_PREFIX, find_model
from distributed_training.planner.choose import choose_model
from distributed_training.predict.predict import parse_cluster
from distributed_training.settings.request import build_config
from tests.models.hub_folders import make_folder
from tests.planner.helpers import UNSPLIT, lay_out, plan_for
from tests.support import GPU_MACHINE, refused


def test_traced_costs_of_a_block_equal_the_native_formulas(tmp_path):
    spec = find_model("Qwen3-0.6B")
    (native,) = spec.size.kinds
    (tmp_path / "config.json").write_text(json.dumps(spec.code.to_config(spec.size, 0)))
    size = find_model(f"{HUB_PREFIX}{tmp_path}").size
    (traced,) = size.kinds
    for mode in ("compiled", "selective", "offload-attention"):
        expected = native.split_values(mode, 1024)
        # The softmax statistics are two values per head.
        assert traced.split_values(mode, 1024) == pytest.approx(expected, rel=0.01)
    kept = [traced.split_values(mode, 1024) for mode in ("compiled", "adapters")]
    norms = 2 * spec.size.hidden_size
    assert kept[0] - kept[1] == norms + native.matrices[-1][1]  # and the input of down_proj
    assert traced.attention_width == native.attention_width
    assert traced.fuses_attention
    assert traced.state_products == 0
    assert traced.split_values("eager", 1024) > 1.3 * native.split_values("eager", 1024)
    assert size.flops_per_token(512) == spec.size.flops_per_token(512)


def test_unfused_attention_saves_more_per_token_in_longer_samples(tmp_path):
    folder = make_folder("gemma2", tmp_path / "gemma2")
    size = find_model(f"{HUB_PREFIX}{folder}").size
    windowed, _ = size.kinds
    assert not windowed.fuses_attention
    short, long = (windowed.split_values("eager", length) for length in (64, 128))
    per_key = (long - short) / 64
    assert per_key >= 4 * 3  # heads x (at least scores, tanh and weights)
    assert windowed.attention_width == 4 * 8
    saved = [windowed.split_values("offload-attention", length) for length in (64, 128)]
    assert saved[0] == saved[1] == windowed.split_values("selective", 64) - 2 * 48  # gate and up

    model = f"{HUB_PREFIX}{folder}"
    for name in (*UNSPLIT, "pp", "hybrid", "tp", "cp"):
        assert lay_out(2, f"strategy={name}", f"model={model}", "max_length=64").stages
    with refused("tp=4", "key/value heads"):
        lay_out(4, "strategy=tp", f"model={model}", "max_length=64")
    find_model(model).check_weights(folder)


def test_attention_with_narrow_values_is_fused_as_on_gpus(tmp_path):
    size = find_model(f"{HUB_PREFIX}{make_folder('deepseek_v3', tmp_path)}").size
    assert all(kind.fuses_attention for kind in size.kinds)


def test_notes_say_which_blocks_have_adapters_and_what_linear_attention_needs(tmp_path):
    folder = make_folder("qwen3_5_text", tmp_path)
    config = {"model": str(folder), "lora_rank": 4, "lora_targets": "q_proj,v_proj"}
    notes: list[str] = []
    choose_model(build_config(config), parse_cluster("H200").machine, notes)
    assert any("1 of the model's 4 blocks" in note for note in notes)
    assert any("flash-linear-attention" in note for note in notes)


@pytest.mark.parametrize("kind", ["lfm2", "granitemoehybrid", "llama4_text"])
def test_unusual_blocks_are_predicted_in_each_mode(kind, tmp_path):
    """Some have no attention, and Llama 4's experts cannot have adapters."""
    config = {"model": f"{HUB_PREFIX}{make_folder(kind, tmp_path / kind)}", "weights": "random"}
    data = {"dataset": "embedded", "tokenizer": "embedded", "max_length": 64}
    for mode in ("selective", "offload-attention", "offload", "full"):
        values = {"activation_checkpointing": mode, "lora_rank": 4, **config, **data}
        assert plan_for(tmp_path, GPU_MACHINE, 1, **values).prediction["step_time_s"] > 0


def test_matrices_that_fused_kernels_read_get_no_adapters(tmp_path):
    size = find_model(f"{HUB_PREFIX}{make_folder('falcon_h1', tmp_path)}").size
    assert "mamba.in_proj" in size.part_names(None)
    assert "mamba.out_proj" not in size.part_names(None)
