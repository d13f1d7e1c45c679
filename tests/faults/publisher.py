"""A learner that only publishes made-up weights; it dies where STREAMRL_CRASH_AT says.

python -m tests.faults.publisher REDIS_URL RUN STORE
"""

from __future__ import annotations

import sys

import numpy as np
import redis

from streamrl.config import schema
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.types import Announcement
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.manifest_bytes import encode_manifest
from streamrl.protocol.weights.stores import open_store
from tests.weights_world import RUN_UID, State, World, nudged, random_state

NUM_VERSIONS = 4
ANCHOR_BESIDE = 2  # the version that also gets an anchor


def states(term: int) -> list[State]:
    """Return the states that a term publishes, so that anyone can tell what must be served."""
    rng = np.random.default_rng(term)
    found = [random_state(rng)]
    while len(found) < NUM_VERSIONS:
        found.append(nudged(rng, found[-1]))
    return found


def publish(client: redis.Redis, keys: Keys, store: str, *, term: int) -> None:
    stream = LearnerStream(
        client, keys, run_uid=RUN_UID, term=term, holder=f"learner {term}", lease_s=30.0, give_up_after_s=5.0
    )
    stream.claim(config_json="{}", fingerprint="model", takeover=True, wait_s=5.0)
    world = World(open_store(store, client, keys), num_ranks=2, term=term)
    for n, state in enumerate(states(term)):
        stream.announce(_told(world.publish(state)), keep=list(world.manifests))
        if n == ANCHOR_BESIDE:
            stream.amend(_told(world.lay_anchor()), keep=list(world.manifests))


def _told(m: Manifest) -> Announcement:
    return Announcement(version=m.version, base=m.base, step=m.step, manifest=encode_manifest(m))


if __name__ == "__main__":
    url, run_name, store_url = sys.argv[1:]
    with connect(url, schema.Redis()) as connection:
        publish(connection, Keys(run_name), store_url, term=1)
