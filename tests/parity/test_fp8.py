"""Compare LoRA training on a base in fp8 with training on the dequantized base, and between
layouts."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from distributed_training.models import find_model, fp8, peft
from distributed_training.models.quantized import Multiply, quantize_matrices
from distributed_training.settings.config import Config
from distributed_training.start import launched
from tests.parity import cases
from tests.parity import test_preference as preference
from tests.parity.support import BASE, MODELS, mesh, micro_batches, run_cases
from tests.planner.helpers import gpu, plan_for
from tests.support import CPU_MACHINE, refused

MODULE = "tests.parity.test_fp8"
ONE = {"strategy": "dp", **micro_batches(1)}
FP8 = {**BASE, "lora_rank": 4, "lora_alpha": 8.0, "base_dtype": "fp8", "learning_rate": 1e-2}
LAYOUTS = {
    "fsdp": {"strategy": "fsdp", **micro_batches(1)},
    "selective": {**ONE, "activation_checkpointing": "selective", "compile": True},
    "pp": {**mesh(pp=2), **micro_batches(2)},
}
E4M3 = torch.float8_e4m3fn


def allow_fp8() -> None:
    """Let the CPU count as a GPU with fp8 until the end of this process, which the pool forked."""
    detect = launched.detect_machine
    launched.detect_machine = lambda: dataclasses.replace(detect(), compute_capability=(9, 0))


def train(arguments: dict[str, Any]) -> Any:
    allow_fp8()
    return cases.train(arguments)


def train_traced(arguments: dict[str, Any]) -> Any:
    allow_fp8()
    return cases.train_without_inductor(arguments)


def train_dequantized(arguments: dict[str, Any]) -> Any:
    """Train like `train`, but multiply by the dequantized matrices. Activations and gradients are
    not quantized."""

    def dequantize(codes, scales):
        return codes.view(E4M3).float() * scales[:, None]

    fp8.product = lambda x, *stored: F.linear(x, dequantize(*stored))
    fp8.input_gradient = lambda dy, *stored: dy @ dequantize(*stored)
    return train(arguments)


def rounded(x, dim):
    """Round the rows (dim 1) or columns (dim 0) of a matrix to e4m3, with one scale each."""
    scale = x.abs().amax(dim, keepdim=True) / 448
    return (x / scale).to(E4M3).float() * scale


def test_products_equal_products_of_rounded_matrices():
    torch.manual_seed(0)
    x, dy, w = torch.randn(2, 5, 64), 1e-9 * torch.randn(2, 5, 96), 0.02 * torch.randn(96, 64)
    codes, scales = fp8.quantize_matrix(w)
    x.requires_grad_()
    y = Multiply.apply(x, codes, scales, fp8)
    y.backward(dy)
    w = rounded(w, 1)
    torch.testing.assert_close(fp8.dequantize_matrix(codes, scales), w)
    row_scales = w.abs().amax(1) / 448
    expected = rounded(x.detach().view(10, 64), 1) @ w.T
    torch.testing.assert_close(y.view(10, 96), expected)
    expected = rounded(dy.view(10, 96) * row_scales, 1) @ (w / row_scales[:, None])
    atol = 1e-5 * expected.abs().max().item()  # the order of sums depends on the threads
    torch.testing.assert_close(x.grad.view(10, 64), expected, rtol=1e-4, atol=atol)


def test_exported_weights_are_the_trained_weights():
    """`export --merge` and `generate` dequantize the matrices that a run multiplies by, of which a
    rank may store some rows and columns."""
    spec = find_model("gpt2-tiny")
    model = spec.build_meta_model().to(torch.bfloat16)
    random = model.random_source(3, torch.device("cpu"), hashed=True)

    def base(name, slices):  # with strides as in files that store matrices transposed
        values = random(name, slices)
        return values.t().contiguous().t() if values.dim() == 2 else values

    stored = quantize_matrices(model, base, torch.device("cpu"), "fp8")
    config = Config(base_dtype="fp8", precision="bf16")
    adapters = peft.Adapters(spec=spec, tensors={}, config=config, base_fingerprint=None, origin="")
    exported = adapters.merged(base)
    names = [name for name, _ in model.named_parameters()]
    num_quantized = sum(name.endswith("scales") for name in names)
    assert num_quantized == len(spec.size.matrix_shapes)
    for name, parameter in model.named_parameters():
        if name.endswith("scales"):
            matrix = name.removesuffix("_scales")
            codes = stored(matrix, (slice(4, 9), slice(8, 24))).view(E4M3).float()
            weights = codes * stored(name, (slice(4, 9),)).float()[:, None]
            assert torch.equal(exported(matrix, (slice(4, 9), slice(16, 48))), weights)
        elif ".weight" not in name or "norm" in name:
            assert torch.equal(exported(name, ()), base(name, ())), parameter.shape


def relative(found, expected):
    """Return the largest relative differences of losses, gradient norms and weights."""
    differences = [
        max(abs(a / b - 1) for a, b in zip(found[what], expected[what], strict=True))
        for what in ("losses", "grad_norms")
    ]
    state = expected["state"].items()
    return *differences, max((found["state"][n] - w).norm() / w.norm() for n, w in state)


def test_training_follows_the_dequantized_base():
    found, expected = (
        run_cases({"one": {**FP8, **ONE}}, 1, module=MODULE, function=function, steps=6)["one"]
        for function in ("train", "train_dequantized")
    )
    loss, norm, weights = relative(found, expected)
    assert 1e-6 < loss < 5e-4
    assert norm < 0.02
    assert weights < 0.1


@pytest.mark.parametrize(
    ("changes", "names", "loss_limit"),
    [
        ({"model": str(MODELS / "qwen3-two-layers")}, [*LAYOUTS], 1e-4),
        (preference.PAIRS, ["fsdp"], 1e-3),
    ],
    ids=["qwen3", "pairs"],
)
def test_layouts_equal_one_process(changes, names, loss_limit):
    """The first step is equal. Later, a rounding error of another order of summation can move a
    value to the next e4m3 number, so runs differ by a part of the quantization error. A loss of
    pairs is a tenth of a loss of text, and its error is about as large."""
    base = {**FP8, "weights": "random", **changes}
    options = {"module": MODULE, "steps": 3}
    one = run_cases({"one": {**base, **ONE}}, 1, **options)["one"]
    layouts = {name: {**base, **LAYOUTS[name]} for name in names}
    for name, found in run_cases(layouts, 2, function="train_traced", **options).items():
        for what in ("losses", "grad_norms"):
            assert found[what][0] == pytest.approx(one[what][0], rel=1e-6), (name, what)
        loss, norm, weights = relative(found, one)
        assert (loss < loss_limit, norm < 5e-3, weights < 0.05) == (True, True, True), name


def test_only_gpus_with_fp8_are_accepted(tmp_path):
    a100 = gpu(gpu_name="A100", compute_capability=(8, 0))
    for machine in (a100, CPU_MACHINE):
        with refused("base_dtype", "fp8", machine.gpu_name or "CPU", "8.9", "nf4"):
            plan_for(tmp_path, machine, 1, **FP8)
    with refused("base_dtype", "fp8", "zero2"):
        plan_for(tmp_path, gpu(), 1, **{**FP8, "strategy": "zero2"})
