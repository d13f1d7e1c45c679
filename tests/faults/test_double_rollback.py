"""T26: Redis goes back to an older copy of itself, and from there to a newer one, of a branch that was given up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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
from tests.faults.stand_in_worker import Habits
from tests.helpers import wait_until

NEVER_FAILS = Habits(fails=False)
NUM_PROMPTS = 40
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


@pytest.mark.xfail(strict=True, reason="a ticket is known by its number alone")
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

        recorder.note("older copy")
        server.put_back(older)
        world.start_learner()
        worker = world.start_worker(name="second", habits=NEVER_FAILS)
        wait_until(lambda: retry in asked(server), description=f"ticket {retry} is asked for again")
        worker.kill()
        assert retry in asked(server)

        recorder.note("newer copy")
        server.put_back(newer)
        world.start_worker(name="third", habits=NEVER_FAILS)
        verdict = finish(world, server, recorder)
    audit = world.audit()
    report("T26", audit, injections=2, violations=len(verdict.violations))
    assert verdict.violations == ()
    assert disagreements(verdict, audit.to_json()) == []


def asked(server: MortalRedis) -> set[int]:
    """Numbers of tickets that wait, or are with a worker."""
    with server.client() as client:
        return {int(fields[b"n"]) for _, fields in client.xrange(Keys("run").tickets("train"))}


def a_retry(server: MortalRedis) -> int | None:
    with server.client() as client:
        return next((int(number) for number in client.hgetall(Keys("run").retried)), None)


def finish(world: FaultWorld, server: MortalRedis, recorder: Recorder) -> Verdict:
    """Everything that was issued ends, the learner does, and the judge has seen it all."""
    learner = world.parts("learner")[-1]
    with server.client() as client:
        set_control(client, world.keys, "drain", by="the test")
        learner.ends_with(0)
        history = read_history(world.place.run_folder)
        record = recorder.stop()
        record.final = look(client, world.place.name, history.run_uid)
    prompts = Prompts(texts=[f"prompt {i}" for i in range(world.place.num_prompts)], seed=1, shuffle=True)
    return judge(history, record, Rules(prompts=prompts, max_lag=_HARD_LIMIT))
