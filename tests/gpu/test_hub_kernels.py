"""Test on a real GPU that the kernels for models from the Hub compute what transformers does."""

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from distributed_training.models import nf4
from distributed_training.models.attention import describe_documents
from distributed_training.models.hub.attention import attention
from distributed_training.models.hub.experts import experts
from distributed_training.models.hub.packing import separate_states
from tests.models.test_experts import HIDDEN, GptOssAttention, compute_separately, make_layer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
LENGTHS = (70, 5, 181)
LENGTH = sum(LENGTHS)


def packed_documents(head_sizes, dropout=0.0):
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].cuda()
    ends = torch.tensor(LENGTHS).cumsum(0)[None].cuda()
    return describe_documents(
        positions, ends, dtype=torch.bfloat16, head_sizes=head_sizes, dropout=dropout
    )


@pytest.mark.parametrize("head_size", [64, 256, 512])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_windows_equal_the_mask(head_size, is_packed, has_sinks):
    torch.manual_seed(0)
    sinks = torch.randn(8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    module = GptOssAttention(is_causal=True, num_key_value_groups=4, sinks=sinks, training=True)
    shapes = [(1, heads, LENGTH, head_size) for heads in (8, 2, 2)]
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    found = []
    for dropout in (0.0, 1e-9):  # with dropout, attention uses a mask
        documents = packed_documents({256, 512}, dropout) if is_packed else None
        own = [tensor.clone().requires_grad_() for tensor in tensors]
        options = {"documents": documents, "sliding_window": 32, "dropout": dropout}
        if has_sinks:
            options |= {"s_aux": sinks, "scaling": head_size**-0.5}
            own.append(sinks)
        y, _ = attention(module, *own[:3], None, **options)
        found.append([y, *torch.autograd.grad(y.float().square().sum(), own)])
    for one, other in zip(*found, strict=True):
        assert (one - other).float().norm() < 0.02 * other.float().norm()


compute_states = separate_states(torch_chunk_gated_delta_rule)


def linear_attention(q, k, v, g, beta, documents=None):
    y, _ = compute_states(
        q, k, v, g=g, beta=beta, output_final_state=False, documents=documents,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return y


def draw_linear_attention():
    torch.manual_seed(0)
    q, k = (torch.randn(1, LENGTH, 2, 128) for _ in range(2))
    v = torch.randn(1, LENGTH, 4, 128)
    g = -torch.rand(1, LENGTH, 4)
    beta = torch.rand(1, LENGTH, 4)
    return [q, k, v, g, beta]


@pytest.mark.parametrize("compiled", [False, True])
def test_linear_attention_equals_the_cpu(compiled):
    pytest.importorskip("fla")
    found = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        own = [tensor.to(device, dtype) for tensor in draw_linear_attention()]
        own[3] = own[3].float()
        own = [tensor.detach().requires_grad_() for tensor in own]
        compute = torch.compile(linear_attention) if compiled else linear_attention
        y = compute(*own)
        results = [y, *torch.autograd.grad(y.float().square().sum(), own)]
        found.append([result.float().cpu() for result in results])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() < 0.02 * one.norm()


def test_packed_linear_attention_equals_separate_records():
    pytest.importorskip("fla")
    tensors = [tensor.cuda().bfloat16() for tensor in draw_linear_attention()]
    packed = linear_attention(*tensors, documents=packed_documents({64}))
    parts = zip(*(tensor.split(LENGTHS, 1) for tensor in tensors), strict=True)
    separate = torch.cat([linear_attention(*part) for part in parts], 1)
    assert (packed - separate).norm() < 0.01 * separate.norm()


@pytest.mark.parametrize("compiled", [False, True])
def test_experts_equal_separate_products(compiled):
    """Experts 1 and 2 have no tokens, and expert 5 has most of them."""
    torch.manual_seed(0)
    module = make_layer(lora=True).requires_grad_(True)
    x, weights = torch.randn(300, HIDDEN), torch.rand(300, 2)
    chosen = torch.where(torch.rand(300, 2) < 0.8, torch.tensor([5, 4]), torch.tensor([0, 3]))
    g = torch.randn(300, HIDDEN)
    found = []
    for device, dtype, compute in (
        ("cpu", torch.float32, compute_separately),
        ("cuda", torch.bfloat16, torch.compile(experts) if compiled else experts),
    ):
        module.to(device, dtype)
        own = [tensor.to(device, dtype).requires_grad_() for tensor in (x, weights)]
        y = compute(module, own[0], chosen.to(device), own[1])
        values = [*own, *module.parameters()]
        grads = torch.autograd.grad(y, values, g.to(device, dtype))
        found.append([value.float().cpu() for value in (y, *grads)])
        module.to("cpu", torch.float32)
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() < 0.03 * one.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_matrices_equal_those_of_bitsandbytes(dtype):
    matrix = torch.randn(70, 192, dtype=dtype)
    matrix[1] = 0
    codes, scales = nf4.quantize_matrix(matrix)
    found = nf4.dequantize_matrix(codes.cuda(), scales.cuda()).cpu()
    expected = nf4.dequantize_matrix(codes, scales)
    torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps, atol=0.0)
