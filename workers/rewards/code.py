"""Rewards of type `code`: runs a completion's program against its row's tests, in this worker's sandboxes.

    score ──► a slot among `processes` ──► keeper ──► a cell for each test ──► outcomes ──► number

A failure of the sandbox is an error and never a score of 0: the keeper died, the machine had no time for the program
within `timeout_s`, or a row holds no tests. Blocks on a slot (bounded by the tests before it) and on each test.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence

from streamrl.config import schema
from streamrl.config.places import SANDBOX
from streamrl.errors import ConfigError, RewardError
from streamrl.permissions import Permissions
from streamrl.workers.rewards.base import ScoreItem, SourceHealth
from streamrl.workers.rewards.child import CallFailed, Child, NoProcess
from streamrl.workers.rewards.code_tests import CaseOutcome, CodeCase, ProgramEnding, judge, score_of

_KEEPER = "streamrl.workers.confined.sandbox_keeper"
_GRACE_S = 15.0  # for the keeper to report that a program got no CPU time: it waits for the CPU, too
_SERVICE = "use a service instead: type http, form sandbox-fusion"


def build_code_reward(name: str, source: schema.CodeReward, permissions: Permissions) -> CodeReward:
    """Check this worker's permission; starts nothing yet."""
    if SANDBOX not in permissions.reward_code:
        raise ConfigError(
            f"rewards.{name}: this worker may not run generated programs and the rows' tests; to allow it, in its "
            f"sandbox, start the worker with --allow-reward-code {SANDBOX}"
        )
    return CodeReward(source, key=f"rewards.{name}")


class _NoKeeper(RewardError):
    """No process was to be had for the keeper, perhaps for a moment: nothing is known of this machine's sandbox."""


class CodeReward:
    def __init__(self, source: schema.CodeReward, *, key: str, keeper: str = _KEEPER) -> None:
        self._source, self._key = source, key
        self._cells = SandboxCells(source, keeper=keeper)

    async def start(self) -> None:
        """Run a probe that tries what is forbidden, and prints. ConfigError if this machine cannot confine it."""
        try:
            await self._cells.prove()
        except _NoKeeper as error:
            raise RewardError(f"{self._key}: {error}") from None
        except RewardError as error:
            await self._cells.close()
            raise ConfigError(f"{self._key}: this machine cannot confine programs: {error}; {_SERVICE}") from None

    async def score(self, item: ScoreItem) -> float:
        return self.score_of(await self.judge(item, every=self._source.tests.partial))

    async def judge(self, item: ScoreItem, *, every: bool = True) -> list[CaseOutcome]:
        """Return the outcome of each test; without `every`, only up to the first failure."""
        return await judge(item, self._source.tests, self._cells, every=every)

    def score_of(self, outcomes: Sequence[CaseOutcome]) -> float:
        return score_of(outcomes, partial=self._source.tests.partial)

    def health(self) -> SourceHealth:
        return SourceHealth()  # a sandbox is always available: failures concern single samples

    async def close(self) -> None:
        await self._cells.close()


class SandboxCells:
    """Limits the number of concurrent cells. The keeper starts on first use, and again after its death."""

    def __init__(self, source: schema.CodeReward, *, keeper: str) -> None:
        self._source, self._module = source, keeper
        self._slots = asyncio.Semaphore(source.processes)
        self._start_lock = asyncio.Lock()
        self._keeper: Child | None = None

    async def run(self, program: str, case: CodeCase) -> ProgramEnding:
        tests, patience_s = self._source.tests, max(self._source.timeout_s, self._source.tests.time_s)
        run = {
            "program": program,
            "then": case.then,
            "stdin": case.stdin,
            "time_s": tests.time_s,
            "memory_mb": tests.memory_mb,
        }
        async with self._slots:
            try:
                keeper = await self._live_keeper()
                result = await keeper.call((run, patience_s), timeout_s=patience_s + _GRACE_S)
            except CallFailed as failed:
                kind = _NoKeeper if isinstance(failed, NoProcess) else RewardError
                raise kind(f"the sandbox failed: {failed}") from None
        stdout = base64.b64decode(result.pop("stdout")).decode(errors="replace")
        return ProgramEnding(
            ended=result["ended"], why=str(result.get("why", "")), stdout=stdout, seconds=result["seconds"]
        )

    async def prove(self) -> None:
        """RewardError if a cell runs no program, or lets it do what is forbidden."""
        ending = await self.run(_PROBE, CodeCase())
        if ending.stdout != "held\n":
            raise RewardError(f"a program could {ending.stdout.strip() or 'not run'} {ending.why}".strip())

    async def close(self) -> None:
        if self._keeper is not None:
            keeper, self._keeper = self._keeper, None
            await keeper.close()

    async def _live_keeper(self) -> Child:
        async with self._start_lock:
            if self._keeper is not None and self._keeper.lost:
                await self.close()
            if self._keeper is None:
                self._keeper = await Child.begin(self._source, self._module)
            return self._keeper


# Attempts that a cell must refuse, run in one.
_PROBE = """
import os
for name, attempt in {
    "start a process": os.fork,
    "write a file": lambda: os.open("/tmp/sandbox", os.O_WRONLY | os.O_CREAT, 0o600),
    "empty a file that it may read": lambda: os.open("/dev/null", os.O_RDONLY | os.O_TRUNC),  # this one is always empty
    "read files other than Python's": lambda: os.listdir("/"),
    "raise its priority": lambda: os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0)),
    "open a connection": lambda: __import__("_socket").socket(),
}.items():
    try:
        attempt()
    except OSError:
        continue
    print(name)
    break
else:
    print("held")
"""
