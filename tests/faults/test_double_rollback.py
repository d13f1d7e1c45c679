"""T26, T27: Redis goes back to an older copy of itself, and on to a newer one, of a branch that was given up."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamrl.learner.checkpoints.terms import CheckpointName
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.operator import set_control
from tests.faults.harness import FaultWorld
from tests.faults.judge.books import Prompts, Rules, Verdict, judge
from tests.faults.judge.compare import disagreements
from tests.faults.judge.history import read_history
from tests.faults.judge.recorder import Recorder, look
from tests.faults.judged.server import MortalRedis
from tests.faults.place import FAILING_TICKET, Place
from tests.faults.report import report
from tests.faults.stand_in_worker import SOUND, Habits
from tests.helpers import wait_until

NEVER_FAILS = Habits(fails=False)
NUM_PROMPTS = 40
NUM_ROLLBACKS = 6
STEP_S = 0.2  # a step of no time may end, and its groups be trimmed, between two reads of the recorder
_HARD_LIMIT = 64  # steps, as lag.hard_limit_steps has it


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MortalRedis]:
    with mortal_redis(tmp_path / "redis") as server:
        yield server


@contextmanager
def mortal_redis(folder: Path) -> Iterator[MortalRedis]:
    server = MortalRedis(folder)
    try:
        yield server
    finally:
        server.kill()


def test_a_number_that_meant_another_ticket_in_a_branch_that_was_given_up_is_not_trained_by_its_answer(
    tmp_path: Path, server: MortalRedis
) -> None:
    """In one branch a number repeats a dead ticket; in the other one it is the next place of the data."""
    # Nothing is committed: whoever begins anew begins with what Redis has.
    place = Place(
        folder=tmp_path, name="run", url=server.url, num_prompts=NUM_PROMPTS, pace_s=0.3, commit_every=1000,
        worker_lease_s=2.0, deadline_s=120,
    )  # fmt: skip
    recorder = Recorder(server.client, place.name, to=tmp_path / "seen.msgpack")
    with FaultWorld(place) as world:
        recorder.start()
        learner = world.start_learner()
        wait_until(lambda: len(asked(server)) >= 6, description="tickets")
        older = server.copy()
        worker = world.start_worker(name="first")
        retry = wait_until(lambda: a_retry(server), description=f"ticket {FAILING_TICKET} has died, and is repeated")
        newer = server.copy()
        learner.kill()
        worker.kill()

        put_back(server, older, recorder, why="older copy")
        world.start_learner()
        worker = world.start_worker(name="second", habits=NEVER_FAILS)
        wait_until(lambda: retry in asked(server), description=f"ticket {retry} is asked for again")
        worker.kill()
        assert retry in asked(server)

        put_back(server, newer, recorder, why="newer copy")
        world.start_worker(name="third", habits=NEVER_FAILS)
        verdict = finish(world, server, recorder)
    audit = world.audit()
    report("T26", audit, injections=2, violations=len(verdict.violations))
    assert verdict.violations == ()
    assert disagreements(verdict, audit.to_json()) == []


@pytest.mark.parametrize(
    ("seed", "curriculum"), [(0, False), pytest.param(1, False, marks=pytest.mark.long), (2, True)]
)
def test_copies_of_all_branches_come_back_in_any_order(
    tmp_path: Path, server: MortalRedis, seed: int, curriculum: bool
) -> None:
    chance = random.Random(seed)
    place = Place(
        folder=tmp_path, name="run", url=server.url, num_prompts=1000, pace_s=0.05, step_s=STEP_S, failing_every=5,
        worker_lease_s=1.0, deadline_s=180, reply_timeout_s=1.0, idle_timeout_s=5.0, commit_every=6,
        curriculum=curriculum,
    )  # fmt: skip
    recorder = Recorder(server.client, place.name, to=tmp_path / "seen.msgpack")
    with FaultWorld(place) as world:
        recorder.start()
        world.start_learner()
        world.start_worker(name="a")
        copies = [server.copy()]
        for number in range(NUM_ROLLBACKS):
            before = world.newest_checkpoint()
            wait_until(lambda: has_gone_on(world, before), description=f"a checkpoint before {number}")  # noqa: B023
            a_moment(chance)  # so that much of what is copied is in no checkpoint
            copies.append(server.copy())
            if chance.random() < 0.7:
                world.parts("learner")[-1].kill()
            put_back(server, chance.choice(copies[-6:]), recorder, why="another copy")
            change_worker(world, chance)
            a_moment(chance, world)
            put_back(server, copies[-1], recorder, why="the newest copy")
            change_worker(world, chance)
        verdict = finish(world, server, recorder)
    audit = world.audit()
    report("T27", audit, injections=NUM_ROLLBACKS, violations=len(verdict.violations))
    assert verdict.violations == ()
    assert disagreements(verdict, audit.to_json()) == []


def put_back(server: MortalRedis, copy: Path, recorder: Recorder, *, why: str) -> None:
    server.hold()
    assert recorder.catch_up(), "the recorder has not seen in time what is lost now"
    recorder.note(why)
    server.put_back(copy)


def a_moment(chance: random.Random, world: FaultWorld | None = None) -> None:
    """In which the world goes on, where it is given, with whom it needs."""
    ends = time.monotonic() + chance.uniform(0.2, 1.5)
    while time.monotonic() < ends:
        if world is not None:
            tend(world)
        threading.Event().wait(0.05)


def has_gone_on(world: FaultWorld, before: CheckpointName) -> bool:
    """With a learner in the place of one that has ended; a copy may hold a word that ended another one."""
    tend(world)
    return world.newest_checkpoint() > before


def change_worker(world: FaultWorld, chance: random.Random) -> None:
    """So that in one branch tickets die, and are repeated, that are answered in another."""
    workers = world.parts("worker")
    workers[-1].kill()
    world.start_worker(name=f"w{len(workers)}", habits=chance.choice([SOUND, NEVER_FAILS]))


def tend(world: FaultWorld) -> None:
    if world.parts("learner")[-1].exit_code is not None:
        world.start_learner()
    if world.parts("worker")[-1].exit_code is not None:
        world.start_worker(name=f"w{len(world.parts('worker'))}")


def asked(server: MortalRedis) -> set[int]:
    """Numbers of tickets that wait, or are with a worker."""
    with server.client() as client:
        return {int(fields[b"n"]) for _, fields in client.xrange(Keys("run").tickets("train"))}


def a_retry(server: MortalRedis) -> int | None:
    with server.client() as client:
        return next((int(number) for number in client.hgetall(Keys("run").retried)), None)


def finish(world: FaultWorld, server: MortalRedis, recorder: Recorder) -> Verdict:
    """Everything that was issued ends, the learner does, and the judge has seen it all."""

    def has_drained() -> bool:
        if world.parts("learner")[-1].exit_code == 0:
            return True
        tend(world)
        set_control(client, world.keys, "drain", by="the test")
        return False

    with server.client() as client:
        wait_until(has_drained, description="the run has drained", poll_s=0.2)
        history = read_history(world.place.run_folder)
        record = recorder.stop()
        record.final = look(client, world.place.name, history.run_uid)
    texts = [f"prompt {i}" for i in range(world.place.num_prompts)]
    prompts = Prompts(texts=texts, seed=1, shuffle=True, drawn=Prompts.drawn_in(world.place.run_folder))
    return judge(history, record, Rules(prompts=prompts, max_lag=_HARD_LIMIT))
