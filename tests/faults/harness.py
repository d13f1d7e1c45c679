"""Processes of a run that are started, killed, stopped and continued from outside, each by its id.

They are forked from a server process that has everything imported, so that a further one takes milliseconds instead of
a second. What a test leaves running is killed when its world ends; a process whose test died is ended by its own
deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis

from streamrl.crashpoints import VARIABLE
from streamrl.errors import Fenced, TransportError
from streamrl.learner.checkpoints.terms import CheckpointName
from streamrl.learner.groups.ledger import Ending
from streamrl.ops.audit import Audit, audit_folder
from streamrl.ops.audit.commit import read_commit
from streamrl.ops.audit.journal import read_chain
from streamrl.protocol.transport.address import PASSWORD
from streamrl.protocol.transport.keys import WORKERS, Keys
from tests.faults.place import Place
from tests.faults.stand_in_learner import learn
from tests.faults.stand_in_worker import SOUND, Habits, work
from tests.helpers import wait_until

FENCED, REFUSED = 70, 71  # exit codes: fenced at a write; refused when asking to be the learner
_PATIENCE_S = 240.0  # other suites may run meanwhile: what takes a second alone can then take a minute
_WORDS = 1500  # characters of a part's output in error messages

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.faults.harness"])


class Part:
    """One process; `crash_at` is what `streamrl.crashpoints` reads from the environment."""

    def __init__(self, place: Place, name: str, run: Callable[[], Any], *, crash_at: str) -> None:
        self.name = name
        self._out = place.folder / f"{name}.out"
        self._process = _CONTEXT.Process(
            target=_live, args=(run, self._out, _told(place, name, crash_at), place.deadline_s), name=name, daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it lives; negative: the signal that ended it."""
        return self._process.exitcode

    @property
    def output(self) -> str:
        return self._out.read_text() if self._out.exists() else ""

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it by SIGKILL, if it still lives."""
        self._process.kill()
        self._process.join(_PATIENCE_S)

    def ended(self) -> int:
        """Return its exit code, once it has ended."""
        self._process.join(_PATIENCE_S)
        assert self.exit_code is not None, f"{self.name} has not ended in {_PATIENCE_S:g} s\n{self.output}"
        return self.exit_code

    def ends_with(self, exit_code: int) -> None:
        """Wait for its end, which must have this exit code."""
        assert self.ended() == exit_code, f"{self.name} ended with {self.exit_code}\n{self.output}"

    def wait_until_stopped(self) -> None:
        """Wait until it is stopped by SIGSTOP, from itself or from another process."""
        wait_until(self._is_stopped, description=f"{self.name} is stopped", timeout_s=_PATIENCE_S)

    def _is_stopped(self) -> bool:
        assert self.exit_code is None, f"{self.name} ended with {self.exit_code} instead of stopping:\n{self.output}"
        return Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


class FaultWorld:
    """A run of stand-ins; every process that it starts ends with it."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._parts: list[Part] = []

    def start_learner(
        self, *, holder: str = "job", takeover: bool = False, crash_at: str = "", url: str | None = None
    ) -> Part:
        """`url`: another route to the same server."""
        return self._start("learner", _Learner(self._place_at(url), holder, takeover), crash_at)

    def start_worker(
        self,
        *,
        name: str = "w",
        crash_at: str = "",
        url: str | None = None,
        pace_s: float | None = None,
        habits: Habits = SOUND,
    ) -> Part:
        """`pace_s`: instead of the place's."""
        place = self._place_at(url)
        return self._start("worker", _Worker(replace(place, pace_s=pace_s or place.pace_s), name, habits), crash_at)

    def parts(self, kind: str) -> list[Part]:
        """Return all learners, or all workers, in the order of their start."""
        return [part for part in self._parts if part.name.startswith(f"{kind}-")]

    def last_words(self) -> str:
        """Return the ends of all parts' outputs."""
        return "\n".join(f"{part.name} ({part.exit_code}): {part.output[-_WORDS:]}" for part in self._parts)

    def held_by(self, client: redis.Redis, worker: str) -> set[bytes]:
        """Return the tickets that this worker has leased, according to Redis; none before the run exists."""
        if not client.exists(self.keys.tickets("train")):
            return set()
        found = client.xpending_range(self.keys.tickets("train"), WORKERS, min="-", max="+", count=100)
        return {entry["message_id"] for entry in found if entry["consumer"] == worker.encode()}

    @property
    def keys(self) -> Keys:
        return Keys(self.place.name)

    def newest_checkpoint(self) -> CheckpointName:
        """Return the newest checkpoint of the highest term that made one, of any lineage; step 0 if there is none."""
        names = (CheckpointName.parse(path.name) for path in (self.place.run_folder / "checkpoints").glob("e*"))
        return max((name for name in names if name), default=CheckpointName(0, 0))

    def files(self) -> dict[str, bytes]:
        """Return the contents of all files in the folder, by name, except the parts' outputs."""
        paths = (path for path in self.place.folder.rglob("*") if path.is_file() and path.suffix != ".out")
        return {str(path.relative_to(self.place.folder)): path.read_bytes() for path in paths}

    def endings(self) -> dict[int, Ending]:
        """Return the endings by ticket, as the audit reads them from the journal."""
        lines = read_chain(self.place.run_folder, read_commit(self.place.run_folder)).lines
        found = [Ending(line.step, line.outcome, t) for line in lines for a, b in line.ranges for t in range(a, b)]
        return {ending.ticket: ending for ending in found}

    def audit(self) -> Audit:
        return audit_folder(self.place.run_folder, redis_url=self.place.url)

    def _place_at(self, url: str | None) -> Place:
        return replace(self.place, url=url or self.place.url)

    def _start(self, kind: str, run: Callable[[], Any], crash_at: str) -> Part:
        part = Part(self.place, f"{kind}-{len(self._parts)}", run, crash_at=crash_at)
        self._parts.append(part)
        return part

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for part in self._parts:
            part.kill()


class _Learner:
    """A learner process's work; an object, because it is sent to the forking server by pickle."""

    def __init__(self, place: Place, holder: str, takeover: bool) -> None:
        self._place, self._holder, self._takeover = place, holder, takeover

    def __call__(self) -> None:
        learn(self._place, holder=self._holder, takeover=self._takeover)


class _Worker:
    def __init__(self, place: Place, name: str, habits: Habits) -> None:
        self._place, self._name, self._habits = place, name, habits

    def __call__(self) -> None:
        asyncio.run(work(self._place, name=self._name, habits=self._habits))


def _told(place: Place, name: str, crash_at: str) -> dict[str, str]:
    """Return its variables, in addition to those of the server that forks it."""
    password = place.passwords and place.passwords / name.partition("-")[0]
    return {**({VARIABLE: crash_at} if crash_at else {}), **({f"{PASSWORD}_FILE": str(password)} if password else {})}


def _live(run: Callable[[], Any], out: Path, told: Mapping[str, str], deadline_s: int) -> None:
    """Run in the new process."""
    signal.alarm(deadline_s)
    os.environ.update(told)
    with out.open("a", buffering=1) as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            run()
        except Fenced as error:
            print(error)
            sys.exit(FENCED)
        except TransportError as error:
            print(error)
            sys.exit(REFUSED)
        except Exception:  # noqa: BLE001 - the test reports it
            traceback.print_exc()
            sys.exit(1)
