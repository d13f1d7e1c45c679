"""What a run leaves behind: processes, descriptors and threads of its starter, names in /dev/shm, keys."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Self

import redis

from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.wire.ticket import Purpose
from tests.faults.random_outcome import Leaks

_SETTLED_WITHIN_S = 5.0
_PAUSE_S = 0.05
_PURPOSES: tuple[Purpose, ...] = ("train", "eval")
_NAMES_OF_SHARED_MEMORY = ("psm_", "sem.", "torch_", "streamrl-mirror-")
_SHARED_MEMORY = Path("/dev/shm")
# With inode numbers: glibc maps a semaphore under a temporary name before it gets its own.
_IN_SHARED_MEMORY = re.compile(rf" (\d+) +{_SHARED_MEMORY}/([^/\s]+)")
_LEVELS = range(1, 10)  # of thinned metrics; more than exist


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Resources of this process and its descendants, and shared memory; taken while nothing of the run exists."""

    processes: frozenset[int]
    num_descriptors: int
    num_threads: int
    shared_memory: frozenset[int]  # inodes

    @classmethod
    def now(cls) -> Self:
        ensure_running()  # the server that forks parts, and its tracker, outlive the run
        resource_tracker.ensure_running()
        gc.collect()  # unreferenced process objects hold descriptors until then
        return cls(
            processes=frozenset(_descendants(os.getpid())),
            num_descriptors=len(os.listdir("/proc/self/fd")),
            num_threads=threading.active_count(),
            shared_memory=frozenset(_shared_memory()),
        )

    def leaks_since(self, strangers: Collection[int], *, num_keys: int, num_descriptors_of_parts: int) -> Leaks:
        """Return the leaks once ending processes have ended or timed out. `strangers`: inodes used by other
        processes."""
        deadline = time.monotonic() + _SETTLED_WITHIN_S
        while True:
            now = self.now()
            grown = Leaks(
                processes=len(now.processes - self.processes),
                descriptors=max(0, now.num_descriptors - self.num_descriptors),
                threads=max(0, now.num_threads - self.num_threads),
                keys=0,
                shared_memory=len(now.shared_memory - self.shared_memory - shared_by_others() - set(strangers)),
            )
            if not grown.num_found or time.monotonic() > deadline:
                return replace(grown, keys=num_keys, descriptors=grown.descriptors + num_descriptors_of_parts)
            threading.Event().wait(_PAUSE_S)


def unknown_keys(client: redis.Redis, keys: Keys) -> list[bytes]:
    """Return keys that are not the run's, and those of the run that `Keys` does not name and that never expire."""
    known = set(vars(keys).values())
    known |= {key for purpose in _PURPOSES for key in (keys.tickets(purpose), keys.groups(purpose))}
    known |= {keys.thinned(level) for level in _LEVELS}
    found = [key for key in client.scan_iter(count=1000) if key.decode() not in known]
    return [key for key in found if not key.startswith(keys.prefix.encode()) or client.ttl(key) == -1]


def _shared_memory() -> set[int]:
    """Return what Python, torch and our own parts create there."""
    with os.scandir(_SHARED_MEMORY) as entries:
        return {entry.inode() for entry in entries if entry.name.startswith(_NAMES_OF_SHARED_MEMORY)}


def shared_by_others() -> set[int]:
    """Return inodes used by other processes, such as other tests. Killed ones leave theirs behind: call it
    repeatedly."""
    ours, found = {os.getpid(), *_descendants(os.getpid())}, set[int]()
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) not in ours:
            with suppress(OSError):  # it has ended, or belongs to another user
                found |= _shared_by(process)
    return found


def _shared_by(process: Path) -> set[int]:
    """Return the inodes that it maps or has open, and those of the folders that contain them."""
    mapped = _IN_SHARED_MEMORY.findall((process / "maps").read_text())
    found, names = {int(inode) for inode, _ in mapped}, {name for _, name in mapped}
    for link in (process / "fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            path = link.readlink()
            if path.is_relative_to(_SHARED_MEMORY):
                found.add(link.stat().st_ino)
                names |= set(path.relative_to(_SHARED_MEMORY).parts[:1])
    for name in names:
        with suppress(OSError):  # renamed or removed meanwhile
            found.add((_SHARED_MEMORY / name).stat().st_ino)
    return found


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            children = [int(word) for word in (task / "children").read_text().split()]
        except FileNotFoundError:
            continue  # the thread has just ended
        found += [one for child in children for one in (child, *_descendants_of_living(child))]
    return found


def _descendants_of_living(pid: int) -> list[int]:
    try:
        return _descendants(pid)
    except FileNotFoundError:
        return []
