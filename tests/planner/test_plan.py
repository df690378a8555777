"""Test the contents and the JSON form of plans. Also test that any CONFIG on any machine gives a
plan or an error."""

import dataclasses
import json
import math
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distributed_training.models.gpt2 import SIZES
from distributed_training.plan.plan import FORMAT, PLAN_AS_JSON, PLAN_FILE, load_plan
from distributed_training.planner import checks
from distributed_training.planner.make_plan import make_plan
from distributed_training.predict.predict import local_cluster
from distributed_training.settings.config import KEYS
from distributed_training.settings.errors import UserError
from distributed_training.settings.request import build_config, load_preset
from distributed_training.start.run_dir import reserve_run_dir
from real_model_example import CONFIG
from tests.planner.helpers import NAMES, SPLIT, UNSPLIT, plan_for
from tests.settings.test_config import OTHER
from tests.support import CPU_MACHINE, GPU_MACHINE, named_strategy, refused

GIB = 2**30
TEXT = "\n".join(f"line {number} of a text that is not very long" for number in range(400))


@pytest.fixture(scope="module", autouse=True)
def _no_extensions_of_this_machine(tmp_path_factory):
    """Hide this machine's extensions and pretend that libaio is installed. Calling the compiler in
    each example would take most of the time."""
    patch = pytest.MonkeyPatch()
    patch.setattr(checks, "has_libaio", lambda: True)
    patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("extensions")))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """Return a folder with a text file, DeepSpeed configuration files and a file that is not valid
    JSON."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "text.txt").write_text(TEXT)
    (folder / "file").write_text("{")
    for name in ("zero1", "zero2", "zero3"):
        document = {**named_strategy(name).document, "gradient_clipping": 1.0}
        (folder / f"{name}.json").write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize(
    ("machine", "num_processes"), [(CPU_MACHINE, 2), (GPU_MACHINE, 2), (GPU_MACHINE, 4)]
)
def test_every_strategy_plans_the_shipped_config(machine, num_processes, tmp_path):
    """All strategies plan the same training: the same model, data, optimizer and global batch size.
    On two processes, only 3d needs a mesh other than its default."""
    works = []
    for name in NAMES:
        axes = {"tp": 1} if name == "3d" and num_processes == 2 else {}
        config = {**CONFIG, "output_dir": str(tmp_path), **axes, "strategy": name}
        plan = plan_for(tmp_path, machine, num_processes, **config)
        check_identities(plan, num_processes)
        works.append(plan.work)
    assert works == [works[0]] * len(works)
    assert works[0]["global_batch_size"] == CONFIG["batch_size"] * num_processes


def check_identities(plan, num_processes):
    batch = plan.batch
    divided_size = batch.micro_batch_size * batch.num_microbatches * batch.num_replicas
    requested_size = plan.config.batch_size * plan.config.grad_accum_steps * num_processes
    assert (
        batch.global_batch_size == plan.work["global_batch_size"] == divided_size == requested_size
    )
    assert math.prod(plan.mesh.values()) == num_processes
    assert PLAN_AS_JSON.validate_json(PLAN_AS_JSON.dump_json(plan)) == plan


@pytest.mark.parametrize("format_", [None, 0, FORMAT + 1])
def test_a_plan_in_another_format_is_refused(format_, tmp_path):
    document = json.loads(PLAN_AS_JSON.dump_json(plan_for(tmp_path, strategy="dp")))
    (tmp_path / PLAN_FILE).write_text(json.dumps(document | {"format": format_}))
    with refused(str(tmp_path / PLAN_FILE), str(format_), str(FORMAT)):
        load_plan(tmp_path)


@pytest.mark.parametrize(("offload_dir", "expected"), [(None, "runs/.offload"), ("~/fast", "fast")])
def test_infinitys_files_are_in_the_configured_folder(offload_dir, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    plan = plan_for(tmp_path, strategy="infinity", output_dir="~/runs", offload_dir=offload_dir)
    assert plan.run_dir.parent == tmp_path / "runs"
    assert plan.offload_dir.parent == tmp_path / expected
    zero = plan.deepspeed_json["zero_optimization"]
    paths = {zero[part]["nvme_path"] for part in ("offload_param", "offload_optimizer")}
    assert paths == {str(plan.offload_dir)}


machines = st.just(CPU_MACHINE) | st.builds(
    lambda count, memory, capability, ram: dataclasses.replace(
        GPU_MACHINE,
        num_gpus=count,
        gpu_memory_bytes=memory * GIB,
        compute_capability=capability,
        ram_bytes=ram * GIB,
    ),
    st.sampled_from([1, 4, 8]),
    st.sampled_from([4, 11, 16, 24, 80, 139]),
    st.sampled_from([(6, 1), (7, 0), (8, 0), (9, 0)]),
    st.sampled_from([4, 64, 512]),
)
STRATEGIES = st.sampled_from([*UNSPLIT, *UNSPLIT, *UNSPLIT, *SPLIT, "zero", "ZeRO2"])
AXIS = st.sampled_from([None, None, None, None, 1, 2, 4, -1])
# Most keys have two values here: the default and another one. Keys that interact with other keys
# have more values.
OPTIONS = {
    name: st.sampled_from([key.default, OTHER[name], *key.choices])
    for name, key in KEYS.items()
    if name != "strategy"
} | {
    "model": st.sampled_from(["auto", *SIZES]),
    "batch_size": st.integers(1, 64),
    "micro_batch_size": st.just("auto") | st.integers(1, 8),
    "num_microbatches": st.just("auto") | st.integers(1, 8),
    "max_length": st.integers(2, 1024) | st.integers(2, 4096),
    "grad_accum_steps": st.integers(1, 64),
    "deepspeed_config": st.sampled_from([None] * 9 + ["zero1.json", "zero3.json", "file", "no"]),
    "dataset": st.sampled_from(["auto", "embedded", "wikitext-2", "text.txt", "no.txt"]),
    "tokenizer": st.sampled_from(["auto", "auto", "embedded", "gpt2", "missing", "file", "."]),
    "weights": st.sampled_from(["auto", "auto", "random", "pretrained", "missing", "file", "."]),
    **dict.fromkeys(("dp_replicate", "dp_shard", "tp", "pp"), AXIS),
    "pipeline_cut": st.sampled_from([None, None, None, "1,1", "2,1", "x", "12"]),
    "output_dir": st.sampled_from(["out", "out", "out", "a/b", "file", "file/x"]),
    "offload_dir": st.sampled_from([None, None, "fast", "file", "file/x"]),
    "resume": st.sampled_from([None, None, None, "auto", "missing", "file", "."]),
}
PATHS = (
    "deepspeed_config", "dataset", "validation_dataset", "tokenizer", "weights", "output_dir",
    "offload_dir", "resume",
)  # fmt: skip
WORDS = (None, "auto", "embedded", "gpt2", "wikitext-2", "random", "pretrained")


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.fixed_dictionaries({"strategy": STRATEGIES}, optional=OPTIONS),
    machines,
    st.sampled_from([1, 2, 3, 4, 8]),
)
def test_any_config_on_any_machine_gives_a_plan_or_a_clear_error(
    scratch, config, machine, num_processes
):
    config = {"output_dir": "out", **config}
    for key in PATHS:
        if config.get(key) not in WORDS:
            config[key] = str(scratch / config[key])
    try:
        plan = make_plan(build_config(config), local_cluster(machine, num_processes, num_processes))
    except UserError as error:
        text = str(error)
        assert text.splitlines() == [text]
        assert len(text) > 20
        return
    values = plan.config.to_key_values()
    # These keys are a path, a prompt, and values that depend on the data (test_make.py).
    kept_auto = {"resume", "generate", "pack"}
    assert [key for key in values if values[key] == "auto" and key not in kept_auto] == []
    assert plan.config.compile in (True, False)
    assert isinstance(plan.config.learning_rate, float)
    assert plan.config.max_length <= plan.size.num_positions
    requested = plan.requested.to_key_values()
    decided = {key for key in values if requested[key] not in ("auto", values[key])}
    # Without a GPU, model=auto is gpt2-tiny, or the preset's model if the dataset is the user's
    # text.
    assert decided <= {"eval_samples", *load_preset("words")}
    if plan.strategy.name == "infinity":
        assert plan.offload_dir.name.startswith(plan.run_dir.name)
        assert machine.num_gpus or values["model"].startswith("gpt2-tiny")
    else:
        assert plan.offload_dir is None
    check_identities(plan, num_processes)
    blocks = [block for stage in plan.stages.block_ranges for block in stage]
    assert blocks == list(range(plan.size.num_layers))
    assert num_processes <= (machine.num_gpus or num_processes)
    assert '"auto"' not in json.dumps(plan.deepspeed_json)
    assert not plan.run_dir.exists()


def test_runs_started_in_the_same_second_have_separate_folders(tmp_path):
    plans = [plan_for(tmp_path, strategy="infinity") for _ in range(2)]
    plans[1] = dataclasses.replace(plans[1], run_dir=plans[0].run_dir)
    first, second = map(reserve_run_dir, plans)
    assert re.fullmatch(r"\d{8}-\d{6}-infinity-gpt2-tiny-x\d", first.run_dir.name)
    assert second.run_dir.name == f"{first.run_dir.name}-2"
    assert first.offload_dir != second.offload_dir


def test_a_damaged_plan_is_named_without_the_class_of_an_error(tmp_path):
    (tmp_path / PLAN_FILE).touch()
    with pytest.raises(UserError, match=PLAN_FILE) as error:
        load_plan(tmp_path)
    assert "Error" not in str(error.value)
