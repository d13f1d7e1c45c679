"""A worker without an engine, as a process that can be killed.

The rollout loop with its leases, renewals and deliveries is the real one, on the engine double, which takes some time.
Of the weights it reads the newest blob, and ends with an error if that is not what was published. It prints a line for
each delivered group. It is also the operator who has dead tickets repeated.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import redis

from streamrl.config import schema
from streamrl.errors import SampleError, TransportError, WeightsError
from streamrl.permissions import Permissions
from streamrl.protocol.transport.connection import connect, connect_async
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.operator import read_letters, request_retries
from streamrl.protocol.transport.types import Leased
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.protocol.wire.group import decode_header
from streamrl.telemetry.progress import Progress
from streamrl.workers.engines.base import Engine, Generated, SampleRequest
from streamrl.workers.engines.double import EngineDouble
from streamrl.workers.environments.playing import playing
from streamrl.workers.rewards.base import RewardDouble, ScoreItem
from streamrl.workers.rewards.mixing import Rewards, Weighted
from streamrl.workers.rollout.answer import Answerer
from streamrl.workers.rollout.loop import Rollout
from streamrl.workers.weights.roles import WeightsDouble
from tests.faults.place import FAILING_TICKET, Place
from tests.faults.stand_in_learner import open_store_of, weights_of
from tests.faults.stand_in_model import stand_in_model
from tests.feed_world import MODEL
from tests.helpers import wait_until_async

_LOOK_EVERY_S = 0.02
_DELIVERED = "delivered "
LEFT = "left "  # open sessions and samples in flight at the end
_DULL_EVERY = 5  # prompts: samples of these get equal rewards, so that the learner drops the group


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """A worker's misbehaviour; or that it fails no ticket."""

    keeps_first_version: bool = False  # for ever, and takes tickets that ask for newer ones anyway
    fingerprint: str = MODEL  # reported for its model and tokenizer
    fails: bool = True  # the tickets that are meant to fail
    repeats: bool = True  # dead tickets, as their operator


SOUND = Habits()


@dataclass(frozen=True, slots=True)
class Delivery:
    """A group accepted by Redis."""

    ticket: int
    oldest: int  # version among its tokens
    youngest: int

    @staticmethod
    def all_in(output: str) -> list[Delivery]:
        """Parse the deliveries that a worker has printed."""
        lines = [line for line in output.splitlines() if line.startswith(_DELIVERED)]
        return [Delivery(*map(int, line.removeprefix(_DELIVERED).split())) for line in lines]


async def work(place: Place, *, name: str, habits: Habits = SOUND) -> None:
    """Work until SIGTERM, or until the run has ended."""
    config, keys = place.config(), Keys(place.name)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    with connect(place.url, config.redis) as client:
        async with connect_async(place.url, config.redis) as async_client:
            stream = _TellingStream(
                async_client,
                keys,
                worker=name,
                lease_s=place.worker_lease_s,
                give_up_after_s=config.redis.give_up_after_s,
            )
            await wait_until_async(partial(_is_running, stream), description="there is a run", timeout_s=240)
            operator = asyncio.create_task(
                _repeat_the_dead(client, keys) if habits.repeats else asyncio.sleep(0), name="operator"
            )
            source = Weighted(reward=RewardDouble(_Judge()), weight=1.0)
            engine = _PacedEngine(place, fails=habits.fails)
            async with playing(config, Permissions(reward_code=(_target(config),)), stand_in_model()) as player:
                rollout = Rollout(
                    tickets=stream,
                    weights=_Weights(stream, config, client, keys, keeps_first=habits.keeps_first_version),
                    answerer=Answerer(
                        rewards=Rewards({"exact": source}),
                        config=config,
                        worker=name,
                        fingerprint=habits.fingerprint,
                        player=player,
                    ),
                    config=config,
                    has_other_settings=lambda info: False,
                    progress=Progress(part=f"worker/{name}", role="worker"),
                )
                await rollout.run(engine, stop)
                left = getattr(getattr(player, "sessions", None), "num_open", 0), engine.stats().in_flight
                print(f"{LEFT}{left[0]} {left[1]}")
            operator.cancel()
            await stream.leave()


def _target(config: schema.Config) -> str:
    return (config.environment and config.environment.target) or ""


async def _is_running(stream: WorkerStream) -> bool:
    info = await stream.run_info()
    return info is not None and info.state == "running"


class _TellingStream(WorkerStream):
    async def deliver(self, leased: Leased, header: bytes, body: bytes) -> bool:
        is_taken = await super().deliver(leased, header, body)
        group = decode_header(header)
        if is_taken and not group.failed:
            print(f"{_DELIVERED}{group.ticket} {group.min_version} {group.max_version}")
        return is_taken


class _Judge:
    """Scores a prompt's samples 0 and 1 in turn, except for the dull prompts."""

    def __init__(self) -> None:
        self._num_judged: Counter[int] = Counter()

    def __call__(self, item: ScoreItem) -> float:
        prompt = item.fields["answer"]
        self._num_judged[prompt] += 1
        return 1.0 if prompt % _DULL_EVERY == 0 else float(self._num_judged[prompt] % 2)


class _PacedEngine(EngineDouble):
    """Takes some time, and refuses the samples of some tickets."""

    def __init__(self, place: Place, *, fails: bool) -> None:
        super().__init__(trouble=partial(_refuse, place) if fails else lambda request: None)
        self._pace_s = place.pace_s

    async def generate(self, request: SampleRequest) -> Generated:
        await asyncio.sleep(self._pace_s * random.uniform(0.5, 1.5))
        return await super().generate(request)


def _refuse(place: Place, request: SampleRequest) -> SampleError | None:
    further = int(request.request_id.split("-")[1]) - FAILING_TICKET
    failing = further == 0 or (place.failing_every and further > 0 and further % place.failing_every == 0)
    return SampleError("made to fail") if failing else None


class _Weights(WeightsDouble):
    """Follows announcements; every version's blob must exist, and belong to that version."""

    def __init__(
        self, stream: WorkerStream, config: schema.Config, client: redis.Redis, keys: Keys, *, keeps_first: bool
    ) -> None:
        super().__init__()
        self._stream, self._store = stream, open_store_of(config, client, keys)
        self._keeps_first = keeps_first

    async def follow(self, engine: Engine) -> None:
        self.engine = engine
        while not (self._keeps_first and self.version):
            latest = await self._stream.announcements.latest()
            if latest is not None and latest.version > self.version and self._has(latest.manifest, latest.version):
                await self.serve(latest.version, step=latest.step)
            await asyncio.sleep(_LOOK_EVERY_S)
        await asyncio.Event().wait()  # companions must not return

    async def serving(self, version: int) -> None:
        await super().serving(1 if self._keeps_first else version)

    def _has(self, manifest: bytes, version: int) -> bool:
        try:
            data = self._store.get(manifest.decode())
        except (WeightsError, TransportError):  # deleted because a newer one exists; or the store is away
            return False
        assert data == weights_of(version), f"version {version} is announced, and its blob is another's"
        return True


async def _repeat_the_dead(client: redis.Redis, keys: Keys) -> None:
    """Request a new ticket for every dead one; retried while Redis is away."""
    while True:
        with suppress(TransportError):
            new = [letter for letter in read_letters(client, keys) if not letter.retry_requested]
            request_retries(client, keys, new, by="the operator")
        await asyncio.sleep(_LOOK_EVERY_S)
