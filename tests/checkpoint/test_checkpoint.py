import fcntl
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from distributed_training.checkpoint import resume
from distributed_training.checkpoint import saver as saver_module
from distributed_training.checkpoint.resume import FORMAT, check_files, read_meta
from distributed_training.checkpoint.saver import Saver, load_checkpoint
from distributed_training.data.pieces import MESSAGES
from distributed_training.engines.base import Engine
from distributed_training.models import find_model
from distributed_training.parallel.mesh import Topology
from distributed_training.parallel.tensor_files import build_part
from distributed_training.records.folder import META_FILE, list_checkpoints, remove_unfinished
from distributed_training.records.record import write_json
from distributed_training.settings import files
from distributed_training.settings.config import Request
from distributed_training.settings.errors import FinishedError
from tests.support import edit_json, refused, save_now, start_test_record

WORK = {"model": "gpt2-tiny", "global_batch_size": 8, "seed": 42, "learning_rate": 3e-4}
SPREAD = {"strategy": "zero2", "num_processes": 1, "mesh": "dp_shard 1"}
TOPOLOGY = Topology(
    world_size=1, rank=0, local_rank=0, dp_replicate=1, dp_shard=1, device_type="cpu"
)
RANK_0 = "rank-00000.safetensors"
pytestmark = pytest.mark.usefixtures("process_group")


class FakeEngine(Engine):
    """Engine whose state tensors are all filled with the same number."""

    # Saving and loading do not call these methods.
    train_step = eval_step = logits = full_state = None

    def __init__(self, value=0):
        self.state = torch.full((10, 4), float(value))

    @property
    def value(self):
        (value,) = self.state.unique().tolist()
        return value

    def state_parts(self):
        yield build_part("weight/w", self.state, (10, 4), (0, 0))

    def counters(self):
        return {"adam_steps": self.value}

    def load(self, saved, counters):
        for part in self.state_parts():
            part.get().copy_(saved.read(part))
        assert counters == self.counters()


def plan_of(run_dir, *, keep=10, work=WORK, spread=SPREAD):
    if run_dir is not None:  # the start of a run creates its folder
        run_dir.mkdir(parents=True, exist_ok=True)
    config = SimpleNamespace(keep_checkpoints=keep, seed=42)
    strategy = SimpleNamespace(name=spread["strategy"], swaps_to_disk=False, steps_on_host=False)
    return SimpleNamespace(
        config=config, requested=Request(), run_dir=run_dir, work=work, layout_fingerprint=spread,
        checkpoint=None, attempt_id="",
        processes_here=1, strategy=strategy, notes=[], has_node_local_files=False,
        data_fingerprint="", run_id="", num_steps=None,
        ranks_on_disk=lambda rank: range(rank, rank + 1),
    )  # fmt: skip


def save(run_dir, step, *, engine=None, **plan):
    plan, engine = plan_of(run_dir, **plan), engine or FakeEngine(step)
    return save_now(engine, plan, TOPOLOGY, step=step, data_fingerprint="tokens")


def load(folder, engine=None, *, tokens="tokens", spread=SPREAD):
    plan = plan_of(None, spread=spread)
    data = SimpleNamespace(fingerprint=tokens, form=MESSAGES)
    return load_checkpoint(folder, engine or FakeEngine(), plan, TOPOLOGY, data)


def begin(run_dir, engine, step, **plan):
    saver = Saver(plan_of(run_dir, **plan), TOPOLOGY)
    saver.begin(engine, step=step, data_fingerprint="tokens")
    return saver


def find_checkpoint(given, output_dir, work=WORK, strategy="zero2", *, notes=None):
    """Return the checkpoint that a single process finds, or a list of notes if there is none."""
    plan = plan_of(None, work=work, spread={**SPREAD, "strategy": strategy})
    plan.config.resume, plan.output_dir = given, output_dir
    notes = [] if notes is None else notes
    return resume.choose_checkpoint(plan, notes) or notes


def make_run(output_dir, name, *steps, status="interrupted", work=WORK, started_at=None):
    """Create a run that started at `started_at`, or else in the order of the names."""
    run_dir = output_dir / name
    run_dir.mkdir(parents=True)
    record = start_test_record(run_dir)
    values = {"work": {**work, "data_fingerprint": "tokens"}, "strategy": {"name": "zero2"}}
    record.update(status=status, started_at=started_at or name, **values)
    for step in steps:
        save(run_dir, step, work=work)
    return run_dir


def test_a_checkpoint_is_flushed_to_disk_before_it_is_published(tmp_path, monkeypatch):
    calls = []

    def fsync(descriptor):
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def publish(source, target, os_replace=os.replace):
        calls.append(f"{Path(source).name} -> {Path(target).name}")
        os_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", publish)
    save(tmp_path, 5)
    renamed = calls.index(".writing-00000005 -> step-00000005")
    assert {RANK_0, "meta.json", ".writing-00000005"} <= set(calls[:renamed])
    assert calls[renamed + 1 :] == ["checkpoints"]


@pytest.mark.parametrize("call", ["rename", "replace", "fsync", "rmdir", "unlink"])
def test_a_folder_exists_at_every_instant_while_it_is_replaced(call, tmp_path, monkeypatch):
    """After each call of `publish` that changes the disk, a process could be killed. The next start
    then finds the complete old or new folder."""
    best, copies = tmp_path / "runs/best", []

    def write(text):
        with files.atomic_folder(best) as unfinished:
            for name in ("a", "b"):
                (unfinished / name).write_text(text)

    write("old")
    original = getattr(os, call)

    def killed_after(*words, **kwargs):
        original(*words, **kwargs)
        copies.append(shutil.copytree(best.parent, tmp_path / f"killed-{len(copies)}"))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, killed_after)
        write("new")
    assert copies
    for run_dir in copies:
        remove_unfinished(run_dir)
        assert [path.name for path in run_dir.iterdir()] == ["best"]
        texts = {(run_dir / "best" / name).read_text() for name in ("a", "b")}
        assert texts in ({"old"}, {"new"})


def test_a_background_save_writes_the_state_of_its_step(tmp_path, monkeypatch):
    engine, gate = FakeEngine(7), threading.Event()
    torch.manual_seed(1)
    expected = save(tmp_path / "while training waits", 5, engine=engine)
    write_parts = saver_module.write_parts
    monkeypatch.setattr(
        saver_module, "write_parts", lambda *words: gate.wait(60) and write_parts(*words)
    )
    saver = begin(tmp_path, engine, 5)
    engine.state += torch.rand(10, 4)  # change the state, like the next step
    assert not saver.pending_write.done()
    assert list_checkpoints(tmp_path) == []
    gate.set()
    folder, row = saver.finish()
    assert list_checkpoints(tmp_path) == [folder]
    for name in (RANK_0, "meta.json"):
        assert (folder / name).read_bytes() == (expected / name).read_bytes()
    assert (row["step"], row["bytes"]) == (5, (folder / RANK_0).stat().st_size)


def test_non_finite_state_is_not_saved_and_the_last_good_checkpoint_is_kept(tmp_path):
    good, engine = save(tmp_path, 1, keep=1), FakeEngine(2)
    engine.counters = dict
    for poison in (float("nan"), -float("inf")):
        engine.state[3, 1] = poison
        saver = begin(tmp_path, engine, 2, keep=1)
        engine.state.fill_(2)  # changed after the copy, so not in the checkpoint
        with pytest.raises(FloatingPointError, match=r"weight/w has non-finite values on rank 0"):
            saver.finish()
        assert list_checkpoints(tmp_path) == [good]
    healed = save(tmp_path, 2, keep=1, engine=engine)
    assert list_checkpoints(tmp_path) == [healed]


def test_loading_restores_engine_step_and_random_numbers(tmp_path):
    """If the layout changes, the random number generators are seeded from the step instead of being
    restored."""
    random_values, other_spread = [], {**SPREAD, "strategy": "fsdp"}
    for step, seed in ((12, 1), (12, 2), (24, 1)):
        torch.manual_seed(seed)
        folder, engine = save(tmp_path, step, engine=FakeEngine(34)), FakeEngine()
        expected = torch.rand(4)
        assert (load(folder, engine), engine.value) == (step, 34)
        assert torch.equal(torch.rand(4), expected)
        load(folder, spread=other_spread)
        random_values.append(torch.rand(4).tolist())
    assert random_values[0] == random_values[1] != random_values[2]


def test_state_is_written_directly_if_ram_cannot_hold_a_copy(tmp_path, monkeypatch):
    """If RAM cannot hold a copy, the state is written directly while training waits."""
    monkeypatch.setattr(saver_module, "available_ram_bytes", lambda: 100)
    saver = begin(tmp_path, FakeEngine(3), 3)
    folder, _ = saver.finish()
    assert saver.memory is None
    engine = FakeEngine()
    assert (load(folder, engine), engine.value) == (3, 3)


def test_a_flipped_bit_and_a_missing_file_are_detected(tmp_path):
    """Both a flipped bit and a missing file are detected. The file is large enough to be read in
    several pieces."""
    engine = FakeEngine()
    engine.state = torch.ones(2**20, 4)
    engine.state_parts = lambda: [build_part("weight/w", engine.state, (2**20, 4), (0, 0))]
    engine.counters = dict
    folder = save(tmp_path, 1, engine=engine)
    check_files(folder, read_meta(folder))
    with open(folder / RANK_0, "r+b") as file:
        file.seek(-5000, 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    with refused(str(folder), "is damaged", f"{RANK_0} has changed", str(folder.parent)):
        check_files(folder, read_meta(folder))
    (folder / RANK_0).unlink()
    with refused("is damaged", f"{RANK_0} is missing"):
        check_files(folder, read_meta(folder))


def test_checkpoints_of_other_releases_and_foreign_files_are_refused(tmp_path):
    folder = save(tmp_path, 1)
    for content, *message in (
        (b'{"format": 3, "step": 1}', str(folder), "format 3", str(FORMAT), "weights=<run>/hf"),
        (b"{}", str(folder), "format None"),
        (b"[]", str(folder), "not a checkpoint"),
        (b"\xff\xfe\x00", str(folder), "not a checkpoint"),
    ):
        (folder / "meta.json").write_bytes(content)
        with refused(*message):
            read_meta(folder)
    renamed = save(tmp_path, 2).rename(folder.with_name("step-00000003"))
    with refused(f"{renamed} is damaged", "step 2"):
        read_meta(renamed)


def test_a_kill_while_an_old_checkpoint_is_deleted_leaves_no_half_of_it(tmp_path, monkeypatch):
    save(tmp_path, 1)
    saver = begin(tmp_path, FakeEngine(2), 2, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", lambda *_, **__: os.stat("killed"))  # after the files are gone
        with pytest.raises(OSError, match="killed"):
            saver.finish()
    (kept,) = list_checkpoints(tmp_path)
    remove_unfinished(tmp_path)
    assert list(kept.parent.iterdir()) == [kept]


def test_resume_auto_takes_the_newest_unfinished_run_of_the_same_work_or_explains(tmp_path):
    (note,) = find_checkpoint("auto", tmp_path)
    assert str(tmp_path) in note
    finished = make_run(tmp_path, "20260103-finished", 5, status="ok")
    with pytest.raises(FinishedError, match="20260103-finished"):
        find_checkpoint("auto", tmp_path)
    (note,) = find_checkpoint("auto", tmp_path, strategy="dp")
    assert "20260103-finished" in note
    edit_json(finished / "record.json", status="failed")
    shutil.rmtree(finished / "checkpoints")
    make_run(tmp_path, "20260104-other-seed", 6, work={**WORK, "seed": 1})
    (note,) = find_checkpoint("auto", tmp_path)
    assert "seed was 1 and is now 42" in note
    assert f"--resume {os.path.relpath(tmp_path)}/20260104-other-seed" in note
    # Neither names nor times decide, because clocks of machines differ.
    make_run(tmp_path, "20260106-tokyo", 1, started_at="20260106")
    newest = make_run(tmp_path, "20260102-b", 3, 4, status="failed")
    make_run(tmp_path, "20260105-without-checkpoint")
    (tmp_path / "a-file").write_text("")
    resumed = find_checkpoint("auto", tmp_path)
    assert resumed == newest / "checkpoints" / "step-00000004"


def test_a_run_whose_model_has_changed_is_not_resumed(tmp_path, monkeypatch):
    run_dir = make_run(tmp_path, "20260101-a", 1)
    size = find_model("gpt2-tiny").size
    plan = plan_of(None)
    plan.output_dir = tmp_path
    saved = SimpleNamespace(model=SimpleNamespace(size=size))
    monkeypatch.setattr(resume, "load_plan", lambda _: saved)
    for setting in ("auto", str(run_dir)):
        plan.config.resume = setting
        plan.model = SimpleNamespace(size=size)
        assert resume.choose_checkpoint(plan, []).name == "step-00000001"
        plan.model = SimpleNamespace(size=replace(size, num_heads=77))
        with refused("20260101-a", "num_heads", "77"):
            resume.choose_checkpoint(plan, [])


def test_resume_auto_prefers_a_run_of_the_same_strategy(tmp_path):
    """With resume=auto, runs of the same strategy take precedence, so that two strategies under
    comparison do not resume each other's runs. Without such a run, a run that is not in use is
    resumed."""
    (same_strategy,) = list_checkpoints(make_run(tmp_path, "20260101-a", 1))
    (other,) = list_checkpoints(make_run(tmp_path, "20260102-b", 2))
    changed = read_meta(other).model_copy(update={"spread": {**SPREAD, "strategy": "dp"}})
    write_json(other / META_FILE, changed.model_dump())
    for strategy, expected in {"zero2": same_strategy, "dp": other, "fsdp": other}.items():
        assert find_checkpoint("auto", tmp_path, strategy=strategy) == expected
    with open(other.parents[1] / ".owner.json", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert find_checkpoint("auto", tmp_path, strategy="fsdp") == same_strategy, (
            "the other run is in use"
        )


def test_resume_auto_leaves_a_copy_beside_its_run_alone(tmp_path):
    """Only if the run is gone, the copy is resumed. Both may have been moved together."""
    run_dir = make_run(tmp_path / "runs", "a", 5)
    write_json(run_dir / "plan.json", {"run_dir": "/earlier/runs/a"})
    copy = shutil.copytree(run_dir, run_dir.with_name("a-copy"))
    save(copy, 6)
    assert find_checkpoint("auto", run_dir.parent).parents[1] == run_dir
    shutil.rmtree(run_dir)
    assert find_checkpoint("auto", run_dir.parent).parents[1] == copy


def test_resume_auto_falls_back_to_an_older_checkpoint_with_a_note(tmp_path):
    run_dir = make_run(tmp_path, "a", 1, 20, 30)
    first, second, third = list_checkpoints(run_dir)
    (third / RANK_0).unlink()
    (second / "meta.json").write_text("{")
    assert find_checkpoint("auto", tmp_path, notes=(notes := [])) == first
    assert len(notes) == 2
    assert f"{second} is not a checkpoint" in notes[0]
    assert f"{third} is damaged. {RANK_0} is missing" in notes[1]
    # The next save deletes the skipped checkpoints, although they are from later steps.
    folder = save(run_dir, 15, keep=1)
    assert list_checkpoints(run_dir) == [folder]


def test_user_files_next_to_checkpoints_are_neither_read_nor_removed(tmp_path):
    run_dir = make_run(tmp_path, "a", 1)
    (newest,) = list_checkpoints(run_dir)
    copy = shutil.copytree(newest, newest.with_name(f"{newest.name}.good"))
    (newest.parent / "step-99999999").write_text("a note")
    for resume_value in ("auto", str(run_dir)):
        assert find_checkpoint(resume_value, tmp_path) == newest
    empty = newest.with_name("step-00000009")
    empty.mkdir()
    with refused(str(empty)):
        find_checkpoint(str(run_dir), tmp_path)
    assert find_checkpoint("auto", tmp_path) == newest
    save(run_dir, 15, keep=1)
    assert copy.is_dir()


def test_resume_refuses_paths_without_a_checkpoint_or_with_one_of_other_work(tmp_path):
    run_dir = make_run(tmp_path, "a")
    for path in (tmp_path / "missing", run_dir, run_dir / "record.json"):
        with refused(f"resume='{path}'", "auto"):
            find_checkpoint(str(path), tmp_path)
    save(run_dir, 1)
    for work, message in (
        ({**WORK, "global_batch_size": 4}, "global_batch_size was 8 and is now 4"),
        ({**WORK, "new": 1}, "new was None and is now 1"),
        ({**WORK, "seed": None}, "seed was 42 and is now None"),
    ):
        with refused(message, f"--weights {run_dir}/hf"):
            find_checkpoint(str(run_dir), tmp_path, work)


def test_epochs_without_effect_are_named(tmp_path):
    run_dir = make_run(tmp_path, "a", 5, work={**WORK, "epochs": 2, "max_steps": 20})
    plan = plan_of(None, work={**WORK, "epochs": 4, "max_steps": 20})
    plan.config.resume, plan.num_steps = str(run_dir), 20
    with refused("epochs=4", "max_steps=20 decides", "-1"):
        resume.find_checkpoint(plan, [])
    plan.work["max_steps"] = plan.num_steps = 40
    notes = []
    assert resume.find_checkpoint(plan, notes).parents[1] == run_dir
    assert "max_steps was 20 and is now 40" in " ".join(notes)
    plan.work["max_steps"] = plan.num_steps = 5
    with refused("max_steps was 20 and is now 5"):
        resume.find_checkpoint(plan, [])


def test_resume_auto_follows_links_to_runs_and_stops_at_what_it_must_not_write(tmp_path):
    runs = tmp_path / "runs"
    moved = make_run(tmp_path / "other disk", "b", 3)
    make_run(runs, "a", 1)
    (runs / "b").symlink_to(moved)
    (runs / "latest").symlink_to("b")
    (runs / "c").symlink_to("missing")
    (runs / "d").mkdir()
    os.mkfifo(runs / "pipe")
    edit_json(make_run(runs, "f", status="ok") / "record.json", strategy={})
    damaged = make_run(runs, "e", 5)
    (damaged / "record.json").unlink()
    os.mkfifo(damaged / "record.json")
    assert find_checkpoint("auto", runs) == moved / "checkpoints" / "step-00000003"
    (moved / "my_notes").symlink_to("text.txt")
    assert find_checkpoint("auto", runs) == moved / "checkpoints" / "step-00000003"
    os.mkfifo(moved / "metrics.jsonl")
    assert find_checkpoint("auto", runs) == runs / "a" / "checkpoints" / "step-00000001"
    shutil.rmtree(runs / "a")
    shutil.rmtree(damaged)
    with refused(str(moved / "metrics.jsonl"), "--resume None"):
        find_checkpoint("auto", runs)


def test_resume_identifies_text_by_its_tokens(tmp_path):
    """A run can be resumed after its text has been moved, but not after the text has changed."""
    work = {**WORK, "dataset": "./a.txt", "tokenizer": "tok"}
    meta = read_meta(save(tmp_path / "a", 1, work=work))
    new_paths = dict.fromkeys(("dataset", "validation_dataset", "tokenizer"), "/moved")
    plan = plan_of(None, work={**work, **new_paths})
    plan.data_fingerprint = "tokens"
    assert resume._differences(meta.work, "tokens", plan) == ""
    plan.data_fingerprint = "others"
    changes = resume._differences(meta.work, "tokens", plan)
    assert "dataset was './a.txt' and is now '/moved'" in changes


@pytest.mark.parametrize("content", [b"", b"{", None])
def test_a_run_is_resumed_without_its_record(content, tmp_path):
    run_dir = make_run(tmp_path, "20260101-a", 1)
    (run_dir / "record.json").unlink()
    if content is not None:
        (run_dir / "record.json").write_bytes(content)
    for resume_value in ("auto", str(run_dir)):
        found = find_checkpoint(resume_value, tmp_path, notes=(notes := []))
        assert found.parents[1] == run_dir
        assert f"{run_dir}/record.json" in notes[0]


def test_a_run_with_a_record_of_another_version_is_refused(tmp_path):
    run_dir = make_run(tmp_path, "20260101-a", 1)
    (run_dir / "record.json").write_bytes(b'{"schema_version": 0}')
    for resume_value in ("auto", str(run_dir)):
        with refused(f"{run_dir}/record.json"):
            find_checkpoint(resume_value, tmp_path)
    assert isinstance(find_checkpoint("auto", tmp_path, {**WORK, "seed": 1}), list)
    make_run(tmp_path, "20260102-b", 1)
    assert find_checkpoint("auto", tmp_path).parents[1].name == "20260102-b"


def test_a_checkpoint_of_other_tokens_is_refused(tmp_path):
    folder = save(tmp_path, 1)
    with refused(str(folder), "resume to None"):
        load(folder, tokens="other tokens")
