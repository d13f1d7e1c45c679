"""Facts about this machine: available memory and cores, and what these compute in."""

from __future__ import annotations

import os
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_CGROUP = Path("/sys/fs/cgroup")
_HALF = {"avx512_bf16", "amx_bf16", "bf16"}  # Linux's names of bfloat16 multiplication on x86 and ARM


def computes_in_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """Return whether the cores multiply bfloat16 natively. Others convert to fp32 and back, slower than fp32 itself."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return any(_HALF & set(line.split()) for line in lines if line.partition("\t")[0] in ("flags", "Features"))


def usable_cores(group: Path = _CGROUP) -> int:
    """Return the cores that this process may use: those of its affinity, or as many as the container's limit allows."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = map(int, (group / "cpu.max").read_text().split())
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return cores
    return max(1, min(cores, quota // period))


def available_memory() -> int:
    """Return the available memory of the machine or of the container, whichever is less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        files = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        used -= int(files.get("inactive_file", "0"))  # page cache, which the kernel reclaims on demand
    except (OSError, ValueError):  # no container, or one without a limit
        return machine
    return min(machine, max(0, limit - used))
