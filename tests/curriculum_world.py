"""A learner's feed with a curriculum, over prompts of which some are never right and some always."""

from __future__ import annotations

from pathlib import Path

from tests.feed_world import FeedWorld, make_config, make_prompts

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
