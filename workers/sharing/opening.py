"""Assembles what a worker shares with others: the host's folder, the server for peers, and the peers.

Sharing within a host is automatic. Sharing between hosts needs `--peers HOST:PORT`, the address at which other hosts
reach this one; a worker without it neither asks peers nor answers them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import redis
import structlog

from streamrl.errors import ConfigError
from streamrl.process import bind, parse_address
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.peers import Peers
from streamrl.protocol.weights.stores import BlobStore
from streamrl.telemetry.progress import Progress
from streamrl.workers.sharing.host import open_share
from streamrl.workers.sharing.neighbours import Neighbours
from streamrl.workers.sharing.reading import Counts, Sharing
from streamrl.workers.sharing.swarm import Swarm

log = structlog.get_logger(__name__)


@contextmanager
def open_sharing(
    store: BlobStore,
    client: redis.Redis,
    keys: Keys,
    *,
    run_uid: str,
    share_bytes: int,
    peers: str | None,  # HOST:PORT; None: no sharing between hosts
    progress: Progress,
    root: Path | None = None,  # the folder that this host's workers share, if not in shared memory
) -> Iterator[Sharing]:
    def note(counts: Counts) -> None:
        progress.note(weights_from_store=counts.store, weights_from_peers=counts.peers, weights_from_host=counts.host)

    with ExitStack() as stack:
        host = stack.enter_context(open_share(run_uid, share_bytes, root=root))
        if peers is None:
            yield Sharing(store, host, on_blob=note)
            return
        if host is None:
            raise ConfigError(
                "--peers: nothing is shared, since the run has weights.share_bytes = 0; raise it, or leave out --peers"
            )
        from streamrl.workers.sharing.door import open_door  # lazy: imports starlette and uvicorn

        door = stack.enter_context(open_door(host, bind(*peers_address(peers), what="--peers"), run_uid=run_uid))
        progress.note(peers=door.address)
        log.info("answering_peers", address=door.address)

        def on_lie(address: str) -> None:
            log.error("peer_lied", peer=address)
            progress.note(peer_lied=address)

        neighbours = Neighbours(run_uid=run_uid, own=door.address, on_lie=on_lie)
        stack.callback(neighbours.close)
        registry = Peers(client, keys, run_uid=run_uid, address=door.address)
        yield Sharing(store, host, Swarm(registry, door, neighbours), on_blob=note)


def peers_address(text: str) -> tuple[str, int]:
    """Parse the address, which is announced to peers unchanged."""
    host, port = parse_address(text, what="--peers")
    try:
        is_numeric = not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_numeric = False
    if not is_numeric:
        raise ConfigError(f"--peers {text!r}: must be the numeric address at which other hosts reach this one")
    return host, port
