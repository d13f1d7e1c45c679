"""A curriculum whose learner dies, whose log is cut or lost, or whose disk is full; and what its log holds."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from streamrl.crashpoints import Point, SimulatedCrash, armed
from streamrl.learner.groups.curriculum import open_order
from streamrl.learner.groups.draws import DrawLog, Draws
from streamrl.learner.groups.ledger import CurriculumState, FeedState, Ledger
from streamrl.protocol.transport.types import Letter
from tests.curriculum_world import NUM_PROMPTS, NUM_SAMPLES, learn, make_world, rows_of
from tests.feed_world import planned, state_of


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


def test_a_ticket_keeps_its_prompt_when_the_curriculum_is_switched_off() -> None:
    """A dead one too, which may be retried; and through further checkpoints, with and without a curriculum."""
    drawn = CurriculumState(num_drawn=9, num_visited=20, places={4: (0, 7), 5: (1, 3), 8: (1, 0)})
    ledger = Ledger()
    ledger.issued = 6
    for number in range(4):
        ledger.resolve(number, "trained", step=1)
    ledger.die(4, Letter("no answer", 0.0), step=1)
    state: CurriculumState | None = drawn
    for on in (False, False, True, False):
        world = make_world(on=on)
        stream = FeedState(ledger=ledger.state(), curriculum=state)
        order = open_order(world.config, world.prompts, state=stream)
        assert (order.locate(4), order.locate(5)) == ((0, 7), (1, 3))
        state = order.state(ledger)
    assert order.locate(8) == world.prompts.locate(8), "it was not asked yet"
    ledger.letters.clear()
    ledger.resolve(5, "trained", step=2)
    assert order.state(ledger) is None
