"""Compare LoRA training with PEFT and with a plain loop, and test exporting adapters.
test_layouts.py tests adapters under more layouts."""

import json
import shutil
from pathlib import Path

import peft as library
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from distributed_training.checkpoint.trained import open_trained_folder
from distributed_training.data.samples import IGNORE_INDEX
from distributed_training.data.tokenizer import EMBEDDED_DIR
from distributed_training.models import HUB_PREFIX, find_model, peft
from distributed_training.models.peft import PREFIX, to_peft
from distributed_training.parallel.lora import Adapter, apply_lora
from distributed_training.settings.config import RunConfig
from tests.conftest import only_record
from tests.models.hub_folders import make_folder
from tests.parity import reference as plain
from tests.parity.support import BASE, mesh, micro_batches, run_cases
from tests.parity.test_reference import SETTINGS, assert_follows, folder, load, run
from tests.planner.helpers import plan_for
from tests.support import GPU_MACHINE, fingerprint, read_model, refused

__all__ = ["folder"]
ADAPTERS = {"lora_rank": 4, "lora_alpha": 8.0}
SCALE = 2.0
CPU = torch.device("cpu")


class Adapted(torch.nn.Module):
    """GPT-2 model from Hugging Face with the matrices `W + SCALE * (B @ A).T`, where W is
    frozen."""

    def __init__(self, model, initial):
        super().__init__()
        self.model = [model]  # in a list, so that its parameters are not registered here
        self.names = [name.removeprefix(PREFIX) for name in initial]
        self.values = torch.nn.ParameterList(initial.values())

    def forward(self, ids):
        trained = dict(zip(self.names, self.values, strict=True))
        weights = {}
        for name, a in trained.items():
            if ".lora_A." in name:
                b = trained[name.replace("lora_A", "lora_B")]
                matrix = name.replace(".lora_A", "")
                weights[matrix] = self.model[0].get_parameter(matrix).detach() + SCALE * (b @ a).T
        return torch.func.functional_call(self.model[0], weights, ids)


def draw(spec):
    """Return our model with a run's initial adapters, and copies of these adapters under PEFT's
    names."""
    config = RunConfig(seed=SETTINGS.seed, **ADAPTERS)
    model = read_model(spec, spec.weights_dir)
    apply_lora(model, spec, config, torch.device("cpu"), {})
    state = to_peft(model.state_dict(), spec, config)
    return model, {name: each.clone() for name, each in state.items()}


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """Return the run folder and the results of a LoRA run."""
    runs = tmp_path_factory.mktemp("runs")
    found = run(folder, runs, strategy="dp", checkpoint_every=None, **ADAPTERS)
    return Path(only_record(runs)["run_dir"]), found


def test_adapters_train_as_in_a_plain_loop(folder, trained):
    base, *records = load(folder)
    adapted = Adapted(base, draw(find_model(str(folder / "model")))[1])
    expected = plain.train(adapted, *records, SETTINGS)
    names = [f"{PREFIX}{name}" for name in adapted.names]
    state = dict(zip(names, adapted.values, strict=True))
    assert_follows(trained[1], {**expected, "state": state})


def test_initial_adapters_do_not_change_the_base(folder):
    for name, values in draw(find_model(str(folder / "model")))[1].items():
        if "lora_B" in name:
            assert not values.any()
        else:  # Kaiming uniform initialization, as in PEFT
            limit = values.shape[1] ** -0.5
            assert 0.9 * limit < values.abs().max() <= limit, name


def test_initial_adapters_depend_only_on_the_names_in_transformers(tmp_path):
    make_folder("qwen3", tmp_path)
    native, hub = (draw(find_model(f"{prefix}{tmp_path}"))[1] for prefix in ("", HUB_PREFIX))
    assert native.keys() == hub.keys()
    for name, values in native.items():
        assert torch.equal(values, hub[name]), name


def test_dropout_acts_on_the_inputs_and_only_in_training():
    torch.manual_seed(0)
    a, b, x = torch.randn(3, 8), torch.randn(5, 3), torch.randn(8).expand(20_000, 1, 8)
    config = RunConfig(lora_rank=3, lora_alpha=6.0, lora_dropout=0.25)
    adapter = Adapter(a, b, config)
    y = torch.ones(20_000, 1, 5)
    exact = 1 + 2.0 * (x @ a.T @ b.T)
    found = adapter(x, y)
    assert len(found.unique(dim=0)) > 200  # of the 256 masks
    torch.testing.assert_close(found.mean(0), exact[0], rtol=0, atol=0.2)
    torch.testing.assert_close(adapter.eval()(x, y), exact)


def assert_exports_agree(adapters, merged, vocab_size):
    """Check that PEFT's model with the adapters gives the same logits as the model in `merged`."""
    base = json.loads((adapters / "adapter_config.json").read_text())["base_model_name_or_path"]
    ids = torch.randint(0, vocab_size, (2, 32))
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    before = model(ids).logits
    found = library.PeftModel.from_pretrained(model, adapters).eval()(ids).logits
    expected = AutoModelForCausalLM.from_pretrained(merged).eval()(ids).logits
    assert (before - expected).norm() > 1e-2 * expected.norm()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_peft_loads_the_exported_adapters(trained, tmp_path):
    from distributed_training.tools.models import export_checkpoint, find_trained

    run_dir, _ = trained
    export_checkpoint(str(run_dir), str(tmp_path / "merged"), merge=True)
    assert_exports_agree(run_dir / "hf", tmp_path / "merged", 2000)
    ids = torch.randint(0, 2000, (2, 32))
    found = [find_trained(str(path), "hf")[0] for path in (run_dir / "hf", tmp_path / "merged")]
    torch.testing.assert_close(*(each.load(CPU)(ids) for each in found), rtol=1e-4, atol=1e-5)


def test_fused_llama_matrices_are_exported_as_separate_peft_modules(tmp_path):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape, **heads)).save_pretrained(tmp_path / "m")
    spec = find_model(str(tmp_path / "m"))
    model, _ = draw(spec)
    for name, values in model.named_parameters():
        if name.endswith("adapter.b"):
            values.data.normal_()
    folder = tmp_path / "adapters"
    adapters = peft.Adapters(
        spec=spec, tensors=model.state_dict(), config=RunConfig(**ADAPTERS), origin="",
        base_fingerprint=str(fingerprint(spec, tmp_path / "m")),
    )  # fmt: skip
    peft.save_adapters(adapters, folder, str(tmp_path / "m"))
    trained = open_trained_folder(spec, folder, tmp_path / "m")
    ids = torch.randint(0, 256, (2, 32))
    torch.testing.assert_close(trained.load(CPU)(ids), model(ids), rtol=1e-4, atol=1e-4)
    trained.save(tmp_path / "merged", eos_token_id=0, dtype=torch.float32)
    assert len(load_file(folder / "adapter_model.safetensors")) == 2 * 2 * 7
    assert_exports_agree(folder, tmp_path / "merged", 256)
    changed = open_trained_folder(spec, folder, tmp_path / "merged")
    with pytest.raises(Exception, match="other weights"):
        changed.load(CPU)
    with pytest.raises(Exception, match="other weights"):
        changed.save(tmp_path / "twice", eos_token_id=0, dtype=torch.float32)


def made_by_peft(folder, kind="llama", **options):
    """Save a tiny model, and PEFT adapters for it with random values. Return both folders."""
    # Under tp=2, each process has a whole number of units of 16 rows.
    make_folder(kind, folder / "base", **({} if kind == "gpt2" else {"intermediate_size": 64}))
    targets = ["q_proj", "v_proj", "gate_proj", "o_proj"]
    settings = {"r": 4, "lora_alpha": 12, "target_modules": targets, **options}
    adapted = library.get_peft_model(load_base(folder / "base"), library.LoraConfig(**settings))
    for name, values in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(values, std=0.1)
    adapted.save_pretrained(folder / "adapters")
    return folder / "base", folder / "adapters"


def load_base(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def peft_model(base, adapters):
    """Load PEFT's model so that its adapters can be trained."""
    return library.PeftModel.from_pretrained(load_base(base), adapters, is_trainable=True)


def trained_values(model):
    """Return the values of PEFT's adapters, keyed by their names in a file."""
    return {
        name.replace(".default", ""): values.detach()
        for name, values in model.named_parameters()
        if values.requires_grad
    }


HUB_KIND = "gemma2"  # runs transformers' code, which is not split over processes
# Kind of model -> targets of adapters. GPT-2 has one fused matrix for q, k and v.
ALL = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
SEPARATE = {"all": ALL, "qv": "q_proj,v_proj", "gate": "gate_proj"}
TARGETS = {
    "gpt2": {"all": "c_attn,attn.c_proj,c_fc,mlp.c_proj", "qv": "c_attn", "gate": "c_fc"},
    "llama": SEPARATE, "qwen2": SEPARATE, "qwen3": SEPARATE, HUB_KIND: SEPARATE,
}  # fmt: skip
LAYOUTS = {
    "dp": {"strategy": "dp", **micro_batches(2)},
    "fsdp": {"strategy": "fsdp", **micro_batches(1)},
    "tp": {**mesh(tp=2), **micro_batches(1)},
    "pp": {**mesh(pp=2), **micro_batches(2)},
    "zero3": {"strategy": "zero3", **micro_batches(2)},
}
UNSPLIT = {name: LAYOUTS[name] for name in ("dp", "fsdp", "zero3")}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Return {"kind targets layout": (results of our run, (model, PEFT's values before and after
    five steps))}. Each layout has two processes. Batches and initial values are equal."""
    cases, peft_values = {}, {}
    for kind, named_targets in TARGETS.items():
        for name, targets in named_targets.items():
            folder = tmp_path_factory.mktemp("peft")
            base, adapters = made_by_peft(folder, kind, target_modules=targets.split(","))
            values = {
                **BASE, "model": "auto", "weights": str(adapters), "pack": False,
                "learning_rate": 1e-2, "lr_schedule": "constant", "warmup_steps": 0,
            }  # fmt: skip
            for layout, keys in (UNSPLIT if kind == HUB_KIND else LAYOUTS).items():
                cases[f"{kind} {name} {layout}"] = {**values, **keys}
            one = {"one": {**values, "strategy": "dp", **micro_batches(1)}}
            steps = run_cases(one, 1, steps=5, function="batches")["one"]
            spec = find_model(str(base))
            peft_values[kind, name] = (spec, *train_with_peft(peft_model(base, adapters), steps))
    found = run_cases(cases, 2, steps=5)
    return {name: (found[name], peft_values[tuple(name.split()[:2])]) for name in cases}


def train_with_peft(model, steps):
    """Train PEFT's adapters with AdamW. Return their values before and after."""
    before = {name: values.clone() for name, values in trained_values(model).items()}
    parameters = [values for values in model.parameters() if values.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.01)
    for ((ids, targets, *_),) in steps:
        logits = model(torch.as_tensor(ids)).logits
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.as_tensor(targets).flatten(), ignore_index=IGNORE_INDEX
        ).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    return before, trained_values(model)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(kind, layout) for kind in TARGETS for layout in (UNSPLIT if kind == HUB_KIND else LAYOUTS)],
)
def test_every_adapter_trains_as_in_peft(kind, layout, compared):
    for name, targets in TARGETS[kind].items():
        found, (spec, before, expected) = compared[f"{kind} {name} {layout}"]
        config = RunConfig(lora_rank=4, lora_targets=targets)
        adapters = to_peft(found["state"], spec, config)
        assert adapters.keys() == expected.keys()
        num_trained = sum(values.numel() for values in expected.values())
        assert sum(values.numel() for values in found["state"].values()) == num_trained
        assert spec.size.num_trained_parameters(4, targets) == num_trained
        for key, values in expected.items():
            assert (values - before[key]).norm() > 0.05 * values.norm(), key
            error = (adapters[key] - values).norm() / values.norm()
            assert error <= 1e-5, f"{name}: {key} differs by {error:.1e}"


def continued(spec, base, adapters):
    """Load our model and PEFT's adapters for further training. Return the model and the RunConfig
    that matches the adapters."""
    initial = peft.read_folder(spec, adapters)
    model = read_model(spec, base)
    apply_lora(model, spec, initial.config, torch.device("cpu"), initial.tensors)
    return model, initial.config


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}])
def test_training_continues_adapters_as_peft_does(options, tmp_path):
    base, adapters = made_by_peft(tmp_path, **options)
    spec = find_model(str(base))
    model, config = continued(spec, base, adapters)
    parts = ["mlp.gate_proj", *(f"self_attn.{name}_proj" for name in "oqv")]
    assert config.lora_rank == 4
    assert sorted(config.lora_targets.split(",")) == parts
    theirs = peft_model(base, adapters)
    ids = torch.randint(0, 256, (2, 32))
    before = theirs(ids).logits.detach()
    torch.testing.assert_close(model(ids), before, rtol=1e-4, atol=1e-5)
    for one, logits in ((model, model), (theirs, lambda ids: theirs(ids).logits)):
        learning = [values for values in one.parameters() if values.requires_grad]
        optimizer = torch.optim.AdamW(learning, lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits(ids).flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
    after = theirs(ids).logits
    assert (after - before).norm() > 0.1 * before.norm()
    torch.testing.assert_close(model(ids), after, rtol=1e-3, atol=1e-4)
    ours = peft.Adapters(
        spec=spec, tensors=model.state_dict(), config=config, base_fingerprint="0", origin=""
    )
    peft.save_adapters(ours, tmp_path / "ours", str(base))
    written = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert (written["r"], written["target_modules"]) == (4, parts)
    again = peft_model(base, tmp_path / "ours")
    torch.testing.assert_close(again(ids).logits, after, rtol=1e-3, atol=1e-4)
    assert trained_values(again).keys() == trained_values(theirs).keys()


def test_unsupported_adapters_are_refused(tmp_path):
    base, adapters = made_by_peft(tmp_path)
    file = adapters / "adapter_config.json"
    document = json.loads(file.read_text())
    for key, value, words in (
        ("init_lora_weights", "pissa", "gaussian"),
        ("init_lora_weights", "olora", "gaussian"),
        ("init_lora_weights", "corda", "gaussian"),
        ("init_lora_weights", "loftq", "gaussian"),
        ("use_dora", True, "plain LoRA"),
        ("rank_pattern", {"q_proj": 8}, "plain LoRA"),
        ("modules_to_save", ["lm_head"], "plain LoRA"),
        ("layer_replication", [[0, 2], [1, 2]], "plain LoRA"),
        ("bias", "all", "plain LoRA"),
        ("peft_type", "IA3", "plain LoRA"),
        ("lora_alpha", "12", "plain LoRA"),
    ):
        file.write_text(json.dumps({**document, key: value}))
        with refused(key, words):
            peft.read_folder(find_model(str(base)), adapters)
    with refused(str(adapters), "weights"):
        find_model(str(adapters))


def test_a_plan_can_continue_adapters(tmp_path):
    base, adapters = made_by_peft(tmp_path)
    given = {"weights": str(adapters), "dataset": "embedded", "max_length": 64}
    with refused(str(base), "tokenizer"):
        plan_for(tmp_path, num_processes=1, strategy="dp", model="auto", **given)
    shutil.copytree(EMBEDDED_DIR, adapters, dirs_exist_ok=True)
    for typed in ({"lora_rank": 16}, {"lora_alpha": 3.0}, {"lora_targets": "q_proj"}):
        with refused(next(iter(typed)), str(adapters)):
            plan_for(tmp_path, num_processes=1, strategy="dp", model="auto", **given, **typed)
    draft = plan_for(tmp_path, num_processes=1, strategy="dp", model="auto", checked=False, **given)
    assert (draft.config.model, draft.config.lora_rank) == (str(base), 4)
    other = tmp_path / "other"
    shutil.copytree(base, other)
    with refused(str(adapters), str(base)):
        plan_for(tmp_path, num_processes=1, strategy="dp", model=str(other), **given)


def test_a_run_continues_from_exported_adapters(folder, trained, tmp_path):
    run_dir, before = trained
    words = {"strategy": "dp", "weights": run_dir / "hf", "max_steps": 1}
    found = run(folder, tmp_path, 1, **words)
    assert found["evaluations"][0] == pytest.approx(before["evaluations"][20], rel=1e-5)
    assert only_record(tmp_path)["config"]["lora_rank"] == 4


def test_infinity_takes_frozen_weights_in_16_bits(tmp_path):
    """Infinity accepts frozen weights in bf16 and rejects them in fp32. With fp32 on a CPU,
    DeepSpeed's results depended on whether it kept weights in files."""
    values = {"model": "gpt2", "strategy": "infinity", "checked": False, **ADAPTERS}
    assert plan_for(tmp_path, GPU_MACHINE, 2, precision="bf16", **values).config.lora_rank == 4
    with refused("precision='fp32'", "16 bits"):
        plan_for(tmp_path, GPU_MACHINE, 2, precision="fp32", **values)
