"""A whole run without its model: the real feed, checkpoints, journal and streams, and a worker that answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import redis
import redis.asyncio

from learner.checkpoint import Checkpoint, CheckpointRoot, CheckpointState
from learner.epochs import CheckpointName, ancestry, claim_run
from learner.feed import Feed
from learner.ledger import StreamState
from learner.plan import Kind, Plan
from streamrl.audit import Audit, audit_folder
from streamrl.config.dump import config_to_json
from streamrl.transport.keys import Keys
from streamrl.transport.learner import LearnerStream
from streamrl.transport.worker import WorkerStream
from streamrl.versions import make_version
from tests.feed_world import MODEL, encode_answer, encode_failure, keep, make_config, make_prompts

NUM_PROMPTS = 20
_MAX_ROUNDS = 200


class Learner:
    """From its epoch on; it dies by not being called any more."""

    def __init__(self, world: RunWorld, *, holder: str = "job") -> None:
        config = world.config
        self.root = CheckpointRoot(config.folder)
        uid = claim_run(config.folder)
        epoch = self.root.claim_epoch(uid)
        parent = self.root.open(epoch.parent) if epoch.parent else None
        self.epoch, self.uid = epoch.number, uid
        self.step = parent.state.step if parent else 0
        self.stream = LearnerStream(
            world.client, world.keys, run_uid=uid, epoch=self.epoch, holder=holder, lease_s=30.0, give_up_after_s=5.0
        )
        self.stream.claim(config_json=config_to_json(config), fingerprint=MODEL, takeover=True, wait_s=0.0)
        self.feed = Feed(
            stream=self.stream,
            prompts=make_prompts(NUM_PROMPTS),
            config=config,
            run_uid=uid,
            fingerprint=MODEL,
            keep=keep,
            state=parent.state.stream if parent else None,
        )
        self.feed.note_version(make_version(self.epoch, 0), self.step)

    def plan(self) -> Plan | None:
        return self.feed.plan(step=self.step, world_size=1, timeout_s=0.0)

    def train(self, plan: Plan) -> list[int]:
        self.feed.settle(plan, [True] * len(plan.entries))
        self.step += 1
        return [entry.ticket for entry in plan.entries]

    def commit(self, stream: StreamState | None = None) -> Checkpoint:
        checkpoint = self.write_checkpoint(stream or self.feed.state())
        self.feed.committed(checkpoint.state.stream, step=self.step)
        self.root.prune(ancestry(self.root.root), epoch=self.epoch, keep_last=1, keep_best=0)
        return checkpoint

    def write_checkpoint(self, stream: StreamState) -> Checkpoint:
        """As `commit`, but Redis hears nothing of it."""
        name = CheckpointName(self.epoch, self.step)
        folder = self.root.new_folder(name)
        (folder / "weights").write_bytes(b"w" * 10)
        state = CheckpointState(
            run_uid=self.uid,
            step=self.step,
            version_n=0,
            stream=stream,
            config_fingerprint="config",
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
        **sections: dict[str, Any],
    ) -> None:
        """`sections` change the configuration, as those of `make_config`."""
        config = make_config(**{"training": {"groups_per_step": 3}, "worker": {"max_attempts": 2}, **sections})
        self.config = config.model_copy(update={"name": keys.name, "dir": path})
        self.client, self.keys, self.url = client, keys, url
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
        await self.worker.run_info()
        while leased := await self.worker.lease(max_tickets=8, block_ms=1):
            for each in leased:
                number = each.ticket.number
                rewards = (1.0, 1.0) if number in dull else (0.0, 1.0)
                failed = number in failing
                answer = encode_failure(each.ticket) if failed else encode_answer(each.ticket, rewards=rewards)
                assert await self.worker.deliver(each, *answer)

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
