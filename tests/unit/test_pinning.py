"""Memory stays pinned only as long as it exists: CUDA would take whatever gets its address next for the pinned one."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

from streamrl.pinning import CudaRuntimeDouble, Pinned

_NUM_BYTES = 1 << 20


class Watching(CudaRuntimeDouble):
    """Notes whether the memory is still there when it is unpinned."""

    def __init__(self) -> None:
        super().__init__()
        self.was_there: list[bool] = []

    def cudaHostUnregister(self, address: int, /) -> int:
        self.was_there.append(is_mapped(address))
        return super().cudaHostUnregister(address)


def is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


def test_memory_is_unpinned_just_before_it_is_freed() -> None:
    runtime = Watching()
    pinned = Pinned(runtime, runtime.launch)
    memory = torch.frombuffer(mmap.mmap(-1, _NUM_BYTES), dtype=torch.uint8)  # given back with the tensor
    address = memory.data_ptr()
    assert pinned.hold(memory)
    assert runtime.pinned == {address: _NUM_BYTES}
    del memory
    assert not runtime.pinned
    assert runtime.was_there == [True]
    assert not is_mapped(address)
    pinned.release()  # nothing is left to unpin


def test_the_next_memory_takes_the_place_of_the_one_before() -> None:
    runtime = CudaRuntimeDouble()
    pinned = Pinned(runtime, runtime.launch)
    first, second = (torch.zeros(size, dtype=torch.uint8) for size in (10, 20))
    assert pinned.hold(first)
    assert pinned.hold(second)
    assert runtime.pinned == {second.data_ptr(): 20}
    pinned.release()
    assert not runtime.pinned
    del first, second
