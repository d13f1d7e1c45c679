"""vLLM's own server as a process, via `streamrl serve` or alone: started, awaited, and never left behind, nor are its
temporary files, which `streamrl serve` has to remove by itself."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.error import URLError

from streamrl.process import free_port
from tests.helpers import temporary_files, wait_until

_START_S = 300.0


class Served:
    def __init__(self, model: Path, *, logs: Path, options: Sequence[str] = (), by_itself: bool = False) -> None:
        """`by_itself`: vLLM without streamrl."""
        self.model = model
        self._by_itself = by_itself
        self._log = logs / "served.log"
        port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        ours = ["streamrl.ops.cli.main", "serve", str(model)]
        words = (
            ["vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"] if by_itself else ours
        )
        self._command = [sys.executable, "-m", *words, "--port", str(port), *options]

    def __enter__(self) -> Self:
        # Disable compilation: vLLM would compile sampling code for half a minute at its first requests.
        lean = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
        self._temporary = Path(tempfile.mkdtemp(prefix="served-", dir="/tmp"))  # a short path, for its sockets
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ, **lean, "TMPDIR": str(self._temporary)}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            wait_until(self._is_well, description="vLLM's server answers", timeout_s=_START_S, poll_s=0.5)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        left = temporary_files(self._temporary)
        shutil.rmtree(self._temporary, ignore_errors=True)
        assert self._by_itself or not left, f"streamrl serve left {left} in the folder of temporary files"

    def _is_well(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False
