"""What a process does with memory that it has freed.

glibc hands large blocks, and the free end of its heap, back to the system at once, and gets them again page by page,
zeroed by the kernel. Forward passes on a CPU free and need the same megabytes at every layer: with a thousand tokens in
a batch of a small model that is a sixth of the time. How much exactly depends on what happens to lie at the end of the
heap, so that each start of a process has a speed of its own.
"""

from __future__ import annotations

import ctypes

# Of <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """From now on what was needed once stays with the process, for the next time. Does nothing without glibc.

    Best called before there are threads: those keep the arenas that they have, and an arena of a thread holds 64 MB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_TRIM_THRESHOLD, -1)  # never
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_ARENA_MAX, 1)
