"""Workers without engines, in their own process: they answer each ticket at once, through a group's real path (lease,
encode, deliver script). Also the comparison for them, and a worker that never answers, to be killed.

Everything here runs until `in_background` ends its process.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from streamrl.config import schema
from streamrl.protocol.transport.connection import connect, connect_async
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.types import Leased
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.protocol.wire.group import Group, GroupHeader, encode_group
from streamrl.protocol.wire.sample import Sample, Span
from streamrl.protocol.wire.ticket import Ticket
from streamrl.versions import make_version

MODEL = "bench"  # model fingerprint of the groups
VOCABULARY = 32_000
PLAIN_STREAM = "plain"
_PLAIN_AHEAD = 1024  # how many groups the plain writer may be ahead of its reader
_SPREAD = 0.8  # sigma of the log-normal time per group
_LEASE_BLOCK_MS = 500  # as in workers.rollout.leases


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a group."""

    num_samples: int
    num_tokens: int  # per sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """Workers of one run; each has its own connections."""

    url: str
    run: str
    shape: Shape
    num_workers: int = 1
    lease_s: float = 60.0
    give_up_after_s: float = 120.0
    max_groups_in_flight: int = 32  # per worker
    generate_s: float = 0.0  # mean time per group, long-tailed; 0: none


@contextmanager
def in_background(work: Callable[..., None], *args: object) -> Iterator[int]:
    """Run `work` in another process inside this context; yields its pid."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=args, daemon=True)
    process.start()
    try:
        assert process.pid is not None, "it was started"
        yield process.pid
    finally:
        process.kill()
        process.join()


def answer_tickets(team: Team) -> None:
    async def all_workers() -> None:
        made = _Made(team.shape)
        await asyncio.gather(*(_Worker(team, number, made).run() for number in range(team.num_workers)))

    asyncio.run(all_workers())


def hold_tickets(team: Team) -> None:
    """Lease the available tickets, renew them in time, and never answer."""
    asyncio.run(_hold(team))


def write_plainly(url: str, header: bytes, body: bytes, batch: int) -> None:
    """Write the same bytes with the least work for Redis and its client: pipelined XADDs and nothing else."""
    with connect(url, schema.Redis()) as client, client.pipeline(transaction=False) as pipe:
        while True:
            for _ in range(batch):
                pipe.xadd(PLAIN_STREAM, {"h": header, "b": body})
            pipe.xlen(PLAIN_STREAM)
            if pipe.execute()[-1] > _PLAIN_AHEAD:
                time.sleep(0.001)


def encode_answer(ticket: Ticket, samples: tuple[Sample, ...], *, worker: str = "bench") -> tuple[bytes, bytes]:
    header = GroupHeader(
        ticket=ticket.number,
        identity=ticket.identity,
        run_uid=ticket.run_uid,
        purpose=ticket.purpose,
        attempt=ticket.attempt,
        worker=worker,
        fingerprint=MODEL,
        num_prompt_tokens=len(ticket.token_ids),
        # The remaining fields are computed from the body.
        sample_lengths=(),
        sample_rewards=(),
        sample_finished=(),
        min_version=0,
        max_version=0,
    )
    return encode_group(Group(header=header, prompt_ids=ticket.token_ids, samples=samples))


def example_ticket(number: int) -> Ticket:
    return Ticket(
        number=number,
        run_uid="bench",
        purpose="train",
        data_epoch=0,
        prompt_index=number,
        prompt=f"prompt {number}",
        token_ids=np.arange(40, dtype=np.int32),
        num_samples=1,
    )


def example_answer(shape: Shape) -> tuple[bytes, bytes]:
    return encode_answer(example_ticket(0), make_samples(shape, version=make_version(1, 0)))


def make_samples(shape: Shape, *, version: int, step: int = 0) -> tuple[Sample, ...]:
    rng = np.random.default_rng(0)
    length = shape.num_tokens
    return tuple(
        Sample(
            token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
            logprobs=-rng.random(length).astype(np.float32),
            mask_runs=(length,),
            spans=(Span(version=version, step=step, start=0, end=length),),
            finish_reason="stop",
            rewards={"exact": float(number)},
            reward=float(number),
        )
        for number in range(shape.num_samples)
    )


class _Made:
    """The samples of the latest step, shared by all workers, since creating them is not part of the measured path."""

    def __init__(self, shape: Shape) -> None:
        self._length = shape.num_tokens
        self._of = (0, 0)  # (version, step)
        self._samples = make_samples(shape, version=0)

    def samples(self, *, version: int, step: int) -> tuple[Sample, ...]:
        if self._of != (version, step):
            spans = (Span(version=version, step=step, start=0, end=self._length),)
            self._of, self._samples = (version, step), tuple(one._replace(spans=spans) for one in self._samples)
        return self._samples


class _Worker:
    """Takes tickets as workers.rollout.leases does: up to its bound, with one task per ticket."""

    def __init__(self, team: Team, number: int, made: _Made) -> None:
        self._team = team
        self._name = f"w{number}"
        self._made = made
        self._chance = random.Random(number)

    async def run(self) -> None:
        team = self._team
        async with connect_async(team.url, schema.Redis()) as client:
            stream = WorkerStream(
                client, Keys(team.run), worker=self._name, lease_s=team.lease_s, give_up_after_s=team.give_up_after_s
            )
            tasks: set[asyncio.Task[None]] = set()
            while True:
                free = team.max_groups_in_flight - len(tasks)
                if free:
                    leased = await stream.lease(max_tickets=free, block_ms=_LEASE_BLOCK_MS)
                    tasks |= {asyncio.create_task(self._answer(stream, one)) for one in leased}
                else:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                done = {task for task in tasks if task.done()}
                tasks -= done
                for task in done:
                    task.result()

    async def _answer(self, stream: WorkerStream, leased: Leased) -> None:
        ticket = leased.ticket
        if self._team.generate_s:
            await asyncio.sleep(self._team.generate_s * self._chance.lognormvariate(-(_SPREAD**2) / 2, _SPREAD))
        samples = self._made.samples(version=ticket.min_version or make_version(1, 0), step=ticket.issued_step)
        header, body = encode_answer(ticket, samples, worker=self._name)
        assert await stream.deliver(leased, header, body), "nobody else takes tickets here"


async def _hold(team: Team) -> None:
    async with connect_async(team.url, schema.Redis()) as client:
        stream = WorkerStream(client, Keys(team.run), worker="doomed", lease_s=team.lease_s)
        held: list[Leased] = []
        while True:
            held += await stream.lease(max_tickets=team.max_groups_in_flight, block_ms=1)
            assert not await stream.renew(held), "nobody takes leases that are renewed"
            await asyncio.sleep(team.lease_s / 4)  # as workers.rollout.leases does
