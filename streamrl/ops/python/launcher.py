"""The launcher of a run started by a program: a separate process, so that the run does not depend on what else the
program does (its working directory, signals, logs, a busy interpreter).

    program ── the request ──► launcher ── `streamrl up` ──► the run's parts
       ▲                          │
       └── JSON lines ◄───────────┘    doing, said, begun, phase, and finally: ended or failed

Owns the process, and a thread that reads its lines. A SIGTERM makes the launcher end the run in order, a second signal
ends it at once. The launcher itself checks whether this program is alive, so that the run ends in order even after
`kill -9`; an orderly exit of the program requests this and waits.
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
from streamrl.ops.launch.processes import ending
from streamrl.ops.python.request import Request

State = Literal["finished", "stopped", "failed"]

_COMMAND = (sys.executable, "-m", "streamrl.ops.cli.beside")
_LOOK_EVERY_S = 0.2
_TELL_AFTER_S = 1.0  # before explaining why the program waits
_AT_ONCE_S = 30.0  # to end all parts at once, before the launcher is killed, and its parts with it

log = logging.getLogger("streamrl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
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
    def ended(self) -> Ended | None:
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
        self.ended: Ended | None = None
        self._begun, self._over = threading.Event(), threading.Event()
        self._owner, self._is_to_end = os.getpid(), False
        self._process = subprocess.Popen(
            [*command, str(self._owner)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        atexit.register(self._leave)
        threading.Thread(target=self._read, name="reads what the launcher says", daemon=True).start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:  # the thread notices its end
            stdin.write(request.to_json().encode())

    def await_begun(self, say: Callable[[str], None]) -> None:
        """Wait until the parts run, or nothing is left to do; on an error nothing is left running."""
        try:
            while not self._begun.wait(_LOOK_EVERY_S):
                if self.phase:
                    say(self.phase)
        except BaseException:
            self.end_now()
            raise
        if self.ended is not None:
            self.ended.check()

    def wait(self, timeout_s: float | None) -> bool:
        return self._over.wait(timeout_s)

    def end(self, timeout_s: float | None) -> None:
        at_first_s = _TELL_AFTER_S if timeout_s is None else min(_TELL_AFTER_S, timeout_s)
        self._signal(signal.SIGTERM)
        try:
            if self.wait(at_first_s):
                return
            print(f"streamrl: run {self.name} writes a checkpoint and ends (Ctrl-C: at once)", file=sys.stderr)
            if self.wait(timeout_s if timeout_s is None else timeout_s - at_first_s):
                return
        except KeyboardInterrupt:  # the second one ends the run at once, as with `streamrl up`
            self.end_now()
            raise
        self.end_now()

    def end_now(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):  # two signals of one kind may be merged
            self._signal(number)
        if not self.wait(_AT_ONCE_S):
            self._process.kill()
            self.wait(None)

    def _signal(self, number: signal.Signals) -> None:
        self._is_to_end = True
        self._process.send_signal(number)

    def _leave(self) -> None:
        """Called at the exit of the program, but not of its forked children."""
        if os.getpid() == self._owner and self.ended is None:
            with contextlib.suppress(KeyboardInterrupt):
                self.end(None)

    def _read(self) -> None:
        assert self._process.stdout is not None
        told: Ended | None = None
        with self._process.stdout as lines:
            for line in lines:
                if line.endswith(b"\n"):  # otherwise it was killed in mid-line
                    told = self._take(json.loads(line)) or told
        code = self._process.wait()
        if told is None and self._is_to_end:  # it was ended before it could handle the signal
            told = Ended(state="stopped")
        self.ended = told or Ended(state="failed", error=f"the launcher {ending(code)} (see {self._log})")
        atexit.unregister(self._leave)
        self._over.set()
        self._begun.set()

    def _take(self, line: dict[str, Any]) -> Ended | None:
        match line["kind"]:
            case "doing" | "phase":
                self.phase = line["text"]
            case "said":
                log.warning("%s", line["text"])
            case "begun":
                self.name, self.folder, self.phase = line["name"], Path(line["folder"]), ""
                self._begun.set()
            case "ended":
                return Ended(state=line["state"], steps=line["steps"], summary=line["summary"])
            case "failed":
                return Ended(state="failed", error=line["error"], kind=getattr(errors, line["type"]))
        return None

    @property
    def _log(self) -> Path:
        return self.folder / "logs" / "launcher.log"
