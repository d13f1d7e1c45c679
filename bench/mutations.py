"""Thousands of ways to corrupt blobs and manifests, and how a mirror reacts to each.

A worker that holds one version is led to the next by a path of manifests and blobs, part of which is corrupted: bits
flipped, truncated, swapped, or from another version, base, run or term. Whatever the mirror then claims to hold must be
bit-identical to what was published under that version.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from safetensors import deserialize

from bench.publishing import Publishing, State
from streamrl.errors import WeightsError
from streamrl.protocol.weights.catchup import catch_up
from streamrl.protocol.weights.format import BITS, Bits, TensorMeta
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.manifest_bytes import decode_manifest, encode_manifest
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.stores import MemoryStore

TENSORS = (
    TensorMeta(name="embed", dtype="bfloat16", shape=(97, 16)),
    TensorMeta(name="norm", dtype="float32", shape=(33,)),
    TensorMeta(name="scale", dtype="float16", shape=()),
    TensorMeta(name="proj", dtype="bfloat16", shape=(64, 40)),
)
_NUM_VERSIONS = 12
_ANCHOR_EVERY = 4

REFUSED, HARMLESS, WRONG = "refused", "harmless", "wrong"


class World(MemoryStore):
    """What the worker sees: everything as published, until a mutation changes part of the path."""

    def __init__(self, chain: Publishing, other_run: Publishing, path: Sequence[Manifest], rng: random.Random) -> None:
        super().__init__()
        self.manifests = {version: encode_manifest(manifest) for version, manifest in chain.manifests.items()}
        self.blobs = {name: chain.store.get(name) for name in chain.store.list()}
        self.unsteady: dict[str, bytes] = {}  # returned by a blob's first read only
        self.rng, self._other_run = rng, other_run
        self.victim = rng.choice(path)  # the version to corrupt
        [self.blob] = (shard.blob_name for shard in self.victim.shards)

    def get(self, name: str) -> bytes:
        return self.unsteady.pop(name) if name in self.unsteady else super().get(name)

    def manifest(self, version: int) -> Manifest | None:
        return decode_manifest(self.manifests[version]) if version in self.manifests else None

    def another_version(self) -> int:
        return self.rng.choice([version for version in self.manifests if version != self.victim.version])

    def blob_of(self, version: int) -> str:
        return decode_manifest(self.manifests[version]).shards[0].blob_name

    def manifest_of_other_run(self) -> bytes:
        return encode_manifest(self._other_run.manifests[self.victim.version])

    def blob_of_other_run(self) -> bytes:
        return self._other_run.store.get(self._other_run.manifests[self.victim.version].shards[0].blob_name)


def _flipped(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _flip_blob(world: World) -> None:
    world.blobs[world.blob] = _flipped(world.blobs[world.blob], world.rng)


def _flip_blob_once(world: World) -> None:
    world.unsteady[world.blob] = _flipped(world.blobs[world.blob], world.rng)


def _cut_blob(world: World) -> None:
    world.blobs[world.blob] = world.blobs[world.blob][: world.rng.randrange(len(world.blobs[world.blob]))]


def _extend_blob(world: World) -> None:
    world.blobs[world.blob] += world.rng.randbytes(world.rng.randint(1, 64))


def _lose_blob(world: World) -> None:
    del world.blobs[world.blob]


def _swap_blobs(world: World) -> None:
    other = world.blob_of(world.another_version())
    world.blobs[world.blob], world.blobs[other] = world.blobs[other], world.blobs[world.blob]


def _blob_of_other_run(world: World) -> None:
    world.blobs[world.blob] = world.blob_of_other_run()


def _flip_manifest(world: World) -> None:
    version = world.victim.version
    world.manifests[version] = _flipped(world.manifests[version], world.rng)


def _cut_manifest(world: World) -> None:
    version = world.victim.version
    world.manifests[version] = world.manifests[version][: world.rng.randrange(len(world.manifests[version]))]


def _lose_manifest(world: World) -> None:
    world.manifests[world.victim.version] = b""


def _swap_manifests(world: World) -> None:
    one, other = world.victim.version, world.another_version()
    world.manifests[one], world.manifests[other] = world.manifests[other], world.manifests[one]


def _manifest_of_other_run(world: World) -> None:
    world.manifests[world.victim.version] = world.manifest_of_other_run()


def _other_base(world: World) -> None:
    older = {0, *(version for version in world.manifests if version < world.victim.version)} - {world.victim.base}
    if older:
        _replace(world, base=world.rng.choice(sorted(older)))


def _other_run(world: World) -> None:
    _replace(world, run_uid="other")


def _blob_name_of_another(world: World) -> None:
    """Point the manifest to another version's blob."""
    [shard] = world.victim.shards
    _replace(world, shards=(replace(shard, blob_name=world.blob_of(world.another_version())),))


def _replace(world: World, **changes: Any) -> None:
    changed = replace(world.victim, **changes)
    world.manifests[world.victim.version] = encode_manifest(changed)  # WeightsError if a learner could not publish it


MUTATIONS: Mapping[str, Callable[[World], None]] = {
    "blob: bits flipped": _flip_blob,
    "blob: bits flipped on the first reading": _flip_blob_once,
    "blob: cut": _cut_blob,
    "blob: bytes added": _extend_blob,
    "blob: lost": _lose_blob,
    "blob: swapped with another version's": _swap_blobs,
    "blob: of another run": _blob_of_other_run,
    "manifest: bits flipped": _flip_manifest,
    "manifest: cut": _cut_manifest,
    "manifest: lost": _lose_manifest,
    "manifest: swapped with another version's": _swap_manifests,
    "manifest: of another run": _manifest_of_other_run,
    "manifest: on another base": _other_base,
    "manifest: says another run": _other_run,
    "manifest: names another blob": _blob_name_of_another,
}


class Trial:
    """A chain of versions, another run's with the same numbers, and a mirror (of TENSORS and RUN_UID) to attack."""

    def __init__(self, mirror: Mirror, *, seed: int) -> None:
        self._random, self._rng = random.Random(seed), np.random.default_rng(seed)
        self._states: dict[int, State] = {}
        self._chain = Publishing(TENSORS, MemoryStore())
        for version, state in self._publish(self._chain):
            self._states[version] = state
        self._other_run = Publishing(TENSORS, MemoryStore(), run_uid="other")
        list(self._publish(self._other_run))
        self._mirror = mirror
        self.outcomes: Counter[str] = Counter()

    def run(self, count: int) -> None:
        for _ in range(count):
            self.outcomes[self._mislead(self._random.choice(list(MUTATIONS.values())))] += 1

    def _mislead(self, mutate: Callable[[World], None]) -> str:
        """Lead a mirror from one version to a later one, with the mutation applied; return the outcome."""
        have, wanted = sorted(self._random.sample(list(self._states), 2))
        self._settle(have)
        path = catch_up(have, self._chain.manifests[wanted], self._chain.manifests.get)
        world = World(self._chain, self._other_run, path, self._random)
        with contextlib.suppress(WeightsError):
            mutate(world)
            target = decode_manifest(world.manifests[wanted])
            self._mirror.apply_path(catch_up(have, target, world.manifest), world)
        version = self._mirror.version
        if version not in (0, *self._states) or (version and not self._holds(version)):
            return WRONG
        return REFUSED if version in (0, have) else HARMLESS

    def _settle(self, version: int) -> None:
        """Bring the mirror to this version, without corruption."""
        if self._mirror.version != version:
            self._mirror.close()
            path = catch_up(0, self._chain.manifests[version], self._chain.manifests.get)
            self._mirror.apply_path(path, self._chain.store)

    def _holds(self, version: int) -> bool:
        """Read the mirror as an engine does, and compare it with what was published."""
        held = {name: bytes(tensor["data"]) for name, tensor in deserialize(self._mirror.path.read_bytes())}
        return held == {name: bits.tobytes() for name, bits in self._states[version].items()}

    def _publish(self, publishing: Publishing) -> Iterator[tuple[int, State]]:
        state = {tensor.name: self._bits(tensor) for tensor in TENSORS}
        for number in range(_NUM_VERSIONS):
            manifest = publishing.publish(state, anchor=number % _ANCHOR_EVERY == 0)
            yield manifest.version, state
            moved = {name: (self._rng.random(len(bits)) < 0.05).astype(bits.dtype) for name, bits in state.items()}
            state = {name: bits + moved[name] for name, bits in state.items()}

    def _bits(self, tensor: TensorMeta) -> Bits:
        dtype = BITS[tensor.dtype]
        return self._rng.integers(0, np.iinfo(dtype).max, size=tensor.num_elements, dtype=dtype, endpoint=True)
