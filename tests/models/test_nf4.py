"""Test frozen NF4 matrices: their values, their size, and the results of a model that uses
them."""

import pytest
import torch
from transformers import JambaConfig

from distributed_training.models import find_model, nf4
from distributed_training.models.initial_weights import InitialWeights
from distributed_training.models.quantized import dequantized_source, quantize_matrices
from tests.models.hub_folders import random_model
from tests.support import assert_near, draw_model

CPU = torch.device("cpu")
SPEC = find_model("gpt2-tiny")
# The 16 NF4 levels (QLoRA, appendix E). Numbers are rounded to the nearest level.
LEVELS = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
])  # fmt: skip


def draw(*shape, seed=0):
    return 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def nearest(values):
    """Quantize and dequantize values in blocks of 64, as in the QLoRA paper."""
    blocks = values.float().view(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    return (LEVELS[(blocks / scales).unsqueeze(-1).sub(LEVELS).abs().argmin(-1)] * scales).view(
        values.shape
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "bytes_per_row"), [(64, 32 + 8), (320, 160 + 12)])
def test_values_match_the_paper_except_for_rounded_scales(columns, bytes_per_row, dtype):
    values = draw(96, columns).to(dtype)
    values[7] = 0
    codes, scales = nf4.quantize_matrix(values)
    assert codes.dtype is scales.dtype is dtype, "FSDP casts other dtypes"
    assert len(codes) == len(scales) == 96, "FSDP shards rows"
    assert codes.nbytes + scales.nbytes == 96 * bytes_per_row
    dequantized = nf4.dequantize_matrix(codes, scales)
    assert not dequantized[7].any()
    exact = nearest(values).nan_to_num().to(dtype)
    torch.testing.assert_close(dequantized, exact, rtol=0.015, atol=0)
    # Each block contains its scale, so the rounding of its root can be seen.
    exact_roots, roots = (
        each.float().view(96, -1, 64).abs().amax(-1).sqrt() for each in (exact, dequantized)
    )
    half_step = exact_roots.amax(1, keepdim=True) / 255 / 2
    rounding = 2**-9 * exact_roots if dtype is torch.bfloat16 else 1e-6
    assert ((roots - exact_roots).abs() <= half_step + rounding).all()


def build_model():
    model = draw_model(SPEC, seed=1).requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(draw(len(parameter)))
    return model


def quantized_model():
    values = build_model().state_dict()
    model = SPEC.build_meta_model()
    source = quantize_matrices(model, lambda name, slices: values[name][slices], CPU, "nf4")
    InitialWeights(source=source).fill(model, CPU)
    return model.requires_grad_(False)


def test_a_model_with_nf4_codes_equals_a_model_with_dequantized_weights():
    """A model with NF4 codes has the same outputs and gradients as a model with the dequantized
    values. `generate` and `export --merge` must use exactly these values."""
    model = quantized_model()
    rounded = build_model()
    source = dequantized_source(
        lambda name, slices: values[name][slices], rounded.size, "nf4", torch.float32
    )
    values = {name: weight.clone() for name, weight in rounded.state_dict().items()}
    rounded.load_state_dict({name: source(name, ()) for name in values})
    ids = torch.arange(16).view(2, 8)
    results = []
    for each in (model, rounded):
        x = y = each.embed(ids).detach().requires_grad_()
        for block in each.blocks.values():
            y = block(y)
        y.square().sum().backward()
        results.append((y.detach(), x.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_matrices_whose_weights_other_code_reads_are_not_quantized(tmp_path):
    """Jamba adds the bias of dt_proj by itself. The planner does not count these matrices."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "mamba_expand": 1, "num_experts": 1}
    shape = {**sizes, "vocab_size": 67, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
    random_model(JambaConfig(**shape, pad_token_id=0, mamba_dt_rank=8)).save_pretrained(tmp_path)
    spec = find_model(str(tmp_path))
    original = spec.weights_source(tmp_path)
    logits = []
    for is_quantized in (True, False):
        model = spec.build_meta_model()
        source = dequantized_source(original, spec.size, "nf4", torch.float32)
        if is_quantized:
            source = quantize_matrices(model, original, CPU, "nf4")
        InitialWeights(source=source).fill(model, CPU)
        logits.append(model(torch.arange(16)[None]))
    assert_near(*logits)
    name = "mamba.dt_proj"
    assert torch.equal(
        model.blocks["0"].get_submodule(name).weight, original(f"blocks.0.{name}.weight", ())
    )
    assert (64, 8) in spec.size.kinds[0].matrices
    assert (64, 8) not in spec.size.kinds[0].quantized_shapes


@pytest.mark.parametrize("backend", [None, "aot_eager_decomp_partition"])
def test_backward_pass_saves_codes_instead_of_matrices(backend):
    """Test compiled code as well, because torch.compile may save dequantized matrices for the
    backward pass."""
    linear = quantized_model().blocks["0"].mlp_in
    function = linear if backend is None else torch.compile(linear, backend=backend, dynamic=False)
    x = draw(3, linear.in_features).requires_grad_()
    saved_tensors = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved_tensors.append(t) or t, lambda t: t
    ):
        y = function(x)
    y.sum().backward()
    assert sum(tensor.nbytes for tensor in saved_tensors) < linear.out_features * linear.in_features
