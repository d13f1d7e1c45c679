"""T16: a reward service of seven replicas under a worker's loop; six are bad, the good one is killed ten times."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from streamrl.config import schema
from streamrl.permissions import Permissions
from streamrl.process import free_port
from streamrl.tasks import cancel_all, close_server
from streamrl.workers.rewards.base import ScoreItem, SourceHealth
from streamrl.workers.rewards.http_client import HttpReward, build_http_reward
from tests.faults.report import Row, note
from tests.worker_world import WorkerWorld

NUM_RESTARTS = 10
TICKETS_A_ROUND = 6

Writer = asyncio.StreamWriter


class Witness:
    """The real client, and whatever it ever gave out."""

    def __init__(self, client: HttpReward) -> None:
        self.client = client
        self.given: list[tuple[ScoreItem, float]] = []

    async def start(self) -> None:
        await self.client.start()

    async def score(self, item: ScoreItem) -> float:
        value = await self.client.score(item)
        self.given.append((item, value))
        return value

    def health(self) -> SourceHealth:
        return self.client.health()

    async def close(self) -> None:
        await self.client.close()


def truth(item: ScoreItem) -> float:
    return float(sum(map(ord, item.prompt + item.completion)))


async def respond(writer: Writer, status: str, body: bytes, *, length: int | None = None) -> None:
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length or len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


async def fail(writer: Writer) -> None:
    await respond(writer, "500 Internal Server Error", b"{}")


async def hang(writer: Writer) -> None:
    await asyncio.Event().wait()


async def say_nan(writer: Writer) -> None:
    await respond(writer, "200 OK", b'{"rewards": [NaN]}')


async def say_1e30(writer: Writer) -> None:
    await respond(writer, "200 OK", b'{"rewards": [1e30]}')


async def close_in_mid_body(writer: Writer) -> None:
    await respond(writer, "200 OK", b'{"rewards": [1.0', length=100)


async def send_a_gigabyte(writer: Writer) -> None:
    await respond(writer, "200 OK", b"", length=1 << 30)
    for _ in range(1 << 10):
        writer.write(b" " * (1 << 20))
        await writer.drain()


@contextlib.asynccontextmanager
async def bad_replica(behave: Callable[[Writer], Awaitable[None]]) -> AsyncIterator[str]:
    handling: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: Writer) -> None:
        task = asyncio.current_task()
        assert task is not None
        handling.add(task)
        task.add_done_callback(handling.discard)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            await behave(writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        await close_server(server)
        await cancel_all(list(handling))


@contextlib.contextmanager
def good_replica(port: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fake_reward_server", str(port)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == str(port)
        yield process
    finally:
        process.kill()
        process.communicate()


async def test_no_group_is_lost_and_no_reward_is_made_up_whatever_the_replicas_do() -> None:
    port = free_port("127.0.0.1")
    kinds = (fail, hang, say_nan, say_1e30, close_in_mid_body, send_a_gigabyte)
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(bad_replica(kind)) for kind in kinds]
        source = schema.HttpReward(
            type="http", url=f"http://127.0.0.1:{port}", replicas=tuple(urls), timeout_s=0.5, attempts=20
        )
        permissions = Permissions(hosts=("127.0.0.1",))
        witness = Witness(build_http_reward("model", source, permissions, None, first_pause_s=0.05))
        stack.push_async_callback(witness.close)
        world = WorkerWorld(source=witness)
        world.start()
        num_tickets = 0
        for _ in range(NUM_RESTARTS):
            process = await asyncio.to_thread(stack.enter_context, good_replica(port))
            for _ in range(TICKETS_A_ROUND):
                world.put(num_tickets)
                num_tickets += 1
            await world.delivered(num_tickets - TICKETS_A_ROUND // 2)
            process.kill()  # with tickets at work
            await asyncio.to_thread(process.wait)
        await asyncio.to_thread(stack.enter_context, good_replica(port))
        groups = await world.delivered(num_tickets)
        await world.finish()

    tickets = [group.header.ticket for group in groups]
    bad = [(item.completion, value) for item, value in witness.given if value != truth(item)]
    note(
        Row(
            scenario="T16",
            injections=NUM_RESTARTS + len(kinds),
            lost=len(set(range(num_tickets)) - set(tickets)),
            twice=len(tickets) - len(set(tickets)),
            more={"bad_rewards": len(bad)},
        )
    )
    assert sorted(tickets) == list(range(num_tickets))
    assert [group.header.error for group in groups if group.header.failed or group.header.num_failed_samples] == []
    assert witness.given
    assert bad == []
