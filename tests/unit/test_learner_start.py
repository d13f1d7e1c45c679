"""What a learner is told at its start; and that it waits on a full disk, and on one that fails: not for ever."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from streamrl.config import schema
from streamrl.errors import ResourceError, TransportError
from streamrl.learner.admission.claim import Claimed, once_there_is_room
from streamrl.learner.admission.start import Start, make_start
from streamrl.learner.assemble import learn
from streamrl.learner.checkpoints.checkpoint import Checkpoint, CheckpointRoot, CheckpointState
from streamrl.learner.checkpoints.terms import CheckpointName, Term
from streamrl.learner.groups.ledger import FeedState
from streamrl.learner.process.ranks import World
from tests.feed_world import Clock, make_config, make_prompts
from tests.learner_cases import learner_config

CLAIMED = Claimed(
    term=Term(number=1, parent=None, run_uid="run"),
    checkpoint=None,
)


def claim_of(answers: Iterator[int], clock: Clock, *, patience_s: float = 10.0) -> Claimed:
    """Each answer is an errno, or 0 for success."""

    def claim() -> Claimed:
        if number := next(answers):
            raise OSError(number, "said the disk")
        return CLAIMED

    return once_there_is_room(claim, patience_s=patience_s, check=lambda: None, clock=clock, sleep=clock.advance)


def test_a_full_disk_is_waited_for() -> None:
    clock = Clock()
    began = clock()
    assert claim_of(iter([errno.ENOSPC, errno.EDQUOT, errno.ENOSPC, 0]), clock) is CLAIMED
    assert 0 < clock() - began <= 10


def test_a_disk_that_stays_full_is_given_up() -> None:
    clock = Clock()
    began = clock()
    with pytest.raises(OSError, match="said the disk"):
        claim_of(iter([errno.ENOSPC] * 100), clock)
    assert 10 < clock() - began < 15


def test_a_disk_that_fails_for_a_moment_is_asked_again() -> None:
    clock = Clock()
    began = clock()
    assert claim_of(iter([errno.EIO, errno.ESTALE, errno.EACCES, 0]), clock) is CLAIMED
    assert 0 < clock() - began <= 3


def test_a_disk_that_goes_on_failing_is_told_with_what_to_do() -> None:
    clock = Clock()
    began = clock()
    told = r"said the disk \(errno 5\), for \d+ s: .* does not resume from an older checkpoint .* start the run again"
    with pytest.raises(ResourceError, match=told):
        claim_of(iter([errno.EIO] * 1000), clock, patience_s=300.0)
    assert 20 < clock() - began < 25


def test_who_has_been_replaced_waits_no_longer() -> None:
    def replaced() -> None:
        raise InterruptedError("another learner")

    with pytest.raises(InterruptedError):
        once_there_is_room(lambda: CLAIMED, patience_s=10.0, check=replaced)


def start_of(*, num_prompts: int, max_steps: int = -1, step: int = 500, **extra: int) -> Start:
    """Two groups a step, from a checkpoint that says `extra`."""
    state = CheckpointState(
        run_uid="run",
        step=step,
        stream=FeedState(),
        data_fingerprint="",
        extra=extra,
    )
    checkpoint = Checkpoint(name=CheckpointName(1, step), folder=Path("unused"), state=state)
    config = make_config(training={"max_steps": max_steps})
    claimed = replace(CLAIMED, checkpoint=checkpoint)
    return make_start(config, claimed, make_prompts(num_prompts), lineage={}, canary_ids=())


def test_the_steps_of_a_run_are_those_of_its_data_or_as_many_as_it_may_make() -> None:
    assert start_of(num_prompts=2000).total_steps == 1000
    assert start_of(num_prompts=2000, max_steps=700).total_steps == 700


def test_the_steps_of_a_fork_with_new_data_are_counted_from_where_these_began() -> None:
    for step in (500, 600):  # the fork itself, and a later start
        start = start_of(num_prompts=400, step=step, first_step=500)
        assert (start.step, start.first_step, start.total_steps) == (step, 500, 200)
    assert start_of(num_prompts=400, max_steps=650, first_step=500).total_steps == 150


def test_a_run_is_as_far_as_the_data_that_are_used_up_or_as_its_steps_if_these_end_it_first() -> None:
    of_data = start_of(num_prompts=2000, step=0)
    assert [of_data.position(step, num_batches=step) for step in (0, 1, 999)] == [0.0, 1.0, 999.0]
    assert of_data.position(400, num_batches=800) == 800.0
    of_steps = start_of(num_prompts=2000, max_steps=700, first_step=500)
    assert of_steps.total_steps == 200
    assert of_steps.position(600, num_batches=100) == 100.0
    assert of_steps.position(600, num_batches=450) == 100.0
    assert of_steps.position(600, num_batches=900) == 180.0, "its data will end it first"


def learn_without_redis(folder: Path, environment: Mapping[str, str]) -> None:
    config = learner_config(folder, dir=folder, redis=schema.Redis(connect_timeout_s=0.05, give_up_after_s=0.1))
    learn(
        config=config,
        url=f"unix://{folder}/nobody.sock",
        takeover=False,
        world=World(rank=0, size=1, device=torch.device("cpu")),
        stop=threading.Event(),
        elastic=False,
        environment=environment,
    )


def test_a_server_that_was_never_there_is_for_the_user_to_mend(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"redis\.url"):
        learn_without_redis(tmp_path, {"TORCHELASTIC_RESTART_COUNT": "0"})


def test_the_server_of_a_run_that_has_begun_is_away_which_a_restart_may_mend(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match=r"within 0\.1 s"):
        learn_without_redis(tmp_path, {"TORCHELASTIC_RESTART_COUNT": "1"})
    CheckpointRoot(tmp_path / "run").claim_term("run")
    with pytest.raises(TransportError, match=r"within 0\.1 s"):
        learn_without_redis(tmp_path, {})
