"""Control a headless Chromium through a pipe, using the DevTools protocol.

To make the README's picture of explorer.html, run
`python tests/browser.py figures/explorer.png`."""

import base64
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlencode

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--remote-debugging-pipe", "--hide-scrollbars", "--disable-dev-shm-usage",
]  # fmt: skip
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TUTORIAL = Path(__file__).resolve().parent.parent


def find_browser():
    """Return the path to Chromium or Chrome, or None if neither is installed."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """A browser with one page. `errors` contains uncaught exceptions and errors that the page
    logged to the console."""

    def __init__(self, profile):
        command = [find_browser(), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(  # Chromium reads from descriptor 3 and writes to 4
            ["sh", "-c", 'exec "$0" "$@" 3<&0 4>&1 >/dev/null', *command], bufsize=0,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.message_id, self.buffer, self.errors, self.session = 0, b"", [], None
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=page, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method, **parameters):
        """Send a DevTools command and return its result. Errors in earlier messages are added to
        `errors`."""
        self.message_id += 1
        message = {"id": self.message_id, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.process.stdin.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.message_id:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def read(self):
        while b"\0" not in self.buffer:
            arrived = self.process.stdout.read(1 << 16)
            assert arrived, "the browser has ended"
            self.buffer += arrived
        line, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(line)
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        if method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])
        if method == "Runtime.consoleAPICalled" and parameters["type"] == "error":
            self.errors.append(str(parameters["args"]))
        return message

    def open(self, path, hash_="", *, width=1000, height=900, dark=False):
        """Load a file in a window of the given size."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip
        self.open_url(path.as_uri() + hash_)

    def open_url(self, url):
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && window.explorer !== undefined")

    def js(self, expression):
        """Return the value of a JavaScript expression. If the value is a promise, return its
        result."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression):
        self.until(lambda: self.js(expression), expression)

    def until(self, condition, what=""):
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end, f"never true: {what}"
            time.sleep(0.02)

    def mouse(self, kind, x, y, button="none"):
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button,
                  buttons=int(button == "left"), clickCount=int(kind != "mouseMoved"))  # fmt: skip

    def key(self, key, *, shift=False):
        text = {"Enter": "\r", "Space": " "}.get(key)
        key_event = {"key": " " if key == "Space" else key, **({"text": text} if text else {})}
        key_event["modifiers"] = 8 * shift
        self.send("Input.dispatchKeyEvent", type="keyDown", **key_event)
        self.send("Input.dispatchKeyEvent", type="keyUp", **key_event)

    def screenshot(self, path):
        """Save a screenshot of the whole page to `path`."""
        page = self.send("Page.getLayoutMetrics")["cssContentSize"]
        shot = self.send(
            "Page.captureScreenshot", captureBeyondViewport=True, clip={**page, "scale": 1}
        )
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        self.process.kill()
        self.process.communicate()


def screenshot_hash():
    """Return a link to an order from records/frontier.json, with ZB-H1 below it."""
    rows = json.loads((TUTORIAL / "records/frontier.json").read_text())["rows"]
    (row,) = (row for row in rows if (row["memory"], row["communication"]) == (5, 1))
    lines = []
    for rank, word in enumerate(row["words"]):
        counts = Counter()
        cells = []
        for kind in word:
            cells.append(f"{rank}{kind}{counts[kind]}")
            counts[kind] += 1
        lines.append(",".join(cells))
    csv = "\n".join(lines)
    keys = {"schedule": "csv", "csv": csv, "K": 5, "c": 1, "other": "zb-h1", "arrows": 1}
    return f"#{urlencode(keys)}"


def main():
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(profile)
        browser.open(TUTORIAL / "explorer.html", screenshot_hash(), width=1280, height=760)
        browser.js("explorer.main.focus = explorer.main.run.timeline.cells.get('1I3')")
        browser.js("explorer.store.change({})")
        browser.js("document.querySelector('footer').remove()")
        browser.screenshot(Path(sys.argv[1]))
        browser.close()


if __name__ == "__main__":
    main()
