"""Serve a small stub of the Hugging Face Hub's HTTP endpoints on loopback.

With the stub, the libraries huggingface_hub and datasets can list a dataset and download a file."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import parse_qs, unquote

from tests.conftest import HUB_OFFLINE_VARIABLE

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """A running stub. `files` maps the path of each URL, without the host name, to the file's
    content."""

    files: dict[str, bytes]
    endpoint: str = ""
    requests: list[str] = field(default_factory=list)  # "METHOD path" of each request, in order


@contextlib.contextmanager
def serve(files: dict[str, bytes]) -> Iterator[Hub]:
    """Start a stub that serves `files` until the `with` block ends."""
    hub = Hub(files)
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            server.shutdown()


def hub_environment(endpoint: str, home: Path) -> dict[str, Any]:
    """Return options for `script` and `train` that make a run use the Hub at `endpoint` and cache
    downloads in `home`."""
    variables = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_TOKEN": ""}
    return {"unset": [HUB_OFFLINE_VARIABLE], **variables, "NO_PROXY": "127.0.0.1"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        hub = self.hub
        path = self.path.lstrip("/").replace(f"/resolve/{COMMIT}/", "/resolve/main/")
        hub.requests.append(f"{self.command} {self.path}")
        if path.startswith("api/datasets/"):
            self._send_dataset_info(path.removeprefix("api/"))
        elif path.startswith("api/models/"):
            self._send_about_model(path.removeprefix("api/models/").partition("?")[0])
        elif "/resolve/" not in path:
            self._send(200, b"a hub")
        elif path not in hub.files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        else:
            content = hub.files[path]
            digest = hashlib.sha1(content).hexdigest()
            self._send(200, content, {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Answer requests for information about a dataset's files."""
        self._body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET()

    def _send_about_model(self, name: str) -> None:
        prefix = f"{name}/resolve/main/"
        names = [key.removeprefix(prefix) for key in self.hub.files if key.startswith(prefix)]
        if not names:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        siblings = [{"rfilename": key} for key in names]
        self._send_json({"id": name, "sha": COMMIT, "siblings": siblings})

    def _send_dataset_info(self, path: str) -> None:
        """Send the description of a dataset in the format of the Hub's API."""
        name, _, tree_path = path.partition("?")[0].partition("/tree/")
        name, _, is_paths_info = name.partition("/paths-info/")
        prefix = f"{name.partition('/revision/')[0]}/resolve/main/"
        files = self.hub.files.items()
        dataset_files = {
            key.removeprefix(prefix): text for key, text in files if key.startswith(prefix)
        }
        if not dataset_files:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            return
        folder = unquote(tree_path).partition("/")[2]
        entries = [
            {"type": "file", "path": key, "size": len(text), "oid": hashlib.sha1(text).hexdigest()}
            for key, text in dataset_files.items()
            if str(PurePath(key).parent) == (folder or ".") or is_paths_info
        ]
        folders = {key.split("/")[0] for key in dataset_files if "/" in key and not folder}
        entries += [{"type": "directory", "path": name, "oid": COMMIT} for name in folders]
        if is_paths_info:
            paths = parse_qs(self._body.decode())["paths"]
            entries = [file for file in entries if file["path"] in paths]
        siblings = [{"rfilename": key} for key in dataset_files]
        description = {"id": name.removeprefix("datasets/"), "sha": COMMIT, "siblings": siblings}
        self._send_json(entries if tree_path or is_paths_info else description)

    def _send_json(self, answer: object) -> None:
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing, because the tests read `requests` instead of a log."""
