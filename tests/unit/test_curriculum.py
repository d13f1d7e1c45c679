"""A curriculum: which prompts are asked, and that what is learnt stays unbiased."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest

from streamrl.learner.groups.curriculum import Curriculum
from streamrl.learner.groups.ledger import Ledger, LedgerState
from streamrl.learner.groups.pool import Pool
from streamrl.protocol.wire.group import GroupHeader, decode_header
from streamrl.recipe.advantages import ScoredGroup, leave_one_out
from tests.curriculum_world import ALWAYS, NEVER, NUM_PROMPTS, NUM_SAMPLES, learn, make_world
from tests.feed_world import FeedWorld, encode_answer, make_config, make_prompts
from tests.helpers import make_ticket


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
