"""Checkpoints as ranks write them together, beside training: each tells of its file, and none hurries the others."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
import torch

from streamrl.config import schema
from streamrl.crashpoints import Point, armed
from streamrl.errors import Fenced
from streamrl.learner.checkpoints.checkpoint import Checkpoint, CheckpointState
from streamrl.learner.checkpoints.save import RankStateDouble, Saver
from streamrl.learner.checkpoints.sealed import MANIFEST, describe
from streamrl.learner.checkpoints.terms import CheckpointName, ancestry
from streamrl.learner.groups.ledger import FeedState
from streamrl.learner.loading.load import load_policy
from streamrl.learner.loading.tokenizer import TokenizerInfo, read_tokenizer_info
from streamrl.learner.metrics.record import Timers
from streamrl.learner.process.background import BackgroundThread, BackgroundThreadDouble, Jobs
from streamrl.learner.process.ranks import World
from streamrl.learner.process.watchdog import Watchdog
from streamrl.learner.publishing.unpublished import Unpublished
from streamrl.learner.rank import work
from streamrl.learner.rank_context import at_disk_s, stall_limit_s
from streamrl.protocol.transport.double import LearnerStreamDouble, MemoryServer
from tests.conductor_world import ALONE, Scene, start_of, surroundings
from tests.feed_world import Clock
from tests.helpers import wait_until
from tests.learner_cases import learner_config
from tests.tiny_models import make_model

CPU = torch.device("cpu")
AT_5 = CheckpointName(1, 5)
T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Another:
    """A rank beside this one: how far it is with its file, and what it tells of it."""

    outcome: int = 0  # done, failed, waiting
    told: bytes = b"[0.5, {}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class WithAnother(World):
    """Rank 0's view of two ranks."""

    other: Another

    def all_agree(self, mine: bool) -> bool:
        return mine

    def largest(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.maximum(values, self.other.outcome)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data, self.other.told]


class JobsByHand:
    """Whoever has something to do beside the loop waits until `go_on`."""

    def __init__(self) -> None:
        self._jobs: list[Callable[[], None]] = []

    def working(self, *, join_s: float) -> AbstractContextManager[None]:
        return nullcontext()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 - whoever waits for the future gets it
                future.set_exception(error)

        self._jobs.append(run)
        return future

    def go_on(self) -> None:
        """One job is done."""
        self._jobs.pop(0)()


class Saving:
    """A saver, and all around it."""

    def __init__(self, folder: Path, *, world: World = ALONE, background: Jobs | None = None, term: int = 1) -> None:
        self.scene = Scene(folder, checkpoint=schema.Checkpoint(keep_last=1, keep_best=0))
        self.scene.checkpoints.claim_term("run")
        self.state, self.timers = RankStateDouble(), Timers()
        self.saver = Saver(
            state=self.state,
            world=world,
            checkpoints=self.scene.checkpoints,
            conductor=self.scene.conductor,
            term=term,
            background=background or BackgroundThreadDouble(),
            timers=self.timers,
        )

    def begin(self, step: int) -> None:
        self.state.now = b"weights of step %d" % step
        self.saver.begin(step, consumed_samples=10 * step)

    def newest(self) -> Checkpoint | None:
        return self.scene.checkpoints.newest_complete(ancestry(self.scene.folder))

    def names(self) -> set[str]:
        return {path.name for path in (self.scene.folder / "checkpoints").iterdir()}

    def files(self, name: CheckpointName) -> dict[str, Any]:
        manifest = json.loads((self.scene.checkpoints.folder_of(name) / MANIFEST).read_bytes())
        found: dict[str, Any] = manifest["content"]["files"]
        return found


def test_the_manifest_has_what_each_rank_tells_of_its_file_and_rank_0_reads_none_of_the_others(tmp_path: Path) -> None:
    theirs = {"train-00001-of-00002.safetensors": [84, "what the other rank has found"]}  # not seen on this machine
    other = Another(told=json.dumps([2.5, theirs]).encode())
    saving = Saving(tmp_path, world=WithAnother(rank=0, size=2, device=CPU, other=other))
    assert saving.saver.save(5, consumed_samples=0)
    mine = saving.scene.checkpoints.folder_of(AT_5) / "weights"
    assert saving.files(AT_5) == {mine.name: list(describe(mine)), **theirs}
    assert saving.timers.take()["timers/checkpoint_write"] == 2.5, "as long as the slowest took"


def test_what_was_saved_is_found_again_with_its_digests(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    assert [saving.saver.save(5, consumed_samples=0) for _ in range(2)] == [True, True]
    found = saving.newest()
    assert found is not None
    assert found.name == AT_5
    assert set(saving.files(AT_5)) == {"weights"}


def test_what_is_trained_after_the_copy_is_not_committed_by_it(tmp_path: Path) -> None:
    background = JobsByHand()
    saving = Saving(tmp_path, background=background)
    saving.scene.feed.now = FeedState(cursor="5-0")
    saving.begin(5)
    saving.scene.feed.now = FeedState(cursor="6-0")
    saving.state.now = b"weights of step 6"
    for _ in ("pruned", "written", "sealed"):
        assert saving.saver.settle() is None
        assert saving.newest() is None
        assert saving.scene.feed.told == []
        background.go_on()
    assert saving.saver.settle()
    found = saving.newest()
    assert found is not None
    assert (found.folder / "weights").read_bytes() == b"weights of step 5"
    assert (found.state.step, found.state.stream.cursor) == (5, "5-0")
    assert found.state.extra["consumed_samples"] == 50
    assert [told.cursor for told in saving.scene.feed.told] == ["5-0"], "Redis keeps what came after it"


def test_nothing_is_committed_before_the_files_of_all_ranks_are_durable(tmp_path: Path) -> None:
    other = Another(outcome=2)
    saving = Saving(tmp_path, world=WithAnother(rank=0, size=2, device=CPU, other=other))
    saving.begin(5)
    assert [saving.saver.settle() for _ in range(3)] == [None] * 3
    assert saving.names() == {f".tmp-{AT_5}"}
    other.outcome = 0
    assert [saving.saver.settle() for _ in range(2)] == [None, True]
    assert saving.names() == {str(AT_5)}


def test_a_checkpoint_that_one_rank_could_not_write_is_none(tmp_path: Path) -> None:
    saving = Saving(tmp_path, world=WithAnother(rank=0, size=2, device=CPU, other=Another(outcome=1)))
    assert not saving.saver.save(5, consumed_samples=0)
    assert saving.names() == set()
    assert not saving.saver.busy


@pytest.mark.parametrize("point", ["checkpoint.copied", "shard.part", "shard.written", "journal.written"])
def test_a_full_disk_costs_this_checkpoint_and_no_other(tmp_path: Path, point: Point) -> None:
    saving = Saving(tmp_path)
    if point == "checkpoint.copied":  # there is no room for a folder
        (saving.scene.folder / "checkpoints").touch()
        saving.begin(5)
        (saving.scene.folder / "checkpoints").unlink()
        assert not saving.saver.busy
    else:
        with armed(full_at(point)):
            saving.begin(5)
            while (committed := saving.saver.settle()) is None:
                pass
        assert not committed
        assert saving.names() == set()
    assert saving.newest() is None
    assert saving.scene.feed.told == []
    assert saving.saver.num_refused == 1
    assert saving.saver.save(6, consumed_samples=0)
    assert saving.saver.num_refused == 0
    assert saving.names() == {"e000001-s00000006"}


def test_a_disk_that_earlier_learners_have_filled_takes_the_first_checkpoint(tmp_path: Path) -> None:
    """Of fewer that are to be kept, and of one that was being written when its learner was killed."""
    saving = Saving(tmp_path, term=2)
    root = saving.scene.checkpoints
    for step in (1, 2, 3):
        (root.new_folder(CheckpointName(1, step)) / "weights").write_bytes(b"earlier")
        state = CheckpointState(run_uid="run", step=step, stream=FeedState(), data_fingerprint="")
        root.commit(CheckpointName(1, step), state)
    root.new_folder(CheckpointName(1, 4))
    root.claim_term("run")

    def full(passed: Point) -> None:
        if passed == "shard.part" and len(saving.names()) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with armed(full):
        assert saving.saver.save(5, consumed_samples=0)
    assert saving.names() == {"e000002-s00000005"}


def full_at(point: Point) -> Callable[[Point], None]:
    def act(passed: Point) -> None:
        if passed == point:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return act


def test_the_next_checkpoint_waits_for_the_one_that_is_being_written_and_tells_so(tmp_path: Path) -> None:
    background = BackgroundThread("checkpoints")
    saving = Saving(tmp_path, background=background)
    written = threading.Event()
    with background.working(join_s=60), armed(lambda point: written.wait(60) if point == "shard.written" else None):
        saving.begin(5)
        assert "timers/checkpoint_wait" not in saving.timers.take()
        threading.Timer(0.2, written.set).start()
        saving.begin(6)
        assert saving.timers.take()["timers/checkpoint_wait"] >= 0.1
        found = saving.newest()
        assert found is not None
        assert found.state.step == 5
        assert saving.saver.save(6, consumed_samples=0)
        assert saving.names() == {"e000001-s00000006"}, "older ones are gone when a run ends"


def test_a_mistake_beside_the_loop_is_heard_in_the_loop(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    saving.begin(5)
    assert saving.saver.settle() is None
    claimed = saving.scene.checkpoints.claim_term("run")  # another learner has come
    assert claimed.number == 2
    saving.begin(6)
    with pytest.raises(Fenced):
        saving.saver.save(6, consumed_samples=0)
    assert saving.names() == {"e000001-s00000005", ".tmp-e000001-s00000006"}


class SlowTokenizer:
    """Is written for so long that the clock goes on."""

    def __init__(self, tokenizer_info: TokenizerInfo, write: Callable[[], None]) -> None:
        self._tokenizer, self._write = tokenizer_info.tokenizer, write

    def save_pretrained(self, folder: Path) -> None:
        self._write()
        self._tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("slow", ["checkpoint", "export"])
@pytest.mark.parametrize(("takes_s", "ends"), [(1000.0, False), (3000.0, True)])
def test_a_rank_at_the_disk_is_not_stalled_before_the_disks_own_timeout(
    tmp_path: Path, slow: str, takes_s: float, ends: bool
) -> None:
    clock, stalls = Clock(), list[str]()

    def disk() -> None:
        clock.advance(takes_s)
        if ends:
            wait_until(lambda: stalls, description="the watchdog ends it")
        else:
            threading.Event().wait(0.1)  # the watchdog looks every hundredth second

    def at_point(point: Point) -> None:
        if slow == "checkpoint" and point == "checkpoint.synced":
            disk()

    config = learner_config(make_model(tmp_path / "model", hidden=32), dir=tmp_path)
    scene = Scene(tmp_path, max_steps=0)
    tokenizer_info = read_tokenizer_info(config.model.path)
    tokenizer: Any = SlowTokenizer(tokenizer_info, disk) if slow == "export" else tokenizer_info.tokenizer
    watchdog = Watchdog(
        limit_s=stall_limit_s(config),
        at_disk_s=at_disk_s(config),
        clock=clock,
        check_every_s=0.01,
        on_stall=stalls.append,
    )
    around = surroundings(config, tokenizer_info=replace(tokenizer_info, tokenizer=tokenizer), watchdog=watchdog)
    start = start_of(term=scene.checkpoints.claim_term("run").number)
    stream = LearnerStreamDouble(MemoryServer(wait=clock.advance), term=1)
    policy = load_policy(config, ALONE, tokenizer_info.end_ids)
    with armed(at_point):
        state = work(around, policy, start, conductor=scene.conductor, stream=stream, publisher=Unpublished(1))
    assert state == "finished"
    assert bool(stalls) is ends


def test_the_disk_has_its_own_timeout_beside_the_time_that_redis_may_be_away(tmp_path: Path) -> None:
    config = learner_config(tmp_path, checkpoint=schema.Checkpoint(timeout_s=7.0))
    assert (stall_limit_s(config), at_disk_s(config)) == (300.0, 307.0)
