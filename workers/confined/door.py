"""The only connection out of a process without network: to its worker's own endpoint, enforced by the kernel.

    in the child   socket(TCP) ──► the kernel asks the worker ──► a socket that is connected to the endpoint already
                   connect(...) ──► the kernel asks the worker ──► "done" for the endpoint's address, else `NO_NETWORK`

Neither call ever runs in the child, so no address of its choice reaches the network: all its connections are made by
the worker. This holds for everything it starts, too, in any language. Other calls are restricted as in `confine`. As
long as the worker has no endpoint, no connection is possible.

Needs seccomp notifications (Linux 5.14). Never blocks: the worker answers from its event loop.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import os
import select
import socket
import struct

from streamrl.workers.confined.confine import NO_NETWORK, admit_by_listener

# From <linux/seccomp.h>.
_RECEIVE, _SEND, _ADD_FD = 0xC0502100, 0xC0182101, 0x40182103
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_RESPONSE, _ADDITION = struct.Struct("=QqiI"), struct.Struct("=QIIII")
_AND_SEND = 2
_INET = struct.Struct("!2xH4s")
_FAMILY = struct.Struct("=H")
_SOCKET_CALLS = (41, 198)  # on x86-64, on ARM; the other call that notifies is `connect`


def shut_in(door: int) -> None:
    """Confine the child, before any user code runs. `door` is its end of the pair. OSError if the kernel cannot."""
    listener = admit_by_listener()
    try:
        with socket.socket(fileno=os.dup(door)) as ours:
            ours.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listener]))])
    finally:
        os.close(listener)


class Door:
    """The worker's side, for one child. `address` is the endpoint's, once there is one."""

    def __init__(self, address: tuple[str, int] | None = None) -> None:
        self.address = address
        self._ours, self.theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._listener: int | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ours, self._take)

    def close(self) -> None:
        """Close the door; further calls of the child fail as unsupported."""
        if self._ours.fileno() >= 0:
            self._loop.remove_reader(self._ours)
            self._ours.close()
        self.theirs.close()
        self._forget()

    def _take(self) -> None:
        """Receive the child's listener, or notice that it has ended."""
        self._loop.remove_reader(self._ours)
        _, attached, _, _ = self._ours.recvmsg(1, socket.CMSG_SPACE(4))
        for _, kind, data in attached:
            if kind == socket.SCM_RIGHTS:
                self._listener = struct.unpack("=i", data[:4])[0]
                os.set_blocking(self._listener, False)
                self._loop.add_reader(self._listener, self._answer)

    def _forget(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            os.close(self._listener)
            self._listener = None

    def _answer(self) -> None:
        assert self._listener is not None, "the listener is read only while it is open"
        if not _is_pending(self._listener):
            self._forget()  # all processes that could ask have ended
            return
        buffer = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(self._listener, _RECEIVE, buffer)
        except OSError:  # the asking process was killed meanwhile
            return
        notification_id, pid, _, number, _, _, *arguments = _NOTIFICATION.unpack(buffer)
        with contextlib.suppress(OSError):  # the asking process was killed meanwhile
            if number in _SOCKET_CALLS:
                try:
                    self._give_socket(notification_id, kind=arguments[1])
                except OSError as error:  # out of file descriptors, here or there
                    self._respond(notification_id, error.errno or NO_NETWORK)
            else:
                is_allowed = self.address is not None and _requested_address(pid, *arguments[1:3]) in (
                    None,
                    self.address,
                )
                self._respond(notification_id, 0 if is_allowed else NO_NETWORK)

    def _give_socket(self, notification_id: int, *, kind: int) -> None:
        assert self._listener is not None, "a notification comes from an open listener"
        if self.address is None:
            self._respond(notification_id, NO_NETWORK)
            return
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as connected:
            connected.setblocking(False)
            connected.connect_ex(self.address)  # it listens on this machine, so there is nothing to wait for
            connected.setblocking(not kind & socket.SOCK_NONBLOCK)
            close_on_exec = os.O_CLOEXEC if kind & socket.SOCK_CLOEXEC else 0
            fcntl.ioctl(
                self._listener,
                _ADD_FD,
                _ADDITION.pack(notification_id, _AND_SEND, connected.fileno(), 0, close_on_exec),
            )

    def _respond(self, notification_id: int, refusal: int) -> None:
        assert self._listener is not None, "a notification comes from an open listener"
        fcntl.ioctl(self._listener, _SEND, _RESPONSE.pack(notification_id, 0, -refusal, 0))


def _is_pending(listener: int) -> bool:
    """Return whether a notification is pending; receiving without one would block."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    return any(event & select.POLLIN for _, event in poll.poll(0))


def _requested_address(pid: int, pointer: int, num_bytes: int) -> tuple[str, int] | None:
    """Read the address from the asker's memory. It may change there at any time, so it serves only for an accurate
    answer, not for security. None: unreadable."""
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(pointer)
            name = memory.read(min(num_bytes, _INET.size))
    except (OSError, ValueError, OverflowError):
        return None
    if len(name) < _INET.size or _FAMILY.unpack_from(name)[0] != socket.AF_INET:
        return "", 0
    port, host = _INET.unpack(name)
    return socket.inet_ntoa(host), port
