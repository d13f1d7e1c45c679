"""This machine: its memory, as far as what runs here may take it, and what its cores compute in."""

from __future__ import annotations

from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_HALF = {"avx512_bf16", "amx_bf16", "bf16"}  # as Linux calls products of bfloat16, on x86 and on ARM


def computes_in_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether its cores have products of it. Others convert to fp32 and back, which takes longer than fp32 alone."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return any(_HALF & set(line.split()) for line in lines if line.partition("\t")[0] in ("flags", "Features"))


def available_memory() -> int:
    """Of the machine or of the container, whichever is less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        files = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used -= int(files.get("inactive_file", "0"))  # pages of files, which make room for whoever asks
    except (OSError, ValueError):  # no container, or one without a limit
        return machine
    return min(machine, max(0, limit - used))
