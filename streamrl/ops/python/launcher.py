"""The launcher of a run started by a program: a separate process, so that the run does not depend on what else the
program does (its working directory, signals, logs, a busy interpreter).

    program ── the request ──► launcher ── `streamrl up` ──► the run's parts
       ▲                          │
       └── JSON lines ◄───────────┘    doing, said, begun, phase, and finally: ended or failed

Owns the process, and a thread that reads its lines. A SIGTERM makes the launcher end the run in order, a second signal
ends it at once. The launcher itself checks whether this program is alive, so that the run ends in order even after
`kill -9`, which is never a second signal; an orderly exit of the program requests this and waits.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from streamrl import errors
from streamrl.errors import PartError, StreamrlError
from streamrl.ops.launch.processes import describe_exit
from streamrl.ops.python.request import Request

State = Literal["finished", "stopped", "failed"]

_COMMAND = (sys.executable, "-m", "streamrl.ops.cli.training.up_child")
_LOOK_EVERY_S = 0.2
_EXPLAIN_AFTER_S = 1.0  # before explaining why the program waits
_ABORT_S = 30.0  # to end all parts at once, before the launcher is killed, and its parts with it

log = logging.getLogger("streamrl")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfRun:
    state: State
    steps: int = 0
    summary: Mapping[str, Any] | None = None  # contents of summary.json
    error: str = ""  # why it failed
    kind: type[StreamrlError] = PartError

    def check(self) -> None:
        """Raise the run's error if it has failed."""
        if self.state == "failed":
            raise self.kind(self.error)


class Life(Protocol):
    """The life of a run, as this program can observe and end it."""

    @property
    def ended(self) -> EndOfRun | None:
        """None while it runs."""

    @property
    def phase(self) -> str:
        """What the run is doing, beyond what its view shows."""

    def wait(self, timeout_s: float | None) -> bool:
        """Return whether it ended within this time."""

    def end(self, timeout_s: float | None) -> None:
        """End it in order; if that takes longer, at once if possible, else TimeoutError."""


class Launcher:
    """The life of a run that this program started."""

    def __init__(self, request: Request, *, command: Sequence[str] = _COMMAND) -> None:
        self.phase, self.name, self.folder = "", "", Path()  # the last two are set once the run has begun
        self.ended: EndOfRun | None = None
        self._started, self._over = threading.Event(), threading.Event()
        self._owner, self._stop_requested = os.getpid(), False
        self._process = subprocess.Popen(
            [*command, str(self._owner)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        atexit.register(self._end_at_exit)
        threading.Thread(target=self._read, name="launcher messages", daemon=True).start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:  # the thread notices its end
            stdin.write(request.to_json().encode())

    def wait_until_started(self, show: Callable[[str], None]) -> None:
        """Wait until the parts run, or nothing is left to do; on an error nothing is left running."""
        try:
            while not self._started.wait(_LOOK_EVERY_S):
                if self.phase:
                    show(self.phase)
        except BaseException:
            self.end_now()
            raise
        if self.ended is not None:
            self.ended.check()

    def wait(self, timeout_s: float | None) -> bool:
        return self._over.wait(timeout_s)

    def end(self, timeout_s: float | None) -> None:
        first_wait_s = _EXPLAIN_AFTER_S if timeout_s is None else min(_EXPLAIN_AFTER_S, timeout_s)
        self._signal(signal.SIGTERM)
        try:
            if self.wait(first_wait_s):
                return
            print(f"streamrl: run {self.name} is writing a checkpoint and stopping (Ctrl-C: at once)", file=sys.stderr)
            if self.wait(timeout_s if timeout_s is None else timeout_s - first_wait_s):
                return
        except KeyboardInterrupt:  # the second one ends the run at once, as with `streamrl up`
            self.end_now()
            raise
        self.end_now()

    def end_now(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):  # two signals of one kind may be merged
            self._signal(number)
        if not self.wait(_ABORT_S):
            self._process.kill()
            self.wait(None)

    def _signal(self, number: signal.Signals) -> None:
        self._stop_requested = True
        self._process.send_signal(number)

    def _end_at_exit(self) -> None:
        """Called at the exit of the program, but not of its forked children."""
        if os.getpid() == self._owner and self.ended is None:
            with contextlib.suppress(KeyboardInterrupt):
                self.end(None)

    def _read(self) -> None:
        assert self._process.stdout is not None
        outcome: EndOfRun | None = None
        with self._process.stdout as lines:
            for line in lines:
                if line.endswith(b"\n"):  # otherwise it was killed in mid-line
                    outcome = self._handle(json.loads(line)) or outcome
        code = self._process.wait()
        if outcome is None and self._stop_requested:  # it was ended before it could handle the signal
            outcome = EndOfRun(state="stopped")
        self.ended = outcome or EndOfRun(state="failed", error=f"the launcher {describe_exit(code)}{self._see_log()}")
        atexit.unregister(self._end_at_exit)
        self._over.set()
        self._started.set()

    def _handle(self, message: dict[str, Any]) -> EndOfRun | None:
        match message["kind"]:
            case "doing" | "phase":
                self.phase = message["text"]
            case "said":
                log.warning("%s", message["text"])
            case "begun":
                self.name, self.folder, self.phase = message["name"], Path(message["folder"]), ""
                self._started.set()
            case "ended":
                return EndOfRun(state=message["state"], steps=message["steps"], summary=message["summary"])
            case "failed":
                return EndOfRun(state="failed", error=message["error"], kind=getattr(errors, message["type"]))
        return None

    def _see_log(self) -> str:
        """Before the run has begun the launcher writes no log; what it prints is on this program's stderr."""
        return f" (see {self.folder / 'logs' / 'launcher.log'})" if self.name else ""
