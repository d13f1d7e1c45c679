"""A learner of one rank that publishes states into a store, and the versions that it announced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from streamrl.versions import make_version
from streamrl.weights.encoder import EncodedShard, ShardEncoder
from streamrl.weights.format import Bits, HeldRange, TensorMeta
from streamrl.weights.manifest import Manifest, decode_manifest, encode_manifest
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
        ranges = [HeldRange(tensor=tensor.name, start=0, bits=state[tensor.name]) for tensor in self._tensors]
        return self._encoder.encode(ranges, anchor=anchor)

    def announce(self, shard: EncodedShard, *, anchor: bool) -> Manifest:
        """Store and announce what was encoded last."""
        version = make_version(1, len(self.manifests))
        record = shard.record(run_uid=self._run_uid, version=version, rank=0)
        self.store.put(record.blob_name, shard.blob)
        manifest = Manifest(
            version=version,
            base=0 if anchor else self._last,
            step=len(self.manifests),
            run_uid=self._run_uid,
            tensors=self._tensors,
            shards=(record,),
        )
        announced = decode_manifest(encode_manifest(manifest))
        self._encoder.advance()
        self.manifests[version] = announced
        self._last = version
        return announced

    def publish(self, state: State, *, anchor: bool = False) -> Manifest:
        return self.announce(self.encode(state, anchor=anchor), anchor=anchor)
