"""A learner of one rank that publishes states into a store, and the versions that it announced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from streamrl.versions import make_version
from streamrl.weights.encoder import EncodedShard, ShardEncoder, encode_whole
from streamrl.weights.format import Bits, HeldRange, TensorMeta
from streamrl.weights.manifest import Manifest, ShardRecord, decode_manifest, encode_manifest
from streamrl.weights.retention import AnchorPace
from streamrl.weights.stores import BlobStore

RUN_UID = "bench"
State = Mapping[str, Bits]  # the flat bits of each tensor


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

    def announce(self, shard: EncodedShard, *, anchor: bool, whole: EncodedShard | None = None) -> Manifest:
        """Store and announce what was encoded last; `whole` as an anchor beside it."""
        version = make_version(1, len(self.manifests))
        manifest = Manifest(
            version=version,
            base=0 if anchor else self._last,
            step=len(self.manifests),
            run_uid=self._run_uid,
            tensors=self._tensors,
            shards=(self._put(shard, version),),
            anchor=() if whole is None else (self._put(whole, version),),
        )
        announced = decode_manifest(encode_manifest(manifest))
        self._encoder.advance()
        self.manifests[version] = announced
        self._last = version
        return announced

    def publish(self, state: State, *, anchor: bool = False, beside: bool = False) -> Manifest:
        whole = encode_whole(self._ranges(state)) if beside else None
        return self.announce(self.encode(state, anchor=anchor), anchor=anchor, whole=whole)

    def publish_at_pace(self, state: State, pace: AnchorPace) -> Manifest:
        """As a learner does it: an anchor first, deltas, and an anchor beside one when it is due."""
        manifest = self.publish(state, anchor=not self.manifests, beside=bool(self.manifests) and pace.due)
        anchor = manifest.as_anchor()
        pace.announced(delta_bytes=manifest.num_bytes, anchor_bytes=None if anchor is None else anchor.num_bytes)
        return manifest

    def _ranges(self, state: State) -> list[HeldRange]:
        return [HeldRange(tensor=tensor.name, start=0, bits=state[tensor.name]) for tensor in self._tensors]

    def _put(self, shard: EncodedShard, version: int) -> ShardRecord:
        record = shard.record(run_uid=self._run_uid, version=version, rank=0)
        self.store.put(record.blob_name, shard.blob)
        return record
