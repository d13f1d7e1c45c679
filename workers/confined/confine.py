"""Confines the process of a reward function: enforced by the kernel, without root, for everything it starts as well.

    seccomp    no sockets: neither network nor Redis, by any address; no access to others' memory or open files
    Landlock   no view of other processes, hence not of their environment (/proc/PID/environ); no signals to them

A forbidden call fails with `Machine is not on the network`, an errno that nothing else uses, so that a sample's error
message can name the setting. Unnamed socket pairs stay allowed, because asyncio needs them. Files stay as accessible as
they are to the worker's user. Must be called in a single-threaded process. Never blocks.

`python -m streamrl.workers.confined.confine` prints as JSON what cannot be enforced on this machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

NO_NETWORK = errno.ENONET if sys.platform == "linux" else errno.EPERM

PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
MODE_FILTER = 2
_SET_FILTER, _WITH_LISTENER = 1, 8
# From <linux/seccomp.h> and <linux/filter.h>.
ALLOW, ERRNO, _NOTIFY = 0x7FFF0000, 0x00050000, 0x7FC00000
LOAD, IF_EQUAL, _IF_AT_LEAST, IF_ANY, RETURN, AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_NUMBER_AT, _MACHINE_AT, ARGUMENTS_AT = 0, 4, 16
_INET, _STREAM, _KIND_BITS, _TCP = 2, 1, 0xF, 6
_FAST_OPEN = 0x20000000  # a send that connects
_OTHER_ABI = 0x40000000  # x32 calls have their own numbers
# By machine: the kernel's name for it; socket; ptrace, process_vm_readv and process_vm_writev.
_CALLS = {"x86_64": (0xC000003E, 41, (101, 310, 311)), "aarch64": (0xC00000B7, 198, (117, 270, 271))}
# By machine: connect; seccomp; sendto, sendmsg and sendmmsg, each with the index of its flags argument.
_DOOR_CALLS = {
    "x86_64": (42, 317, {44: 3, 46: 2, 307: 3}),
    "aarch64": (203, 277, {206: 3, 211: 2, 269: 3}),
}
_IO_URING_SETUP, _PIDFD_GETFD = 425, 438  # can open sockets, or take others'; the same on all machines

CREATE_RULESET, RESTRICT_SELF = 444, 446
RULESET_VERSION = 1
_SCOPES_SINCE = 6  # Landlock ABI version
_SCOPES = 1 | 2  # abstract sockets, signals
_MAKE_BLOCK_DEVICE = 1 << 11
_CAPABILITIES_VERSION = 0x20080522
_ABOVE_OTHERS = (19, 21, 38)  # root's capabilities that bypass Landlock: SYS_PTRACE, SYS_ADMIN, PERFMON


def forbid_calls(*, network: bool) -> None:
    """Install the filter; `network` allows sockets. OSError if the kernel cannot."""
    machine = this_machine()
    _, socket, _ = _CALLS[machine]
    closed = () if network else (*_refuse(IF_EQUAL, socket, NO_NETWORK), *_no_io_uring())
    with compiled([*begin(machine), *closed, _allowed()]) as program:
        system_call("prctl", PR_SET_SECCOMP, MODE_FILTER, program, 0, 0)


def admit_by_listener() -> int:
    """Forbid the network, except that the reader of the returned descriptor decides on TCP sockets and on their
    connections: these calls do not run themselves (see `door`)."""
    machine = this_machine()
    connect, seccomp, sends = _DOOR_CALLS[machine]
    _, socket, _ = _CALLS[machine]
    steps = [
        *begin(machine),
        *_no_io_uring(),
        *_ask_for_tcp(socket),
        (IF_EQUAL, 0, 1, connect),
        (RETURN, 0, 0, _NOTIFY),
    ]
    for number, place in sends.items():
        steps += [
            (IF_EQUAL, 0, 4, number),
            (LOAD, 0, 0, ARGUMENTS_AT + 8 * place),
            (IF_ANY, 0, 1, _FAST_OPEN),
            (RETURN, 0, 0, ERRNO | NO_NETWORK),
            _allowed(),
        ]
    with compiled([*steps, _allowed()]) as program:
        return system_call("syscall", seccomp, _SET_FILTER, _WITH_LISTENER, program)


Step = tuple[int, int, int, int]  # a filter instruction: operation, steps to skip if true, if false, operand


def this_machine() -> str:
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in _CALLS:
        raise OSError(errno.ENOSYS, f"there is no seccomp filter for {sys.platform} on {machine}")
    return machine


def begin(machine: str) -> Iterator[Step]:
    """Refuse what is always forbidden; afterwards the call's number is loaded."""
    name, _, of_others = _CALLS[machine]
    yield LOAD, 0, 0, _MACHINE_AT
    yield from _refuse(IF_EQUAL, name, errno.EPERM, unless=True)
    yield LOAD, 0, 0, _NUMBER_AT
    yield from _refuse(_IF_AT_LEAST, _OTHER_ABI, errno.ENOSYS)
    for number in (*of_others, _PIDFD_GETFD):
        yield from _refuse(IF_EQUAL, number, errno.EPERM)


def _no_io_uring() -> Iterator[Step]:
    return _refuse(IF_EQUAL, _IO_URING_SETUP, errno.ENOSYS)


def _ask_for_tcp(socket: int) -> Iterator[Step]:
    """Ask the listener for TCP sockets, and refuse all others."""
    yield IF_EQUAL, 0, 12, socket
    yield LOAD, 0, 0, ARGUMENTS_AT
    yield from _refuse(IF_EQUAL, _INET, NO_NETWORK, unless=True)
    yield LOAD, 0, 0, ARGUMENTS_AT + 8
    yield AND, 0, 0, _KIND_BITS
    yield from _refuse(IF_EQUAL, _STREAM, NO_NETWORK, unless=True)
    yield LOAD, 0, 0, ARGUMENTS_AT + 16
    yield IF_EQUAL, 2, 0, 0
    yield from _refuse(IF_EQUAL, _TCP, NO_NETWORK, unless=True)
    yield RETURN, 0, 0, _NOTIFY


def _refuse(test: int, value: int, reason: int, *, unless: bool = False) -> Iterator[Step]:
    yield (test, 1, 0, value) if unless else (test, 0, 1, value)
    yield RETURN, 0, 0, ERRNO | reason


def _allowed() -> Step:
    return RETURN, 0, 0, ALLOW


@contextlib.contextmanager
def compiled(steps: Sequence[Step]) -> Iterator[int]:
    """Yield the address of the compiled program, with no_new_privs set, which the kernel requires."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    head = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    gain_nothing()
    yield ctypes.addressof(head)


def keep_apart() -> None:
    """Forbid access to other processes; OSError if the kernel cannot. Any Landlock ruleset hides processes outside of
    it. Before scopes existed a ruleset had to restrict files: then files cannot move between folders, either."""
    version = system_call("syscall", CREATE_RULESET, 0, 0, RULESET_VERSION)
    has_scopes = version >= _SCOPES_SINCE
    attributes = struct.pack("QQQ", 0, 0, _SCOPES) if has_scopes else struct.pack("Q", _MAKE_BLOCK_DEVICE)
    rules = ctypes.create_string_buffer(attributes, len(attributes))
    ruleset = system_call("syscall", CREATE_RULESET, ctypes.addressof(rules), len(attributes), 0)
    try:
        gain_nothing()
        system_call("syscall", RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    drop_capabilities(_ABOVE_OTHERS)


def drop_capabilities(numbers: Sequence[int]) -> None:
    head = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITIES_VERSION, 0))
    sets = ctypes.create_string_buffer(24)  # effective, permitted, inheritable; twice, for 64 capabilities
    system_call("capget", ctypes.addressof(head), ctypes.addressof(sets))
    words = list(struct.unpack("6I", sets))
    for number in numbers:
        for place in range(3):
            words[3 * (number // 32) + place] &= ~(1 << number % 32)
    struct.pack_into("6I", sets, 0, *words)
    system_call("capset", ctypes.addressof(head), ctypes.addressof(sets))


def gain_nothing() -> None:
    """Set no_new_privs, which the kernel requires: no program started from here gains privileges."""
    system_call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def system_call(name: str, *words: int) -> int:
    done: int = getattr(ctypes.CDLL(None, use_errno=True), name)(*map(ctypes.c_long, words))
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return done


GUARDS: Mapping[str, Callable[[], None]] = {
    "sockets": lambda: forbid_calls(network=False),
    "other processes": keep_apart,
}


def lacking() -> dict[str, str]:
    """Confine this process; return which guards do not hold, and why."""
    found = {}
    for name, guard in GUARDS.items():
        try:
            guard()
        except OSError as error:
            found[name] = error.strerror or str(error)
    return found


if __name__ == "__main__":
    print(json.dumps(lacking()))
