"""`streamrl serve` as a process: started, waited for, and not left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.error import URLError

from tests.helpers import wait_until

_START_S = 240.0


class Served:
    def __init__(self, model: Path, *, logs: Path, options: tuple[str, ...] = ()) -> None:
        self.model = model
        self._log = logs / "served.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        words = ["serve", str(model), "--port", str(port), *options]
        self._command = [sys.executable, "-m", "streamrl.ops.cli.main", *words]

    def __enter__(self) -> Self:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        wait_until(self._is_well, description="vLLM's server answers", timeout_s=_START_S, poll_s=0.5)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()

    def _is_well(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False
