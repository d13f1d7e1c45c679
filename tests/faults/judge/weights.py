"""Compares published weights with those of the checkpoint of the same step, byte by byte.

    checkpoint's shards (safetensors) ─► runs of the masters ─► cast as served ─┐
    version's blobs, from the store, raw ────────────────────────────────────────┴─► every byte once, or what is wrong

An anchor's blobs are the elements' bytes, range after range (docs/wire.md), so their contents are known without the
manifest, whose framing the standard library cannot decode. Deltas prove nothing by themselves, and a version without an
anchor is skipped: a run to be judged publishes an anchor with each version. Blocks on the disk and briefly on Redis.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import redis

from tests.faults.judge.books import Violation
from tests.faults.judge.recorder import Record

Store = Callable[[int], Mapping[str, bytes]]  # returns the blobs of a version, by name
Masters = Mapping[str, npt.NDArray[np.float32]]  # by tensor, all elements in row-major order
_LOOK_EVERY_S = 0.2
_MOST_WAITING = 8  # checkpoints
_BYTES_OF = {"float32": 4, "bfloat16": 2}


@dataclass(slots=True)
class WeightsLooks:
    """The findings for the versions that could be compared."""

    compared: list[int] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)

    def compare(self, version: int, step: int, masters: Masters, blobs: Mapping[str, bytes], *, dtype: str) -> bool:
        """Return whether this version could be compared: deltas, and incomplete blobs, prove nothing."""
        anchors = anchors_of(blobs, sum(master.size for master in masters.values()) * _BYTES_OF[dtype])
        if anchors is None:
            return False
        self.compared.append(version)
        if missing := missing_tensors({name: served_bytes(m, dtype) for name, m in masters.items()}, anchors):
            what = f"version {version} was published without the checkpoint's values of {missing[:5]}"
            self.violations.append(Violation(kind="weights", what=what, step=step))
        return True


def read_masters(checkpoint: Path) -> Masters:
    """Assemble the masters from the ranks' files."""
    pieces: dict[str, list[tuple[int, npt.NDArray[np.float32]]]] = {}
    for path in sorted(checkpoint.glob("train-*-of-*.safetensors")):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        head = json.loads(data[8 : 8 + length])
        starts = json.loads(head["__metadata__"]["starts"])
        for name, start in starts.items():
            begin, end = (8 + length + offset for offset in head[f"master/{name}"]["data_offsets"])
            pieces.setdefault(name, []).append((start, np.frombuffer(data[begin:end], "<f4")))
    return {name: np.concatenate([run for _, run in sorted(runs, key=lambda r: r[0])]) for name, runs in pieces.items()}


def served_bytes(master: npt.NDArray[np.float32], dtype: str) -> bytes:
    """Round to nearest, ties to even, if the served dtype is the shorter one."""
    if dtype == "float32":
        return master.tobytes()
    bits = master.view("<u4").astype(np.uint64)
    rounded: npt.NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return rounded.tobytes()


def anchors_of(blobs: Mapping[str, bytes], num_bytes: int) -> list[bytes] | None:
    """Return the blobs that together hold the whole state; None if they are not there. A delta beside them is smaller
    than the part that its rank holds."""
    by_rank: dict[str, bytes] = {}
    for name, data in blobs.items():
        rank = name.rpartition("/")[2].split("-")[1]
        by_rank[rank] = max(by_rank.get(rank, b""), data, key=len)
    found = list(by_rank.values())
    return found if sum(map(len, found)) == num_bytes else None


def missing_tensors(tensors: Mapping[str, bytes], anchors: list[bytes]) -> list[str]:
    """Return the names of tensors that are not in the blobs, whole or split among them."""
    return [name for name, data in tensors.items() if not _lies_in(data, anchors)]


def _lies_in(data: bytes, anchors: list[bytes]) -> bool:
    """Match greedily: the longest prefix that is in one blob, then the rest."""
    while data:
        longest = max((_longest_start(data, blob) for blob in anchors), default=0)
        if longest == 0:
            return False
        data = data[longest:]
    return True


def _longest_start(data: bytes, blob: bytes) -> int:
    if data in blob:
        return len(data)
    low, high = 0, len(data)
    while high - low > 1:  # if a prefix is there, so are all shorter ones
        middle = (low + high) // 2
        low, high = (middle, high) if data[:middle] in blob else (low, middle)
    return low if low >= min(len(data), 8) else 0  # a few bytes match anywhere


def redis_store(client: redis.Redis, run: str, run_uid: str) -> Store:
    """Read blobs from Redis, where they are stored in chunks, with an index that says how many."""
    prefix = f"streamrl:{{{run}}}:"

    def get(version: int) -> Mapping[str, bytes]:
        found: dict[str, bytes] = {}
        indices: Any = client.hgetall(f"{prefix}blobs")
        for raw_name, raw in indices.items():
            name, index = raw_name.decode(), msgpack.unpackb(raw)
            if index["whole"] and name.startswith(beginning_of(run_uid, version)):
                count = -(-index["num_bytes"] // index["chunk_bytes"])
                chunks: list[Any] = [client.get(f"{prefix}blob:{name}:{at}") or b"" for at in range(count)]
                found[name] = b"".join(chunks)
        return found

    return get


def file_store(folder: Path, run_uid: str) -> Store:
    def get(version: int) -> Mapping[str, bytes]:
        beginning = beginning_of(run_uid, version)
        paths = (folder / beginning).parent.glob(f"{beginning.rpartition('/')[2]}*")
        found: dict[str, bytes] = {}
        for path in paths:
            try:
                found[path.relative_to(folder).as_posix()] = path.read_bytes()
            except FileNotFoundError:  # swept meanwhile
                continue
        return found

    return get


def beginning_of(run_uid: str, version: int) -> str:
    """Return the prefix of its blobs' names."""
    return f"{run_uid}/{version >> 32:06d}/{version & 0xFFFFFFFF}-"


class WeightsWatch:
    """Compares while the run goes on, since checkpoints are pruned and versions swept. Has a thread of its own."""

    def __init__(self, folder: Path, record: Record, store: Callable[[], Store], *, dtype: str) -> None:
        """`store` opens the place of the blobs each time; RedisError if it cannot be reached now."""
        self._folder, self._record, self._store, self._dtype = folder, record, store, dtype
        self.looks = WeightsLooks()
        self._waiting: dict[tuple[int, int], Masters] = {}  # of checkpoints whose version is not there yet
        self._met: set[str] = set()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._live, name="weights watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> WeightsLooks:
        self._stop.set()
        self._thread.join(30.0)
        if self._error is not None:
            raise self._error
        return self.looks

    def _live(self) -> None:
        try:
            while not self._stop.wait(_LOOK_EVERY_S):
                self._look()
            self._look()
        except BaseException as error:  # noqa: BLE001 - raised by `stop`
            self._error = error

    def _look(self) -> None:
        for path in sorted((self._folder / "checkpoints").glob("e*")):
            if path.name not in self._met:
                self._met.add(path.name)
                term, step = int(path.name[1:7]), int(path.name.rpartition("-s")[2])
                try:
                    self._waiting[term, step] = read_masters(path)
                except FileNotFoundError:  # pruned meanwhile
                    continue
        versions = {(version >> 32, step): version for version, step in list(self._record.steps.items())}
        for place in sorted(self._waiting)[:-_MOST_WAITING]:
            del self._waiting[place]
        for place in [place for place in self._waiting if place in versions]:
            try:
                blobs = self._store()(versions[place])
            except redis.RedisError:
                return
            if self.looks.compare(versions[place], place[1], self._waiting[place], blobs, dtype=self._dtype):
                del self._waiting[place]  # otherwise its anchor may still come
