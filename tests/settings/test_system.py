import errno
import os
import resource

import pytest

from distributed_training.settings import system
from distributed_training.settings.errors import RunError, explain, run_and_report_errors
from distributed_training.settings.files import relative_path
from tests.support import refused


@pytest.fixture
def gone(tmp_path, monkeypatch):
    """Change to a folder and then remove it."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()


def test_a_folder_that_is_removed_before_or_during_a_command_is_named(gone, capsys):
    with refused("current folder"):
        system.require_system()
    assert relative_path("/some/run") == "/some/run"

    def library() -> int:
        os.path.abspath("a")
        return 0

    assert run_and_report_errors(library) == 2
    assert capsys.readouterr().err.startswith("error: the current folder")


def test_out_of_memory_errors_are_one_line(monkeypatch):
    for error in (MemoryError(), OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))):
        explained = explain(error)
        assert isinstance(explained, RunError)
        assert "fewer processes" in str(explained)
    no_thread = RuntimeError("can't start new thread")
    for error in (no_thread, OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))):
        assert "ulimit -u" in str(explain(error))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2 * 10**9, -1))
    assert "2.00 GB" in str(explain(MemoryError()))
    assert explain(RuntimeError("a fault of another kind")) is None
