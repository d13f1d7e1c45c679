"""What a GPU tells at each step, as far as it can be told without one."""

from __future__ import annotations

import torch

from streamrl.learner.metrics.gpu import Gpu
from streamrl.telemetry.metrics import is_metric

GPU = torch.device("cuda", 0)


class CudaDouble:
    """80 GB, of which this process has had 30 and all together have 50 now."""

    def __init__(self, *, use: int | None) -> None:
        self.use, self.num_asked = use, 0
        self.peak_bytes = 30

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 30, 80

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak_bytes

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak_bytes = 10

    def utilization(self, device: torch.device) -> int:
        self.num_asked += 1
        if self.use is None:
            raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")
        return self.use


def test_its_memory_and_use_are_shares_and_peaks_are_of_one_step() -> None:
    gpu = Gpu(GPU, cuda=CudaDouble(use=87))
    found = gpu.metrics()
    assert found == {"gpu/memory": 0.625, "gpu/peak_memory": 0.375, "gpu/use": 0.87}
    assert all(is_metric(name) for name in found)
    assert gpu.metrics()["gpu/peak_memory"] == 0.125


def test_where_its_use_is_not_told_memory_is_and_nobody_asks_again() -> None:
    cuda = CudaDouble(use=None)
    gpu = Gpu(GPU, cuda=cuda)
    assert [set(gpu.metrics()) for _ in range(3)] == [{"gpu/memory", "gpu/peak_memory"}] * 3
    assert cuda.num_asked == 1


def test_without_a_gpu_there_is_nothing_to_tell() -> None:
    assert Gpu(torch.device("cpu")).metrics() == {}
