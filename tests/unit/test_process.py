"""Freed memory that stays with the process, in processes of their own: it cannot be undone. Ports for later."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from streamrl.process import free_port

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


def test_a_port_for_later_is_none_that_the_system_hands_out() -> None:
    handed_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [free_port("127.0.0.1") for _ in range(20)]
    assert all(1024 <= port < handed_out for port in ports)
    assert len(set(ports)) > 10


@pytest.mark.parametrize("lowest", [1024, 1025, 1123])
def test_there_is_a_port_for_later_where_the_system_hands_out_almost_all(tmp_path: Path, lowest: int) -> None:
    handed_out = tmp_path / "range"
    handed_out.write_text(f"{lowest}\t65535\n")
    assert free_port("127.0.0.1", handed_out=handed_out) >= 1024


def test_a_port_that_is_taken_is_no_port_for_later(tmp_path: Path) -> None:
    handed_out = tmp_path / "range"
    handed_out.write_text("1025\t65535\n")  # only 1024 is left
    with ExitStack() as stack:
        with suppress(OSError):  # somebody else has it, which is as good
            stack.enter_context(socket.create_server(("127.0.0.1", 1024)))
        assert free_port("127.0.0.1", handed_out=handed_out) > 1024
