import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from distributed_training.plan.resume import FORMAT, find_resume, list_checkpoints, read_meta
from distributed_training.plan.topology import Topology
from distributed_training.records.record import start_record
from distributed_training.run.checkpoint import load_checkpoint, save_checkpoint
from tests.support import refused

IDENTITY = {"strategy": "zero2", "num_processes": 1, "seed": 42, "learning_rate": 3e-4}
TOPOLOGY = Topology(
    world_size=1, rank=0, local_rank=0, dp_replicate=1, dp_shard=1, device_type="cpu"
)


class FakeEngine:
    """Saves one number; `saving` lets a test look at, or break, the moment of saving."""

    def __init__(self, value=0, saving=None):
        self.value = value
        self.saving = saving

    def save(self, folder):
        (folder / "sub").mkdir()
        (folder / "sub" / "state").write_text(f"{self.value:08}")
        if self.saving:
            self.saving(folder)

    def load(self, folder):
        self.value = int((folder / "sub" / "state").read_text())


@pytest.fixture(scope="module", autouse=True)
def _group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def save(run_dir, step, *, keep=10, identity=IDENTITY, engine=None):
    config = SimpleNamespace(keep_checkpoints=keep)
    plan = SimpleNamespace(run_dir=run_dir, identity=identity, config=config)
    engine = engine or FakeEngine(step)
    return save_checkpoint(engine, plan, TOPOLOGY, step=step, data_fingerprint="tokens")


def make_run(output_dir, name, *steps, status="interrupted", identity=IDENTITY):
    run_dir = output_dir / name
    run_dir.mkdir(parents=True)
    start_record(run_dir).update(status=status)
    for step in steps:
        save(run_dir, step, identity=identity)
    return run_dir


def edit_meta(folder, **changes):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, **changes}))


def test_a_checkpoint_is_published_whole(tmp_path):
    seen = []

    def saving(folder):
        seen.append((folder, list_checkpoints(tmp_path)))

    folder = save(tmp_path, 5, engine=FakeEngine(7, saving))
    ((writing, published),) = seen
    assert writing != folder
    assert published == []
    assert not writing.exists()
    assert list_checkpoints(tmp_path) == [folder]
    meta = read_meta(folder)
    assert (meta.step, meta.identity) == (5, IDENTITY)
    assert meta.files == {"rng-rank0.pt": (folder / "rng-rank0.pt").stat().st_size, "sub/state": 8}


def test_a_failed_save_publishes_nothing_and_the_next_one_works(tmp_path):
    def saving(_):
        raise OSError("disk full")

    first = save(tmp_path, 1)
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, 2, keep=1, engine=FakeEngine(2, saving))
    assert list_checkpoints(tmp_path) == [first]
    second = save(tmp_path, 2, keep=1)
    assert list_checkpoints(tmp_path) == [second]
    assert sorted(path.name for path in second.parent.iterdir()) == [second.name]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_ones_are_kept(keep, tmp_path):
    for step in (5, 10, 100, 1000):
        save(tmp_path, step, keep=keep)
    steps = [int(folder.name.split("-")[1]) for folder in list_checkpoints(tmp_path)]
    assert steps == [5, 10, 100, 1000][-keep:]


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 5, engine=FakeEngine(1))
    folder = save(tmp_path, 5, engine=FakeEngine(2))
    engine = FakeEngine()
    load_checkpoint(engine, folder, TOPOLOGY, data_fingerprint="tokens")
    assert engine.value == 2
    assert list_checkpoints(tmp_path) == [folder]


def test_loading_restores_engine_step_and_random_numbers(tmp_path):
    torch.manual_seed(1)
    folder = save(tmp_path, 12, engine=FakeEngine(34))
    expected = torch.rand(4)
    torch.manual_seed(2)
    engine = FakeEngine()
    assert load_checkpoint(engine, folder, TOPOLOGY, data_fingerprint="tokens") == 12
    assert engine.value == 34
    assert torch.equal(torch.rand(4), expected)


def test_a_small_file_of_the_right_size_with_other_content_is_found(tmp_path):
    folder = save(tmp_path, 1)
    (folder / "sub" / "state").write_text("no digit")
    with refused(str(folder), "is damaged", "sub/state has other contents"):
        read_meta(folder)


def test_a_large_file_of_the_right_size_with_other_content_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr("distributed_training.run.checkpoint.CHECKED_BYTES", 0)
    folder = save(tmp_path, 1)
    (folder / "sub" / "state").write_text("no digit")
    with refused(str(folder), "cannot be loaded", "ValueError", "remove that folder"):
        load_checkpoint(FakeEngine(), folder, TOPOLOGY, data_fingerprint="tokens")
    save(tmp_path, 1)
    size = (folder / "rng-rank0.pt").stat().st_size
    (folder / "rng-rank0.pt").write_bytes(b"x" * size)
    with refused(str(folder), "cannot be loaded"):
        load_checkpoint(FakeEngine(), folder, TOPOLOGY, data_fingerprint="tokens")


def test_damage_is_named_with_sizes(tmp_path):
    folder = save(tmp_path, 1)
    (folder / "sub" / "state").write_text("1")
    with refused("is damaged", "sub/state is 1 bytes long instead of 8", "resume to None"):
        read_meta(folder)
    (folder / "sub" / "state").unlink()
    with refused("is damaged", "sub/state is missing"):
        read_meta(folder)


META_OF_ANOTHER_FORM = [
    {"identity": None}, {"files": []}, {"checksums": None}, {"step": "1"}, {"step": True},
]  # fmt: skip


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b"\xff\xfe\x00", *META_OF_ANOTHER_FORM], ids=str
)
def test_a_corrupt_meta_is_no_checkpoint(content, tmp_path):
    folder = save(tmp_path, 1)
    if isinstance(content, dict):
        edit_meta(folder, **content)
    else:
        (folder / "meta.json").write_bytes(content)
    with refused(f"{folder} is not a checkpoint of this suite", "remove that folder"):
        read_meta(folder)


def test_another_format_is_refused(tmp_path):
    folder = save(tmp_path, 1)
    edit_meta(folder, format=FORMAT + 1)
    with refused(f"checkpoint format {FORMAT + 1}"):
        read_meta(folder)


def test_auto_takes_the_newest_unfinished_run_of_the_same_work(tmp_path):
    make_run(tmp_path, "20260101-a", 1)
    wanted = make_run(tmp_path, "20260102-b", 3, 4, status="failed")
    make_run(tmp_path, "20260103-finished", 5, status="ok")
    make_run(tmp_path, "20260104-other-seed", 6, identity={**IDENTITY, "seed": 1})
    make_run(tmp_path, "20260105-without-checkpoint")
    (tmp_path / "20260106-without-record").mkdir()
    (tmp_path / "a-file").write_text("")
    found = find_resume("auto", tmp_path, IDENTITY)
    assert found == (wanted, wanted / "checkpoints" / "step-00000004")


def test_auto_names_a_run_that_is_going_on(tmp_path):
    make_run(tmp_path, "20260101-a", 1)
    going = make_run(tmp_path, "20260102-b", 5, status="running")  # of this very process
    with refused("20260102-b", "is going on", f"process {os.getpid()} on"):
        find_resume("auto", tmp_path, IDENTITY)
    record = json.loads((going / "record.json").read_text())
    (going / "record.json").write_text(json.dumps({**record, "hostname": "another-host"}))
    assert find_resume("auto", tmp_path, IDENTITY)[0] == going  # killed, or so it must be taken


def test_auto_finds_nothing_where_nothing_is(tmp_path):
    assert find_resume("auto", tmp_path, IDENTITY) is None
    assert find_resume("auto", tmp_path / "missing", IDENTITY) is None
    make_run(tmp_path, "a", 1, status="ok")
    assert find_resume("auto", tmp_path, IDENTITY) is None
    assert find_resume(None, tmp_path, IDENTITY) is None


def damage(checkpoint):
    shutil.rmtree(checkpoint / "sub")


def test_auto_falls_back_to_an_older_checkpoint_and_says_so(tmp_path, caplog):
    run_dir = make_run(tmp_path, "a", 1, 2, 3)
    first, second, third = list_checkpoints(run_dir)
    damage(third)
    (second / "meta.json").write_text("{")
    assert find_resume("auto", tmp_path, IDENTITY) == (run_dir, first)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert f"{third} is damaged; sub/state is missing" in told[0]
    assert f"{second} is not a checkpoint" in told[1]


def test_auto_falls_back_to_an_older_run_and_says_so(tmp_path, caplog):
    older = make_run(tmp_path, "20260101-a", 1)
    newer = make_run(tmp_path, "20260102-b", 5)
    damage(list_checkpoints(newer)[0])
    assert find_resume("auto", tmp_path, IDENTITY) == (older, list_checkpoints(older)[0])
    assert str(list_checkpoints(newer)[0]) in caplog.text
    damage(list_checkpoints(older)[0])
    assert find_resume("auto", tmp_path, IDENTITY) is None
    with refused("is damaged", "sub/state is missing", "fall back to the one before"):
        find_resume(str(newer), tmp_path, IDENTITY)


def test_what_was_passed_over_gives_way_to_new_checkpoints(tmp_path):
    """Otherwise the damaged one, being of a later step, would be the one that is kept."""
    run_dir = make_run(tmp_path, "a", 10, 20)
    damage(list_checkpoints(run_dir)[1])
    found = find_resume("auto", tmp_path, IDENTITY)
    assert found == (run_dir, list_checkpoints(run_dir)[0])
    folder = save(run_dir, 15, keep=1)
    assert list_checkpoints(run_dir) == [folder]
    assert find_resume("auto", tmp_path, IDENTITY) == (run_dir, folder)


def test_a_path_names_a_run_or_a_checkpoint(tmp_path):
    run_dir = make_run(tmp_path, "a", 1, 2, status="ok")
    older, newer = list_checkpoints(run_dir)
    assert find_resume(str(run_dir), tmp_path, IDENTITY) == (run_dir, newer)
    assert find_resume(str(older), tmp_path, IDENTITY) == (run_dir, older)


@pytest.mark.parametrize("name", ["missing", "a", "a/record.json"])
def test_a_path_without_a_checkpoint(name, tmp_path):
    make_run(tmp_path, "a")
    with refused(f"resume='{tmp_path / name}' holds no checkpoint", "auto, or None"):
        find_resume(str(tmp_path / name), tmp_path, IDENTITY)


@pytest.mark.parametrize(
    ("key", "value"),
    [("strategy", "zero3"), ("num_processes", 2), ("learning_rate", 1e-3), ("new", 1)],
)
def test_a_foreign_checkpoint_says_what_differs(key, value, tmp_path):
    run_dir, saved = make_run(tmp_path, "a", 1), IDENTITY.get(key)
    with refused("is of another run", f"{key} was {saved!r} and is {value!r}", "hf/"):
        find_resume(str(run_dir), tmp_path, {**IDENTITY, key: value})
    with refused("seed was 42 and is None"):
        find_resume(str(run_dir), tmp_path, {"strategy": "zero2"})


@pytest.mark.parametrize("content", [b'{"schema_version": 0}', b"[]", b"{", b'{"version": 2}'])
def test_auto_passes_over_what_is_no_record_of_ours(content, tmp_path, caplog):
    wanted = make_run(tmp_path, "20260101-a", 1)
    other = make_run(tmp_path, "20260102-b", 1)
    (other / "record.json").write_bytes(content)
    assert find_resume("auto", tmp_path, IDENTITY)[0] == wanted
    (warning,) = caplog.records
    assert f"passes over {other}" in warning.getMessage()
    with refused(str(other)):
        find_resume(str(other), tmp_path, IDENTITY)


def test_auto_passes_over_a_folder_that_may_not_be_read(tmp_path, monkeypatch, caplog):
    """Root, whom tests may run as, may read every folder: the system's answer is played."""
    wanted = make_run(tmp_path, "20260101-a", 1)
    other = make_run(tmp_path, "20260102-b", 1)
    read_text = Path.read_text

    def forbidden(path, **kwargs):
        if path.parent == other:
            raise PermissionError(13, "Permission denied")
        return read_text(path, **kwargs)

    monkeypatch.setattr(Path, "read_text", forbidden)
    assert find_resume("auto", tmp_path, IDENTITY)[0] == wanted
    assert "Permission denied" in caplog.text


def test_a_named_checkpoint_needs_its_runs_record(tmp_path):
    run_dir = make_run(tmp_path, "a", 1)
    (run_dir / "record.json").unlink()
    for path in (run_dir, list_checkpoints(run_dir)[0]):
        with refused("record", "record.json does not exist"):
            find_resume(str(path), tmp_path, IDENTITY)


def test_a_relative_checkpoint_names_its_run(tmp_path, monkeypatch):
    run_dir = make_run(tmp_path, "a", 1)
    monkeypatch.chdir(run_dir / "checkpoints")
    for path in ("step-00000001", "./step-00000001/", "..", "../checkpoints/step-00000001"):
        found = find_resume(path, tmp_path, IDENTITY)
        assert found == (run_dir, run_dir / "checkpoints" / "step-00000001")


def test_other_tokens_are_refused(tmp_path):
    folder = save(tmp_path, 1)
    with refused(str(folder), "is not what", "resume to None"):
        load_checkpoint(FakeEngine(), folder, TOPOLOGY, data_fingerprint="other tokens")


def test_what_a_killed_save_left_is_removed(tmp_path):
    left = tmp_path / "checkpoints" / ".writing-00000007"
    left.mkdir(parents=True)
    save(tmp_path, 8)
    assert not left.exists()
