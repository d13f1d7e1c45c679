"""The learner's half: announcing versions of the weights."""

from __future__ import annotations

import pytest
import redis

from streamrl.errors import TransportError
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.snapshot import snapshot
from streamrl.protocol.transport.types import Announcement
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.versions import make_version
from tests.redis.conftest import MakeLearner, MakeWorker


async def test_an_announced_version_is_what_workers_see(learner: LearnerStream, worker: WorkerStream) -> None:
    assert await worker.announcements.latest() is None
    one, two = make_version(1, 0), make_version(1, 1)
    learner.announce(Announcement(version=one, base=0, step=0, manifest=b"anchor"), keep=[])
    assert await worker.announcements.latest() == Announcement(version=one, base=0, step=0, manifest=b"anchor")
    delta = Announcement(version=two, base=one, step=1, manifest=b"delta")
    learner.announce(delta, keep=[one])
    assert await worker.announcements.latest() == delta
    assert await worker.announcements.latest() == delta
    assert await worker.announcements.manifest(one) == b"anchor"


async def test_manifests_that_are_not_kept_are_dropped(learner: LearnerStream, worker: WorkerStream) -> None:
    versions = [make_version(1, n) for n in range(4)]
    for version in versions[:3]:
        learner.announce(Announcement(version=version, base=0, step=0, manifest=b"m"), keep=versions[:3])
    learner.announce(Announcement(version=versions[3], base=0, step=0, manifest=b"m"), keep=[versions[1]])
    there = [await worker.announcements.manifest(version) for version in versions]
    assert there == [None, b"m", None, b"m"]


async def test_the_versions_of_all_learners_are_counted_and_not_the_attempts(
    make_learner: MakeLearner, client: redis.Redis, keys: Keys
) -> None:
    assert snapshot(client, keys).num_versions_published is None
    first = make_learner(term=1)
    for number in (0, 1, 1, 205):  # one call is repeated, and of the numbers between attempts have failed
        first.announce(Announcement(version=make_version(1, number), base=0, step=0, manifest=b"m"), keep=[])
    assert snapshot(client, keys).num_versions_published == 3
    second = make_learner(term=2)
    second.announce(Announcement(version=make_version(2, 7), base=0, step=0, manifest=b"m"), keep=[])
    assert snapshot(client, keys).num_versions_published == 4


async def test_an_anchor_beside_a_version_shows_to_who_reads_its_manifest_anew(
    learner: LearnerStream, worker: WorkerStream, make_worker: MakeWorker
) -> None:
    one, two, three = (make_version(1, n) for n in range(3))
    for version, base in ((one, 0), (two, one), (three, two)):
        learner.announce(Announcement(version=version, base=base, step=0, manifest=b"delta"), keep=[one, two])
    before = Announcement(version=three, base=two, step=0, manifest=b"delta")
    assert await worker.announcements.latest() == before
    after = Announcement(version=three, base=two, step=0, manifest=b"delta and anchor")
    learner.amend(after, keep=[two])
    assert await worker.announcements.latest() == before, "nothing is read again for who has the version on its way"
    assert await worker.announcements.latest(anew=True) == after
    assert await make_worker("late").announcements.latest() == after
    assert [await worker.announcements.manifest(version) for version in (one, two)] == [None, b"delta"]


def test_no_anchor_is_laid_beside_a_version_that_redis_has_lost(
    learner: LearnerStream, client: redis.Redis, keys: Keys
) -> None:
    told = Announcement(version=make_version(1, 0), base=0, step=0, manifest=b"m")
    learner.announce(told, keep=[])
    client.flushall()
    with pytest.raises(TransportError, match="has lost the weights"):
        learner.amend(told, keep=[])
    assert not client.exists(keys.manifests)


def test_versions_only_grow(learner: LearnerStream) -> None:
    new, old = make_version(1, 5), make_version(1, 4)
    learner.announce(Announcement(version=new, base=0, step=5, manifest=b"new"), keep=[])
    learner.announce(Announcement(version=new, base=0, step=5, manifest=b"new"), keep=[])
    with pytest.raises(TransportError, match="already has weights"):
        learner.announce(Announcement(version=old, base=0, step=4, manifest=b"old"), keep=[])
    with pytest.raises(TransportError, match="already has weights"):
        learner.announce(Announcement(version=new, base=0, step=5, manifest=b"others"), keep=[])


def test_versions_of_a_high_term_are_compared_exactly(make_learner: MakeLearner) -> None:
    learner = make_learner(term=100_000)
    for n in range(3):
        learner.announce(Announcement(version=make_version(100_000, n), base=0, step=n, manifest=b"m"), keep=[])


def test_a_version_of_another_term_is_a_mistake(learner: LearnerStream) -> None:
    with pytest.raises(AssertionError, match="another term"):
        learner.announce(Announcement(version=make_version(2, 0), base=0, step=0, manifest=b"m"), keep=[])
