"""This machine's memory, as far as what runs here may take it."""

from __future__ import annotations

from pathlib import Path


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
