"""Settings of every end-to-end test."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def _one_thread_a_process():
    """Threads that spin for a core that another process holds make a busy machine crawl."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
