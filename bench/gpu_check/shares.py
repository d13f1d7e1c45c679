"""Where the time of a step goes: the kernels of one step by what they do, and the time in which none ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.gpu_check.rows import Row, Scale
from bench.measure import seconds

# The first kind whose word is in the name; names are those of kernels, or of operators on a CPU.
_KINDS = {
    "attention": ("flash", "fmha", "attention"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "aten::mm", "aten::addmm", "aten::bmm"),
    "optimizer": ("adam",),
    "copies and casts": ("memcpy", "memset", "copy", "chunk_cat", "split_with_sizes", "aten::cat"),
    "elementwise and sums": ("elementwise", "reduce", "vectorized", "softmax", "triton", "aten::"),
}
_OTHER = "other kernels"


def shares(name: str, step: Callable[[], object], scale: Scale) -> Iterator[Row]:
    """Profile one call of `step`, which must wait for its kernels."""
    on_gpu = scale.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        took_s = seconds(step)
    spent = Counter[str]()
    for event in seen.events() or ():
        if not on_gpu or event.device_type == DeviceType.CUDA:
            spent[kind_of(event.name)] += (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
    for kind in (*_KINDS, _OTHER):
        yield Row(what=f"{name}: {kind}", value=spent[kind], unit="s", note=f"of {took_s:.3g} s, with the profiler")
    if on_gpu:
        idle_s = max(0.0, took_s - spent.total())  # two streams at once count twice
        yield Row(what=f"{name}: no kernel ran", value=idle_s, unit="s")


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, words in _KINDS.items() if any(word in lower for word in words)), _OTHER)
