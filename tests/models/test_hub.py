"""Test decoders that are built from transformers' blocks. Their results must match the results of
transformers' own models."""

import inspect
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import distributed_training
import distributed_training.models.hub as hub_family
from distributed_training.checkpoint.export import generate_ids
from distributed_training.models import HUB, ModelSpec, find_model
from distributed_training.models.attention import Documents
from distributed_training.models.chunked_loss import ChunkedCrossEntropy
from distributed_training.models.decoder import KVCache
from distributed_training.models.hub import packing
from distributed_training.models.initial_weights import InitialWeights
from distributed_training.parallel import blocks
from distributed_training.planner.choose import choose_model
from distributed_training.settings.cache import CACHE_VARIABLE
from distributed_training.settings.request import build_config
from tests.models.hub_folders import VOCABULARY, make_folder
from tests.models.theirs import generate, logits, train_step
from tests.planner.helpers import plan_for
from tests.reference import call_reference
from tests.support import (
    CPU_MACHINE,
    assert_near,
    draw_model,
    edit_json,
    read_model,
    refused,
    save_model,
)

LENGTH = 40  # longer than the sliding windows


def build(folder: Path) -> tuple[ModelSpec, torch.nn.Module]:
    spec = find_model(str(folder))
    assert spec.family == HUB
    return spec, read_model(spec, folder)


# Properties that no config of test_all_types.py has: caps, factors, partial rotation, ALiBi,
# windows shorter than a sample, and several kinds of blocks and mixtures in a model.
EXACT = (
    "gemma2", "granite", "phi", "falcon-alibi", "opt", "mistral-window", "qwen3_5_text",
    "gemma4_text", "lfm2", "nemotron_h", "qwen3_moe", "deepseek_v3", "llama4_text", "gpt_oss",
)  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize("kind", EXACT)
def test_step_export_and_kv_cache_equal_transformers(kind, tmp_path):
    folder = make_folder(kind, tmp_path / "theirs")
    spec, model = build(folder)
    torch.manual_seed(0)  # Measuring a size that is not in the cache draws numbers.
    ids = torch.randint(spec.size.vocab_size, (2, LENGTH + 1))
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    expected, loss, theirs, num_parameters = call_reference(train_step, folder, inputs, targets)
    assert spec.size.num_parameters == num_parameters
    assert_near(model(inputs), expected)
    ours = model(inputs, targets)
    ours.backward()
    assert_near(ours, loss)
    # Rounding errors of large gradients pass on to small ones, such as those of states' decays.
    error = 1e-7 * sum(grad.square().sum() for grad in theirs.values()) ** 0.5
    for name, parameter in model.named_parameters():
        their_name, _ = spec.code.to_hf(name, parameter, spec.size)
        expected_grad = theirs.pop(their_name)
        difference = (parameter.grad - expected_grad).norm()
        assert difference <= 1e-5 * expected_grad.norm() + error, name
    assert not theirs

    save_model(spec, model.state_dict(), tmp_path / "ours")
    before, after = (
        load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(values, after[name]) for name, values in before.items())
    assert torch.equal(call_reference(logits, tmp_path / "ours", inputs), expected)

    past = KVCache()
    with torch.no_grad():
        pieces = [inputs[:1, :30], *inputs[:1, 30:].split(1, 1)]
        cached = torch.cat([model.eval()(piece, past=past) for piece in pieces], 1)
    assert_near(cached, expected[:1])


PACKED = (
    "gemma2", "gemma3_text", "phi", "opt", "mistral-window", "granite_swa", "qwen3_5_text",
    "gemma4_text", "lfm2",
)  # fmt: skip


MANY_LAYERS = {  # changes of a config -> number of kinds of blocks
    "gemma4_text": ({"layer_types": 5 * ["sliding_attention", "full_attention"]}, 6),
    "gpt_oss": ({"layer_types": 5 * ["sliding_attention", "full_attention"]}, 2),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "mode"), [("gemma4_text", "none"), ("gpt_oss", "offload-attention")]
)
def test_blocks_of_a_kind_share_a_compiled_graph(kind, mode, tmp_path):
    """After too many graphs, torch runs blocks without compilation, and says so in a warning."""
    changes, num_kinds = MANY_LAYERS[kind]
    folder = make_folder(kind, tmp_path, num_hidden_layers=10, **changes)
    (_, model), (_, uncompiled) = build(folder), build(folder)
    counter = CompileCounterWithBackend("aot_eager")
    blocks.apply_checkpointing(model, mode)
    for block in model.blocks.values():
        block.forward = blocks._compile(block.forward, counter)
    ids = torch.arange(LENGTH)[None]
    for each in (model, uncompiled):
        each(ids).square().sum().backward()
    assert counter.frame_count == num_kinds
    for one, other in zip(model.parameters(), uncompiled.parameters(), strict=True):
        assert_near(one.grad, other.grad)


def test_a_compiled_convolution_keeps_no_shifted_inputs():
    convolve = packing._separate_convolution(lambda: None)
    x, weight = torch.randn(1, 8, 96, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        torch.compile(convolve, backend="aot_eager_decomp_partition")(x, weight)
    assert sum(tensor.numel() for tensor in kept) <= x.numel() + weight.numel()


@pytest.mark.parametrize("kind", PACKED)
def test_packed_documents_do_not_affect_each_other(kind, tmp_path, monkeypatch):
    spec, model = build(make_folder(kind, tmp_path))
    assert spec.size.packs
    lengths = (11, 23, 6)
    ids = torch.randint(spec.size.vocab_size, (1, LENGTH))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    ends = torch.tensor(lengths).cumsum(0)[None]
    separate_logits = torch.cat([model(document) for document in ids.split(lengths, 1)], 1)
    # The state of linear attention is reset by a factor that is not quite 0.
    limit = 1e-4 if kind == "qwen3_5_text" else 1e-5
    assert_near(model(ids, positions=positions, ends=ends), separate_logits, limit)
    if kind == "gemma2":
        # The document kernel, which receives ends instead of a mask, does not support caps.
        only_ends = Documents(positions, torch.nn.functional.pad(ends[0].int(), (1, 0)))
        monkeypatch.setattr(type(model), "describe_documents", lambda *_: only_ends)
        assert_near(model(ids, positions=positions, ends=ends), separate_logits)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "gpt_oss"])
def test_the_code_of_transformers_stays_as_it_was(kind, tmp_path):
    """Other models in the same process, such as those of the tests, must not call our functions."""
    _, model = build(make_folder(kind, tmp_path))
    model(torch.arange(LENGTH)[None])
    packages = ("transformers.", "peft.")
    spaces = [vars(module) for name, module in sys.modules.items() if name.startswith(packages)]
    classes = [value for space in spaces for value in space.values() if inspect.isclass(value)]
    spaces += map(vars, classes)
    functions = {value for space in spaces for value in space.values() if inspect.isfunction(value)}
    assert len(functions) > 1000
    own_folder = str(Path(distributed_training.__file__).parent)
    assert not [f for f in functions if f.__code__.co_filename.startswith(own_folder)]


@pytest.mark.parametrize("kind", ["nemotron", "falcon", "mpt", "falcon_h1", "granitemoehybrid"])
def test_models_that_mix_packed_documents_do_not_pack(kind, tmp_path):
    """Nemotron's blocks drop the document mask, falcon and mpt use custom attention code, and the
    states of the others pass on from document to document. In falcon_h1, such a state is beside
    attention that separates documents."""
    assert not find_model(str(make_folder(kind, tmp_path))).size.packs


@pytest.mark.parametrize("kind", ["gemma2", "phi", "granite"])
def test_chunked_loss_equals_the_full_loss(kind, tmp_path):
    """The gradients of the chunked loss equal the gradients of the loss over all tokens at once.
    The tested models apply a cap, a bias or a factor to their logits."""
    _, model = build(make_folder(kind, tmp_path))
    ids = torch.randint(2048, (2, LENGTH + 1))
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    gradients = []
    for loss in (model.loss, ChunkedCrossEntropy(7, compiled=False)):
        model.zero_grad()
        model.loss = loss
        model(inputs, targets).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for expected, chunked in zip(*gradients, strict=True):
        assert_near(chunked, expected)


def test_a_model_that_computes_in_bf16_gets_its_initial_weights(tmp_path):
    """If a model computes in bf16, its modules read bf16 copies of their parameters. Initialization
    must still set the parameters themselves."""
    spec, _ = build(make_folder("gemma2", tmp_path))
    model = spec.build_meta_model()
    model.compute_dtype = torch.bfloat16
    cpu = torch.device("cpu")
    InitialWeights(source=model.random_source(0, cpu, hashed=False)).fill(model, cpu)
    drawn = draw_model(spec, seed=0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # only norms, which are initialized without random numbers
            torch.testing.assert_close(parameter, drawn.get_parameter(name))


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["gemma2", "xglm"])  # xglm adds fp32 positions
def test_computing_in_bf16_rounds_weights_and_keeps_buffers(kind, tmp_path):
    folder = make_folder(kind, tmp_path)
    _, model = build(folder)
    model.compute_dtype = torch.bfloat16
    inputs = torch.randint(2048, (2, LENGTH))
    expected = call_reference(logits, folder, inputs, dtype=torch.bfloat16)
    assert model(inputs).dtype is torch.bfloat16
    assert_near(model(inputs).float(), expected.float(), 0.01)
    model.to(torch.bfloat16)
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_random_weights_follow_transformers_and_depend_only_on_the_seed(tmp_path):
    spec, _ = build(make_folder("gemma", tmp_path))
    state, same_seed, other_seed = (draw_model(spec, seed=seed).state_dict() for seed in (1, 1, 2))
    norms = [name for name in state if "norm" in name]
    assert norms
    assert all(not state[name].any() for name in norms)  # Gemma adds 1 to its norm weights
    assert all(torch.equal(state[name], same_seed[name]) for name in state)
    name = "blocks.0.self_attn.q_proj.weight"
    assert not torch.equal(state[name], other_seed[name])
    assert 0.015 < state[name].std() < 0.025


def test_no_parameter_keeps_what_was_in_memory(tmp_path):
    """The block around Qwen3-Next's router initializes it. Only constructors initialize parameters
    of Apertus, so they have no values."""
    spec, _ = build(make_folder("qwen3_next", tmp_path / "router"))
    assert 0.01 < draw_model(spec, seed=1).state_dict()["blocks.0.mlp.gate.weight"].std() < 0.03
    spec, _ = build(make_folder("apertus", tmp_path / "constructor"))
    with refused("act_fn.alpha_p", "weights=pretrained"):
        draw_model(spec, seed=1)


def test_a_block_that_fsdp_wraps_has_random_weights(tmp_path):
    """A copy of such a block would construct a block."""
    _, model = build(make_folder("olmo2", tmp_path))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        fully_shard(model.blocks["0"], mesh=init_device_mesh("cpu", (2,)))
    finally:
        dist.destroy_process_group()
    source = model.random_source(1, torch.device("cpu"), hashed=False)
    assert source("blocks.0.post_attention_layernorm.weight", ()).unique() == 1


def test_hashed_weights_of_experts_are_drawn_by_shards(tmp_path):
    """On GPUs, each rank draws only its shards. Biases of experts are 0, as in transformers."""
    _, model = build(make_folder("gpt_oss", tmp_path))
    source = model.random_source(1, torch.device("cpu"), hashed=True)
    name = "blocks.0.mlp.experts.gate_up_proj"
    stack = source(name, ())
    assert 0.015 < stack.std() < 0.025
    assert torch.equal(source(name, (slice(1, 3), slice(None), slice(5))), stack[1:3, :, :5])
    assert not source(f"{name}_bias", ()).any()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "t5"}, ("encoder-decoder",)),
        ({"model_type": "nobody"}, ("nobody",)),
        ({"model_type": "nobody", "auto_map": {"AutoConfig": "own.Config"}}, ("auto_map", "code")),
        ({"model_type": "olmo2", "hidden_size": "wide"}, ("config.json",)),
        ({"model_type": "olmo2", "num_attention_heads": 0}, ("config.json",)),
        ({"model_type": "olmo2", "hidden_act": "nobody"}, ("config.json", "nobody")),
        (
            {"model_type": "olmo2", "per_layer_config": {"0": {"num_attention_heads": 4}}},
            ("config.json", "num_attention_heads"),
        ),
    ],
)
def test_models_other_than_dense_decoders_are_refused_in_one_line(changes, words, tmp_path):
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps({**shape, **changes}))
    with refused(str(tmp_path), *words):
        find_model(str(tmp_path))


def test_code_named_in_a_config_is_ignored_if_transformers_has_the_type(tmp_path):
    folder = make_folder("olmo2", tmp_path)
    plain = find_model(str(folder))
    edit_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "own.Model"})
    spec = find_model(str(folder))
    assert spec.size == plain.size
    assert "auto_map" not in spec.code.to_config(spec.size, 0)
    notes: list[str] = []
    choose_model(build_config({"model": str(folder)}), CPU_MACHINE, notes)
    assert any("auto_map" in note for note in notes)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}


@pytest.mark.processes
def test_samples_are_no_longer_than_the_frequencies_of_their_positions_allow(tmp_path):
    """Llama 4 and models with longrope compute a token differently in longer samples."""
    changes = {"original_max_position_embeddings": 24, "rope_parameters": LONGROPE}
    folder = make_folder("phi3", tmp_path / "phi3", **changes)
    spec = find_model(str(folder))
    assert (spec.size.num_positions, spec.size.context_length) == (24, 96)
    with refused("max_length=25", "24 or less"):
        plan_for(tmp_path, strategy="dp", model=str(folder), max_length=25, checked=False)
    model = read_model(spec, folder).eval()
    prompt = torch.randint(2, VOCABULARY, (1, 10))
    expected = call_reference(generate, folder, prompt, max_new_tokens=30)
    generation = {"num_tokens": 30, "context": 96, "eos_ids": [-1], "seed": 0, "temperature": 0.0}
    with torch.inference_mode():
        ids = generate_ids(lambda x, past: model(x, past=past), prompt[0].tolist(), **generation)
        assert [*ids] == expected
    llama4 = make_folder("llama4_text", tmp_path / "llama4", floor_scale=32)
    assert find_model(str(llama4)).size.num_positions == 31


def test_a_size_depends_only_on_the_config(tmp_path, monkeypatch):
    """A run continues after its folder was moved, and on a machine with an empty cache."""
    sizes = []
    for name in ("one", "two"):
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / f"cache {name}"))
        sizes.append(hub_family.read_size(make_folder("gemma2", tmp_path / name)))
    assert sizes[0] == sizes[1]
