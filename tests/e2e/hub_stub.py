"""A small stub of the Hugging Face Hub's HTTP endpoints on loopback.

It keeps what is uploaded to a model, whole files in one commit, for whoever has the token TOKEN.

It answers what huggingface_hub asks to download one file: HEAD and GET on
/<repo>/resolve/main/<file>, with /datasets/ in front for data sets, and the headers ETag,
X-Repo-Commit and Content-Length. `behaviour` says how it fails: it "refuses" every file with 404,
"cuts off" a file's body half-way, or is "mute" and never answers.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePath
from urllib.parse import parse_qs, unquote

TOKEN = "hf_of_the_stub"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """A running stub."""

    files: dict[str, bytes]
    """Path after the host name, without the leading slash -> content."""
    behaviour: str
    endpoint: str = ""
    pushed: dict[str, bytes] = field(default_factory=dict)
    """Path after the host name of every uploaded file -> content."""
    cards: list[str] = field(default_factory=list)
    """Model cards that were sent to be checked."""
    requests: list[str] = field(default_factory=list)
    """"METHOD path" of every request, in order."""
    closing: threading.Event = field(default_factory=threading.Event)


@contextlib.contextmanager
def serve(files: dict[str, bytes], behaviour: str = "serves") -> Iterator[Hub]:
    """Run a stub that serves `files` until the block ends."""
    hub = Hub(files, behaviour)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_POST(self) -> None:
        """About a dataset's files; for a push repos/create, validate-yaml, preupload (nothing is a
        large file here) and commit."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.startswith("/api/datasets/"):
            self._asked = body
            self._answer(with_body=True)
            return
        self.hub.requests.append(f"POST {self.path}")
        repo = self.path.removeprefix("/api/models/").partition("/preupload/")[0]
        repo = repo.partition("/commit/")[0]
        if self.path == "/api/validate-yaml":
            self.hub.cards.append(json.loads(body)["content"])
            self._send_json({"errors": [], "warnings": []})
        elif self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._send(401, b'{"error": "Invalid credentials"}', with_body=True)
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            self._send_json({"url": f"{self.hub.endpoint}/{name}", "name": name})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            kinds = [{"path": f["path"], "uploadMode": "regular"} for f in files]
            self._send_json({"files": [{**kind, "shouldIgnore": False} for kind in kinds]})
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.hub.pushed[f"{repo}/{line['value']['path']}"] = content
            url = f"{self.hub.endpoint}/{repo}/commit/{COMMIT}"
            self._send_json({"commitUrl": url, "commitOid": COMMIT, "success": True})

    def _send_json(self, answer: dict[str, object]) -> None:
        self._send(200, json.dumps(answer).encode(), with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        hub, path = self.hub, self.path.lstrip("/").replace(f"/resolve/{COMMIT}/", "/resolve/main/")
        hub.requests.append(f"{self.command} {self.path}")
        wants_file = "/resolve/" in path
        if hub.behaviour == "mute":
            hub.closing.wait(120)
            self.close_connection = True
        elif path.startswith("api/datasets/") and hub.behaviour != "refuses":
            self._send_about_dataset(path.removeprefix("api/"), with_body=with_body)
        elif path.startswith("api/models/"):
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body=with_body)
        elif not wants_file:
            self._send(200, b"a hub", with_body=with_body)
        elif hub.behaviour == "refuses" or path not in hub.files:
            headers = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            self._send(404, b"Entry not found", headers, with_body=with_body)
        else:
            self._send_file(hub.files[path], with_body=with_body)

    def _send_about_dataset(self, path: str, *, with_body: bool) -> None:
        """What there is of a dataset, as the Hub's API says it."""
        name, _, rest = path.partition("?")[0].partition("/tree/")
        name, _, inside = name.partition("/paths-info/")
        prefix = f"{name.partition('/revision/')[0]}/resolve/main/"
        found = {key.removeprefix(prefix): text for key, text in self.hub.files.items()
                 if key.startswith(prefix)}  # fmt: skip
        if not found:
            headers = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            self._send(404, b"Repository not found", headers, with_body=with_body)
            return
        folder = unquote(rest).partition("/")[2]
        listed = [
            {"type": "file", "path": key, "size": len(text), "oid": hashlib.sha1(text).hexdigest()}
            for key, text in found.items()
            if str(PurePath(key).parent) == (folder or ".") or inside
        ]
        below = {key.split("/")[0] for key in found if "/" in key and not folder}
        listed += [{"type": "directory", "path": name, "oid": COMMIT} for name in below]
        if inside:
            asked = parse_qs(self._asked.decode())["paths"]
            listed = [file for file in listed if file["path"] in asked]
        answer = {"id": name.removeprefix("datasets/"), "sha": COMMIT,
                  "siblings": [{"rfilename": key} for key in found]}  # fmt: skip
        body = json.dumps(listed if rest or inside else answer).encode()
        headers = {"Content-Type": "application/json"}
        self._send(200, body, headers, with_body=with_body)

    def _send_file(self, content: bytes, *, with_body: bool) -> None:
        first = 0
        asked = self.headers.get("Range", "")
        if asked.startswith("bytes="):
            first = int(asked.removeprefix("bytes=").partition("-")[0])
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        rest = content[first:]
        cut = len(rest) // 2 if self.hub.behaviour == "cuts off" else len(rest)
        self._send(206 if first else 200, rest, headers, with_body=with_body, cut=cut)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        *,
        with_body: bool,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body[:cut])
            self.close_connection = cut is not None and cut < len(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the tests read `requests`."""
