"""A learner of one rank that publishes states into a store, and keeps the manifests of its versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from streamrl.protocol.weights.encoder import EncodedShard, ShardEncoder
from streamrl.protocol.weights.format import Bits, HeldRange, TensorMeta
from streamrl.protocol.weights.manifest import Manifest, ShardRecord
from streamrl.protocol.weights.manifest_bytes import decode_manifest, encode_manifest
from streamrl.protocol.weights.retention import AnchorPace
from streamrl.protocol.weights.stores import BlobStore
from streamrl.versions import make_version

RUN_UID = "bench"
State = Mapping[str, Bits]  # flat bits of each tensor


class Publishing:
    def __init__(self, tensors: Sequence[TensorMeta], store: BlobStore, *, run_uid: str = RUN_UID) -> None:
        self.store = store
        self.manifests: dict[int, Manifest] = {}
        self._tensors = tuple(tensors)
        self._run_uid = run_uid
        self._encoder = ShardEncoder()
        self._last = 0

    def encode(self, state: State, *, anchor: bool) -> EncodedShard:
        return self._encoder.encode(self._ranges(state), anchor=anchor)

    def announce(self, shard: EncodedShard, *, anchor: bool) -> Manifest:
        """Store and announce the last encoded state."""
        version = make_version(1, len(self.manifests))
        manifest = Manifest(
            version=version,
            base=0 if anchor else self._last,
            step=len(self.manifests),
            run_uid=self._run_uid,
            tensors=self._tensors,
            shards=(self._put(shard, version),),
        )
        self._encoder.advance()
        self._last = version
        return self._announced(manifest)

    def publish(self, state: State, *, anchor: bool = False) -> Manifest:
        return self.announce(self.encode(state, anchor=anchor), anchor=anchor)

    def publish_at_pace(self, state: State, pace: AnchorPace) -> Manifest:
        """Publish like a learner: an anchor first, then deltas, with an anchor beside a delta when one is due."""
        due = pace.due
        manifest = self.publish(state, anchor=not self.manifests)
        if manifest.base:
            pace.announced(delta_bytes=manifest.num_bytes)
            manifest = self._lay_anchor(manifest) if due else manifest
        if anchor := manifest.as_anchor():
            pace.anchored(anchor_bytes=anchor.num_bytes)
        return manifest

    def _lay_anchor(self, manifest: Manifest) -> Manifest:
        whole = self._put(self._encoder.encode_base(), manifest.version)
        return self._announced(replace(manifest, anchor=(whole,)))

    def _announced(self, manifest: Manifest) -> Manifest:
        self.manifests[manifest.version] = decode_manifest(encode_manifest(manifest))
        return self.manifests[manifest.version]

    def _ranges(self, state: State) -> list[HeldRange]:
        return [HeldRange(tensor=tensor.name, start=0, bits=state[tensor.name]) for tensor in self._tensors]

    def _put(self, shard: EncodedShard, version: int) -> ShardRecord:
        record = shard.record(run_uid=self._run_uid, version=version, rank=0)
        self.store.put(record.blob_name, shard.blob)
        return record
