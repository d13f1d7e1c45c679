"""Facts about this machine: available memory, and what its cores compute in."""

from __future__ import annotations

from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_HALF = {"avx512_bf16", "amx_bf16", "bf16"}  # Linux's names of bfloat16 multiplication on x86 and ARM


def computes_in_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """Return whether the cores multiply bfloat16 natively. Others convert to fp32 and back, slower than fp32 itself."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return any(_HALF & set(line.split()) for line in lines if line.partition("\t")[0] in ("flags", "Features"))


def available_memory() -> int:
    """Return the available memory of the machine or of the container, whichever is less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        files = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used -= int(files.get("inactive_file", "0"))  # page cache, which the kernel reclaims on demand
    except (OSError, ValueError):  # no container, or one without a limit
        return machine
    return min(machine, max(0, limit - used))
