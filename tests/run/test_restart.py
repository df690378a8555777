"""What torchrun starts again goes on with the same work, on as many processes as there are."""

import os
from dataclasses import replace

import pytest

from distributed_training.run.prepare import go_on, make_plan, reserve_run_dir
from distributed_training.run.saving.resume import last_of_run
from distributed_training.settings.config import build_config
from tests.support import CPU_MACHINE, refused

AGENTS = ["a 100 1.5", "b 7 2.5"]


def config_for(output_dir, **values):
    about = {"model": "gpt2-tiny", "strategy": "dp", "dataset": "embedded", "num_samples": 40}
    return build_config({**about, "output_dir": str(output_dir), **values})


def planned(config, num_processes):
    return make_plan(config, CPU_MACHINE, num_processes=num_processes, processes_here=1)


@pytest.fixture
def begun(tmp_path):
    def begin(num_processes, launchers=AGENTS, **values):
        plan = planned(config_for(tmp_path, **values), num_processes)
        return reserve_run_dir(replace(plan, launchers=launchers))

    return begin


@pytest.mark.parametrize("batch", [(4, 1), (3, 2), (1, 4)], ids=str)
def test_the_global_batch_stays(batch, begun, tmp_path):
    values = {"batch_size": batch[0], "grad_accum_steps": batch[1]}
    before = begun(4, **values)
    for count in (1, 2, 3, 4, 6):
        each, odd = divmod(before.batch.global_batch_size, count)
        if odd:
            with refused(f"{count} processes cannot share the global batch"):
                go_on(config_for(tmp_path, **values), AGENTS[:1], count)
            continue
        config, (note,) = go_on(config_for(tmp_path, **values), AGENTS[:1], count)
        after = planned(config, count)
        assert after.work == before.work
        assert config.batch_size <= batch[0]
        assert config.batch_size * config.grad_accum_steps == each
        assert ("global batch stays" in note) is (count != 4)
        assert "from the beginning" in note


def test_a_batch_that_was_left_to_the_planner_stays(begun, tmp_path):
    before = begun(2, batch_size="auto", strategy="auto")
    config, _ = go_on(config_for(tmp_path, batch_size="auto", strategy="auto"), AGENTS, 1)
    assert planned(config, 1).work == before.work


def test_it_is_the_run_of_these_launchers(begun, tmp_path):
    asked = config_for(tmp_path)
    assert go_on(asked, AGENTS, 2) == (asked, [])
    older, _ = begun(2), begun(2, launchers=["a 100 9.5"])
    (older.run_dir / "checkpoints/step-00000007").mkdir(parents=True)
    assert go_on(asked, ["a 101 1.5"], 2) == go_on(asked, [], 2) == (asked, [])
    config, notes = go_on(asked, AGENTS[1:], 2)
    saved = older.run_dir.resolve() / "checkpoints/step-00000007"
    assert config == asked.model_copy(update={"resume": str(saved)})
    assert notes == ["started again, from step-00000007"]


def test_what_was_passed_over_is_not_gone_on_from(tmp_path):
    """Resumed from the older of two checkpoints, and started again before and after a save."""
    older, newer = (tmp_path / "checkpoints" / f"step-0000000{step}" for step in (2, 5))
    older.mkdir(parents=True)
    newer.mkdir()
    (tmp_path / "plan.json").touch()
    for folder in (older, newer):
        os.utime(folder, (1, 1))
    assert last_of_run(tmp_path, older) == older
    newer.rmdir()
    saved = tmp_path / "checkpoints/step-00000003"
    saved.mkdir()
    assert last_of_run(tmp_path, older) == saved
    assert last_of_run(tmp_path, None) == saved
