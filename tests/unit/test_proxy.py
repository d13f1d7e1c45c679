"""The proxy does to a connection what it says, seen from both ends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    client.connect(proxy.url.removeprefix("unix://"))
    return client


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
