"""A curriculum: which prompts are asked, what survives, and that what is learnt stays unbiased."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from streamrl.crashpoints import Point, SimulatedCrash, armed
from streamrl.learner.groups.curriculum import Curriculum, open_order
from streamrl.learner.groups.draws import DrawLog, Draws
from streamrl.learner.groups.ledger import FeedState, Ledger, LedgerState
from streamrl.learner.groups.pool import Pool
from streamrl.protocol.wire.group import GroupHeader, decode_header
from streamrl.recipe.advantages import ScoredGroup, leave_one_out
from tests.feed_world import FeedWorld, encode_answer, make_config, make_prompts, planned, state_of
from tests.helpers import make_ticket

NUM_PROMPTS = 60
NUM_SAMPLES = 8
NEVER, ALWAYS = 20, 40  # prompts below the first are never right, from the second on always
HALF = (0.0, 1.0) * (NUM_SAMPLES // 2)


def answer_of(row: int) -> tuple[float, ...]:
    return (0.0,) * NUM_SAMPLES if row < NEVER else (1.0,) * NUM_SAMPLES if row >= ALWAYS else HALF


def make_world(folder: Path | None = None, *, on: bool = True, **sections: dict[str, object]) -> FeedWorld:
    values = {
        "data": {"curriculum": on},
        "sampling": {"num_samples": NUM_SAMPLES},
        "training": {"groups_per_step": 4, "max_epochs": 20},
        **sections,
    }
    return FeedWorld(make_config(**values), prompts=make_prompts(NUM_PROMPTS), draws=folder)


def answer_some(world: FeedWorld, count: int = 1000) -> list[int]:
    """The rows that were asked."""
    asked = []
    for number in sorted(world.tickets())[:count]:
        row = world.tickets()[number].prompt_index
        asked.append(row)
        world.answer(number, rewards=answer_of(row))
    return asked


def learn(world: FeedWorld, num_groups: int, *, at_once: int = 1000) -> list[int]:
    """The rows that were asked, in their order; so many tickets are answered between two plans."""
    asked: list[int] = []
    while len(asked) < num_groups:
        plan = world.plan()
        if plan is not None:
            world.train(plan)
        asked += answer_some(world, at_once)
    return asked


def rows_of(world: FeedWorld) -> dict[int, int]:
    return {number: ticket.prompt_index for number, ticket in world.tickets().items()}


def test_as_long_as_nothing_is_known_the_order_is_that_of_the_data() -> None:
    world, plain = make_world(), make_world(on=False)
    assert learn(world, 20)[:20] == learn(plain, 20)[:20]


@pytest.mark.parametrize("drops", [True, False], ids=["dropped", "trained"])
def test_solved_and_hopeless_prompts_rest_and_come_back(drops: bool) -> None:
    asked = Counter(learn(make_world(algorithm={"drop_zero_variance": drops}), 900)[300:])
    middle = sum(count for row, count in asked.items() if NEVER <= row < ALWAYS)
    assert middle > 0.75 * asked.total(), "a third of the prompts, and three quarters of the groups"
    rested = [asked[row] for row in range(NUM_PROMPTS) if not NEVER <= row < ALWAYS]
    assert sum(count > 0 for count in rested) > 20, "most were looked at again"


def test_where_all_prompts_fit_none_is_left_out() -> None:
    world = FeedWorld(
        make_config(data={"curriculum": True}, training={"groups_per_step": 4, "max_epochs": 20}),
        prompts=make_prompts(NUM_PROMPTS),
    )
    while world.feed.metrics()["stream/issued"] < 300:
        plan = world.plan()
        if plan is not None:
            world.train(plan)
        world.answer_all()
    assert world.feed.metrics()["curriculum/passes"] == pytest.approx(300 / NUM_PROMPTS, abs=0.5)


def test_rewards_that_always_differ_leave_the_order_as_it_is() -> None:
    pool, chance = Pool([""] * NUM_PROMPTS, num_samples=NUM_SAMPLES), np.random.default_rng(0)
    for row in range(NUM_PROMPTS):
        pool.observe(row, chance.normal(size=NUM_SAMPLES).tolist(), at=0, informative=True)
    pool.refit()
    assert pool.admission(0).min() > 0.99


def test_rewards_that_differ_in_their_last_bit_are_one_reward() -> None:
    pool = Pool([""] * 4, num_samples=4)
    for row, rewards in enumerate([(0.1 + 0.2, 0.3, 0.3, 1.0), (0.3, 0.3, 0.3, 1.0), (0.0, 0.3, 0.3, 1.0)]):
        pool.observe(row, rewards, at=0, informative=True)
    pool.refit()
    rounded, exact, another, _ = pool.admission(1)
    assert rounded == exact < another


def test_a_dataset_that_nobody_can_solve_waits_though_its_prompts_were_not_all_asked() -> None:
    pool = Pool(["hard"] * 100 + ["fit"] * 100, num_samples=NUM_SAMPLES)
    for row in range(40):
        pool.observe(row, (0.0,) * NUM_SAMPLES, at=0, informative=False)
        pool.observe(100 + row, HALF, at=0, informative=True)
    pool.refit()
    assert pool.admission(0)[99] < 0.1
    assert pool.admission(0)[199] > 0.9


def test_new_prompts_of_an_easy_dataset_are_compared_with_those_that_are_known_to_fit() -> None:
    """And not with what is expected of another new prompt alone: that falls as the model gets better."""
    pool, solved = Pool(["easy"] * 100 + ["fit"] * 40, num_samples=NUM_SAMPLES), (1.0,) * NUM_SAMPLES
    for row in range(40):
        pool.observe(row, HALF if row % 5 == 0 else solved, at=0, informative=row % 5 == 0)
        pool.observe(100 + row, HALF if row % 2 else solved, at=0, informative=row % 2 == 1)
    pool.refit()
    assert 0.05 < pool.admission(0)[99] < 0.25
    assert pool.admission(0)[101] > 0.9


def test_what_was_observed_does_not_depend_on_the_order_in_which_groups_ended() -> None:
    seen = [(row % 10, HALF if row % 3 else (1.0,) * NUM_SAMPLES, row // 10) for row in range(60)]
    found = []
    for order in (seen, sorted(seen, key=lambda one: (one[2] // 2, one[0], one[2]))):
        pool = Pool([""] * 60, num_samples=NUM_SAMPLES)
        for row, rewards, at in order:
            pool.observe(row, rewards, at=at, informative=len(set(rewards)) > 1)
        found.append(pool.admission(6))
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_prompts_that_never_teach_anything_are_asked_all_the_same() -> None:
    pool = Pool([""] * 20, num_samples=NUM_SAMPLES)
    for row in [*range(20)] * 50:
        pool.observe(row, (1.0,) * NUM_SAMPLES, at=0, informative=False)
    pool.refit()
    assert pool.admission(0).min() > 0.9, "one is as good as another"
    assert pool.census(0) == {"new": 0, "fitting": 0, "solved": 20, "hopeless": 0}


def test_a_checkpoint_holds_the_pool_to_the_last_bit() -> None:
    world = make_world()
    learn(world, 200)
    world.commit()
    state = state_of(json.loads(json.dumps(world.committed.to_json())))
    assert state.curriculum == world.committed.curriculum
    again = FeedState(curriculum=state.curriculum, ledger=state.ledger)
    orders = [open_order(world.config, world.prompts, state=one) for one in (world.committed, again)]
    for order in orders:
        order.draw(600)
    assert [orders[0].locate(place) for place in range(500, 600)] == [
        orders[1].locate(place) for place in range(500, 600)
    ]


# What survives


@pytest.mark.parametrize("point", ["draws.written", "issue.counted", "group.read", "group.settled"])
def test_tickets_under_way_keep_their_prompts_when_the_learner_dies(tmp_path: Path, point: Point) -> None:
    world = make_world(tmp_path)
    learn(world, 100)
    world.commit()
    learn(world, 100, at_once=3)

    def die(at: Point) -> None:
        if at == point and world.tickets():
            raise SimulatedCrash(at)

    with armed(die), pytest.raises(SimulatedCrash):
        learn(world, 10_000, at_once=3)
    before = rows_of(world)
    assert before
    world.start()
    world.plan()
    after = rows_of(world)
    assert {number: after[number] for number in before} == before
    assert world.feed.metrics().get("stream/ignored/not_asked", 0) == 0


@pytest.mark.parametrize("lag", [0, 2])
def test_a_run_that_is_killed_at_ten_places_asks_the_same_prompts_and_has_the_same_weights(
    tmp_path: Path, lag: int
) -> None:
    whole = Run(tmp_path / "whole", lag=lag)
    whole.learn(until=60)
    killed = Run(tmp_path / "killed", lag=lag)
    chance = np.random.default_rng(7)
    for step in sorted(chance.choice(np.arange(2, 59), 10, replace=False)):
        killed.learn(until=int(step))
        killed.die()
    killed.learn(until=60)
    assert killed.asked == whole.asked
    assert len(set(killed.asked.values())) > 20
    assert (killed.weights == whole.weights).all()
    assert whole.weights.any()


def test_a_run_whose_log_is_lost_loses_nothing_else(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    learn(world, 200)
    world.commit()
    learn(world, 50)
    for path in (tmp_path / "curriculum").iterdir():
        path.unlink()
    world.start()
    learn(world, 200)
    metrics = world.feed.metrics()
    assert metrics["stream/issued"] == sum(
        metrics[f"stream/{how}"] for how in ("groups_trained", "groups_dropped", "outstanding")
    )


def test_a_line_that_was_cut_short_was_never_acted_on(tmp_path: Path) -> None:
    log = DrawLog(tmp_path, term=1)
    for first in (0, 2):
        assert log.write(Draws(first=first, num_visited=first + 3, asked=((0, first), (0, 9)), chances=(1.0, 0.5)))
    path = tmp_path / "curriculum" / "000001.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    found = DrawLog(tmp_path, term=2).earlier(0)
    assert found == Draws(first=0, num_visited=3, asked=((0, 0), (0, 9)), chances=(1.0, 0.5))


def test_of_a_long_log_only_the_wanted_places_are_kept_in_memory(tmp_path: Path) -> None:
    log, num_lines, asked = DrawLog(tmp_path, term=1), 2000, tuple((0, row) for row in range(50))
    chances = (1.0,) * len(asked)
    assert log.write(Draws(first=0, num_visited=50, asked=asked, chances=chances))
    path = tmp_path / "curriculum" / "000001.jsonl"
    head, line = path.read_text().splitlines()
    lines = ({**json.loads(line), "first": 50 * at, "num_visited": 50 * (at + 1)} for at in range(num_lines))
    path.write_text("".join(f"{line}\n" for line in (head, *map(json.dumps, lines))))
    first = 50 * num_lines - 60
    tracemalloc.start()
    try:
        found = DrawLog(tmp_path, term=2).earlier(first)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == Draws(first=first, num_visited=50 * num_lines, asked=(*asked[-10:], *asked), chances=(1.0,) * 60), (
        "a line that begins before the first wanted place counts from there on"
    )
    assert peak < 1_000_000, "bytes; 100,000 places take tens of millions"


def test_of_two_terms_that_have_drawn_for_a_place_the_younger_counts(tmp_path: Path) -> None:
    for term, row in ((2, 5), (1, 4), (3, 6)):
        DrawLog(tmp_path, term=term).write(Draws(first=0, num_visited=1, asked=((0, row),), chances=(1.0,)))
    found = [DrawLog(tmp_path, term=3, since=since).earlier(0) for since in (0, 1)]
    assert [one and one.asked for one in found] == [((0, 5),)] * 2
    assert DrawLog(tmp_path, term=3).earlier(7) is None


def test_on_a_full_disk_no_ticket_goes_out_and_afterwards_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "no space left on the device")

    with monkeypatch.context() as patch:
        patch.setattr("streamrl.learner.groups.draws.os.fsync", full)
        world = make_world(tmp_path)
        world.plan(timeout_s=700.0)  # longer than groups are awaited
        assert world.tickets() == {}
        assert world.feed.metrics()["curriculum/refused"] > 0
    world.plan()
    assert world.feed.metrics()["curriculum/refused"] == 0
    assert len(world.tickets()) == 8
    assert DrawLog(tmp_path, term=2).earlier(0) is not None


def test_a_run_may_go_on_with_a_curriculum_that_began_without_and_the_other_way_round(tmp_path: Path) -> None:
    world = make_world(tmp_path, on=False)
    learn(world, 100)
    while (plan := world.plan()) is not None:
        world.train(plan)
    world.commit()
    before = rows_of(world)
    for on in (True, False):
        world.config = world.config.model_copy(update={"data": world.config.data.model_copy(update={"curriculum": on})})
        world.start()
        assert world.plan() is None
        if on:
            assert {number: rows_of(world)[number] for number in before} == before
        learn(world, 100)
        while (plan := world.plan()) is not None:
            world.train(plan)
        world.commit()
    assert world.feed.metrics()["stream/groups_trained"] > 50


class Run:
    """One worker that answers at once, and a policy of one number a prompt."""

    def __init__(self, folder: Path, *, lag: int) -> None:
        folder.mkdir()
        self.world = make_world(folder, lag={"max_steps": lag})
        self.weights = self.committed = np.linspace(-4.0, 4.0, NUM_PROMPTS)
        self.asked: dict[int, int] = {}  # the row of each ticket
        self.answered: dict[int, tuple[float, ...]] = {}

    def learn(self, *, until: int) -> None:
        world = self.world
        while world.step < until:
            plan = world.plan()
            if plan is not None:
                self.weights = self.weights + sum(self._gradient(number) for number in planned(plan))
                world.train(plan)
                if world.step % 5 == 0:
                    world.commit()
                    self.committed = self.weights
            for number, ticket in sorted(world.tickets().items()):
                self.asked[number] = ticket.prompt_index
                self.answered[number] = self._rewards(number)
                world.answer(number, rewards=self.answered[number])

    def die(self) -> None:
        self.weights = self.committed
        self.world.start()

    def _rewards(self, number: int) -> tuple[float, ...]:
        right = 1 / (1 + np.exp(-self.weights[self.asked[number]]))
        return tuple((np.random.default_rng(number).random(NUM_SAMPLES) < right).astype(float).tolist())

    def _gradient(self, number: int) -> np.ndarray:
        step: np.ndarray = 0.5 * np.std(self.answered[number]) * (np.arange(NUM_PROMPTS) == self.asked[number])
        return step


# What is learnt


@cache
def advantages_of(rewards: tuple[float, ...]) -> np.ndarray:
    """By the recipe."""
    everything = np.ones((NUM_SAMPLES, 1), dtype=np.bool_)
    return leave_one_out(
        ScoredGroup(
            rewards=np.array(rewards),
            may_teach=everything[:, 0],
            lengths=everything.sum(axis=1),
            finish_reasons=("stop",) * NUM_SAMPLES,
            masks=tuple(everything),
            rewards_by_source={},
        )
    )


@cache
def header_of(rewards: tuple[float, ...]) -> GroupHeader:
    return decode_header(encode_answer(make_ticket(0), rewards=rewards)[0])


def with_all_open(num_tickets: int) -> Ledger:
    return Ledger(LedgerState(issued=num_tickets))


def surpluses(seed: int) -> tuple[float, float]:
    """What the groups of a run taught, less what they should by the chances that were announced before; and less what
    they would if all candidates had been asked."""
    chance, prompts = np.random.default_rng(seed), make_prompts(NUM_PROMPTS, seed=seed)
    order = Curriculum(prompts, num_samples=NUM_SAMPLES, num_places=10**6, block=10)
    announced = Pool([""] * NUM_PROMPTS, num_samples=NUM_SAMPLES)
    skill = np.concatenate([np.full(20, -5.0), np.linspace(-2, 2, 20), np.full(20, 5.0)])
    found, visited = np.zeros(2), 0
    for block in range(30):
        announced.refit()
        order.draw(10 * (block + 1))
        right = 1 / (1 + np.exp(-skill))
        exact, learnt = right * (1 - right), 0.0
        until = order.state(with_all_open(order.num_drawn)).num_visited
        while visited < until:
            at, first = divmod(visited, NUM_PROMPTS)
            rows = prompts.candidates(at)[0][first : first + until - visited]
            found -= [(exact[rows] * announced.admission(at)[rows]).sum(), exact[rows].sum()]
            visited += len(rows)
        for place in range(10 * block, 10 * block + 10):
            at, row = order.locate(place)
            rewards = tuple((chance.random(NUM_SAMPLES) < right[row]).astype(float).tolist())
            learnt += float(np.mean(advantages_of(rewards) * (np.array(rewards) - right[row])))
            order.ended(place, header_of(rewards), informative=len(set(rewards)) > 1)
            announced.observe(row, rewards, at=at, informative=len(set(rewards)) > 1)
        found += learnt
        skill[20:40] += 0.1 * learnt
    return found[0], found[1]


def test_the_mean_gradient_is_that_of_the_announced_prompt_weights() -> None:
    """A policy whose gradient is known, p (1 - p) of each prompt, and which learns meanwhile. Answers decide what is
    asked next, and the announced chances with it; not what the next answers are."""
    by_announced, by_all = np.array([surpluses(seed) for seed in range(49)]).T
    assert abs(by_announced.mean()) < 3 * by_announced.std(ddof=1) / 7
    assert abs(by_all.mean()) > 3 * by_all.std(ddof=1) / 7, "the test would see other weights"
