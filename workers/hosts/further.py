"""A further host's side: joins the first host, follows its commands, and rejoins when the connection is lost.

    join ─┬─► bring   bring the copy of the weights to this version    ─► tell what arrives; reply when done, or why not
     ▲    ├─► begin   start ranks of the engine, in their own thread   ─► one that ends is reported, and ends them all
     │    ├─► end     kill the ranks
     │    └─► leave   the first host's worker left in order, and so does this one
     └── the first host or a rank is lost: kill the ranks, keep the copy

Blocks on the first host for `start_timeout_s`, then raises EngineError. A stop is reported to the first host only after
`grace_s`: if both hosts are stopped at once, the first one finishes its samples and sends `leave` before that.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from streamrl.errors import EngineError, TransportError, UserError, WeightsError
from streamrl.tasks import cancel_all, run_beside, unless
from streamrl.telemetry.progress import Progress, Wait
from streamrl.workers.engines.base import Meeting
from streamrl.workers.hosts.link import LONGEST_LINE, SILENT_S, Link, LinkLost, Message, greet

log = structlog.get_logger(__name__)

_CONNECT_S = 5.0
_RETRY_S = 1.0
_KILL_AGAIN_S = 0.2
_TELL_EVERY_S = 1.0


class Ranks(Protocol):
    """Implemented by `engines.vllm.headless.HeadlessRanks`, and by a double."""

    def start(self) -> None: ...

    def wait(self) -> str: ...

    def kill(self) -> None: ...


class Holds(Protocol):
    """Implemented by `hosts.copy.Copy`, and by a double."""

    def num_read(self) -> int:
        """Return how many bytes of weights have arrived so far."""
        ...

    async def bring(self, version: int, *, refetch: bool) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstHost:
    """Where the first host is, and the time limits for it."""

    at: tuple[str, int]
    run_uid: str
    start_timeout_s: float
    grace_s: float
    silent_s: float = SILENT_S


class FurtherHost:
    def __init__(
        self,
        *,
        name: str,
        first: FirstHost,
        secret: Callable[[], Awaitable[bytes | None]],  # returns the run's secret; None: the run has ended
        copy: Holds,
        make_ranks: Callable[[Meeting, int], Ranks],  # second argument: the seed, shared by an engine's ranks
        progress: Progress,
    ) -> None:
        self._name, self._first, self._secret = name, first, secret
        self._copy, self._make_ranks, self._progress = copy, make_ranks, progress
        # The kernel kills ranks when the thread that started them ends, so it must stay.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm")
        self._link: Link | None = None  # the latest
        self._ranks: Ranks | None = None
        self._starting: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until stopped by either side, or until the run is over."""
        try:
            while (link := await unless(stop, self._join())) is not None:
                try:
                    if await self._serve(link, stop):
                        return
                except LinkLost as error:
                    log.warning("first_host_lost", reason=str(error))
                finally:
                    await self._end()
                    await link.close()
        finally:
            if self._link is not None:  # created during a cancellation
                await self._link.close()
            self._thread.shutdown(wait=False)

    async def _join(self) -> Link | None:
        """Return a link to the first host; None if the run is over."""
        deadline, logged = time.monotonic() + self._first.start_timeout_s, ""
        host, port = self._first.at
        with self._progress.waiting(Wait.HOSTS):
            while (secret := await self._secret()) is not None:
                joined = await self._connect(secret)
                if isinstance(joined, Link):
                    log.info("joined", first=f"{host}:{port}")
                    return joined
                if joined != logged:
                    log.warning("not_joined", first=f"{host}:{port}", reason=joined)
                    logged = joined
                self._progress.note(not_joined=joined)
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"could not join the engine whose first host is {host}:{port} (--join) within "
                        f"worker.start_timeout_s={self._first.start_timeout_s:g}: {joined}"
                    )
                await asyncio.sleep(_RETRY_S)
        return None

    async def _connect(self, secret: bytes) -> Link | str:
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(*self._first.at, limit=LONGEST_LINE)
        except TimeoutError:
            return f"it did not answer within {_CONNECT_S:g} s"
        except OSError as error:
            return f"nothing is listening there: {error.strerror or error}"
        self._link = link = Link(reader, writer, silent_s=self._first.silent_s)
        try:
            about = {"name": self._name, "host": socket.gethostname()}
            await greet(link, side="further", secret=secret, run_uid=self._first.run_uid, about=about)
            answer = await link.receive()
        except LinkLost as error:
            why = str(error)
        else:
            if answer.get("do") == "welcome":
                return link
            why = str(answer.get("why", "it accepts no further host"))
        await link.close()
        return why

    async def _serve(self, link: Link, stop: asyncio.Event) -> bool:
        """Follow commands. Return whether to leave; otherwise the first host is to be joined again."""
        self._progress.working("wait for an engine to start")
        self._broken = asyncio.get_running_loop().create_future()
        following = asyncio.create_task(self._follow_commands(link), name="follow the first host's commands")
        stopping = asyncio.create_task(stop.wait(), name="wait for stop")
        try:
            waited: list[asyncio.Future[Any]] = [following, self._broken]
            await asyncio.wait([*waited, stopping], return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set() and self._ranks is not None:
                self._progress.stopping()
                grace_s = self._first.grace_s
                await asyncio.wait(waited, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
                return True
            if self._broken.done():
                error = self._broken.exception()
                link.send({"lost": str(error)})
                log.error("ranks_failed", error=str(error))
                if not isinstance(error, EngineError):  # another start would not help
                    self._broken.result()
                return stop.is_set()
            link.send({"lost": "it was stopped"})
            return True
        finally:
            await cancel_all([following, stopping, *self._tasks])

    async def _follow_commands(self, link: Link) -> None:
        while True:
            message = await link.receive()
            match message.get("do"):
                case "bring":
                    self._in_background(self._bring(link, message), name="bring a version")
                case "begin":
                    await self._end()
                    self._begin(link, message)
                case "end":
                    await self._end()
                    self._progress.working("wait for an engine to start")
                case "leave":
                    log.info("left", reason="the worker of the first host left")
                    return

    def _in_background(self, work: Awaitable[None], *, name: str) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring(self, link: Link, message: Message) -> None:
        version, why = int(message["version"]), ""
        try:
            bringing = self._copy.bring(version, refetch=bool(message["anew"]))
            await run_beside(bringing, {"tell that data arrives": self._tell_arrivals(link)})
        except (WeightsError, TransportError) as error:  # the first host retries, perhaps with a newer version
            why = str(error)
        except Exception as error:  # noqa: BLE001 - such as a full disk's; `_break` logs it
            self._break(error)
            return
        else:
            self._progress.advanced(version=version)
        link.send({"number": message["number"], "why": why})

    async def _tell_arrivals(self, link: Link) -> None:
        """Have the first host go on waiting, however long the transfer takes."""
        told = self._copy.num_read()
        while True:
            await asyncio.sleep(_TELL_EVERY_S)
            if (arrived := self._copy.num_read()) != told:
                link.send({"arrived": arrived - told})
                told = arrived

    def _begin(self, link: Link, message: Message) -> None:
        meeting = Meeting(
            address=str(message["address"]), port=int(message["port"]), own=link.own_address, node=int(message["node"])
        )
        self._progress.working("start ranks")
        self._progress.note(number=meeting.node + 1)
        self._ranks = self._make_ranks(meeting, int(message["seed"]))
        self._starting = asyncio.get_running_loop().run_in_executor(self._thread, self._ranks.start)
        self._in_background(self._watch(self._ranks, self._starting), name="watch ranks")

    async def _watch(self, ranks: Ranks, starting: asyncio.Future[None]) -> None:
        try:
            await asyncio.shield(starting)
            self._progress.working("serve")
            failure: Exception = EngineError(await asyncio.to_thread(ranks.wait))
        except Exception as error:  # noqa: BLE001 - such as a broken driver's; `_break` logs it
            failure = error
        if ranks is self._ranks:  # else they were ended on purpose
            self._break(failure)

    def _break(self, error: Exception) -> None:
        """Have the first host told, whatever the error: it would wait in vain, and name itself."""
        if not isinstance(error, EngineError | UserError):
            log.error("host_failed", exc_info=error)
            error = EngineError(f"{type(error).__name__}: {error}")
        if not self._broken.done():
            self._broken.set_exception(error)

    async def _end(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is None or self._starting is None:
            return
        while not self._starting.done():
            await asyncio.to_thread(ranks.kill)  # those started so far
            await asyncio.wait([self._starting], timeout=_KILL_AGAIN_S)
        await asyncio.to_thread(ranks.kill)
        await asyncio.gather(self._starting, return_exceptions=True)
