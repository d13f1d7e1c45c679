"""The part of a worker that fetches weights, as a process: fetches the blob of `sharing_world` from Redis and from
peers, reports that, and ends when its stdin does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from streamrl.config import schema
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.weights.redis_store import RedisStore
from streamrl.telemetry.progress import Progress
from streamrl.workers.sharing.opening import open_sharing
from tests.sharing_world import BLOB, RUN_UID, fetched


def main(url: str, name: str, root: str, peers: str) -> None:
    keys = Keys(name)
    with (
        connect(url, schema.Redis()) as client,
        open_sharing(
            RedisStore(client, keys),
            client,
            keys,
            run_uid=RUN_UID,
            share_bytes=1 << 24,
            peers=peers or None,
            progress=Progress(part="worker/0", role="worker"),
            root=Path(root),
        ) as sharing,
    ):
        print("ready", flush=True)
        sys.stdin.readline()
        assert fetched(sharing) == BLOB, "what was fetched is the blob"
        counts = sharing.counts
        print(f"fetched {counts.store} {counts.peers} {counts.host}", flush=True)
        sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
