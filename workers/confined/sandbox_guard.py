"""What a generated program may do, enforced by the kernel, without root and against root: compute, read its input,
print.

    one process   no fork, no other program; only threads, so that all limits are exact, and one kill ends it
    memory        RLIMIT_AS: of addresses, shared ones too, threads' stacks among them
    files         Landlock: it reads Python and its libraries; it writes none, nowhere, nor in memory (memfd)
    all else      seccomp: calls not listed below are refused: sockets, signals to others, other priorities

Root is bound as well: capabilities are dropped first, and cannot be regained. Must be called in a cell, which is
single-threaded. Never blocks.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterator

from streamrl.workers.confined.confine import (
    ALLOW,
    AND,
    ARGUMENTS_AT,
    CREATE_RULESET,
    ERRNO,
    IF_ANY,
    IF_EQUAL,
    LOAD,
    MODE_FILTER,
    PR_SET_SECCOMP,
    RESTRICT_SELF,
    RETURN,
    RULESET_VERSION,
    Step,
    begin,
    compiled,
    drop_capabilities,
    gain_nothing,
    system_call,
    this_machine,
)

_MAX_FILES = 64
_READABLE = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")

# From <linux/landlock.h>.
_ADD_RULE, _BELOW = 445, 1
_WRITE_FILE, _READ_FILE, _READ_FOLDER = 1 << 1, 1 << 2, 1 << 3
_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}  # on files, by the ABI version that added them

_CLONE_THREAD = 0x10000
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)  # about files only: none that makes the kernel send signals
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # isatty, bytes waiting, non-blocking mode
# By name: the number on x86-64, on ARM; None: it does not exist there.
_FREELY: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "preadv": (295, 69),
    "lseek": (8, 62),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "stat": (4, None),
    "lstat": (6, None),
    "statx": (332, 291),
    "statfs": (137, 43),
    "fstatfs": (138, 44),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getdents": (78, None),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "select": (23, None),
    "pselect6": (270, 72),
    "poll": (7, None),
    "ppoll": (271, 73),
    "epoll_create": (213, None),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "eventfd2": (290, 19),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "mincore": (27, 232),
    "brk": (12, 214),
    "membarrier": (324, 283),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "times": (100, 153),
    "setitimer": (38, 103),
    "getitimer": (36, 102),
    "alarm": (37, None),
    "pause": (34, None),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getppid": (110, 173),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getgroups": (115, 158),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "getpriority": (140, 141),
    "getcpu": (309, 168),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "getrandom": (318, 278),
    "futex": (202, 98),
    "set_robust_list": (273, 99),
    "get_robust_list": (274, 100),
    "set_tid_address": (218, 96),
    "rseq": (334, 293),
    "arch_prctl": (158, None),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "exit": (60, 93),
    "exit_group": (231, 94),
    # asyncio's event loop needs a socket pair, which leads nowhere.
    "socketpair": (53, 199),
    "recvfrom": (45, 207),
    "shutdown": (48, 210),
    "getsockopt": (55, 209),
    "getsockname": (51, 204),
}
# Allowed depending on their arguments, or refused with an errno of their own.
_CLONE, _CLONE3 = (56, 220), (435, 435)
_PRLIMIT, _SENDTO = (302, 261), (44, 206)
_FCNTL, _IOCTL = (72, 25), (16, 29)
_OPENS = {(2, None): 1, (257, 56): 2}  # open and openat: which argument holds the flags; openat2 hides them: refused
_SIGNALS = {(62, 129): 1, (234, 131): 2}  # kill and tgkill: which argument is the signal
_MACHINES = ("x86_64", "aarch64")


def seal(*, memory_bytes: int, cpu_s: int) -> None:
    """Turn this process into a cell. OSError if the kernel cannot."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_FILES, _MAX_FILES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gain_nothing()
    _see_only_python()
    drop_capabilities(range(64))
    _refuse_other_calls(os.getpid())


def readable_folders() -> list[str]:
    """Python's own folders with its packages, possibly streamrl among them."""
    below = {os.path.realpath(place) for place in (sys.prefix, sys.base_prefix)}
    return sorted(below)


def _see_only_python() -> None:
    version = system_call("syscall", CREATE_RULESET, 0, 0, RULESET_VERSION)
    handled = sum(rights for since, rights in _RIGHTS.items() if version >= since)
    attributes = ctypes.create_string_buffer(struct.pack("Q", handled), 8)
    ruleset = system_call("syscall", CREATE_RULESET, ctypes.addressof(attributes), 8, 0)
    try:
        for place in (*readable_folders(), *_READABLE):
            _permit(ruleset, place, _READ_FILE | (_READ_FOLDER if os.path.isdir(place) else 0))
        for device in _DEVICES:
            _permit(ruleset, device, _READ_FILE | (_WRITE_FILE if device == "/dev/null" else 0))
        system_call("syscall", RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _permit(ruleset: int, place: str, rights: int) -> None:
    try:
        folder = os.open(place, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # missing, or not accessible to this user
        return
    try:
        attributes = struct.pack("=Qi", rights, folder)
        rule = ctypes.create_string_buffer(attributes, len(attributes))
        system_call("syscall", _ADD_RULE, ruleset, _BELOW, ctypes.addressof(rule), 0)
    finally:
        os.close(folder)


def _refuse_other_calls(pid: int) -> None:
    machine = this_machine()
    at = _MACHINES.index(machine)
    steps = [*begin(machine)]
    for numbers in _FREELY.values():
        if (number := numbers[at]) is not None:
            steps += [(IF_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    steps += _where(_CLONE[at], 0, [(IF_ANY, 0, 1, _CLONE_THREAD), (RETURN, 0, 0, ALLOW)])
    # ENOSYS makes the C library fall back to clone, whose flags can be inspected.
    steps += [(IF_EQUAL, 0, 1, _CLONE3[at]), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    steps += _where(_PRLIMIT[at], 2, _if_null(2))  # may be read, not set
    steps += _where(_SENDTO[at], 4, _if_null(4))  # only without an address, to the pair's other end
    steps += _where(_FCNTL[at], 1, _if_one_of(_FCNTL_COMMANDS))
    steps += _where(_IOCTL[at], 1, [*_if_one_of(_IOCTLS), (RETURN, 0, 0, ERRNO | errno.ENOTTY)])
    for numbers, place in _OPENS.items():
        if (number := numbers[at]) is not None:
            steps += _where(number, place, _unless_it_only_truncates())
    for numbers, place in _SIGNALS.items():
        steps += _where(numbers[at], 0, _if_its_own(pid, place))
    with compiled([*steps, (RETURN, 0, 0, ERRNO | errno.EPERM)]) as program:
        system_call("prctl", PR_SET_SECCOMP, MODE_FILTER, program, 0, 0)


def _where(number: int, place: int, steps: list[Step]) -> Iterator[Step]:
    """Apply the steps to this call's argument at `place`, lower half; refuse what no step allows."""
    inside = [(LOAD, 0, 0, ARGUMENTS_AT + 8 * place), *steps, (RETURN, 0, 0, ERRNO | errno.EPERM)]
    yield IF_EQUAL, 0, len(inside), number
    yield from inside


def _if_one_of(values: tuple[int, ...]) -> list[Step]:
    return [step for value in values for step in ((IF_EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW))]


def _unless_it_only_truncates() -> list[Step]:
    """Landlock refuses to open files for writing, but before its ABI 3 (Linux 6.2) a file that is not opened for
    writing can still be emptied."""
    in_no_write_mode = [(AND, 0, 0, os.O_ACCMODE), *_if_one_of((os.O_WRONLY, os.O_RDWR))]
    return [(IF_ANY, 1, 0, os.O_TRUNC), (RETURN, 0, 0, ALLOW), *in_no_write_mode]


def _if_its_own(pid: int, place: int) -> list[Step]:
    """Any signal to itself but SIGKILL: that is a sign that others ended it, which excuses it from its score."""
    number = (LOAD, 0, 0, ARGUMENTS_AT + 8 * place)
    return [(IF_EQUAL, 0, 3, pid), number, (IF_EQUAL, 1, 0, signal.SIGKILL), (RETURN, 0, 0, ALLOW)]


def _if_null(place: int) -> list[Step]:
    """Check a pointer: both halves."""
    upper = (LOAD, 0, 0, ARGUMENTS_AT + 8 * place + 4)
    return [(IF_EQUAL, 0, 3, 0), upper, (IF_EQUAL, 0, 1, 0), (RETURN, 0, 0, ALLOW)]
