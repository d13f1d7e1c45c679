"""Redis returns to an older copy, a learner goes on from there, and Redis returns to the newer copy: numbers then stand
for other tickets than those that lie there. Every ticket ends by a group of its own prompt all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import redis

from streamrl.learner.groups.plan import Kind, fetch_groups
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.operator import read_letters, request_retries
from tests.redis.conftest import MakeWorld
from tests.redis.disaster_learner import make_prompts
from tests.redis.run_world import RunWorld

NUM_PROMPTS = 20
ROUNDS = 200
RunCopy = Mapping[bytes, bytes]


def copy_of(client: redis.Redis, keys: Keys) -> RunCopy:
    """All keys of the run."""
    found = {key: client.dump(key) for key in client.scan_iter(match=f"{keys.prefix}*", count=1000)}
    return {key: value for key, value in found.items() if value is not None}


def go_back(client: redis.Redis, keys: Keys, copy: RunCopy) -> None:
    with client.pipeline() as pipe:
        for key in client.scan_iter(match=f"{keys.prefix}*", count=1000):
            pipe.delete(key)
        for key, value in copy.items():
            pipe.restore(key, 0, value)
        pipe.delete(keys.lease)  # it has run out by then
        pipe.execute()


@dataclass
class Trained:
    """By ticket, the prompt of each group that it was trained by: nothing here is asked of those who are judged."""

    prompts: dict[int, list[list[int]]] = field(default_factory=dict)

    def train(self, world: RunWorld) -> Kind:
        learner = world.learner
        plan = learner.plan()
        if plan is None:
            return Kind.IDLE
        if plan.kind is Kind.STEP:
            fetched = fetch_groups(learner.stream, plan, rank=0, vocabulary=1000)
            for group in fetched.groups:
                self.prompts.setdefault(group.header.ticket, []).append(group.prompt_ids.tolist())
            learner.train(plan, [int(verdict) for verdict in fetched.verdicts])
        return plan.kind

    async def finish(self, world: RunWorld) -> None:
        for _ in range(ROUNDS):
            if self.train(world) is Kind.END:
                world.learner.commit()
                return
            await world.answer_all()
        raise AssertionError(f"no end after {ROUNDS} rounds: {world.learner.feed.metrics()}")

    def others(self, world: RunWorld, retries: Mapping[int, int]) -> dict[int, list[list[int]]]:
        """Tickets that were trained twice, or by an answer to another prompt than the one that they stand for."""
        places: dict[int, int] = {}
        for number in range(NUM_PROMPTS + len(retries)):
            places[number] = places[retries[number]] if number in retries else number - sum(r < number for r in retries)
        prompts = {n: world.prompts.rows[world.prompts.locate(place)[1]] for n, place in places.items()}
        return {n: found for n, found in self.prompts.items() if found != [prompts[n].token_ids.tolist()]}


async def test_tickets_of_another_branch_under_the_same_numbers_are_not_taken_for_ours(
    make_world: MakeWorld, client: redis.Redis, keys: Keys
) -> None:
    world = make_world(worker={"max_attempts": 1}, prompts=make_prompts(NUM_PROMPTS))
    trained = Trained()
    world.learner.plan()
    await world.answer_all(failing=frozenset({0, 1}))
    trained.train(world)
    world.learner.commit()
    older = copy_of(client, keys)

    letters = read_letters(client, keys)
    assert request_retries(client, keys, letters, by="the test") == 2
    issued = int(world.learner.feed.metrics()["stream/issued"])
    await world.answer_all()
    trained_by_a = Trained()
    while not world.learner.feed.metrics()["stream/retries"]:
        trained_by_a.train(world)
    newer = copy_of(client, keys)

    go_back(client, keys, older)
    world.restart()
    await world.answer_all()
    while world.learner.feed.metrics()["stream/issued"] < issued + 2:
        trained.train(world)
        await world.answer_all()
    assert not world.learner.feed.metrics()["stream/retries"]

    go_back(client, keys, newer)
    await trained.finish(world)
    state = world.learner.feed.state().ledger
    assert trained.others(world, state.retries) == {}
    audit = world.audit()
    assert audit.clean, audit.to_json()
    assert (audit.trained, audit.dead, audit.outstanding) == (NUM_PROMPTS - 2, 2, 0)
