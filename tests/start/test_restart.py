"""Test that a run restarted by torchrun continues the same work on the remaining processes."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from distributed_training.checkpoint.resume import Meta
from distributed_training.plan.plan import PLAN_FILE, load_plan
from distributed_training.planner.make_plan import inherit_settings, make_plan
from distributed_training.planner.sort import as_typed
from distributed_training.predict.predict import local_cluster
from distributed_training.records.folder import META_FILE
from distributed_training.records.record import OWNER_FILE, write_json
from distributed_training.settings.config import KEYS, with_values
from distributed_training.settings.request import build_config
from distributed_training.start import run_dir
from distributed_training.start.launched import continue_run
from distributed_training.start.run_dir import plan_restart, reserve_run_dir, write_plan
from distributed_training.supervise import claims
from tests.planner.helpers import merged
from tests.settings.test_config import OTHER
from tests.support import CPU_MACHINE, edit_json, refused, start_test_record

RUN_ID = "TORCHELASTIC_RUN_ID"


def build_plan(config, num_processes):
    return make_plan(config, local_cluster(CPU_MACHINE, num_processes, 1))


def test_restarting_continues_the_unfinished_run_of_the_same_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv(RUN_ID, "job-7")
    work = {"model": "gpt2-tiny", "strategy": "dp", "dataset": "embedded", "num_samples": 40}
    requested = build_config({**work, "output_dir": str(tmp_path)})
    assert continue_run(requested) == (requested, [])
    run_dir = reserve_run_dir(build_plan(requested, 2)).run_dir.resolve()
    # Whatever lies in output_dir must not end the start.
    for number, text in enumerate(("", "[]", "null", "{", json.dumps({"run_id": ["job-7"]}))):
        (tmp_path / f"other-{number}").mkdir()
        (tmp_path / f"other-{number}" / "plan.json").write_text(text)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "plan.json")
    saved = save(load_plan(run_dir), 7)
    shutil.copytree(run_dir, run_dir.with_name(f"{run_dir.name}-copy"))
    config, notes = continue_run(requested)
    assert config == requested.model_copy(update={"resume": str(saved)})
    assert notes == ["the run was restarted from step-00000007"]
    for run_id in ("job-8", "none"):
        monkeypatch.setenv(RUN_ID, run_id)
        assert continue_run(requested) == (requested, [])
    monkeypatch.setenv(RUN_ID, "job-7")
    start_test_record(run_dir).update(status="ok")
    assert continue_run(requested) == (requested, [])


def test_a_job_waits_for_ranks_that_slurm_has_lost(tmp_path, monkeypatch):
    """A job that SLURM started again continues from what the old ranks save before they end."""
    config = merged({"model": "gpt2-tiny", "dataset": "embedded", "output_dir": str(tmp_path)})
    plan = reserve_run_dir(build_plan(config, 1))
    resumed = build_plan(config.model_copy(update={"resume": "auto"}), 1)

    def save_work(step):
        changes = {"work": plan.work, "spread": plan.layout_fingerprint}
        edit_json(save(plan, step) / META_FILE, **changes)

    def end_old_ranks(_):
        save_work(5)
        for fd in Path("/proc/self/fd").iterdir():
            if fd.exists() and fd.readlink().name == OWNER_FILE:
                os.close(int(fd.name))

    save_work(2)
    with refused(str(plan.run_dir), "still in use"):
        reserve_run_dir(resumed)
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setattr(claims.time, "sleep", end_old_ranks)
    resumed = reserve_run_dir(resumed)
    assert (resumed.run_dir, resumed.checkpoint.name) == (plan.run_dir, "step-00000005")
    claims.check(plan.run_dir, resumed.run_id)


def test_a_skipped_checkpoint_is_not_resumed(tmp_path):
    """A run that resumed from the older of two checkpoints is restarted, both before and after a
    save. The newer checkpoint must not be used."""
    first = SimpleNamespace(run_dir=tmp_path, checkpoint=None, attempt_id="first")
    older, newer = save(first, 2), save(first, 5)
    plan = SimpleNamespace(run_dir=tmp_path, checkpoint=older, attempt_id="second")
    os.utime(newer, (1e10, 1e10))  # clocks do not decide
    assert plan_restart(plan) == (older, "the run was restarted from step-00000002")
    saved = save(plan, 3)
    os.utime(saved, (1, 1))
    (tmp_path / "checkpoints/step-00000009").mkdir()
    assert plan_restart(plan)[0] == saved


def save(plan, step):
    """Write a checkpoint's meta.json, and return the checkpoint."""
    folder = plan.run_dir / f"checkpoints/step-0000000{step}"
    folder.mkdir(parents=True)
    values = {"work": {}, "spread": {}, "counters": {}, "files": {}, "checksums": {}}
    meta = Meta(step=step, attempt_id=plan.attempt_id, **values)
    write_json(folder / META_FILE, meta.model_dump())
    return folder


@pytest.fixture
def saved_plan(tmp_path):
    """Return the plan of a local SGD run on four processes that has saved a checkpoint."""
    own = ("strategy=local_sgd", "local_steps=3", "seed=7", "batch_size=2", "max_length=128")
    config = {"model": "gpt2-tiny", "dataset": "embedded", "output_dir": str(tmp_path)}
    kept = ("hang_timeout_s=50", "checkpoint_every=signal", "keep_checkpoints=9")
    plan = reserve_run_dir(build_plan(merged(config, *own, *kept), 4))
    save(plan, 7)
    return plan


def resume(saved_plan, *typed, count=4, **config):
    """Return the settings of a run on `count` processes that resumes the saved run, and notes."""
    notes = []
    requested = merged(config, f"resume={saved_plan.run_dir}", *typed)
    return inherit_settings(requested, count, notes), notes


@pytest.mark.parametrize("repeated", [[], ["batch_size=2"]], ids=str)
@pytest.mark.parametrize(("count", "batch"), [(4, (2, 1)), (2, (2, 2)), (8, (1, 1))])
def test_resuming_a_named_run_keeps_its_work(count, batch, repeated, saved_plan):
    """A printed command repeats the options of the first run. With a different number of
    processes, the repeated batch size must not change the global batch."""
    shipped = {"strategy": "auto", "seed": 42, "batch_size": 4, "max_length": 512, "model": "auto"}
    file = saved_plan.run_dir / PLAN_FILE
    edit_json(file, requested__date="2024-02-29")  # for chat templates that render the date
    config, notes = resume(saved_plan, *repeated, count=count, **shipped)
    assert config.date == "2024-02-29"
    plan = build_plan(config.model_copy(update={"resume": None}), count)
    assert plan.work == saved_plan.work
    assert (plan.strategy.name, plan.engine_options["local_steps"]) == ("local_sgd", 3)
    assert (config.batch_size, config.grad_accum_steps) == batch
    for text in ("strategy='local_sgd'", "model='gpt2-tiny'", "seed=7", "keep_checkpoints=9"):
        assert text in notes[0]
    assert ("the global batch stays 8" in notes[-1]) is (count != 4)


def test_resume_auto_keeps_the_date_that_templates_rendered(saved_plan, monkeypatch):
    """The planned tokens have today's date, so the ranks read the data again (trl#5138)."""
    edit_json(saved_plan.run_dir / PLAN_FILE, requested__date="2024-02-29")
    checkpoint = saved_plan.run_dir / "checkpoints/step-00000007"
    monkeypatch.setattr(run_dir.resume, "choose_checkpoint", lambda plan, notes: checkpoint)
    monkeypatch.setattr(run_dir.claims, "claim", lambda folder, run_id: None)
    today = saved_plan.requested.date
    for fingerprint, date, cache in (("today's", today, "a"), ("earlier", "2024-02-29", None)):
        meta = SimpleNamespace(data_fingerprint=fingerprint)
        monkeypatch.setattr(run_dir.resume, "read_meta", lambda folder, meta=meta: meta)
        plan = reserve_run_dir(replace(saved_plan, data_fingerprint="today's", cache="a"))
        assert (plan.requested.date, plan.cache) == (date, cache)
        edit_json(saved_plan.run_dir / PLAN_FILE, requested__date="2024-02-29")


def test_a_typed_batch_size_is_kept(saved_plan):
    assert resume(saved_plan, "batch_size=4", count=8)[0].batch_size == 4
    plan = build_plan(merged({}, f"resume={saved_plan.run_dir}", "batch_size=2"), 8)
    assert (plan.config.batch_size, plan.requested.batch_size) == (1, 2)  # for the next resume


def with_setting(plan, key, value):
    """Return the plan after a run with `key` set to `value`, and write it to the run's folder."""
    config = with_values(plan.config, **{key: value})
    requested = as_typed(plan.requested, **{key: value})
    plan = replace(plan, config=config, requested=requested)
    write_plan(plan)
    return plan


def test_resuming_a_named_run_inherits_every_key(saved_plan):
    for key in KEYS.keys() - {"strategy", "batch_size", "grad_accum_steps", "output_dir", "resume"}:
        with_setting(saved_plan, key, OTHER[key])
        config, notes = resume(saved_plan)
        assert getattr(config, key) == OTHER[key]
        assert f"{key}={OTHER[key]!r}" in notes[0]
        assert config.is_set(key)


@pytest.mark.parametrize("key", ["dp_replicate", "checkpointed_blocks"])
@pytest.mark.parametrize(("count", "strategy"), [(2, "local_sgd"), (4, "fsdp")])
def test_settings_of_another_layout_are_named_and_not_inherited(count, strategy, key, saved_plan):
    with_setting(saved_plan, key, 4)
    config, notes = resume(saved_plan, f"strategy={strategy}", count=count)
    assert getattr(config, key) is None
    assert key in notes[1]
    assert key not in notes[0]


@pytest.mark.parametrize("typed", [{"seed": 8}, {"local_steps": 4}], ids=str)
def test_typed_values_override_those_of_the_saved_run(typed, saved_plan):
    """Values that the user sets in CONFIG or on the command line replace the saved run's values."""
    own = "strategy=local_sgd"
    more = [f"{name}={value}" for name, value in typed.items()]
    for config, notes in (
        resume(saved_plan, own, strategy="local_sgd", **typed),
        resume(saved_plan, own, *more, strategy="local_sgd"),
    ):
        plan = build_plan(config.model_copy(update={"resume": None}), 4)
        assert plan.work == saved_plan.work | typed
        assert not any(name in " ".join(notes) for name in typed)


def test_a_typed_strategy_drops_the_keys_of_the_saved_one(saved_plan):
    config, _ = resume(saved_plan, "strategy=fsdp")
    assert (config.strategy, config.seed, config.engine_options) == ("fsdp", 7, {})
    with refused("3 processes", "8"):
        resume(saved_plan, count=3)
