import copy
import math
import random

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from distributed_training.data.samples import IGNORE_INDEX
from distributed_training.models import ModelSpec, find_model
from distributed_training.models.gpt2 import gpt2_size
from distributed_training.models.initial_weights import hashed_normal
from distributed_training.models.private import register_flop_formulas
from distributed_training.parallel import exchanges  # noqa: F401  # registers all_to_all
from distributed_training.parallel.blocks import apply_checkpointing
from distributed_training.parallel.lora import apply_lora
from distributed_training.settings.config import Config
from distributed_training.settings.files import ROOT
from tests.support import draw_model, save_model

# The vocabulary size 300 is not a multiple of 128, so the embedding has 84 rows of padding.
SIZE = gpt2_size(vocab_size=300, num_positions=32, num_layers=3, num_heads=4, hidden_size=32)
SPEC = ModelSpec(label="small", family="gpt2", size=SIZE)


def random_model(dropout=0.0):
    """Return a model with random parameters, including biases and norms."""
    model = draw_model(SPEC, dropout=dropout, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def random_batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(SIZE.vocab_size, (3, 21), generator=generator)
    inputs, targets = ids[:, :-1], ids[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = IGNORE_INDEX
    return inputs, targets


def loss_and_gradients(model, inputs, targets):
    model.zero_grad()
    loss = model(inputs, targets)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_equal(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_batch_without_targets_has_no_loss_and_no_gradients():
    inputs, targets = random_batch()
    targets.fill_(IGNORE_INDEX)
    loss, gradients = loss_and_gradients(random_model(), inputs, targets)
    assert loss == 0
    assert all(not gradient.any() for gradient in gradients.values())


def test_padding_rows_do_not_affect_results():
    model = random_model()
    filled = copy.deepcopy(model)
    with torch.no_grad():
        filled.token_embedding.weight[SIZE.vocab_size :] = 1e3
    inputs, targets = random_batch()
    assert model(inputs).shape == (3, 20, SIZE.vocab_size)
    assert torch.equal(model(inputs), filled(inputs))
    loss, gradients = loss_and_gradients(model, inputs, targets)
    assert_equal((loss, gradients), loss_and_gradients(filled, inputs, targets))
    has_gradient = gradients["token_embedding.weight"].any(dim=1)
    assert has_gradient.tolist() == [True] * SIZE.vocab_size + [False] * 84


def test_initial_weights_follow_gpt2_and_depend_only_on_the_seed():
    size = gpt2_size(vocab_size=500, num_positions=64, num_layers=8, num_heads=4, hidden_size=128)
    spec = ModelSpec(label="small", family="gpt2", size=size)
    rng_state = torch.get_rng_state()
    state = draw_model(spec, seed=5).state_dict()
    assert torch.equal(rng_state, torch.get_rng_state())
    torch.manual_seed(2)
    same = draw_model(spec, dropout=0.5, seed=5).state_dict()
    other = draw_model(spec, seed=6).state_dict()
    assert not state["token_embedding.weight"][500:].any()
    for name, tensor in state.items():
        assert torch.equal(tensor, same[name])
        assert tensor.dtype == torch.float32
        if name.endswith("bias"):
            assert not tensor.any()
        elif "norm" in name:
            assert (tensor == 1).all()
        else:
            assert not torch.equal(tensor, other[name])
            residual = "attention_out" in name or "mlp_out" in name
            assert float(tensor[:500].std()) == pytest.approx(
                0.02 / (4 if residual else 1), rel=0.05
            )
            assert float(tensor[:500].mean()) == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activation_checkpointing_keeps_results_and_saves_fewer_values(dropout):
    """Activation checkpointing changes no result and saves fewer values. The test counts the
    elements that autograd saves outside of checkpointed blocks, and the FLOPs. Unlike "full",
    "selective" does not repeat matrix multiplications."""
    results, saved_bytes, flops = {}, {}, {}
    for mode in ("none", "full", "selective", "offload-attention"):
        model, sizes = random_model(dropout), []
        apply_checkpointing(model, mode)
        torch.manual_seed(3)
        with (
            FlopCounterMode(display=False) as counter,
            torch.autograd.graph.saved_tensors_hooks(
                lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t
            ),
        ):
            results[mode] = loss_and_gradients(model, *random_batch())
        saved_bytes[mode], flops[mode] = sum(sizes), counter.get_total_flops()
    assert_equal(results["none"], results["full"])
    assert_equal(results["none"], results["selective"])
    assert_equal(results["none"], results["offload-attention"])
    assert max(saved_bytes["full"], saved_bytes["selective"]) < saved_bytes["none"] / 2
    if not dropout:  # with dropout, attention on a CPU is not a single operation
        assert flops["none"] == flops["selective"] < flops["full"]
        mlp_in = math.prod(SIZE.kinds[0].matrices[2])
        repeated = 2 * random_batch()[0].numel() * mlp_in * SIZE.num_layers
        assert flops["offload-attention"] == flops["none"] + repeated


def test_only_the_first_blocks_recompute():
    model = random_model()
    apply_checkpointing(model, "full", 2)
    blocks = model.blocks.values()
    assert [hasattr(block.forward, "func") for block in blocks] == [True, True, False]


def saving_policy(mode, **options):
    """Return the function that decides whether a block saves the result of an operation."""
    model = random_model()
    apply_checkpointing(model, mode, **options)
    forward, _ = model.blocks["0"].forward.keywords["context_fn"]()
    return lambda op, *args: forward.policy_fn(None, op, *args).name


@pytest.mark.parametrize(("dtype", "num_scales"), [("nf4", 0), ("fp8", 1)])
def test_offloading_attention_repeats_the_product_of_a_quantized_mlp(dtype, num_scales):
    saves = saving_policy("offload-attention")
    product = f"distributed_training.{dtype}_matmul.default"
    args = (*[torch.ones(2, 2)] * (1 + num_scales), torch.ones(3, 1))
    ops = (product, "distributed_training.delta_rule.default", product, product)
    decided = [saves(op, *args) for op in ops]
    assert decided == ["MUST_SAVE", "MUST_SAVE", "MUST_SAVE", "PREFER_RECOMPUTE"]


def test_selective_checkpointing_recomputes_no_matmuls():
    register_flop_formulas()
    flops = {}
    config = Config(lora_rank=2)
    for mode in ("none", "selective"):
        model = random_model()
        apply_lora(model, SPEC, config, torch.device("cpu"), {})
        apply_checkpointing(model, mode)
        with FlopCounterMode(display=False) as counter:
            model(*random_batch()).backward()
        flops[mode] = counter.get_total_flops()
    assert flops["selective"] == flops["none"]


def test_selective_checkpointing_saves_all_reduces_and_repeats_all_gathers():
    saves = saving_policy("selective", compiled=True)
    communicate = torch.ops._c10d_functional
    x = torch.ones(4, 2)
    decided = {}
    for op in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
        saves(getattr(communicate, op).default, x)
        decided[op] = saves(communicate.wait_tensor.default, x)
    assert decided == {
        "all_gather_into_tensor": "PREFER_RECOMPUTE",
        "reduce_scatter_tensor": "MUST_SAVE",
        "all_reduce": "MUST_SAVE",
    }


def test_selective_checkpointing_repeats_the_product_after_an_all_to_all():
    saves = saving_policy("selective")
    x = torch.ones(4, 2)
    ops = (
        torch.ops.aten.mm,
        torch.ops.distributed_training.all_to_all,
        torch.ops.aten.mm,
        torch.ops.aten.mm,
    )
    decided = [saves(op.default, x, x) for op in ops]
    assert decided == ["MUST_SAVE", "PREFER_RECOMPUTE", "PREFER_RECOMPUTE", "MUST_SAVE"]


def test_under_cp_the_mlp_begins_after_the_product_that_follows_the_exchange():
    saves = saving_policy("offload-attention")
    x = torch.ones(4, 2)
    product, exchange = torch.ops.aten.mm.default, "distributed_training.all_to_all.default"
    ops = (product, "distributed_training.delta_rule.default", exchange, product, product)
    decided = [saves(op, x, x) for op in ops]
    assert decided == ["MUST_SAVE"] * 2 + ["PREFER_RECOMPUTE"] * 3


def test_dropout_acts_in_training_only():
    model = random_model(dropout=0.5)
    inputs, _ = random_batch()
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), model(inputs))
    torch.testing.assert_close(model(inputs), random_model()(inputs))


def test_hashed_weights_depend_only_on_their_index():
    shape, cpu = (300, 70), torch.device("cpu")
    numbers = hashed_normal(shape, (), 5, cpu)
    slices = (slice(90, 200), slice(30, 60))
    assert torch.equal(hashed_normal(shape, slices, 5, cpu), numbers[slices])
    assert torch.equal(hashed_normal(shape, (slice(280, 400),), 5, cpu), numbers[280:])
    assert abs(numbers.mean()) < 0.02
    assert abs(numbers.std() - 1) < 0.02
    assert abs((numbers * hashed_normal(shape, (), 6, cpu)).mean()) < 0.03
    # All machines must draw the same bits, because adapters may have been trained for these random
    # weights.
    assert [x.hex() for x in numbers[[0, 299], [1, 69]].tolist()] == [
        "0x1.0d557a0000000p-7",
        "-0x1.206b980000000p+0",
    ]


@pytest.mark.parametrize("model", ["gpt2-tiny", "grouped", "untied"])
def test_any_slice_of_a_weight_file_is_read(model, tmp_path):
    folder = ROOT / "tests/models" / model
    spec = find_model(str(folder) if folder.is_dir() else model)
    model = draw_model(spec, seed=1)
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        save_model(spec, model.state_dict(), folder, torch.bfloat16)
    names = ("model.safetensors", "config.json")
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in names)
    read = spec.weights_source(one)
    choose = random.Random(0)
    for name, parameter in model.named_parameters():
        values = parameter.detach().bfloat16()
        assert torch.equal(read(name, ()), values), name
        for _ in range(3):
            starts = [choose.randrange(size) for size in values.shape]
            slices = tuple(slice(start, start + choose.randrange(1, 90)) for start in starts)
            assert torch.equal(read(name, slices), values[slices]), (name, slices)
