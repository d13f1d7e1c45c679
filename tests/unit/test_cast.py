"""What is published is the cast of this step's masters: shown by digests that owe nothing to the copy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from streamrl.learner.model.tensors import held
from streamrl.learner.publishing.host_copy import cast_digests
from streamrl.protocol.weights.format import MAX_RANGE_ELEMENTS
from tests.publish_world import Scene, publish


@pytest.fixture(params=["float32", "bfloat16"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Scene:
    return Scene(tmp_path, dtype=request.param)


def test_the_digests_of_a_version_are_those_of_its_cast(scene: Scene) -> None:
    publish(scene.publisher, 0)
    [manifest] = scene.stream.manifests
    published = {(part.tensor, part.start): part.digest for shard in manifest.shards for part in shard.ranges}
    assert published == cast_digests(scene.policy.model, scene.config.weights.dtype)


def test_a_copy_that_was_not_refreshed_is_not_published_and_the_next_one_is(scene: Scene, tmp_path: Path) -> None:
    names = [name for name, _ in scene.policy.model.named_parameters()]
    for stale in names:
        publish(scene.publisher, 0)
        num_published = len(scene.stream.manifests)
        scene.train()
        refreshed = scene.publisher._copy._buffers[stale]
        scene.publisher._copy._buffers[stale] = Deaf.of(refreshed)
        assert publish(scene.publisher, 1) is None, stale
        assert scene.publisher.failing
        assert len(scene.stream.manifests) == num_published
        scene.publisher._copy._buffers[stale] = refreshed
        assert publish(scene.publisher, 1) is not None
    assert scene.is_served(tmp_path / "mirror")


class Deaf(torch.Tensor):
    """A buffer that keeps what it has."""

    @staticmethod
    def of(buffer: torch.Tensor) -> torch.Tensor:
        return buffer.as_subclass(Deaf)

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        return self

    def view(self, *shape: object) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).view(*shape)


def test_long_tensors_are_cut_where_the_encoder_cuts_them() -> None:
    long = torch.nn.Module()
    long.weight = torch.nn.Parameter(torch.arange(MAX_RANGE_ELEMENTS + 3, dtype=torch.float32))
    assert [start for _, start in cast_digests(long, "bfloat16")] == [0, MAX_RANGE_ELEMENTS]
    assert len(held(long.weight, shape=long.weight.shape).values) == MAX_RANGE_ELEMENTS + 3


def test_a_nan_has_the_bits_that_the_copy_has(scene: Scene) -> None:
    with torch.no_grad():
        next(scene.policy.model.parameters())[0, 0] = np.nan
    assert publish(scene.publisher, 0) is not None
