"""T39: a worker is killed or stopped at each point of fetching weights for others; the others get them all the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from streamrl.crashpoints import POINTS, VARIABLE
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.weights.redis_store import RedisStore
from tests.faults.report import Row, note
from tests.helpers import wait_until
from tests.sharing_world import BLOB, RECORD, RUN_UID

OF_SHARING = sorted(point for point in POINTS if point.startswith("share."))
_WITHIN_S = 40.0


class Fetcher:
    """A process, and what it says line by line."""

    def __init__(self, *words: str, crash_at: str = "") -> None:
        environment = {**os.environ, **({VARIABLE: crash_at} if crash_at else {})}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.sharing_worker", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def said(self) -> str:
        """The next line that is ours; "" when it has ended."""
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline()) and line.split()[0] not in ("ready", "fetched"):
            pass
        return line.strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def is_stopped(self) -> bool:
        _, status = os.waitpid(self.process.pid, os.WNOHANG | os.WUNTRACED)
        return status != 0 and os.WIFSTOPPED(status)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Place:
    def __init__(self, folder: Path, url: str, keys: Keys) -> None:
        self.folder, self.url, self.keys = folder, url, keys
        self.started: list[Fetcher] = []

    def start(self, *, host: int, peers: bool, crash_at: str = "") -> Fetcher:
        root = self.folder / f"host-{host}"
        root.mkdir(exist_ok=True)
        address = f"127.0.0.{host}:0" if peers else ""
        one = Fetcher(self.url, self.keys.name, os.fspath(root), address, crash_at=crash_at)
        self.started.append(one)
        assert one.said() == "ready"
        return one


@pytest.fixture
def place(tmp_path: Path, redis_url: str, client: redis.Redis, keys: Keys) -> Iterator[Place]:
    client.hset(keys.meta, "uid", RUN_UID)
    RedisStore(client, keys).put(RECORD.blob_name, BLOB)
    place = Place(tmp_path, redis_url, keys)
    yield place
    for one in place.started:
        one.end()


def goes_on(place: Place, point: str, other: Fetcher, began: float) -> None:
    assert other.said().startswith("fetched"), "the other has the blob"
    took_s = time.monotonic() - began
    note(Row(scenario=f"T39 {point}", injections=1, lost=0, twice=0, more={"recovery_s": took_s}))
    assert took_s < _WITHIN_S


@pytest.mark.parametrize("point", OF_SHARING)
@pytest.mark.parametrize("hosts", ["one host", "two hosts"])
def test_a_fetcher_that_is_killed_at_a_point_leaves_the_blob_to_the_others(
    place: Place, point: str, hosts: str
) -> None:
    peers = hosts == "two hosts" or point == "share.told"
    doomed = place.start(host=2, peers=peers, crash_at=f"{point}:{3 if point == 'share.piece' else 1}")
    other = place.start(host=3 if hosts == "two hosts" else 2, peers=peers)
    doomed.go()
    assert doomed.said() == ""
    assert doomed.process.wait(_WITHIN_S) == -signal.SIGKILL
    began = time.monotonic()
    other.go()
    goes_on(place, f"{point}, killed, {hosts}", other, began)


@pytest.mark.parametrize("point", ["share.piece", "share.told"])
def test_a_fetcher_that_stops_at_a_point_is_not_waited_for_without_end(place: Place, point: str) -> None:
    peers = point == "share.told"
    stopped = place.start(host=2, peers=peers, crash_at=f"{point}:1:stop")
    other = place.start(host=2, peers=peers)
    stopped.go()
    wait_until(stopped.is_stopped, description="it stops at the point")
    began = time.monotonic()
    other.go()
    goes_on(place, f"{point}, stopped", other, began)

    os.kill(stopped.process.pid, signal.SIGCONT)
    assert stopped.said().startswith("fetched"), "it wakes, and has the blob, too"
