"""On a GPU gradients are divided in another stream than FSDP allocated them in; the allocator must know."""

from __future__ import annotations

import torch

from streamrl.learner.parallel.fsdp import _divide


class OnGpu:
    """The double of a gradient on a GPU."""

    is_cuda, device = True, torch.device("cuda", 3)

    def __init__(self) -> None:
        self.told: list[tuple[str, object]] = []

    def div_(self, by: float) -> None:
        self.told.append(("div_", by))

    def record_stream(self, stream: object) -> None:
        self.told.append(("record_stream", stream))


def test_the_memory_of_a_gradient_that_is_divided_in_another_stream_waits_for_that_stream() -> None:
    gradient = OnGpu()
    _divide(gradient, by=4, stream=lambda device: f"all-reduce of {device}")  # type: ignore[arg-type,return-value]
    assert gradient.told == [("div_", 4), ("record_stream", "all-reduce of cuda:3")]


def test_on_a_processor_there_is_one_stream() -> None:
    gradient = torch.ones(3)
    _divide(gradient, by=4)
    assert gradient.tolist() == [0.25] * 3
