"""Test that profiles are loaded, rejected and measured correctly. Also test the GPT-2 layers that
are measured."""

import json
from pathlib import Path

import pipedream_planner
import pytest
import torch
from pipedream.errors import UserError
from pipedream.plan.profile import load_profile
from pipedream.train.models import GPT2_SIZES, Block, GPT2Size, gpt2_layers
from torch import nn

SHIPPED = Path(__file__).resolve().parent.parent / "profiles" / "gpt2_cpu.json"
TINY = GPT2Size(num_layers=2, hidden=24, heads=3, vocabulary=50, seq_len=16)


def test_shipped_profile_has_the_layers_of_gpt2():
    profile = load_profile(SHIPPED)
    assert (profile.model, profile.batch, profile.sequence) == ("gpt2", 1, 256)
    assert profile.dtype == "float32"
    with torch.device("meta"):
        names = list(gpt2_layers(GPT2_SIZES["gpt2"]))
    assert [layer.name for layer in profile.layers] == names
    weights = sum(layer.weight_bytes for layer in profile.layers)
    # GPT-2's parameters (Radford et al.: 124M), plus the output projection, whose weights are not
    # tied here
    assert weights == 4 * (124_439_808 + 50257 * 768)
    assert {layer.activation_bytes for layer in profile.layers[:-1]} == {4 * 256 * 768}
    blocks = profile.layers[1:-1]
    assert len({layer.forward_s for layer in blocks}) > 1, "each block must be measured separately"
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in profile.layers)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda v: v.pop("dtype"), "profile.json lacks dtype; it needs model, "),
        (lambda v: v.update(modle="x"), "unknown key 'modle'; did you mean 'model'"),
        (lambda v: v.update(batch=0), "batch=0 is not accepted; give a whole number"),
        (lambda v: v.update(layers=[]), "has no list of layers"),
        (
            lambda v: v["layers"][2].update(forward_s=-0.5),
            r"layers\[2\]: forward_s=-0.5 is not accepted; give a number from",
        ),
        (lambda v: v["layers"][0].update(backward_s=float("nan")), "backward_s=nan"),
        ('{"model": "gpt2",\n  "batch" 1}', "profile.json: .*line 2 column 11"),
        ("[1, 2]", "has no list of layers"),
        ("[" * 100_000, "profile.json"),
    ],
)
def test_a_wrong_profile_is_refused_with_file_and_key(tmp_path, change, text):
    path = tmp_path / "profile.json"
    values = json.loads(SHIPPED.read_text())
    if isinstance(change, str):
        path.write_text(change)
    else:
        change(values)
        path.write_text(json.dumps(values))
    with pytest.raises(UserError, match=text) as caught:
        load_profile(path)
    assert "profile.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_script_measures_and_saves_a_model(tmp_path, monkeypatch):
    monkeypatch.setitem(GPT2_SIZES, "tiny", TINY)
    threads = torch.get_num_threads()
    path = tmp_path / "tiny.json"
    wanted = {"profile": "tiny", "save_profile": str(path), "sequence": 7, "batch": 2}
    try:
        profile = pipedream_planner.get_profile({**pipedream_planner.CONFIG, **wanted})
    finally:
        torch.set_num_threads(threads)
    assert load_profile(path) == profile
    assert (profile.model, profile.sequence, profile.torch) == ("tiny", 7, torch.__version__)
    assert [layer.activation_bytes for layer in profile.layers] == [4 * 2 * 7 * 24] * 3 + [4]


def test_block_equals_torchs_pre_norm_encoder_layer_with_a_causal_mask():
    torch.manual_seed(0)
    block = Block(TINY).double()
    reference = nn.TransformerEncoderLayer(
        TINY.hidden, TINY.heads, 4 * TINY.hidden, dropout=0.0, batch_first=True, norm_first=True,
        activation=nn.GELU(approximate="tanh"), dtype=torch.float64,
    )  # fmt: skip
    pairs = [
        (reference.self_attn.in_proj_weight, block.query_key_value.weight),
        (reference.self_attn.in_proj_bias, block.query_key_value.bias),
        (reference.self_attn.out_proj.weight, block.attention_out.weight),
        (reference.self_attn.out_proj.bias, block.attention_out.bias),
        (reference.linear1.weight, block.mlp_in.weight),
        (reference.linear1.bias, block.mlp_in.bias),
        (reference.linear2.weight, block.mlp_out.weight),
        (reference.linear2.bias, block.mlp_out.bias),
    ]
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source)
    x = torch.randn(2, 9, TINY.hidden, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    expected = reference(x, src_mask=mask, is_causal=True)
    assert torch.allclose(block(x), expected, rtol=0, atol=1e-12)
