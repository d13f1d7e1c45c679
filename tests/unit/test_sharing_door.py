"""Pieces for other hosts: their server, and what is known of peers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import pytest

from streamrl.errors import ResourceError
from streamrl.process import address_of, bind
from streamrl.protocol.transport.peers import HAVE, bitmap_of
from streamrl.workers.sharing.door import open_door
from streamrl.workers.sharing.host import HostShare, open_share
from streamrl.workers.sharing.neighbours import MAX_IDLE, Neighbour, Neighbours
from tests.sharing_world import RECORD, ill_peer


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HostShare]:
    with open_share("run", 1 << 20, root=tmp_path) as share:
        assert share is not None
        yield share


def test_who_cannot_listen_says_so_at_once(host: HostShare) -> None:
    """Two may be bound to one port as long as neither listens."""
    with socket.socket() as listens:
        listens.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listens.bind(("127.0.0.1", 0))
        bound = bind(*listens.getsockname(), what="--peers")
        listens.listen()
        with (
            pytest.raises(ResourceError, match=r"cannot listen at 127\.0\.0\.1:\d+: Address already in use"),
            open_door(host, bound, run_uid="run"),
        ):
            pass


def test_it_serves_until_the_end(host: HostShare) -> None:
    bound = bind("127.0.0.1", 0, what="--peers")
    url = f"http://{address_of(bound)}/pieces/{RECORD.digest.hex()}"
    with open_door(host, bound, run_uid="run"):
        assert httpx.get(url).status_code == 403
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_a_late_answer_about_a_complete_blob_is_not_remembered() -> None:
    forgotten = threading.Event()
    bitmap = bitmap_of([0], RECORD.num_pieces)

    def answer(client: socket.socket) -> None:
        forgotten.wait(60)
        client.sendall(f"HTTP/1.1 404 Not Found\r\n{HAVE}: {bitmap.hex()}\r\ncontent-length: 0\r\n\r\n".encode())

    with ill_peer(answer) as peer:
        neighbours = Neighbours(run_uid="run", own="127.0.0.2:1")
        neighbours.update(RECORD, {peer.address: bitmap})
        chosen = neighbours.choose(RECORD, [0])
        assert chosen is not None
        piece, neighbour = chosen
        asking = threading.Thread(target=neighbours.ask, args=(neighbour, RECORD, piece))
        asking.start()
        neighbours.forget(RECORD)
        forgotten.set()
        asking.join()
        assert neighbour.rest_s < 1, "it answered in order"
        assert neighbour.have == {}
        neighbours.close()


def test_of_many_peers_that_were_asked_the_connections_to_the_last_ones_are_kept() -> None:
    """Hosts come and go for weeks, and a worker that stays may have few files open."""

    def answer(client: socket.socket) -> None:
        client.sendall(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")

    asked: list[Neighbour] = []
    with ExitStack() as stack, closing(Neighbours(run_uid="run", own="127.0.0.2:1")) as neighbours:
        for _ in range(MAX_IDLE + 9):
            peer = stack.enter_context(ill_peer(answer))
            neighbours.update(RECORD, {peer.address: bitmap_of([0], RECORD.num_pieces)})
            chosen = neighbours.choose(RECORD, [0])
            assert chosen is not None
            assert neighbours.ask(chosen[1], RECORD, 0) is None
            neighbours.forget(RECORD)
            asked.append(chosen[1])
        assert [one.address for one in asked if one.connection is not None] == [
            one.address for one in asked[-MAX_IDLE - 1 :]
        ]
