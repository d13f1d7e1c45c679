"""A learner of several ranks and a store, small enough for every test of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
from safetensors import deserialize

from streamrl.errors import WeightsError
from streamrl.protocol.weights.encoder import EncodedShard, ShardEncoder
from streamrl.protocol.weights.format import BITS, HeldRange, TensorMeta
from streamrl.protocol.weights.manifest import Manifest, ShardRecord
from streamrl.protocol.weights.manifest_bytes import decode_manifest, decode_record, encode_manifest, encode_record
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.stores import BlobStore, MemoryStore
from streamrl.versions import make_version

Store = TypeVar("Store", bound=BlobStore)
Bits = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
State = Mapping[str, Bits]  # flat bits by tensor

RUN_UID = "run-a"
TENSORS = (
    TensorMeta(name="model.embed", dtype="bfloat16", shape=(97, 16)),
    TensorMeta(name="model.norm", dtype="float32", shape=(33,)),
    TensorMeta(name="model.scale", dtype="float16", shape=()),
    TensorMeta(name="model.unused", dtype="bfloat16", shape=(0, 4)),
    TensorMeta(name="model.proj", dtype="bfloat16", shape=(64, 40)),
)


def random_state(rng: np.random.Generator, tensors: Sequence[TensorMeta] = TENSORS) -> State:
    return {t.name: random_bits(rng, BITS[t.dtype], t.num_elements) for t in tensors}


def random_bits(rng: np.random.Generator, dtype: np.dtype, length: int) -> Bits:
    return rng.integers(0, np.iinfo(dtype).max, size=length, dtype=dtype, endpoint=True)


def nudged(rng: np.random.Generator, state: State, *, share: float = 0.05) -> State:
    """Return the state after a step: a share of the elements move to a neighbouring bit pattern."""
    moved = {}
    for name, bits in state.items():
        moved[name] = bits + (rng.random(len(bits)) < share).astype(bits.dtype)
    return moved


class World(Generic[Store]):
    """Ranks that publish into a store, each a part of every tensor."""

    def __init__(
        self, store: Store, *, num_ranks: int = 1, tensors: Sequence[TensorMeta] = TENSORS, term: int = 1
    ) -> None:
        self.store = store
        self.tensors = tuple(tensors)
        self.manifests: dict[int, Manifest] = {}
        self.states: dict[int, State] = {}
        self._encoders = [ShardEncoder() for _ in range(num_ranks)]
        self._term = term
        self._last = 0

    def publish(
        self, state: State, *, anchor: bool = False, beside: bool = False, canary_ids: tuple[int, ...] = ()
    ) -> Manifest:
        anchor = anchor or not self.manifests
        version = make_version(self._term, len(self.manifests))
        records = [
            self._put(encoder.encode(self._held(state, rank), anchor=anchor), version, rank)
            for rank, encoder in enumerate(self._encoders)
        ]
        manifest = Manifest(
            version=version,
            base=0 if anchor else self._last,
            step=len(self.manifests),
            run_uid=RUN_UID,
            tensors=self.tensors,
            shards=tuple(records),
            canary_ids=canary_ids,
        )
        for encoder in self._encoders:
            encoder.advance()
        self.states[version], self._last = state, version
        announced = self._announced(manifest)
        return self.lay_anchor() if beside else announced

    def lay_anchor(self) -> Manifest:
        """Add an anchor to the last version."""
        whole = [self._put(encoder.encode_base(), self._last, rank) for rank, encoder in enumerate(self._encoders)]
        return self._announced(replace(self.manifests[self._last], anchor=tuple(whole)))

    def _announced(self, manifest: Manifest) -> Manifest:
        announced = self.manifests[manifest.version] = decode_manifest(encode_manifest(manifest))
        assert announced == manifest
        return announced

    def _put(self, shard: EncodedShard, version: int, rank: int) -> ShardRecord:
        record = shard.record(run_uid=RUN_UID, version=version, rank=rank)
        self.store.put(record.blob_name, shard.blob)
        return decode_record(encode_record(record))

    def _held(self, state: State, rank: int) -> list[HeldRange]:
        held = []
        for tensor in self.tensors:
            bounds = [tensor.num_elements * r // len(self._encoders) for r in (rank, rank + 1)]
            held.append(HeldRange(tensor=tensor.name, start=bounds[0], bits=state[tensor.name][slice(*bounds)]))
        return held


def make_world(num_versions: int, *, num_ranks: int = 2, store: MemoryStore | None = None) -> World:
    """Version 0 is an anchor, the others are deltas."""
    rng = np.random.default_rng(3)
    world = World(MemoryStore() if store is None else store, num_ranks=num_ranks)
    state = random_state(rng)
    for _ in range(num_versions):
        world.publish(state)
        state = nudged(rng, state)
    return world


def versions(world: World) -> list[Manifest]:
    return list(world.manifests.values())


def read_safetensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Read the file with the library that engines use: dtype, shape, bytes."""
    return {name: (t["dtype"], t["shape"], bytes(t["data"])) for name, t in deserialize(path.read_bytes())}


def assert_holds(path: Path, state: State) -> None:
    contents = {name: data for name, (_, _, data) in read_safetensors(path).items()}
    assert contents == {name: bits.tobytes() for name, bits in state.items()}


def refused(mirror: Mirror, manifest: Manifest, store: MemoryStore, *, match: str = "") -> None:
    with pytest.raises(WeightsError, match=match):
        mirror.apply(manifest, store)
    assert mirror.version == 0
