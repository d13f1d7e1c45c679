"""A learner that begins on a full disk waits for others to make room: not for ever, and for nothing else."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from learner.checkpoints.checkpoint import CheckpointRoot
from learner.checkpoints.epochs import Epoch
from learner.start import Claimed, once_there_is_room
from tests.feed_world import Clock

CLAIMED = Claimed(
    run_uid="run",
    epoch=Epoch(number=1, parent=None, run_uid="run"),
    checkpoints=CheckpointRoot(Path("runs/run")),
    checkpoint=None,
)


def claim_of(answers: Iterator[int], clock: Clock) -> Claimed:
    """Each answer is an errno, or 0 for success."""

    def claim() -> Claimed:
        if number := next(answers):
            raise OSError(number, "said the disk")
        return CLAIMED

    return once_there_is_room(claim, patience_s=10.0, check=lambda: None, clock=clock, sleep=clock.advance)


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


def test_what_more_room_would_not_mend_is_told_at_once() -> None:
    with pytest.raises(OSError, match="said the disk"):
        claim_of(iter([errno.EIO, 0]), Clock())


def test_who_has_been_replaced_waits_no_longer() -> None:
    def replaced() -> None:
        raise InterruptedError("another learner")

    with pytest.raises(InterruptedError):
        once_there_is_room(lambda: CLAIMED, patience_s=10.0, check=replaced)
