"""Settings of every end-to-end test."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _one_thread_a_process():
    """Threads that spin for a core that another process holds make a busy machine crawl."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture
def takes(record_property):
    """A context around what a document's reader types; pytest's last lines say how long it took."""

    @contextlib.contextmanager
    def timed(path: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        record_property("path", f"{path}: {(time.monotonic() - began) / 60:.1f} minutes")

    return timed
