"""A headless Chromium over its DevTools pipe, without any package of Python."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.tools import BROWSERS

MESSAGE = "these tests look at pages in a browser: install Chromium (apt-get install chromium)"


def path() -> str | None:
    """The path of Chromium, or None if there is none."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)


FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio"),
    *("--force-color-profile=srgb", "--font-render-hinting=none", "--disable-dev-shm-usage"),
)


class Browser:
    """One page. `errors` and `requests`: console errors and network requests since it was opened."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._numbers, self._buffer = itertools.count(1), b""
        self._events: list[dict[str, Any]] = []
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Send a command, and wait for its answer; RuntimeError if it is refused."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._receive, 1 << 16)
            if not data:
                raise RuntimeError("the browser has gone")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def open(self, path: Path, width: int = 1300, height: int = 800, dark: bool = False) -> None:
        """Load a file, and wait until it is drawn."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.mouse("mouseMoved", 0, 0)
        self._events.clear()
        self.call("Page.navigate", url=path.absolute().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._read())
        self.settle()

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page; of its promise if it is one."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def settle(self) -> None:
        """Wait two frames, until the requested change is on the screen."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def hover(self, x: float, y: float) -> None:
        self.mouse("mouseMoved", x, y)
        self.settle()

    def click(self, x: float, y: float, count: int = 1) -> None:
        self.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=count)
        self.mouse("mouseReleased", x, y, button="left", clickCount=count)
        self.settle()

    def press(self, key: str, modifiers: int = 0) -> None:
        text_argument: dict[str, Any] = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, modifiers=modifiers, **text_argument)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, modifiers=modifiers)
        self.settle()

    def screenshot(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    @property
    def errors(self) -> list[str]:
        """Exceptions, errors on the console, and dialogs."""
        bad = {"Runtime.exceptionThrown", "Page.javascriptDialogOpening"}
        events = [event for event in self._events if event["method"] in bad]
        entries = [event["params"]["entry"] for event in self._events if event["method"] == "Log.entryAdded"]
        console_calls = [event["params"] for event in self._events if event["method"] == "Runtime.consoleAPICalled"]
        return [str(event["params"]) for event in events] + [str(e) for e in (*entries, *console_calls)]

    @property
    def requests(self) -> list[str]:
        """Addresses the page loaded."""
        sent = [event for event in self._events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with its profile in `folder`, ended at the end. Without Chromium, skip the test, or fail in CI."""
    chromium = path()
    if chromium is None:
        assert "CI" not in os.environ, MESSAGE
        pytest.skip(MESSAGE)  # `make test` reports it at its start
    commands, answers = os.pipe(), os.pipe()
    redirected = f'exec "$0" "$@" 3<&{commands[0]} 4>&{answers[1]}'
    arguments = ["bash", "-c", redirected, chromium, *FLAGS, f"--user-data-dir={folder}"]
    child_ends = (commands[0], answers[1])
    process = subprocess.Popen(arguments, pass_fds=child_ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for descriptor in child_ends:
            os.close(descriptor)
        yield Browser(commands[1], answers[0])
    finally:
        for descriptor in (commands[1], answers[0]):
            os.close(descriptor)  # it ends when its pipe is closed
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
