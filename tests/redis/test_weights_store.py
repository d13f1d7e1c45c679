"""Blobs in a real Redis."""

from __future__ import annotations

import numpy as np
import pytest
import redis

from streamrl.errors import TransportError, WeightsError
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.redis_store import RedisStore
from streamrl.protocol.weights.stores import open_store
from tests.store_cases import check_names, check_store
from tests.weights_world import World, assert_holds, nudged, random_state

NAME = "u/000001/0-0-aa"
TEN = bytes(range(10))


@pytest.fixture
def store(client: redis.Redis, keys: Keys) -> RedisStore:
    return RedisStore(client, keys, chunk_bytes=4)


def test_blobs_come_back_are_never_overwritten_and_go(client, keys):
    check_store(open_store("redis:", client, keys))
    check_store(RedisStore(client, Keys(f"{keys.name}-small"), chunk_bytes=1000))


def test_names_that_lead_elsewhere_are_refused(store):
    check_names(store)


def test_a_blob_lies_in_chunks_and_leaves_no_key_behind(client, keys, store):
    store.put(NAME, TEN)
    assert [client.get(keys.blob(NAME, chunk)) for chunk in range(4)] == [TEN[:4], TEN[4:8], TEN[8:], None]

    store.delete(NAME)
    assert list(client.scan_iter()) == []


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_blob_with_a_lost_or_cut_chunk_is_not_whole(client, keys, store, chunk):
    store.put(NAME, TEN)
    client.setrange(keys.blob(NAME, chunk), 4, b"more")
    with pytest.raises(WeightsError, match="is not whole in Redis"):
        store.get(NAME)
    client.delete(keys.blob(NAME, chunk))
    with pytest.raises(WeightsError, match="is not whole in Redis"):
        store.get(NAME)


class DyingClient(redis.Redis):
    """Its process dies after so many stored chunks."""

    chunks_left = 2

    def set(self, *args, **kwargs):
        if self.chunks_left == 0:
            raise KeyboardInterrupt
        self.chunks_left -= 1
        return super().set(*args, **kwargs)


def test_what_a_crash_left_half_written_is_listed_collected_or_completed(redis_url, client, keys, store):
    with DyingClient.from_url(redis_url) as dying, pytest.raises(KeyboardInterrupt):
        RedisStore(dying, keys, chunk_bytes=4).put(NAME, TEN)
    with pytest.raises(WeightsError, match="or incomplete"):
        store.get(NAME)
    assert list(store.list()) == [NAME]

    RedisStore(client, keys, chunk_bytes=3).put(NAME, TEN)
    assert store.get(NAME) == TEN

    store.delete(NAME)
    with DyingClient.from_url(redis_url) as dying, pytest.raises(KeyboardInterrupt):
        RedisStore(dying, keys, chunk_bytes=4).put(NAME, TEN)
    store.delete(NAME)
    assert list(client.scan_iter()) == []


def test_an_index_of_another_program_is_one_error(client, keys, store):
    client.hset(keys.blobs, NAME, b"strange")

    with pytest.raises(WeightsError, match="the index of blob u/000001/0-0-aa cannot be read"):
        store.get(NAME)


def test_a_refused_write_is_an_error_with_the_servers_name(client, keys, store):
    client.set(keys.blobs, "not a hash")

    with pytest.raises(TransportError, match="could not read a blob: WRONGTYPE"):
        store.put(NAME, TEN)


def test_a_mirror_follows_through_redis(tmp_path, store):
    rng = np.random.default_rng(0)
    state = random_state(rng)
    world = World(store, num_ranks=2)
    mirror = Mirror(tmp_path)
    for _ in range(3):
        mirror.apply(world.publish(state), store)
        assert_holds(mirror.path, state)
        state = nudged(rng, state)
