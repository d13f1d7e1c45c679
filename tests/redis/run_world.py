"""A whole run without its model: the real feed, checkpoints, journal and streams, and a worker that answers at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import redis
import redis.asyncio

from streamrl.config import schema
from streamrl.learner.checkpoints.checkpoint import Checkpoint, CheckpointRoot, CheckpointState
from streamrl.learner.checkpoints.terms import CheckpointName, ancestry, claim_run, known_run
from streamrl.learner.groups.curriculum import open_order
from streamrl.learner.groups.ledger import FeedState
from streamrl.learner.groups.open_feed import open_feed
from streamrl.learner.groups.plan import GroupCheck, Kind, Plan
from streamrl.learner.groups.prompts import PromptSet
from streamrl.ops.audit import Audit, audit_folder
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.lease import await_lease
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.versions import make_version
from tests.feed_world import MODEL, drop_reason, encode_answer, encode_failure, make_config, make_prompts

NUM_PROMPTS = 20
_MAX_ROUNDS = 200


class Place(Protocol):
    """Where a learner works."""

    config: schema.Config
    prompts: PromptSet
    client: redis.Redis
    keys: Keys
    patience_s: float  # while Redis is away, or full


class Learner:
    """From its lease on; it dies by not being called any more."""

    def __init__(
        self,
        place: Place,
        *,
        holder: str = "job",
        takeover: bool = True,
        lease_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config, client, keys = place.config, place.client, place.keys
        patience_s = place.patience_s
        await_lease(
            client,
            keys,
            run_uid=partial(known_run, config.folder),
            holder=holder,
            lease_s=lease_s,
            wait_s=0.0,
            takeover=takeover,
            give_up_after_s=patience_s,
        )
        self.root = CheckpointRoot(config.folder)
        uid = claim_run(config.folder)
        term = self.root.claim_term(uid)
        self.parent = self.root.open(term.parent) if term.parent else None
        self.term, self.uid = term.number, uid
        self.step = self.parent.state.step if self.parent else 0
        self.stream = LearnerStream(
            client, keys, run_uid=uid, term=self.term, holder=holder, lease_s=lease_s, give_up_after_s=patience_s
        )
        self.stream.claim(config_json=config.model_dump_json(), fingerprint=MODEL, wait_s=0.0)
        state = self.parent.state.stream if self.parent else None
        since = self.parent.name.term if self.parent else 0
        self.feed = open_feed(
            stream=self.stream,
            prompts=place.prompts,
            order=open_order(config, place.prompts, root=config.folder, term=self.term, since=since, state=state),
            config=config,
            run_uid=uid,
            fingerprint=MODEL,
            drop_reason=drop_reason,
            state=state,
            clock=clock,
        )
        self._num_versions = 0
        self.copied: tuple[int, FeedState] | None = None  # of a checkpoint under way: its step, and what it says
        self.feed.note_version(make_version(self.term, 0), self.step)

    def plan(self) -> Plan | None:
        return self.feed.plan(step=self.step, world_size=1, timeout_s=0.0)

    def train(self, plan: Plan, verdicts: Sequence[GroupCheck] | None = None) -> list[int]:
        """Every group is sound, unless the verdicts say otherwise."""
        self.feed.settle(plan, verdicts or [GroupCheck.SOUND] * len(plan.entries), trained=True)
        self.step += 1
        self._num_versions += 1
        self.feed.note_version(make_version(self.term, self._num_versions), self.step)
        return [entry.ticket for entry in plan.entries]

    def copy(self, stream: FeedState | None = None) -> CheckpointName:
        """A checkpoint begins: what is trained from here on is not committed by it."""
        self.copied = self.step, stream or self.feed.state()
        return CheckpointName(self.term, self.step)

    def commit(self, stream: FeedState | None = None) -> Checkpoint:
        """The one that is under way; else one of now."""
        checkpoint = self.write_checkpoint(stream)
        self.feed.committed(checkpoint.state.stream, step=checkpoint.name.step)
        self.root.prune(ancestry(self.root.root), term=self.term, keep_last=1, keep_best=0)
        return checkpoint

    def write_checkpoint(self, stream: FeedState | None = None) -> Checkpoint:
        """As `commit`, but Redis hears nothing of it."""
        (step, stream), self.copied = self.copied or (self.step, stream or self.feed.state()), None
        name = CheckpointName(self.term, step)
        folder = self.root.new_folder(name)
        (folder / "weights").write_bytes(b"w" * 10)
        state = CheckpointState(
            run_uid=self.uid,
            step=step,
            stream=stream,
            data_fingerprint="data",
        )
        return self.root.commit(name, state)


class RunWorld:
    def __init__(
        self,
        path: Path,
        *,
        client: redis.Redis,
        async_client: redis.asyncio.Redis,
        keys: Keys,
        url: str,
        num_prompts: int = NUM_PROMPTS,
        prompts: PromptSet | None = None,
        patience_s: float = 5.0,
        redis_forgets: bool = False,
        **sections: dict[str, Any],
    ) -> None:
        """`sections` change the configuration, as those of `make_config`. Where Redis forgets, a lease may be gone when
        its group is delivered."""
        config = make_config(**{"training": {"groups_per_step": 3}, "worker": {"max_attempts": 2}, **sections})
        self.config = config.model_copy(update={"name": keys.name, "dir": path})
        self.prompts, self.patience_s = prompts or make_prompts(num_prompts), patience_s
        self.client, self.keys, self.url = client, keys, url
        self._redis_forgets = redis_forgets
        self.worker = WorkerStream(async_client, keys, worker="w", lease_s=30.0, give_up_after_s=5.0)
        self.learner = Learner(self)

    def restart(self) -> Learner:
        """The learner before is dead, or at least replaced."""
        self.learner = Learner(self)
        return self.learner

    def audit(self) -> Audit:
        return audit_folder(self.config.folder, redis_url=self.url)

    async def answer_all(self, *, failing: frozenset[int] = frozenset(), dull: frozenset[int] = frozenset()) -> None:
        """The dull ones are answered with equal rewards, so that the learner drops them."""
        while await self.answer_some(8, failing=failing, dull=dull):
            pass

    async def answer_some(
        self, count: int, *, failing: frozenset[int] = frozenset(), dull: frozenset[int] = frozenset()
    ) -> bool:
        """So many at most; whether there were any."""
        await self.worker.run_info()
        leased = await self.worker.lease(max_tickets=count, block_ms=1)
        for each in leased:
            number = each.ticket.number
            rewards = (1.0, 1.0) if number in dull else (0.0, 1.0)
            failed = number in failing
            answer = encode_failure(each.ticket) if failed else encode_answer(each.ticket, rewards=rewards)
            assert await self.worker.deliver(each, *answer) or self._redis_forgets
        return bool(leased)

    async def next_step(self, **answers: frozenset[int]) -> Plan:
        """The next batch, or the end of the run."""
        for _ in range(_MAX_ROUNDS):
            if (plan := self.learner.plan()) is not None:
                return plan
            await self.answer_all(**answers)
        raise AssertionError(f"no batch in {_MAX_ROUNDS} rounds: {self.learner.feed.metrics()}")

    async def train_steps(self, count: int, **answers: frozenset[int]) -> list[int]:
        """The tickets trained; fewer steps at the end of the data."""
        trained: list[int] = []
        for _ in range(count):
            plan = await self.next_step(**answers)
            if plan.kind is Kind.END:
                break
            trained += self.learner.train(plan)
        return trained
