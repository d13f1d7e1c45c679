"""Freed memory that stays with the process, in processes of their own: it cannot be undone."""

from __future__ import annotations

import subprocess
import sys

# 40 MB is more than glibc keeps by itself, of any age.
_AGAIN_AND_AGAIN = """
import ctypes, resource
from streamrl.process import keep_freed_memory
if {keep}:
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    place = ctypes.c_void_p(libc.malloc(40 << 20))
    ctypes.memset(place, 1, 40 << 20)
    libc.free(place)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def num_faults(*, keep: bool) -> int:
    """Pages that the system had to give for the third time."""
    script = _AGAIN_AND_AGAIN.format(keep=keep)
    return int(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=240).stdout)


def test_memory_that_was_freed_is_there_when_it_is_needed_again() -> None:
    assert num_faults(keep=True) < 10 < 1000 < num_faults(keep=False)
