"""Anchors beside deltas: when they come, what a worker has before, and what one that fails costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.errors import Fenced, StreamrlError, TrainingError, TransportError, WeightsError
from streamrl.protocol.weights.mirror import Mirror
from tests.publish_world import ByHand, Scene, finish, publish


def has_anchor(scene: Scene) -> list[bool]:
    return [manifest.as_anchor() is not None for manifest in scene.stream.manifests]


def test_an_anchor_comes_as_often_as_set_beside_a_delta(tmp_path: Path) -> None:
    scene = Scene(tmp_path, anchor_every=3)
    for step in range(7):
        publish(scene.publisher, step)
        scene.train()
    assert has_anchor(scene) == [True, False, False, True, False, False, True]
    assert [manifest.base == 0 for manifest in scene.stream.manifests] == [True] + [False] * 6


def anchor_due_at_once(folder: Path, **more: Any) -> Scene:
    """The next version is to have an anchor beside it."""
    scene = Scene(folder, anchor_every=1, **more)
    scene.publisher.begin(0)
    if isinstance(hand := scene.background, ByHand):
        hand.work()
    assert finish(scene.publisher) is not None
    scene.train()
    return scene


def test_workers_have_the_version_before_its_anchor_is_stored(tmp_path: Path) -> None:
    """Training that waits for them goes on by then, and the next version waits for the anchor."""
    hand = ByHand()
    scene = anchor_due_at_once(tmp_path, background=hand)
    scene.publisher.begin(1)
    hand.work(2)  # encode, ship
    published = scene.publisher.settle()
    assert published is not None
    assert published.needs == (scene.stream.manifests[1].version, scene.stream.manifests[0].version)
    assert has_anchor(scene) == [True, False]
    assert (scene.publisher.announcing, scene.publisher.busy) == (False, True)
    assert scene.is_served(tmp_path / "early")

    scene.train()  # the anchor is of the version, not of what is trained since
    hand.work()
    assert scene.publisher.settle() is None
    assert not scene.publisher.busy
    assert has_anchor(scene) == [True, True]
    anchor = scene.stream.manifests[1].as_anchor()
    assert anchor is not None
    late = Mirror(tmp_path / "late")
    late.apply(anchor, scene.store)
    assert late.path.read_bytes() == (tmp_path / "early" / "mirror.safetensors").read_bytes()


@pytest.mark.parametrize("trouble", [TransportError("away"), WeightsError("in the way")])
def test_an_anchor_that_fails_leaves_its_version_and_comes_with_the_next(
    tmp_path: Path, trouble: StreamrlError
) -> None:
    scene = anchor_due_at_once(tmp_path)
    scene.stream.anchor_refusal = trouble
    assert publish(scene.publisher, 1) is not None
    assert not scene.publisher.failing
    assert has_anchor(scene) == [True, False]
    scene.stream.anchor_refusal = None
    scene.train()
    assert publish(scene.publisher, 2) is not None
    assert has_anchor(scene) == [True, False, True]
    assert [manifest.base for manifest in scene.stream.manifests[1:]] == [m.version for m in scene.stream.manifests[:2]]
    assert scene.is_served(tmp_path / "mirror")


def test_a_version_that_fails_has_no_anchor_laid_beside_it(tmp_path: Path) -> None:
    scene = anchor_due_at_once(tmp_path)
    scene.stream.refusal = TransportError("away")
    assert publish(scene.publisher, 1) is None
    assert scene.publisher.failing
    assert has_anchor(scene) == [True]


def test_anchors_that_fail_for_too_long_end_the_run(tmp_path: Path) -> None:
    scene = anchor_due_at_once(tmp_path, give_up_after_s=30.0)
    scene.stream.anchor_refusal = TransportError("away")
    for step, now in ((1, 0.0), (2, 29.0)):
        scene.clock.now = now
        assert publish(scene.publisher, step) is not None
    scene.clock.now = 31.0
    with pytest.raises(TrainingError, match=r"no anchor of the weights could be published for 31 s"):
        publish(scene.publisher, 3)


def test_an_anchor_that_is_being_stored_has_its_own_time_after_one_that_failed_long_before(tmp_path: Path) -> None:
    hand = ByHand()
    scene = anchor_due_at_once(tmp_path, background=hand, give_up_after_s=30.0)
    scene.stream.anchor_refusal = TransportError("away")
    scene.publisher.begin(1)
    hand.work()
    assert finish(scene.publisher) is not None
    scene.stream.anchor_refusal = None
    scene.train()

    scene.clock.now = 31.0
    scene.publisher.begin(2)
    hand.work(2)  # encode, ship
    for scene.clock.now in (31.0, 60.0):
        scene.publisher.settle()
    hand.work()
    scene.publisher.settle()
    assert has_anchor(scene) == [True, False, True]


def test_an_anchor_has_its_own_time_after_a_version_that_took_long(tmp_path: Path) -> None:
    hand = ByHand()
    scene = anchor_due_at_once(tmp_path, background=hand, give_up_after_s=30.0)
    scene.publisher.begin(1)
    scene.clock.now = 29.0
    hand.work(2)  # encode, ship
    for scene.clock.now in (29.0, 58.0):
        scene.publisher.settle()
    hand.work()
    scene.publisher.settle()
    assert has_anchor(scene) == [True, True]


def test_an_anchor_that_hangs_for_too_long_ends_the_run(tmp_path: Path) -> None:
    hand = ByHand()
    scene = anchor_due_at_once(tmp_path, background=hand, give_up_after_s=30.0)
    scene.publisher.begin(1)
    hand.work(2)  # encode, ship; the anchor is never stored
    for scene.clock.now in (0.0, 29.0):
        scene.publisher.settle()
    scene.clock.now = 31.0
    with pytest.raises(TrainingError, match=r"no anchor of the weights could be published for 31 s"):
        scene.publisher.settle()


def test_a_newer_learner_ends_publishing_also_while_an_anchor_is_laid(tmp_path: Path) -> None:
    scene = anchor_due_at_once(tmp_path)
    scene.stream.anchor_refusal = Fenced("a newer term")
    with pytest.raises(Fenced):
        publish(scene.publisher, 1)


def test_an_anchor_comes_as_soon_as_the_deltas_weigh_a_share_of_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path, anchor_every=50, anchor_share=0.05)
    for step in range(8):
        publish(scene.publisher, step)
        scene.train()
    sizes = [manifest.num_bytes for manifest in scene.stream.manifests]
    limit = 0.05 * sizes[0]
    due = next(n for n in range(2, 8) if sum(sizes[1:n]) > limit)
    assert has_anchor(scene)[: due + 1] == [True] + [False] * (due - 1) + [True]


def test_an_anchor_comes_alone_where_deltas_are_as_large(tmp_path: Path) -> None:
    scene = Scene(tmp_path, dtype="float32")
    for step in range(6):
        publish(scene.publisher, step)
        with torch.no_grad():
            for parameter in scene.policy.parameters():
                parameter += torch.randn_like(parameter)
    assert [manifest.base == 0 for manifest in scene.stream.manifests] == [True, False, True, False, True, False]
    assert not any(manifest.anchor for manifest in scene.stream.manifests)
    assert len({manifest.version for manifest in scene.stream.manifests}) == 6


def test_the_anchor_beside_a_delta_is_the_same_state(tmp_path: Path) -> None:
    scene = Scene(tmp_path, anchor_every=2)
    for step in range(3):
        publish(scene.publisher, step)
        scene.train()
    anchor = scene.stream.manifests[2].as_anchor()
    assert anchor is not None
    late, close = Mirror(tmp_path / "late"), Mirror(tmp_path / "close")
    late.apply(anchor, scene.store)
    close.apply_path(scene.stream.manifests, scene.store)
    assert late.path.read_bytes() == close.path.read_bytes()
