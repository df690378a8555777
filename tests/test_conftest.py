"""Test which tests of unchanged code are skipped."""

import sys
from types import SimpleNamespace

import pytest

from tests import conftest

NAMES = ("one", "two")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs a session with two tests of a module, which import code.py. It
    returns whether each was skipped."""
    monkeypatch.setattr(conftest, "ROOT", tmp_path)
    monkeypatch.setattr(conftest, "versions", lambda: {"torch": "2"})
    code, path = tmp_path / "code.py", tmp_path / "test_it.py"
    code.write_text("")
    monkeypatch.setitem(sys.modules, "code_of_a_test", SimpleNamespace(__file__=str(code)))
    values = {}
    cache = SimpleNamespace(get=values.get, set=values.__setitem__)
    items = [SimpleNamespace(nodeid=name, path=path) for name in NAMES]

    def run(names=NAMES, *, fails=None, deselected=(), args=("tests",)):
        monkeypatch.setattr(conftest, "_not_passed", {})
        monkeypatch.setattr(conftest, "_deselected", set())
        conftest.pytest_deselected([item for item in items if item.nodeid in deselected])
        session = SimpleNamespace(testsfailed=3, items=items)
        skipped = []
        for name in names:
            request = SimpleNamespace(
                config=SimpleNamespace(cache=cache, args=args), session=session, path=path,
                node=SimpleNamespace(nodeid=name),
            )  # fmt: skip
            tests = conftest.skip_unchanged(request)
            try:
                next(tests)
            except pytest.skip.Exception:
                skipped.append(name)
                continue
            session.testsfailed += name == fails
            next(tests, None)
        return skipped == [*names]

    return run


def test_only_unchanged_modules_that_have_passed_are_skipped(run, tmp_path, monkeypatch):
    """A session with a failure, an interrupted one and one with chosen tests have not passed."""
    assert [run(fails="one"), run(["two"]), run(["one"], deselected=["two"]), run()] == 4 * [False]
    assert run()
    assert [run(["one"], deselected=["two"]), run(args=("t.py::x",)), run()] == [False, False, True]
    (tmp_path / "code.py").write_text("changed")
    assert [run(fails="two"), run(), run()] == [False, False, True]
    monkeypatch.setattr(conftest, "versions", lambda: {"torch": "3"})
    assert [run(), run()] == [False, True]
