"""A mirror of a model with adapters: serves the pretrained model with the newest adapters merged.

    pretrained files ─► digests equal the learner's? ─► once: the tensors without adapters
                             adapters of a version   ─► the tensors with adapters, where the adapters changed
                                                         └─► compared with the learner's digests of some of them

Each version carries digests of other ranges, so that all are compared within some versions; the first version of a
learner carries all. Blocks on the CPU and on the pretrained model's files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from streamrl.errors import DataError, WeightsError
from streamrl.protocol.weights.adapters import Adapter, merge
from streamrl.protocol.weights.delta import side_by_side, threads_for
from streamrl.protocol.weights.format import Bits, Coding, RangeRecord, digest_of
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.pretrained import Pretrained
from streamrl.versions import show

_NUM_THREADS = threads_for(2)  # as for several versions: as many as there are cores, up to the maximum


class Merging:
    """The merging of one mirror."""

    def __init__(self, pretrained: Pretrained | None) -> None:
        self._pretrained = pretrained
        self._proved: dict[tuple[str, int], tuple[int, bytes]] = {}  # of the pretrained model, by (tensor, start)
        self._merged: dict[str, Adapter] = {}  # by tensor: the adapter merged into it

    def forget(self) -> None:
        """Forget what was merged: the mirror has a new file."""
        self._proved, self._merged = {}, {}

    def bring(self, manifest: Manifest, views: Mapping[str, Bits], touched: set[str]) -> None:
        """Bring the served tensors to this version, whose adapters are in `views`; those in `touched` are not merged
        yet.

        DataError: the pretrained model is not the learner's. WeightsError: the merged bits differ from the learner's
        digests.
        """
        if self._pretrained is None:
            raise DataError(
                f"version {show(manifest.version)} holds adapters only: give the base model that they belong to"
            )
        self._lay_pretrained(self._pretrained, manifest, views)
        for adapter in manifest.adapters:
            if touched & {adapter.a, adapter.b}:
                self._merged.pop(adapter.tensor, None)
        self._merge(self._pretrained, manifest, views)
        for record in _ranges(manifest, Coding.MERGED):
            if digest_of(views[record.tensor][record.start : record.start + record.length].data) != record.digest:
                where = f"{record.tensor} from element {record.start}"
                raise WeightsError(
                    f"version {show(manifest.version)}: {where}, merged, does not match the learner's digest"
                )

    def _lay_pretrained(self, pretrained: Pretrained, manifest: Manifest, views: Mapping[str, Bits]) -> None:
        doubtful: dict[str, list[RangeRecord]] = defaultdict(list)
        for record in _ranges(manifest, Coding.PRETRAINED):
            if self._proved.get((record.tensor, record.start)) != (record.length, record.digest):
                doubtful[record.tensor].append(record)
        metas = {tensor.name: tensor for tensor in manifest.tensors}
        adapted = {adapter.tensor for adapter in manifest.adapters}

        def lay(name: str) -> None:
            bits = pretrained.bits(metas[name])
            for record in doubtful[name]:
                if digest_of(bits[record.start : record.start + record.length].data) != record.digest:
                    raise DataError(
                        f"the pretrained model here is not the one that the learner trains: {name} differs from "
                        f"element {record.start} on; use the same files as the learner (model.path, --model)"
                    )
            if name not in adapted:
                views[name][:] = bits

        side_by_side(lay, list(doubtful), num_threads=_NUM_THREADS)
        for name, records in doubtful.items():
            self._merged.pop(name, None)
            self._proved |= {(name, record.start): (record.length, record.digest) for record in records}

    def _merge(self, pretrained: Pretrained, manifest: Manifest, views: Mapping[str, Bits]) -> None:
        metas = {tensor.name: tensor for tensor in manifest.tensors}

        def merge_one(adapter: Adapter) -> None:
            bits, out = pretrained.bits(metas[adapter.tensor]), views[adapter.tensor]
            merge(adapter, metas, pretrained=bits, a=views[adapter.a], b=views[adapter.b], out=out)

        other = [adapter for adapter in manifest.adapters if self._merged.get(adapter.tensor) != adapter]
        side_by_side(merge_one, other, num_threads=_NUM_THREADS)
        self._merged |= {adapter.tensor: adapter for adapter in other}


def _ranges(manifest: Manifest, coding: Coding) -> Iterator[RangeRecord]:
    return (record for shard in manifest.shards for record in shard.ranges if record.coding is coding)
