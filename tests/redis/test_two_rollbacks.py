"""Redis returns to an older copy, a learner goes on from there, and Redis returns to the newer copy: numbers then stand
for other tickets than those that lie there. Every ticket ends by a group of its own prompt all the same.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field

import pytest
import redis

from streamrl.learner.groups.fetch import fetch_groups
from streamrl.learner.groups.plan import GroupCheck, Kind
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.operator import read_letters, request_retries
from tests.feed_world import rows_drawn
from tests.redis.conftest import MakeWorld
from tests.redis.disaster_learner import make_prompts
from tests.redis.run_world import RunWorld

NUM_PROMPTS = 20
ROUNDS = 200
NUM_ACTS = 80
ACTS = {"train": 3, "answer": 3, "retry": 2, "commit": 1, "copy": 1, "go back": 2, "die": 2}  # how often
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
            learner.train(plan, [GroupCheck(int(verdict)) for verdict in fetched.verdicts])
        return plan.kind

    async def finish(self, world: RunWorld) -> None:
        world.learner.stream.disturbed = True
        for _ in range(ROUNDS):
            if self.train(world) is Kind.END:
                world.learner.commit()
                return
            await world.answer_all()
        raise AssertionError(f"no end after {ROUNDS} rounds: {world.learner.feed.metrics()}")

    def others(self, world: RunWorld) -> dict[int, list[list[int]]]:
        """Tickets that were trained twice, or by an answer to another prompt than the one that they stand for."""
        retries = world.learner.feed.state().ledger.retries
        places: dict[int, int] = {}
        for number in range(world.prompts.num_places(world.config.training.max_epochs) + len(retries)):
            places[number] = places[retries[number]] if number in retries else number - sum(r < number for r in retries)
        drawn = rows_drawn(world.config.folder) if world.config.data.curriculum else {}
        prompts = {n: world.prompts.rows[drawn.get(p, world.prompts.locate(p)[1])] for n, p in places.items()}
        return {n: found for n, found in self.prompts.items() if found != [prompts[n].token_ids.tolist()]}


async def test_tickets_of_another_lineage_under_the_same_numbers_are_not_taken_for_ours(
    make_world: MakeWorld, client: redis.Redis, keys: Keys
) -> None:
    world = make_world(worker={"max_attempts": 1}, prompts=make_prompts(NUM_PROMPTS))
    trained = Trained()
    world.learner.plan()
    await world.answer_all(failing=frozenset({0, 1}))
    trained.train(world)
    world.learner.commit()
    older = copy_of(client, keys)

    assert request_retries(client, keys, read_letters(client, keys), by="the test") == 2
    issued = int(world.learner.feed.metrics()["stream/issued"])
    await world.answer_all()
    while not world.learner.feed.metrics()["stream/retries"]:
        Trained().train(world)  # of a learner that dies before it commits
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
    check(world, trained)
    assert world.learner.feed.metrics()["stream/ignored/not_asked"] > 0


@pytest.mark.parametrize("seed", range(15))
async def test_whichever_copy_redis_returns_to_every_ticket_ends_by_an_answer_to_its_own_prompt(
    make_world: MakeWorld, client: redis.Redis, keys: Keys, seed: int
) -> None:
    """In any order, with learners that die, and tickets that die and are asked for again; with a curriculum too."""
    chance = random.Random(seed)
    curriculum, epochs = seed >= 10, 2 if seed >= 10 else 1
    num_of_data, dull = NUM_PROMPTS * epochs, frozenset(range(0, 1000, 2) if curriculum else ())
    world = make_world(
        worker={"max_attempts": 1},
        prompts=make_prompts(NUM_PROMPTS),
        data={"curriculum": curriculum},
        training={"groups_per_step": 3, "max_epochs": epochs},
    )
    trained, committed = Trained(), Trained()
    copies = [copy_of(client, keys)]
    for _ in range(NUM_ACTS):
        match chance.choices(list(ACTS), list(ACTS.values()))[0]:
            case "train":
                trained.train(world)
            case "answer":
                failing = frozenset(number for number in range(2 * num_of_data) if chance.random() < 0.3)
                await world.answer_some(chance.randrange(1, 6), failing=failing, dull=dull)
            case "retry":
                request_retries(client, keys, read_letters(client, keys), by="the test")
                await world.answer_some(3)
                trained.train(world)
                copies = [*copies[-3:], copy_of(client, keys)]
            case "commit":
                world.learner.commit()
                committed = deepcopy(trained)
            case "copy":
                copies = [*copies[-3:], copy_of(client, keys)]
            case "go back":
                go_back(client, keys, chance.choice(copies))
                world.learner.stream.disturbed |= chance.random() < 0.7  # or it has yet to notice
            case "die":
                if chance.random() < 0.7:
                    go_back(client, keys, chance.choice(copies))
                world.restart()
                trained = deepcopy(committed)
                trained.train(world)
    await trained.finish(world)
    check(world, trained, num_of_data=num_of_data)


def check(world: RunWorld, trained: Trained, *, num_of_data: int = NUM_PROMPTS) -> None:
    assert trained.others(world) == {}
    audit = world.audit()
    assert audit.clean, audit.to_json()
    num_retries = len(world.learner.feed.state().ledger.retries)
    assert (audit.issued, audit.outstanding) == (num_of_data + num_retries, 0)
    assert audit.trained == len(trained.prompts)
