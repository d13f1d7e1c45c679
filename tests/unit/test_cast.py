"""What is published is the cast of this step's masters: shown by digests that owe nothing to the copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from streamrl.learner.parallel.dtensors import held
from streamrl.learner.publishing.copiers import (
    AtOnce,
    Check,
    Copier,
    Copies,
    OnStream,
    Ready,
    StreamDouble,
    sum_of_words,
    sum_on_host,
)
from streamrl.learner.publishing.host_copy import HostCopy, cast_digests
from streamrl.pinning import CudaRuntimeDouble
from streamrl.protocol.weights.format import MAX_RANGE_ELEMENTS, digest_of
from tests.publish_world import Scene, publish


@pytest.fixture(params=["float32", "bfloat16"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Scene:
    return Scene(tmp_path, dtype=request.param)


def test_the_digests_of_a_version_are_those_of_its_cast(scene: Scene) -> None:
    publish(scene.publisher, 0)
    [manifest] = scene.stream.manifests
    published = {(part.tensor, part.start): part.digest for shard in manifest.shards for part in shard.ranges}
    assert published == cast_digests(scene.policy.model, scene.config.weights.dtype)


class Forgetful:
    """Copies as another copier does, but for one tensor, which keeps what it has on the host."""

    def __init__(self, copier: Copier) -> None:
        self.checks, self._copier = copier.checks, copier
        self.forgets: torch.Tensor | None = None

    def begin(self, host: torch.Tensor) -> None:
        self._copier.begin(host)

    def copy(self, copies: Copies) -> tuple[Ready, Check]:
        kept = [(target, target.clone()) for target, source in copies if self._forgets(source)]
        ready, check = self._copier.copy(copies)

        def forget() -> None:
            ready()
            for target, old in kept:
                target.copy_(old)

        return forget, check

    def _forgets(self, source: torch.Tensor) -> bool:
        return self.forgets is not None and source.data_ptr() == self.forgets.data_ptr()


def on_stream() -> OnStream:
    return OnStream(StreamDouble(CudaRuntimeDouble()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [AtOnce, on_stream])
def test_a_copy_that_was_not_refreshed_is_not_published_and_the_next_one_is(
    make: Callable[[], Copier], dtype: str, tmp_path: Path
) -> None:
    copier = Forgetful(make())
    scene = Scene(tmp_path, dtype=dtype, copier=copier)
    for name, stale in scene.policy.model.named_parameters():
        publish(scene.publisher, 0)
        num_published = len(scene.stream.manifests)
        scene.train()
        copier.forgets = stale
        assert publish(scene.publisher, 1) is None, name
        assert scene.publisher.failing
        assert len(scene.stream.manifests) == num_published
        copier.forgets = None
        assert publish(scene.publisher, 1) is not None
    assert scene.is_served(tmp_path / "mirror")


def test_a_stream_is_told_of_all_copies_before_any_is_waited_for(tmp_path: Path) -> None:
    runtime = CudaRuntimeDouble()
    stream = StreamDouble(runtime)
    scene = Scene(tmp_path, copier=OnStream(stream))
    publish(scene.publisher, 0)
    assert stream.calls == ["follow", "copy", "wait"]  # one part: the model is small
    [num_bytes] = runtime.pinned.values()
    assert num_bytes >= sum(tensor.num_bytes for tensor in scene.stream.manifests[0].tensors)
    publish(scene.publisher, 1)
    assert len(runtime.pinned) == 1
    assert scene.is_served(tmp_path / "mirror")


def test_large_models_are_handed_out_in_parts() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(1500, 1500) for _ in range(5)))  # 4.5 MB each
    stream = StreamDouble(CudaRuntimeDouble())
    for count, part in enumerate(HostCopy("bfloat16", OnStream(stream)).take(model), start=1):
        part.check()
        assert stream.calls == ["follow", *["copy"] * 3, *["wait"] * count]
    assert count == 3


def test_a_large_tensor_is_handed_out_in_the_ranges_that_are_encoded() -> None:
    large = torch.nn.Module()
    large.weight = torch.nn.Parameter(torch.arange(2 * MAX_RANGE_ELEMENTS + 3, dtype=torch.float32))
    parts = [part.ranges for part in HostCopy("bfloat16", AtOnce()).take(large)]
    assert [[held.start for held in part] for part in parts] == [[0], [MAX_RANGE_ELEMENTS], [2 * MAX_RANGE_ELEMENTS]]
    digests = {(held.tensor, held.start): digest_of(held.bits.data) for part in parts for held in part}
    assert digests == cast_digests(large, "bfloat16")


def test_the_copy_that_was_announced_stays_as_it_is_until_the_next_one_is() -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(1000), requires_grad=False)
    copy = HostCopy("bfloat16", AtOnce())

    def taken(value: float) -> np.ndarray:
        model.weight.fill_(value)
        [part] = copy.take(model)
        return part.ranges[0].bits

    first = taken(1.0)
    copy.keep()
    failed = taken(2.0)
    second = taken(3.0)

    assert np.shares_memory(failed, second), "what was not announced is written over"
    assert set(first.tolist()) == {0x3F80}, "what was announced is what the next is encoded against"
    assert set(second.tolist()) == {0x4040}


@pytest.mark.parametrize("bits", [torch.int16, torch.int32])
@pytest.mark.parametrize("length", [1, 3, 4, 4097])
def test_each_bit_counts_in_the_sum_of_words(bits: torch.dtype, length: int) -> None:
    values = torch.randint(-(2**15), 2**15, (length,), dtype=bits)
    sums = {int(sum_of_words(values))}
    for bit in range(8 * values.element_size()):
        for place in {0, length // 2, length - 1}:
            other = values.clone()
            other[place] ^= torch.tensor(1, dtype=bits) << bit
            sums.add(int(sum_of_words(other)))
    assert len(sums) == 1 + 8 * values.element_size() * len({0, length // 2, length - 1})


@pytest.mark.parametrize("length", [1, 3, 4, 4097, (1 << 18) + 5, 3 << 18])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_host_sums_the_words_as_a_gpu_does(dtype: torch.dtype, length: int) -> None:
    """In blocks, of which the longer ones here are several."""
    values = torch.randn(length).to(dtype)
    assert sum_on_host(values) == int(sum_of_words(values)) % (1 << 64)


def test_memory_that_may_not_be_pinned_is_used_as_it_is(tmp_path: Path) -> None:
    runtime = CudaRuntimeDouble(most_bytes=10)
    scene = Scene(tmp_path, copier=OnStream(StreamDouble(runtime)))
    publish(scene.publisher, 0)
    assert not runtime.pinned
    runtime.launch()  # no error is left to it
    assert scene.is_served(tmp_path / "mirror")


def test_long_tensors_are_cut_where_the_encoder_cuts_them() -> None:
    long = torch.nn.Module()
    long.weight = torch.nn.Parameter(torch.arange(MAX_RANGE_ELEMENTS + 3, dtype=torch.float32))
    assert [start for _, start in cast_digests(long, "bfloat16")] == [0, MAX_RANGE_ELEMENTS]
    assert len(held(long.weight, shape=long.weight.shape).values) == MAX_RANGE_ELEMENTS + 3


def test_a_nan_has_the_bits_that_the_copy_has(scene: Scene) -> None:
    with torch.no_grad():
        next(scene.policy.model.parameters())[0, 0] = np.nan
    assert publish(scene.publisher, 0) is not None


def test_a_gpus_tensors_are_cast_and_summed_there_in_pieces() -> None:
    """Made-up tensors: where each operation runs, and how large what it makes is, is checked by torch."""
    length = (1 << 25) + 3
    with FakeTensorMode():
        target, source = torch.empty(length, dtype=torch.bfloat16), torch.empty(length, device="cuda")
        made = Made()
        with made:
            OnStream(StreamDouble(CudaRuntimeDouble())).copy([(target, source)])
    assert all(num_bytes <= 8 * (1 << 23) for num_bytes in made.on_gpu), "a piece, not the tensor"
    assert made.to_host == 3 * [torch.bfloat16, torch.int64]


class Made(TorchDispatchMode):
    """What operations make on the GPU, and what they bring to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.on_gpu: list[int] = []
        self.to_host: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, torch.Tensor):
            return result
        given = [one for one in args if isinstance(one, torch.Tensor)]
        if any(one.is_cuda for one in given) and not result.is_cuda:
            self.to_host.append(result.dtype)
            assert all(one.dtype == result.dtype for one in given), "cast on the GPU, not on the way"
        elif result.is_cuda:
            self.on_gpu.append(result.nbytes)
        return result
