"""The first host's side: accepts further hosts, sends them commands, and reports when one is lost.

    further hosts ── join ──► Hosts ──┬─ begin   wait for all, then have each start its ranks
                                      ├─ bring   have each hold exactly this version of the weights
                                      ├─ end     have each end its ranks
                                      └─ lost    a host with running ranks is gone, and so is the engine

Hosts stay joined from one engine to the next. A host that comes when all places are taken is told so, and retries.
Blocks on missing hosts for `worker.start_timeout_s`, and on versions for as long as the caller waits.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from streamrl.errors import EngineError, WeightsError
from streamrl.process import address_of, bind, free_port
from streamrl.tasks import cancel_all, close_server
from streamrl.telemetry.progress import Progress, Wait
from streamrl.versions import show
from streamrl.workers.engines.base import Meeting
from streamrl.workers.hosts.link import LONGEST_LINE, SILENT_S, Link, LinkLost, Message, greet

log = structlog.get_logger(__name__)


class _Joined:
    """One further host."""

    def __init__(self, link: Link, about: Message) -> None:
        self.link = link
        self.name, self.host = str(about.get("name"))[:200], str(about.get("host"))[:200]
        self.lost = ""  # the reason, once it is lost
        self.bringing: dict[int, asyncio.Future[str]] = {}  # each resolves to "", or to why the host lacks the version

    def __str__(self) -> str:
        return f"{self.name} on {self.host}"


class Hosts:
    """Implements `engines.base.FurtherHosts` and `workers.weights.roles.FurtherMirrors`."""

    def __init__(
        self,
        *,
        num: int,  # hosts of the engine, this one included
        secret: bytes,
        run_uid: str,
        progress: Progress,
        start_timeout_s: float,
        silent_s: float = SILENT_S,
    ) -> None:
        self.num = num
        self.address = ""  # where further hosts join
        self._secret, self._run_uid, self._silent_s = secret, run_uid, silent_s
        self._progress, self._start_timeout_s = progress, start_timeout_s
        self._joined: list[_Joined] = []
        self._at_work: list[_Joined] = []  # in rank order
        self._lost: asyncio.Future[str] | None = None  # belongs to the running engine
        self._changed = asyncio.Condition()
        self._numbers = itertools.count(1)
        self._on_arrival: dict[int, Callable[[], None]] = {}  # by number of the command

    async def begin(self, seed: int) -> Meeting:
        try:
            async with asyncio.timeout(self._start_timeout_s), self._changed:
                with self._progress.waiting(Wait.HOSTS):
                    await self._changed.wait_for(lambda: len(self._joined) >= self.num - 1)
        except TimeoutError:
            raise EngineError(
                f"{len(self._joined) + 1} of the {self.num} hosts of this engine (worker.hosts) had joined within "
                f"worker.start_timeout_s={self._start_timeout_s:g}: start `streamrl worker` with --join "
                f"{self.address} on the others"
            ) from None
        self._at_work = list(self._joined)
        self._lost = asyncio.get_running_loop().create_future()
        address = self._at_work[0].link.own_address
        meeting = Meeting(address=address, port=free_port(address), own=address)
        for node, joined in enumerate(self._at_work, start=1):
            command = {"do": "begin", "node": node, "address": meeting.address, "port": meeting.port, "seed": seed}
            joined.link.send(command)
        return meeting

    async def lost(self) -> str:
        assert self._lost is not None, "an engine was started"
        return await asyncio.shield(self._lost)

    def end(self) -> None:
        for joined in self._at_work:
            joined.link.send({"do": "end"})
        self._at_work, self._lost = [], None

    def named(self, node: int) -> str:
        return "" if node == 0 else f", host {node + 1} of {self.num} ({self._at_work[node - 1]})"

    async def bring(
        self, version: int, *, refetch: bool = False, bytes_arrived: Callable[[], None] = lambda: None
    ) -> None:
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        waiting = {joined: loop.create_future() for joined in self._at_work}
        self._on_arrival[number] = bytes_arrived
        try:
            for joined, answer in waiting.items():
                if joined.lost:
                    answer.set_result(joined.lost)
                joined.bringing[number] = answer
                joined.link.send({"do": "bring", "number": number, "version": version, "anew": refetch})
            for joined, answer in waiting.items():
                if why := await answer:
                    raise WeightsError(f"{joined} does not have version {show(version)}: {why}")
        finally:
            del self._on_arrival[number]
            for joined in waiting:
                joined.bringing.pop(number, None)

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer, silent_s=self._silent_s)
        try:
            about = await greet(link, side="first", secret=self._secret, run_uid=self._run_uid)
            await self._listen(_Joined(link, about))
        except LinkLost as error:
            log.warning("further_host_refused", address=link.other_address, reason=str(error))
        finally:
            await link.close()

    async def _listen(self, joined: _Joined) -> None:
        for old in [one for one in self._joined if one.name == joined.name]:
            await self._lose(old, "it has joined again")  # its old connection has not ended yet
        if len(self._joined) >= self.num - 1:
            joined.link.send({"do": "wait", "why": f"all {self.num} hosts have joined already"})
            return
        self._joined.append(joined)
        self._note_hosts()
        joined.link.send({"do": "welcome"})
        log.info("host_joined", name=joined.name, host=joined.host, address=joined.link.other_address)
        why = "the worker of the first host left"
        try:
            async with self._changed:
                self._changed.notify_all()
            while True:
                message = await joined.link.receive()
                if message.get("lost"):
                    raise LinkLost(str(message["lost"])[:1000])
                if "arrived" in message:
                    for bytes_arrived in self._on_arrival.values():
                        bytes_arrived()
                answer = joined.bringing.pop(int(message.get("number", 0)), None)
                if answer is not None and not answer.done():
                    answer.set_result(str(message.get("why", ""))[:1000])
        except LinkLost as error:
            why = str(error)
        finally:
            await self._lose(joined, why)

    async def _lose(self, joined: _Joined, why: str) -> None:
        if joined.lost:
            return
        joined.lost = why
        self._joined.remove(joined)
        self._note_hosts()
        log.warning("host_lost", name=joined.name, host=joined.host, reason=why)
        for answer in joined.bringing.values():
            if not answer.done():
                answer.set_result(why)
        if joined in self._at_work and self._lost is not None and not self._lost.done():
            number = self._at_work.index(joined) + 2  # the first host is number 1
            self._lost.set_result(f"host {number} of {self.num} ({joined}) is lost: {why}")
        await joined.link.close()

    def _note_hosts(self) -> None:
        self._progress.note(hosts=len(self._joined) + 1, hosts_wanted=self.num, hosts_at=self.address)

    async def _leave(self) -> None:
        """Make the further hosts leave too."""
        for joined in list(self._joined):
            joined.link.send({"do": "leave"})
            await self._lose(joined, "the worker of the first host left")


@asynccontextmanager
async def open_hosts(hosts: Hosts, at: tuple[str, int]) -> AsyncIterator[Hosts]:
    """Let further hosts join at this address while the context is open. They leave at its end, unless it ends by an
    error: then they keep their weights, and join the worker that is started in place of this one.
    """
    welcomed: set[asyncio.Task[None]] = set()

    def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def forget(task: asyncio.Task[None]) -> None:
            welcomed.discard(task)
            writer.close()  # also of a task that was cancelled before it started

        task = asyncio.create_task(hosts._welcome(reader, writer), name="a further host")
        welcomed.add(task)
        task.add_done_callback(forget)

    bound = bind(*at, what="--hosts")
    server = await asyncio.start_server(welcome, sock=bound, limit=LONGEST_LINE)
    hosts.address = address_of(bound)
    hosts._note_hosts()
    log.info("hosts_join_here", address=hosts.address, num=hosts.num)
    failed = False
    try:
        yield hosts
    except Exception:
        failed = True
        raise
    finally:
        await close_server(server)
        if not failed:
            await hosts._leave()
        await cancel_all(list(welcomed))
        await asyncio.sleep(0)  # the loop closes the sockets of closed writers in its next turn
