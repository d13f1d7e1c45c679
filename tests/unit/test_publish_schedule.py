"""When weights go out, how long training waits for that, and that whoever ends the learner does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl.learner.metrics.record import Timers
from streamrl.learner.process.background import BackgroundThread
from streamrl.learner.publishing.schedule import PublishSchedule
from streamrl.learner.publishing.shipping import Published
from streamrl.ops.monitor.build import build_view
from streamrl.protocol.weights.stores import MemoryStore
from streamrl.telemetry.progress import Progress, Wait
from streamrl.versions import make_version
from tests.launch_world import NOW, make_run, make_snapshot
from tests.unit.test_learner_publish import Scene


class FakePublisher:
    """A version gets out at the look after the one that `settles_in` counts down to; or never; or fails then. Where it
    has an anchor, that gets out at the next look."""

    latest: Published | None = None

    def __init__(self, settles_in: int | None) -> None:
        self._settles_in, self._left = settles_in, 0
        self.begun: list[int] = []
        self.announcing = self.anchoring = False
        self.refuses = self.has_anchors = self._failed = False

    @property
    def busy(self) -> bool:
        return self.announcing or self.anchoring

    @property
    def failing(self) -> bool:
        return self._failed and not self.busy

    def begin(self, step: int, *, whole: bool = False) -> None:
        assert not self.busy
        self.begun.append(step)
        self.announcing, self.anchoring, self._left = True, self.has_anchors, self._settles_in or 0

    def settle(self, *, wait_s: float = 0.0) -> Published | None:
        if not self.announcing:
            self.anchoring = False
            return None
        if self._settles_in is None:
            return None
        self._left -= 1
        if self._left >= 0:
            return None
        self.announcing, self._failed = False, self.refuses
        if self.refuses:
            return None
        self.latest = Published(version=make_version(1, 0), step=self.begun[-1], num_bytes=0, changed_fraction=0.0)
        return self.latest


class Answers:
    """Told to stop at the nth time of asking."""

    def __init__(self, stop_at: int | None = None) -> None:
        self._stop_at, self.asked = stop_at, 0

    def must_stop(self) -> bool:
        self.asked += 1
        return self.asked == self._stop_at

    def note_published(self, published: Published) -> None: ...


class StopsOnce(Answers):
    """This is so."""

    def __init__(self, is_so: Callable[[], bool]) -> None:
        super().__init__()
        self.must_stop = is_so  # type: ignore[method-assign]


def outgoing(
    publisher: object, answers: Answers, *, max_ahead: int = 1, progress: Progress | None = None
) -> PublishSchedule:
    return PublishSchedule(
        publisher=publisher,
        max_ahead=max_ahead,
        conductor=answers,
        progress=progress or Progress(part="learner/0", role="learner"),
        timers=Timers(),
    )


def test_a_version_is_sent_when_it_is_out() -> None:
    publisher, answers = FakePublisher(settles_in=2), Answers()
    assert outgoing(publisher, answers).send(5)
    assert publisher.latest is not None
    assert publisher.latest.step == 5
    assert answers.asked == 3


def test_a_word_to_stop_ends_the_wait_for_a_version() -> None:
    assert not outgoing(FakePublisher(settles_in=None), Answers(stop_at=3)).send(5)


def test_training_waits_only_where_it_would_run_too_far_ahead() -> None:
    publisher, answers = FakePublisher(settles_in=4), Answers()
    out = outgoing(publisher, answers, max_ahead=2)
    out.send(0)
    asked = answers.asked
    out.send_in_background(1)
    out.send_in_background(2)  # the version of step 1 is still on its way, and is left alone
    assert (publisher.begun, answers.asked) == ([0, 1], asked)
    out.send_in_background(3)  # three steps ahead of version 0
    assert publisher.begun == [0, 1, 3]
    assert answers.asked > asked


def test_training_that_waits_for_a_version_goes_on_when_told_to_stop() -> None:
    publisher = FakePublisher(settles_in=None)
    out = outgoing(publisher, Answers(stop_at=1), max_ahead=0)
    out.send_in_background(1)
    assert publisher.begun == [1]
    assert publisher.busy


def test_no_step_follows_on_a_version_that_failed_until_one_is_out_again() -> None:
    publisher = FakePublisher(settles_in=0)
    out = outgoing(publisher, Answers(), max_ahead=1)
    assert out.send(0)
    publisher.refuses = True
    out.send_in_background(1)
    assert out.keeps_up(1), "version 0 is young enough"
    out.send_in_background(2)
    for _ in range(3):
        assert not out.keeps_up(2)
        out.retry(2)
    publisher.refuses = False
    assert out.keeps_up(2), "the version that is on its way is waited for"
    assert publisher.latest is not None
    assert publisher.latest.step == 2
    assert publisher.begun[-1] == 2


def test_attempts_that_fail_for_a_minute_are_a_cause_however_often_they_are_made() -> None:
    now = 0.0
    progress = Progress(part="learner/0", role="learner", clock=lambda: NOW + now, timer=lambda: now)
    publisher = FakePublisher(settles_in=0)
    schedule = outgoing(publisher, Answers(), progress=progress)
    schedule.send(0)
    publisher.refuses = True
    progress.working("train")
    schedule.send_in_background(2)
    while now < 60:
        assert not schedule.keeps_up(2)
        with progress.waiting(Wait.WEIGHTS):  # as the conductor does before another attempt
            now += 1.0
            waiting = progress.report()
        schedule.retry(2)
    for report in (waiting, progress.report()):
        seen = make_snapshot(run=make_run(lag={"max_steps": 1}), step=2, at=report.at, reports=(report,))
        [cause] = [one for one in build_view(seen, run_name="run", server="here").causes if one.name == "publish_stuck"]
        assert cause.evidence == "the learner has tried for 60s; the newest version is 1.0"


def test_steps_between_two_versions_do_not_run_ahead_of_one_that_failed_either() -> None:
    publisher = FakePublisher(settles_in=0)
    out = outgoing(publisher, Answers(), max_ahead=2)
    out.send(0)
    publisher.refuses = True
    out.send_in_background(2)
    assert out.keeps_up(2)
    assert not out.keeps_up(3)


def test_a_version_that_was_not_sent_for_an_anchor_on_its_way_is_sent_when_training_needs_it() -> None:
    publisher = FakePublisher(settles_in=0)
    out = outgoing(publisher, Answers(), max_ahead=2)
    out.send(0)
    publisher.has_anchors = True
    publisher.begin(2)
    publisher.settle()
    assert publisher.anchoring
    assert out.keeps_up(5)
    assert publisher.begun == [0, 2, 5]


def test_training_that_may_not_go_on_without_a_version_hears_that_it_shall_stop() -> None:
    publisher = FakePublisher(settles_in=None)
    publisher.latest = Published(version=make_version(1, 0), step=0, num_bytes=0, changed_fraction=0.0)
    publisher.begin(1)
    assert not outgoing(publisher, Answers(stop_at=1), max_ahead=0).keeps_up(1)


class HangingStore(MemoryStore):
    """Takes nothing until it is let go, or nothing from so many bytes on."""

    def __init__(self, *, from_bytes: int = 0) -> None:
        super().__init__()
        self._from_bytes = from_bytes
        self.reached, self.let_go = threading.Event(), threading.Event()

    def put(self, name: str, data: bytes) -> None:
        if len(data) >= self._from_bytes:
            self.reached.set()
            assert self.let_go.wait(60)
        super().put(name, data)


@pytest.mark.timeout(60)
def test_a_store_that_hangs_holds_up_the_end_for_a_second_or_two(tmp_path: Path) -> None:
    """And not for `weights.give_up_after_s`, which is 300 here."""
    store, background = HangingStore(), BackgroundThread("publisher")
    publisher = Scene(tmp_path, store=store, background=background).publisher
    with background.working(join_s=30):
        began = time.monotonic()
        assert not outgoing(publisher, StopsOnce(store.reached.is_set)).send(0)  # told to stop once it hangs
        took_s = time.monotonic() - began
        store.let_go.set()
    assert publisher.busy
    assert took_s < 10


@pytest.mark.timeout(60)
def test_training_that_waits_for_workers_does_not_wait_for_an_anchor(tmp_path: Path) -> None:
    store, background = HangingStore(from_bytes=100_000), BackgroundThread("publisher")
    scene = Scene(tmp_path, store=store, background=background, anchor_every=1)
    out = outgoing(scene.publisher, Answers(), max_ahead=0)
    with background.working(join_s=30):
        store.let_go.set()
        assert out.send(0)
        store.reached.clear()
        store.let_go.clear()
        scene.train()
        out.send_in_background(1)
        assert scene.publisher.latest is not None
        assert scene.publisher.latest.step == 1
        assert scene.publisher.busy
        assert store.reached.wait(30), "the anchor is on its way"
        store.let_go.set()
        assert out.wait()
    assert [manifest.as_anchor() is not None for manifest in scene.stream.manifests] == [True, True]
