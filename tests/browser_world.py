"""A real Chromium, controlled over its debugging pipe: pages, their requests and their console messages."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

_PATIENCE_S = 30.0
_INSTALL = Path(__file__).parents[1] / ".ci" / "chromium"
_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


@cache
def find_chromium() -> tuple[str | None, str]:
    """Return (the program, why there is none). Installs it if it is not on PATH and no consent is needed."""
    if (found := _on_path()) is not None:
        return found, ""
    tried = subprocess.run([_INSTALL], capture_output=True, text=True, timeout=300, check=False)
    return _on_path(), (tried.stdout.strip().splitlines() or [f"{_INSTALL.name} failed"])[-1]


def _on_path() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


class Page:
    """One tab. `requests` are the URLs requested, `complaints` the errors and warnings of its console."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._browser, self._session = browser, session
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        return self._browser.call(method, session=self._session, page=self, **parameters)

    def evaluate(self, expression: str) -> Any:
        reply = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        deadline = time.monotonic() + _PATIENCE_S
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"not within {_PATIENCE_S:g} s: {expression}"
        return value

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def look(self, *, width: int, height: int, is_phone: bool = False, is_dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        reply = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(reply["data"]))

    def note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event["method"]:
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.complaints.append(str(parameters["entry"]))


class Browser:
    def __init__(self, to_it: int, from_it: int) -> None:
        self._to, self._from = to_it, from_it
        self._rest = b""
        self._calls = 0

    def page(self) -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        return Page(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])

    def call(self, method: str, *, session: str | None = None, page: Page | None = None, **parameters: Any) -> Any:
        self._calls += 1
        message: dict[str, Any] = {"id": self._calls, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == self._calls:
                assert "error" not in reply, reply
                return reply["result"]
            if "method" in reply and page is not None:
                page.note(reply)

    def _next(self) -> Any:
        deadline = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium does not answer"
            data = os.read(self._from, 1 << 20)
            assert data, "Chromium has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


def _pipe_beyond(number: int) -> list[int]:
    """Create a pipe with descriptors above those that the shell sets up for Chromium."""
    low = os.pipe()
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, number + 1) for end in low]
    for end in low:
        os.close(end)
    return ends


@contextmanager
def chromium(program: str) -> Iterator[Browser]:
    """Run Chromium, which reads commands from descriptor 3 and answers on 4."""
    its_in, to_it = _pipe_beyond(4)
    from_it, its_out = _pipe_beyond(4)
    script = f'exec "$@" 3<&{its_in} 4>&{its_out} {its_in}<&- {its_out}>&-'
    with tempfile.TemporaryDirectory(prefix="chromium-", dir="/tmp") as folder:  # a short path, for its sockets
        process = subprocess.Popen(
            ["bash", "-c", script, "bash", program, *_ARGUMENTS, f"--user-data-dir={folder}/profile"],
            env={**os.environ, "TMPDIR": folder},  # being killed, it leaves what it has there
            pass_fds=(its_in, its_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(its_in)
        os.close(its_out)
        try:
            yield Browser(to_it, from_it)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # the whole group: Chromium has many processes
            process.wait()
            os.close(to_it)
            os.close(from_it)
