"""Compare LoRA training with PEFT, and test that PEFT and this package read each other's adapters.
test_layouts.py tests adapters under more layouts."""

import json
import shutil
from dataclasses import replace

import peft as library
import pytest
import torch
from transformers import AutoModelForCausalLM

from distributed_training.checkpoint.trained import open_trained_folder
from distributed_training.data.tokenizer import EMBEDDED_DIR
from distributed_training.models import find_model, peft
from distributed_training.models.decoder import Linear
from distributed_training.models.peft import to_peft
from distributed_training.parallel.lora import Adapter, apply_lora
from distributed_training.settings.config import Config
from tests.models.hub_folders import make_folder
from tests.models.theirs import logits, train, trained_values
from tests.parity.support import BASE, assert_same_bits, mesh, micro_batches, run_cases
from tests.planner.helpers import plan_for
from tests.reference import call_reference
from tests.support import GPU_MACHINE, fingerprint, read_model, refused

ADAPTERS = {"lora_rank": 4, "lora_alpha": 8.0}
CPU = torch.device("cpu")


def test_initial_adapters_are_as_in_peft_and_depend_only_on_the_names_in_transformers(tmp_path):
    make_folder("qwen3", tmp_path)
    spec = find_model(str(tmp_path))
    config = Config(**ADAPTERS)
    drawn = []
    for targets in (None, "k_proj,up_proj"):
        model = read_model(spec, tmp_path)
        selected = config.model_copy(update={"lora_targets": targets})
        apply_lora(model, spec, selected, CPU, {})
        drawn.append(to_peft(model.state_dict(), spec, selected))
    adapters, some = drawn
    assert len(some) == 2 * 2 * 2  # blocks, matrices, factors
    for name, values in adapters.items():
        assert torch.equal(values, some.get(name, values)), name
        if "lora_B" in name:  # so that the adapters do not change the base
            assert not values.any()
        else:  # Kaiming uniform
            limit = values.shape[1] ** -0.5
            assert 0.9 * limit < values.abs().max() <= limit, name


def test_dropout_acts_on_the_inputs_and_only_in_training():
    torch.manual_seed(0)
    a, b, x = torch.randn(3, 8), torch.randn(5, 3), torch.randn(8).expand(20_000, 1, 8)
    adapter = Adapter(a, b, Config(lora_rank=3, lora_alpha=6.0, lora_dropout=0.25))
    linear = Linear(8, 5).requires_grad_(False)
    exact = linear(x) + 2.0 * (x @ a.T @ b.T)
    linear.adapter = adapter
    found = adapter(linear, x)
    assert len(found.unique(dim=0)) > 200  # of the 256 masks
    torch.testing.assert_close(found.mean(0), exact[0], rtol=0, atol=0.2)
    torch.testing.assert_close(adapter.eval()(linear, x), exact)


def made_by_peft(folder, kind="llama", **options):
    """Save a tiny model, and PEFT adapters for it with random values. Return both folders."""
    # Under tp=2, each process has a whole number of units of 16 rows.
    make_folder(kind, folder / "base", **({} if kind == "gpt2" else {"intermediate_size": 64}))
    settings = {
        "r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "gate_proj", "o_proj"],
        **options,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    adapted = library.get_peft_model(model, library.LoraConfig(**settings))
    for name, values in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(values, std=0.1)
    adapted.save_pretrained(folder / "adapters")
    return folder / "base", folder / "adapters"


def train_in_peft(base, adapters, steps, learning_rate=1e-2):
    """Return the adapters, or without adapters all parameters, before and after steps in PEFT or
    transformers. Each step has one micro-batch."""
    batches = [batch[:2] for (batch,) in steps]  # inputs and targets
    return call_reference(train, base, adapters, batches, learning_rate)


# Adam divides by small gradients, so that at 1e-2, PEFT in fp32 and in fp64 differ by 6e-4 for
# qwen3_5_text. Transformers' eager attention and convolutions round differently.
RATES = {"gemma4_text": 1e-3, "qwen3_5_text": 1e-3}
LIMITS = {"gemma4_text": 1e-4, "qwen3_5_text": 1e-4, "qwen2": 2e-5}
ALL = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
LAYOUTS = {
    "dp": {"strategy": "dp", **micro_batches(2)},
    "fsdp": {"strategy": "fsdp", **micro_batches(1)},
    "tp": {**mesh(tp=2), **micro_batches(1)},
    "pp": {**mesh(pp=2), **micro_batches(2)},
    "zero3": {"strategy": "zero3", **micro_batches(2)},
}
# (kind of model, targets of adapters) -> layouts. GPT-2 has one fused matrix for q, k and v.
ADAPTED = {
    ("gpt2", "c_attn,attn.c_proj,c_fc,mlp.c_proj"): ["tp", "pp", "zero3"],
    ("llama", ALL): [*LAYOUTS],
    ("llama", "q_proj,v_proj"): ["tp", "zero3"],
    ("llama", "gate_proj"): ["pp"],
    ("qwen3", ALL): ["tp"],
    ("gemma2", ALL): ["fsdp"],
    ("qwen3_5_text", f"{ALL},in_proj_qkv,in_proj_z,out_proj"): ["zero3"],
    ("gemma4_text", ALL): ["dp"],
}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Return {"kind targets layout": (results of our run, (model, PEFT's values before and after
    five steps))}. Each layout has two processes. Batches and initial values are equal."""
    cases, peft_values = {}, {}
    for (kind, targets), layouts in ADAPTED.items():
        folder = tmp_path_factory.mktemp("peft")
        base, adapters = made_by_peft(folder, kind, target_modules=targets.split(","))
        values = {
            **BASE, "model": "auto", "weights": str(adapters), "pack": False,
            "learning_rate": RATES.get(kind, 1e-2), "lr_schedule": "constant",
            "warmup_steps": 0,
        }  # fmt: skip
        for layout in layouts:
            cases[f"{kind} {targets} {layout}"] = {**values, **LAYOUTS[layout]}
        one = {"one": {**values, "strategy": "dp", **micro_batches(1)}}
        steps = run_cases(one, 1, steps=5, function="batches")["one"]
        trained = train_in_peft(base, adapters, steps, RATES.get(kind, 1e-2))
        peft_values[kind, targets] = (find_model(str(base)), *trained)
    found = run_cases(cases, 2, steps=5)
    return {name: (found[name], peft_values[tuple(name.split()[:2])]) for name in cases}


@pytest.mark.parametrize(
    ("kind", "targets", "layout"),
    [(*adapted, layout) for adapted, layouts in ADAPTED.items() for layout in layouts],
)
def test_every_adapter_trains_as_in_peft(kind, targets, layout, compared):
    found, (spec, before, expected) = compared[f"{kind} {targets} {layout}"]
    adapters = to_peft(found["state"], spec, Config(lora_rank=4, lora_targets=targets))
    assert adapters.keys() == expected.keys()
    num_trained = sum(values.numel() for values in expected.values())
    assert sum(values.numel() for values in found["state"].values()) == num_trained
    assert spec.size.num_trained_parameters(4, targets) == num_trained
    for key, values in expected.items():
        assert (values - before[key]).norm() > 0.005 * values.norm(), key
        error = (adapters[key] - values).norm() / values.norm()
        assert error <= LIMITS.get(kind, 1e-5), f"{key} differs by {error:.1e}"


EXCHANGED = [
    ("llama", {}),
    ("llama", {"target_modules": ALL.split(","), "use_rslora": True}),
    ("gpt2", {"target_modules": ["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"]}),
    ("gemma2", {}),
    ("gpt_neox", {"target_modules": ["query_key_value", "dense", "dense_4h_to_h"]}),
    ("opt", {"target_modules": ["q_proj", "k_proj", "out_proj", "fc1", "fc2"]}),
    # PEFT wraps a module of experts once for each of its stacks with adapters.
    ("qwen3_moe", {
        "target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    }),
    ("gpt_oss", {"target_parameters": ["experts.gate_up_proj"]}),
    ("deepseek_v3", {
        "target_modules": ["o_proj"],
        "target_parameters": ["mlp.up_proj.weight", "shared_experts.down_proj.weight", "down_proj"],
    }),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options"), EXCHANGED)
def test_adapters_of_peft_are_read_merged_and_written_again(kind, options, tmp_path):
    base, adapters = made_by_peft(tmp_path, kind, **options)
    ids = torch.randint(0, 256, (2, 12))
    without = call_reference(logits, base, ids)
    expected = call_reference(logits, base, ids, adapters=adapters)
    assert (without - expected).norm() > 0.01 * expected.norm()
    spec = find_model(str(base))
    initial = peft.read_folder(spec, adapters)
    checksum = str(fingerprint(spec, base))
    written = tmp_path / "written"
    peft.save_adapters(replace(initial, base_fingerprint=checksum), written, str(base))
    names = [call_reference(trained_values, base, path).keys() for path in (adapters, written)]
    assert names[0] == names[1]
    trained = open_trained_folder(spec, written, base)
    weights = trained.merged_weights()
    spec.save(weights, tmp_path / "merged", eos_token_id=0, dtype=torch.float32)
    again = call_reference(logits, base, ids, adapters=written)
    merged = call_reference(logits, tmp_path / "merged", ids)
    for found in (again, trained.load(CPU)(ids), merged):
        assert (found - expected).norm() <= 1e-4 * expected.norm()
    changed = open_trained_folder(spec, written, tmp_path / "merged")
    with refused(str(written), "weights"):
        changed.load(CPU)
    with refused(str(written), "weights"):
        changed.merged_weights()


def test_unsupported_adapters_are_refused(tmp_path):
    base, adapters = made_by_peft(tmp_path)
    file = adapters / "adapter_config.json"
    document = json.loads(file.read_text())
    for key, value in (
        ("init_lora_weights", "pissa"),
        ("use_dora", True),
        ("rank_pattern", {"q_proj": 8}),
        ("modules_to_save", ["lm_head"]),
        ("layers_to_transform", [0]),
        ("bias", "all"),
        ("peft_type", "IA3"),
        ("lora_alpha", "12"),
    ):
        file.write_text(json.dumps({**document, key: value}))
        with refused(str(file), key):
            peft.read_folder(find_model(str(base)), adapters)
    with refused(str(adapters), "weights"):
        find_model(str(adapters))


def test_a_plan_can_continue_adapters(tmp_path):
    base, adapters = made_by_peft(tmp_path)
    given = {"num_processes": 1, "strategy": "dp", "model": "auto", "dataset": "embedded"}
    given |= {"weights": str(adapters), "max_length": 64}
    with refused(str(base), "tokenizer"):
        plan_for(tmp_path, **given)
    shutil.copytree(EMBEDDED_DIR, adapters, dirs_exist_ok=True)
    for typed in ({"lora_rank": 16}, {"lora_alpha": 3.0}, {"lora_targets": "q_proj"}):
        with refused(next(iter(typed)), str(adapters)):
            plan_for(tmp_path, **given, **typed)
    draft = plan_for(tmp_path, checked=False, **given)
    assert (draft.config.model, draft.config.lora_rank) == (str(base), 4)
    other = tmp_path / "other"
    shutil.copytree(base, other)
    with refused(str(adapters), str(base)):
        plan_for(tmp_path, **{**given, "model": str(other)})


def test_frozen_weights_are_equal_if_they_are_copied_from_other_ranks(tmp_path):
    """Between GPUs of one machine, FSDP copies large frozen weights instead of gathering them with
    NCCL (parallel/private.py)."""
    folder = make_folder("qwen3_moe", tmp_path)
    targets = "q_proj,experts.gate_up_proj"
    values = {**BASE, **ADAPTERS, "model": "auto", "weights": str(folder), "lora_targets": targets}
    cases = {"one": {**values, **LAYOUTS["fsdp"], "activation_checkpointing": "full"}}
    gathered = run_cases(cases, 2)["one"]
    copied = run_cases(cases, 2, function="train_with_shared_shards")["one"]
    assert_same_bits(copied, gathered)


def test_infinity_takes_frozen_weights_in_16_bits(tmp_path):
    """Infinity accepts frozen weights in bf16 and rejects them in fp32. With fp32 on a CPU,
    DeepSpeed's results depended on whether it kept weights in files."""
    values = {"model": "gpt2", "strategy": "infinity", "checked": False, **ADAPTERS}
    assert plan_for(tmp_path, GPU_MACHINE, 2, precision="bf16", **values).config.lora_rank == 4
    with refused("precision='fp32'", "16 bits"):
        plan_for(tmp_path, GPU_MACHINE, 2, precision="fp32", **values)
