"""Child processes: each in its own process group, with a log file, and killed if the launcher dies.

Owns the processes of one machine. Ctrl-C at the terminal reaches only the launcher, which decides the order in which
the parts end. If the launcher is killed, the kernel kills its children, and by the same means their children. Nothing
here waits longer than its caller says.

Also counts signals that request an end, so that the caller handles them when it suits.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, Self

from streamrl.errors import PartError, UserError
from streamrl.process import dying_with_us, signals_to_end

_TAIL_BYTES = 16 << 10
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
HEALTHY_AFTER_S = 120.0  # a life of this length resets the count of failures
_MAX_FAILURES = 5  # in a row, before giving up
_KILL_S = 10.0  # only a process that hangs in the kernel takes longer
_TIDY_S, _LOOK_EVERY_S = 1.0, 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    name: str  # the part's: "learner", "worker/0", "reward/0"
    arguments: tuple[str, ...]  # the program's path first
    log: Path  # its stdout and stderr are appended here
    environment: Mapping[str, str] = field(default_factory=dict)  # in addition to the launcher's own


class StartedProcess(Protocol):
    """The part of `subprocess.Popen` used here."""

    @property
    def pid(self) -> int: ...  # also its process group

    def poll(self) -> int | None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float) -> int: ...


def _start(command: Command) -> StartedProcess:
    with command.log.open("ab") as log:
        return subprocess.Popen(
            dying_with_us(command.arguments, by=signal.SIGKILL),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **command.environment},
            start_new_session=True,
        )


class Process:
    """A command that runs from now on, and dies with the thread that starts it."""

    def __init__(self, command: Command, *, start: Callable[[Command], StartedProcess] = _start) -> None:
        self.command = command
        command.log.parent.mkdir(parents=True, exist_ok=True)
        with command.log.open("ab") as log:
            self._log_start = log.tell()
        self._process = start(command)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """Ask it to end; it takes care of its own children."""
        if self.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """Kill it, and then the rest of its group. Its children die with it, except the one that removes their
        semaphores and shared memory once the others are gone, which gets a moment."""
        self._process.kill()
        self.wait(_KILL_S)
        deadline = time.monotonic() + _TIDY_S
        while _group_is_alive(self._process.pid) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
        with contextlib.suppress(ProcessLookupError):  # the group is empty
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Return whether it ended within this time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self.poll() is not None

    def last_words(self, *, num_lines: int = 15) -> list[str]:
        """Return the end of its output since it was started."""
        with self.command.log.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-num_lines:]


class SupervisedProcess:
    """A process that is restarted when it dies, after a backoff that grows with repeated deaths.

    Exit code 0 means that it had nothing more to do, unless the caller knows better; 2 that the user must fix
    something, which a restart does not. `look` never blocks; call it several times a second.
    """

    def __init__(
        self,
        command: Command,
        *,
        notify: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[Command], Process] = Process,
    ) -> None:
        self.command = command
        self.num_restarts = 0
        self._notify, self._clock, self._start = notify, clock, start
        self._deaths, self._failures = 0, 0  # in a row; failures are deaths with an error
        self._restart_at: float | None = None
        self._began = clock()
        self.process = start(command)

    def look(self, *, is_needed: bool = False) -> None:
        """Restart it if it is dead and its backoff is over; with `is_needed` even after exit code 0, as when somebody
        asked it to end."""
        code = self.process.poll()
        if code is None or self.has_given_up or (code == 0 and not is_needed):
            return
        now = self._clock()
        if self._restart_at is None:
            if now - self._began >= HEALTHY_AFTER_S:
                self._deaths, self._failures = 0, 0
            self._note_death(describe_exit(code), is_failure=code != 0)
        elif now >= self._restart_at:
            try:
                process = self._start(self.command)
            except OSError as error:  # no process, memory or descriptor is to be had, perhaps for a moment
                self._note_death(f"could not be started: {error}", is_failure=True)
                return
            self.num_restarts += 1
            self._restart_at, self._began, self.process = None, now, process

    def _note_death(self, what: str, *, is_failure: bool) -> None:
        self._deaths += 1
        self._failures += is_failure
        pause_s = min(_FIRST_PAUSE_S * 2 ** (self._deaths - 1), _LONGEST_PAUSE_S)
        self._restart_at = self._clock() + pause_s * random.uniform(0.5, 1.0)
        outlook = "giving up on it" if self.has_given_up else "restarting it"
        self._notify(f"{self.command.name} {what}; {outlook} (see {self.command.log})")

    @property
    def has_given_up(self) -> bool:
        """It is dead, and a restart would not help."""
        code = self.process.poll()
        return code == 2 or (code not in (None, 0) and self._failures >= _MAX_FAILURES)


def _group_is_alive(group: int) -> bool:
    """Return whether the group has a live member. A zombie keeps its group until it is reaped, which in a container may
    never happen."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, _, its_group, *_ = stat.read_text().rpartition(")")[2].split()
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def describe_exit(code: int) -> str:
    """Describe an exit code."""
    if code == 0:
        return "exited before the run ended"
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def end_all(processes: list[Process], *, within_s: float) -> None:
    """Send SIGTERM to all; kill what is left after this time."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + within_s
    for process in processes:
        if not process.wait(max(0.0, deadline - time.monotonic())):
            process.kill()


def part_error(process: Process) -> UserError | PartError:
    """Return why a part ended, with its own error message if it printed one."""
    lines = process.last_words()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if process.poll() == UserError.exit_code and errors:
        return UserError(f"{process.command.name}: {errors[-1]}")
    tail = "\n".join(f"  {line}" for line in lines)
    return PartError(
        f"{process.command.name} {describe_exit(process.poll() or 0)} and cannot continue; the end of "
        f"{process.command.log}:\n{tail}"
    )


class Interrupts:
    """Inside the context Ctrl-C and similar signals raise nothing; `count` is how often an end was requested."""

    def __init__(self) -> None:
        self.count = 0
        self._first: int | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in signals_to_end():
            self._previous_handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self.count:
            # No second request: both the shell and the kernel tell of one closed terminal, and a program that has asked
            # for the end may be gone before it comes (`ask_to_end_with`).
            return
        self.count += 1
        self._first = self._first or number

    @property
    def exit_code(self) -> int:
        """The exit code of a shell for a process ended by the first of these signals; 0 if none came."""
        return 0 if self._first is None else 128 + self._first
