"""Test which tests of unchanged code are skipped."""

import sys
from types import SimpleNamespace

import pytest

from tests import conftest


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs a module's tests, which import code.py, and returns whether they
    were skipped."""
    monkeypatch.setattr(conftest, "ROOT", tmp_path)
    monkeypatch.setattr(conftest, "versions", lambda: {"torch": "2"})
    code = tmp_path / "code.py"
    code.write_text("")
    monkeypatch.setitem(sys.modules, "code_of_a_test", SimpleNamespace(__file__=str(code)))
    values = {}
    cache = SimpleNamespace(get=values.get, set=values.__setitem__)

    def run(*, failed=0, keyword="", args=("tests",)):
        option = SimpleNamespace(keyword=keyword)
        session = SimpleNamespace(testsfailed=3)
        config = SimpleNamespace(cache=cache, option=option, args=args)
        request = SimpleNamespace(config=config, session=session, path=tmp_path / "test_it.py")
        tests = conftest.skip_unchanged(request)
        try:
            next(tests)
        except pytest.skip.Exception:
            return True
        session.testsfailed += failed
        next(tests, None)
        return False

    return run


def test_only_an_unchanged_module_that_has_passed_is_skipped(run, tmp_path, monkeypatch):
    assert [run(failed=1), run(), run(), run(keyword="x"), run(args=("t.py::x",)), run()] == [
        False, False, True, False, False, True,
    ]  # fmt: skip
    (tmp_path / "code.py").write_text("changed")
    assert [run(keyword="x"), run(failed=1), run(), run()] == [False, False, False, True]
    monkeypatch.setattr(conftest, "versions", lambda: {"torch": "3"})
    assert [run(), run()] == [False, True]
