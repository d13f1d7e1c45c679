"""The proxy does to a connection what it says, seen from both ends."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers import wait_until
from tests.proxy import Proxy

_MOMENT_S = 0.05


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    """Before a server that sends everything back."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "echo"))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                one, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=echo, args=(one,), daemon=True).start()

    def echo(one: socket.socket) -> None:
        with one:
            while data := one.recv(100):
                one.sendall(data)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with Proxy(f"unix://{tmp_path / 'echo'}") as proxy:
        yield proxy
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def connect(proxy: Proxy) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(10)
    client.connect(str(path_of(proxy)))
    return client


def path_of(proxy: Proxy) -> Path:
    return Path(proxy.url.removeprefix("unix://"))


def test_what_is_sent_comes_through_and_back(proxy: Proxy) -> None:
    with connect(proxy) as client:
        client.sendall(b"ping")
        assert client.recv(100) == b"ping"


def test_the_reply_to_a_named_request_is_lost_and_only_that(proxy: Proxy) -> None:
    proxy.drop_reply_to(b"XADD")
    with connect(proxy) as client:
        client.sendall(b"PING")
        assert client.recv(100) == b"PING"
        client.sendall(b"XADD")
        assert client.recv(100) == b"", "the connection broke"
    assert proxy.num_dropped == 1


def test_all_replies_are_lost_at_a_loss_of_one(proxy: Proxy) -> None:
    proxy.loss = 1.0
    with connect(proxy) as client:
        client.sendall(b"ping")
        assert client.recv(100) == b""


def test_both_ways_take_the_delay_longer(proxy: Proxy) -> None:
    proxy.delay_s = _MOMENT_S
    with connect(proxy) as client:
        began = time.monotonic()
        client.sendall(b"ping")
        assert client.recv(100) == b"ping"
    assert time.monotonic() - began >= 2 * _MOMENT_S


def test_in_a_blackhole_nothing_moves_and_nothing_breaks(proxy: Proxy) -> None:
    with connect(proxy) as client:
        with proxy.blackhole():
            client.sendall(b"ping")
            client.settimeout(_MOMENT_S)
            with pytest.raises(TimeoutError):
                client.recv(100)
        client.settimeout(10)
        assert client.recv(100) == b"ping"


@pytest.fixture
def mute(tmp_path: Path) -> Iterator[socket.socket]:
    """A server that has room for one connection and accepts none, unless the test does."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(10)
        listener.bind(str(tmp_path / "mute"))
        listener.listen(0)
        yield listener


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_client_of_a_server_that_is_not_there_sees_its_connection_end(tmp_path: Path) -> None:
    """And no socket is left to the collector, which would warn, and a warning fails the test."""
    with Proxy(f"unix://{tmp_path / 'nobody'}") as proxy:
        for _ in range(2):
            with connect(proxy) as client:
                assert client.recv(100) == b""
        assert proxy.num_connections == 0


def test_a_proxy_that_has_ended_has_nothing_open_and_no_thread(mute: socket.socket) -> None:
    before = num_descriptors()
    with Proxy(f"unix://{mute.getsockname()}") as proxy:
        client = connect(proxy)
        wait_until(lambda: proxy.num_connections, description="the client is connected")
    assert num_descriptors() == before + 1, "the client's own"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("proxy")]
    client.close()


def test_a_client_that_came_while_the_proxy_ended_sees_its_connection_end(mute: socket.socket) -> None:
    """The server keeps the proxy waiting for so long."""
    with ExitStack() as life, socket.socket(socket.AF_UNIX) as first:
        first.connect(mute.getsockname())
        proxy = life.enter_context(Proxy(f"unix://{mute.getsockname()}"))
        before = num_descriptors()
        with connect(proxy) as client:
            wait_until(lambda: num_descriptors() == before + 3, description="the proxy is connecting to the server")
            end = threading.Thread(target=life.close)
            end.start()
            wait_until(lambda: not path_of(proxy).exists(), description="the proxy is ending")
            mute.accept()[0].close()
            with mute.accept()[0]:
                assert client.recv(100) == b""
        end.join(10)
