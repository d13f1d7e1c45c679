"""One version of the weights to 64 workers on 8 hosts: bytes that leave Redis, and how late the workers have it.

    [one worker, from the store] ─► [64 workers, 8 hosts] ─► [one] ─► ...       a new version each time

Workers are processes with all of a worker that fetches (the stream that wakes them, paths to a version, sharing within
a host, peers), but without engine and mirror, whose cost is the same as for a single worker. A host is a loopback
address, a folder in shared memory, and a link each way; Redis has one too. All links are equally fast (`links`), and
slow enough for two cores to carry the traffic. Lateness counts from the announcement to the last blob that matches its
digest; bytes are those that Redis counts itself, of any kind.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import redis

from bench.links import Link, Network, free_socket
from bench.measure import Say
from bench.report import Bar, Fact, Line
from streamrl.config import schema
from streamrl.held_folders import scratch_folder
from streamrl.protocol.transport.connection import connect, connect_async
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.peers import Peers
from streamrl.protocol.transport.types import START, Announcement
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.protocol.weights.catchup import catch_up
from streamrl.protocol.weights.encoder import ShardEncoder
from streamrl.protocol.weights.fetching import fetch_ahead
from streamrl.protocol.weights.format import HeldRange, TensorMeta
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.manifest_bytes import decode_manifest, encode_manifest
from streamrl.protocol.weights.redis_store import RedisStore
from streamrl.versions import make_version
from streamrl.workers.sharing.door import open_door
from streamrl.workers.sharing.host import open_share
from streamrl.workers.sharing.neighbours import Neighbours
from streamrl.workers.sharing.reading import Sharing
from streamrl.workers.sharing.swarm import Swarm

_RUN, _RUN_UID = "fanout", "bench"
_NUM_HOSTS, _PER_HOST = 8, 8
_SHARE_BYTES = 1 << 30
_WITHIN_S = 120.0
_TENSORS = 8

_CONTEXT = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    num_bytes: int  # per version
    bytes_per_s: float  # per link


def bench(*, quick: bool, say: Say) -> list[Line]:
    _CONTEXT.set_forkserver_preload(["bench.fanout"])
    size = Size(num_bytes=12 << 20, bytes_per_s=6e6) if quick else Size(num_bytes=24 << 20, bytes_per_s=6e6)
    with scratch_folder(in_memory=True) as folder, ExitStack() as stack:
        server = stack.enter_context(EmbeddedRedis.start(folder / "redis"))
        client = stack.enter_context(connect(server.url, schema.Redis()))
        learner = _Learner(client, size.num_bytes)
        network = Network(bytes_per_s=size.bytes_per_s)
        stack.enter_context(network.running())
        say(f"{_NUM_HOSTS * _PER_HOST} workers on {_NUM_HOSTS} hosts")
        socket_path = server.url.removeprefix("unix://")
        fleet = stack.enter_context(_fleet(folder, network, socket_path))
        rounds = [_round(learner, fleet, number, say) for number in range(2 if quick else 6)]
    return _lines(rounds, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    blob_bytes: int
    alone_s: float
    late_s: Sequence[float]  # per worker of the fleet
    redis_bytes: int
    store_bytes: int  # part of them that is blobs
    peer_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Came:
    """A worker's report on a version."""

    at: float  # on a clock shared by all processes
    store: int
    peers: int


def _round(learner: _Learner, fleet: Sequence[Connection], number: int, say: Say) -> _Round:
    [alone], _, began, _ = _version(learner, fleet[number * _PER_HOST % len(fleet) :][:1], shared=False)
    alone_s = alone.at - began
    came, redis_bytes, began, blob_bytes = _version(learner, fleet, shared=True)
    late_s = sorted(one.at - began for one in came)
    say(
        f"alone {alone_s:.2f} s; {len(came)} workers: median {median(late_s):.2f} s, last {late_s[-1]:.2f} s, "
        f"{redis_bytes / blob_bytes:.2f} x the blob out of Redis"
    )
    return _Round(
        blob_bytes=blob_bytes,
        alone_s=alone_s,
        late_s=late_s,
        redis_bytes=redis_bytes,
        store_bytes=sum(one.store for one in came),
        peer_bytes=sum(one.peers for one in came),
    )


def _version(learner: _Learner, workers: Sequence[Connection], *, shared: bool) -> tuple[list[Came], int, float, int]:
    """Publish a new version to these workers."""
    version, manifest = learner.store()
    for worker in workers:
        worker.send((version, shared))
    for worker in workers:
        assert worker.recv() == "listens"
    before, began = learner.sent_bytes(), time.monotonic()
    learner.announce(manifest)
    came: list[Came] = [_answer(worker) for worker in workers]
    return came, learner.sent_bytes() - before, began, manifest.num_bytes


def _answer(worker: Connection) -> Came:
    assert worker.poll(_WITHIN_S), f"a worker did not get its version within {_WITHIN_S:g} s"
    came: Came = worker.recv()
    return came


class _Learner:
    def __init__(self, client: redis.Redis, num_bytes: int) -> None:
        self._client, self._keys = client, Keys(_RUN)
        self._store = RedisStore(client, self._keys)
        self._stream = LearnerStream(client, self._keys, run_uid=_RUN_UID, term=1, holder="bench", lease_s=600.0)
        self._stream.claim(config_json="{}", fingerprint="bench", wait_s=0.0)
        self._stream.restore(cursor=START)
        elements = num_bytes // 2 // _TENSORS
        self._tensors = tuple(TensorMeta(name=f"t{n}", dtype="bfloat16", shape=(elements,)) for n in range(_TENSORS))
        self._random, self._num = np.random.default_rng(0), 0
        self._stored: list[str] = []

    def store(self) -> tuple[int, Manifest]:
        """Store a new version with all bits changed, and delete the previous one."""
        for name in self._stored:
            self._store.delete(name)
        held = [
            HeldRange(tensor=t.name, start=0, bits=self._random.integers(0, 1 << 16, t.num_elements, np.uint16))
            for t in self._tensors
        ]
        self._num += 1
        version, shard = make_version(1, self._num), ShardEncoder().encode(held, anchor=True)
        record = shard.record(run_uid=_RUN_UID, version=version, rank=0)
        self._store.put(record.blob_name, shard.blob)
        self._stored = [record.blob_name]
        return version, Manifest(
            version=version, base=0, step=self._num, run_uid=_RUN_UID, tensors=self._tensors, shards=(record,)
        )

    def announce(self, manifest: Manifest) -> None:
        encoded = encode_manifest(manifest)
        announcement = Announcement(version=manifest.version, base=0, step=manifest.step, manifest=encoded)
        self._stream.announce(announcement, keep=[manifest.version])

    def sent_bytes(self) -> int:
        return int(self._client.info("stats")["total_net_output_bytes"])


@contextmanager
def _fleet(folder: Path, network: Network, redis_socket: str) -> Iterator[list[Connection]]:
    """Yield a pipe to each worker, grouped by host."""
    redis_link = Link(network.bytes_per_s)
    processes, pipes = [], []
    try:
        for number in range(2, 2 + _NUM_HOSTS):
            host, root = f"127.0.0.{number}", folder / f"host-{number}"
            root.mkdir()
            url = f"redis://127.0.0.1:{network.add('127.0.0.1', redis_socket, redis_link)}"
            link = Link(network.bytes_per_s)
            for _ in range(_PER_HOST):
                ours, theirs = _CONTEXT.Pipe()
                process = _CONTEXT.Process(target=work, args=(theirs, url, host, root), daemon=True)
                process.start()
                processes.append(process)
                door: tuple[str, int] = ours.recv()
                ours.send(f"{host}:{network.add(host, door, link)}")
                pipes.append(ours)
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()


def work(pipe: Connection, url: str, host: str, root: Path) -> None:
    """Run a worker until its process is ended."""
    keys, settings = Keys(_RUN), schema.Redis()
    bound = free_socket(host)
    pipe.send(bound.getsockname())
    address: str = pipe.recv()
    with ExitStack() as stack:
        client = stack.enter_context(connect(url, settings))
        share = stack.enter_context(open_share(_RUN_UID, _SHARE_BYTES, root=root))
        assert share is not None, "only called with sharing"
        door = stack.enter_context(open_door(share, bound, run_uid=_RUN_UID, address=address))
        neighbours = Neighbours(run_uid=_RUN_UID, own=address)
        swarm = Swarm(Peers(client, keys, run_uid=_RUN_UID, address=address), door, neighbours)
        store = RedisStore(client, keys)
        sharing, alone = Sharing(store, share, swarm), Sharing(store, None)
        while True:
            version, shared = pipe.recv()
            asyncio.run(_follow(pipe, url, keys, sharing if shared else alone, version))


async def _follow(pipe: Connection, url: str, keys: Keys, sharing: Sharing, version: int) -> None:
    counts = sharing.counts
    before = counts.store, counts.peers
    async with connect_async(url, schema.Redis()) as client:
        stream = WorkerStream(client, keys, worker=f"{id(pipe)}", lease_s=60.0)
        await stream.run_info()
        pipe.send("listens")
        while (announced := await stream.announcements.latest()) is None or announced.version < version:
            await stream.announcements.await_newer(version - 1, within_s=5.0)
    path = catch_up(0, decode_manifest(announced.manifest), lambda _: None)
    shards = (shard for manifest in path for shard in manifest.shards)
    with closing(fetch_ahead(shards, sharing.reading(path))) as fetched:
        for _ in fetched:
            pass
    pipe.send(Came(at=time.monotonic(), store=counts.store - before[0], peers=counts.peers - before[1]))


def _lines(rounds: Sequence[_Round], size: Size) -> list[Line]:
    p95 = [quantiles(one.late_s, n=20)[-1] for one in rounds]
    copies = [one.redis_bytes / one.blob_bytes for one in rounds]
    late = [slow / one.alone_s for slow, one in zip(p95, rounds, strict=True)]
    return [
        Bar(name="bytes out of Redis / the blob, 64 workers", value=median(copies), unit="x", goal=2.0, better="lower"),
        Bar(name="lateness p95 / one worker's", value=median(late), unit="x", goal=2.0, better="lower"),
        Fact(name="the most bytes of a round / the blob", value=max(copies), unit="x"),
        Fact(name="the latest p95 of a round / one worker's", value=max(late), unit="x"),
        Fact(name="one worker alone", value=median(one.alone_s for one in rounds), unit="s"),
        Fact(name="64 workers: median", value=median(median(one.late_s) for one in rounds), unit="s"),
        Fact(name="64 workers: p95", value=median(p95), unit="s"),
        Fact(name="64 workers: the last", value=median(max(one.late_s) for one in rounds), unit="s"),
        Fact(name="blobs out of Redis / the blob", value=_share(rounds, "store"), unit="x"),
        Fact(name="from peers / the blob", value=_share(rounds, "peer"), unit="x"),
        Fact(name="the blob", value=size.num_bytes / 1e6, unit="MB"),
        Fact(name="each link", value=size.bytes_per_s / 1e6, unit="MB/s"),
    ]


def _share(rounds: Sequence[_Round], of: str) -> float:
    return median(getattr(one, f"{of}_bytes") / one.blob_bytes for one in rounds)
