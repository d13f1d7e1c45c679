"""Several datasets under one feed: each gets its share, what became of it is counted, and a commit carries on."""

from __future__ import annotations

from collections import Counter

import numpy as np

from streamrl.learner.groups.ledger import FeedState
from streamrl.learner.groups.mixture import MixedDataset
from streamrl.learner.groups.plan import GroupCheck, Kind
from streamrl.learner.groups.prompts import Prompt, PromptSet
from streamrl.telemetry.metrics import is_metric
from tests.feed_world import FeedWorld, make_config, state_of


def two_datasets() -> PromptSet:
    """In each pass every row of `math` comes twice, and every other of `chat`: 6 tickets each."""
    rows = [
        Prompt(line=i + 1, text=f"{name} {i}", token_ids=np.arange(3, dtype=np.int32), fields={}, dataset=name)
        for name, count in (("math", 3), ("chat", 12))
        for i in range(count)
    ]
    parts = [MixedDataset(num_rows=3, weight=2.0), MixedDataset(num_rows=12, weight=0.5)]
    return PromptSet(rows, seed=1, shuffle=True, parts=parts)


def dataset_of(world: FeedWorld, number: int) -> str:
    return world.prompts.rows[world.tickets()[number].prompt_index].dataset


def a_step(world: FeedWorld) -> None:
    plan = world.plan(timeout_s=5.0)
    assert plan is not None
    world.train(plan)


def counts(world: FeedWorld) -> dict[str, float]:
    prefixes = ("stream/trained_by_dataset/", "stream/dropped_by_dataset/")
    return {name: value for name, value in world.feed.metrics().items() if name.startswith(prefixes)}


def test_a_run_asks_for_each_prompt_as_often_as_its_dataset_weighs_and_counts_what_was_trained_of_it() -> None:
    world = FeedWorld(make_config(training={"max_epochs": 2}), prompts=two_datasets())
    asked: dict[int, str] = {}  # by ticket
    while (plan := world.plan(timeout_s=5.0)) is None or plan.kind is Kind.STEP:
        if plan is not None:
            world.train(plan)
        asked |= {number: ticket.prompt for number, ticket in world.tickets().items()}
        world.answer_all()
    times = Counter(asked.values())
    assert times == {**{f"math {i}": 4 for i in range(3)}, **{f"chat {i}": 1 for i in range(12)}}
    assert counts(world) == {
        "stream/trained_by_dataset/math": 12,
        "stream/trained_by_dataset/chat": 12,
        "stream/dropped_by_dataset/math": 0,
        "stream/dropped_by_dataset/chat": 0,
    }


def test_drops_are_counted_by_dataset_and_rewards_are_those_of_the_newest_step() -> None:
    world = FeedWorld(prompts=two_datasets())
    world.plan()
    drawn = {number: dataset_of(world, number) for number in sorted(world.tickets())}
    assert set(drawn.values()) == {"math", "chat"}, "or this shows nothing"
    solved = next(number for number, name in drawn.items() if name == "math")
    for number in drawn:
        world.answer(number, rewards=(1.0, 1.0) if number == solved else (0.0, float(number + 1)))
    a_step(world)
    metrics = world.feed.metrics()
    assert metrics["stream/dropped_by_dataset/math"] == 1
    trained = [number for number in drawn if number != solved][:2]
    for name in ("math", "chat"):
        means = [(number + 1) / 2 for number in trained if drawn[number] == name]
        expected = sum(means) / len(means) if means else None
        assert metrics.get(f"train_rollouts/rewards_by_dataset/{name}") == expected
    assert [name for name in metrics if not is_metric(name)] == []


def test_counts_and_order_go_on_where_a_commit_left_off() -> None:
    world, undisturbed = (FeedWorld(prompts=two_datasets()) for _ in range(2))
    for one in (world, undisturbed):
        one.plan()
        one.answer_all()
        a_step(one)
    world.commit()
    world.committed = state_of(world.committed.to_json())
    before = counts(world)
    assert sum(before.values()) == 2
    world.start()
    assert counts(world) == before
    world.run_to_end()
    undisturbed.run_to_end()
    assert counts(world) == counts(undisturbed)
    assert counts(world)["stream/trained_by_dataset/math"] == 6


def test_a_checkpoint_from_before_datasets_were_counted_is_read() -> None:
    old = FeedState().to_json()
    del old["datasets"]
    assert state_of(old) == FeedState()


def test_a_single_dataset_has_no_counts_of_its_own() -> None:
    world = FeedWorld()
    world.plan()
    world.answer_all()
    a_step(world)
    assert counts(world) == {}


def test_rewards_are_told_of_all_groups_too_for_the_filter_leaves_neither_the_solved_nor_the_hopeless() -> None:
    world = FeedWorld(prompts=two_datasets(), config=make_config(lag={"max_steps": 2}))
    world.plan()
    drawn = {number: dataset_of(world, number) for number in sorted(world.tickets())}
    rewards = {number: (0.0, 1.0) if number % 2 else (1.0, 1.0) for number in drawn}
    for number in drawn:
        world.answer(number, rewards=rewards[number])
    a_step(world)
    metrics = world.feed.metrics()
    ended = [number for number in drawn if number <= 3]  # a batch of two, and what was dropped until it was full
    assert metrics["all_rollouts/rewards"] == 0.75
    for name in set(drawn.values()):
        of_name = [sum(rewards[number]) / 2 for number in ended if drawn[number] == name]
        expected = sum(of_name) / len(of_name) if of_name else None
        assert metrics.get(f"all_rollouts/rewards_by_dataset/{name}") == expected
    assert [name for name in metrics if not is_metric(name)] == []


def test_what_is_no_answer_of_this_runs_model_says_nothing_of_its_rewards() -> None:
    world = FeedWorld()
    world.plan()
    first, *others = sorted(world.tickets())
    world.answer(first, rewards=(1e9, 1e9), fingerprint="another")
    for number in others:
        world.answer(number)
    a_step(world)
    assert world.feed.metrics()["all_rollouts/rewards"] == 0.5
    world.answer_all()
    plan = world.plan(timeout_s=5.0)
    assert plan is not None
    world.train(plan, [GroupCheck.MALFORMED, GroupCheck.SOUND])
    assert world.feed.metrics()["all_rollouts/rewards"] == 0.5
