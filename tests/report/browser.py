"""A browser without a window, driven through two pipes by the DevTools protocol: just what the tests of the page need."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT = 120  # seconds for one answer: machines may be slow, and paused


def find() -> str | None:
    """The browser of EXPUNGE_BROWSER, else one that is installed."""
    return os.environ.get("EXPUNGE_BROWSER") or next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """`with Browser(path) as browser:`; pages are opened one after the other, `events` holds what the last one told."""

    def __init__(self, path: str) -> None:
        self.path, self.count, self.buffer = path, 0, b""
        self.events: list[dict[str, Any]] = []
        self.session: str | None = None

    def __enter__(self) -> Browser:
        self.profile = tempfile.mkdtemp(prefix="expunge-browser-")
        (theirs_in, self.out), (self.come, theirs_out) = _pipe(), _pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"]
        arguments = [self.path, *options, f"--user-data-dir={self.profile}", "--remote-debugging-pipe", "about:blank"]
        silent = os.open(os.devnull, os.O_RDWR)
        # The browser reads from 3 and writes to 4.
        files = [(os.POSIX_SPAWN_DUP2, ours, theirs) for ours, theirs in ((theirs_in, 3), (theirs_out, 4), (silent, 1), (silent, 2))]
        self.process = os.posix_spawn(self.path, arguments, os.environ, file_actions=files)
        for each in (theirs_in, theirs_out, silent):
            os.close(each)
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.session = None
            self.call("Browser.close")
        finally:
            os.close(self.out)
            os.close(self.come)
            os.waitpid(self.process, 0)
            shutil.rmtree(self.profile, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer; events that come before it are kept."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters} | ({"sessionId": self.session} if self.session else {})
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.count:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + WAIT
        while b"\0" not in self.buffer:
            assert select.select([self.come], [], [], max(0.0, end - time.monotonic()))[0], "the browser does not answer"
            piece = os.read(self.come, 1 << 16)
            assert piece, "the browser ended"
            self.buffer += piece
        message, _, self.buffer = self.buffer.partition(b"\0")
        told = json.loads(message)
        if "method" in told:
            self.events.append(told)
        return told

    def open(self, address: str, scripts: bool = True, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Open an address in a new tab and wait until it is loaded."""
        self.session, self.events = None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=address)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._next()

    def ask(self, expression: str) -> Any:
        """The value of an expression on the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            told = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **told)

    def told(self, *methods: str) -> Sequence[dict[str, Any]]:
        return [event["params"] for event in self.events if event["method"] in methods]

    def screenshot(self, path: str | os.PathLike[str]) -> None:
        """The whole page, as far as it is long."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        Path(path).write_bytes(base64.b64decode(answer["data"]))

    def printed(self) -> bytes:
        """The page on paper, a PDF."""
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True)["data"])


def _pipe() -> tuple[int, int]:
    """Both ends above 9, so that neither is in the way of 3 and 4."""
    low = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low]
    for end in low:
        os.close(end)
    return high[0], high[1]
