"""The worker's side: a host copy of the weights, in a safetensors file in shared memory that is patched in place.

    manifests ─► fetch blobs ahead, check their digests ─► patch the file ─► check the state's digests ─► version
                          (generation continues all the while; only the engine's load pauses it)

A worker far behind has many deltas to apply. It applies all of them to one stretch of a tensor, then to the next
(`delta`), so that memory is read once. The intermediate states never exist as a whole, and nothing could serve them.

Verification: each blob matches the digest in its manifest; after the last patch, every range of every touched tensor is
digested again from the file and compared with the last manifest. A range of an untouched tensor was verified against an
earlier manifest; if its digest changed since, it is digested again too. So a `version` other than 0 means that all bits
are the learner's, whatever path led there.

Where a version consists of adapters for a pretrained model, the file has that model with the adapters merged
(`merging`), and the adapters themselves are in memory.

The engine that loads the file must not read it while `apply` runs; the caller ensures that. One thread at a time may
use a mirror.

A worker that died leaves its file in the folder. Give its replacement the same folder: the first anchor replaces the
file. Blocks on the store and the file system, on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np

from streamrl.errors import ResourceError, TransportError, WeightsError
from streamrl.protocol.weights.changes import Changed, ChangeLog
from streamrl.protocol.weights.delta import batches, patch, side_by_side, threads_for
from streamrl.protocol.weights.fetching import AHEAD_BYTES, fetch_ahead
from streamrl.protocol.weights.format import BITS, Bits, Coding, RangeRecord, TensorMeta, digest_of
from streamrl.protocol.weights.manifest import Manifest, ShardRecord
from streamrl.protocol.weights.merging import Merging
from streamrl.protocol.weights.mirror_file import create_file
from streamrl.protocol.weights.pretrained import Pretrained
from streamrl.protocol.weights.sparse import Codecs
from streamrl.protocol.weights.stores import Blobs
from streamrl.versions import show

Fetched = Generator[tuple[ShardRecord, bytes]]
Layout = Mapping[str, TensorMeta]


class Mirror:
    """The mirror of one worker. `path` is the safetensors file; it holds `version` whenever that is not 0."""

    def __init__(
        self,
        folder: Path,  # on a memory file system, such as /dev/shm
        *,
        run_uid: str | None = None,  # manifests of another run are refused
        pretrained: Pretrained | None = None,  # the model that adapters are merged into, if any
        ahead_bytes: int = AHEAD_BYTES,  # of blobs held in memory, besides the one needed next
        make_room: Callable[[int], None] = lambda num_bytes: None,  # given the bytes needed in the folder's file system
    ) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResourceError(f"cannot create the mirror of the weights in {folder}: {error.strerror}") from error
        self.path = folder / "mirror.safetensors"
        self.version = 0
        self._changes = ChangeLog()
        self._codecs = Codecs()
        self._run_uid, self._ahead_bytes, self._make_room = run_uid, ahead_bytes, make_room
        self._merging = Merging(pretrained)
        self._layout: Layout = {}
        self._views: Mapping[str, Bits] = {}  # [num_elements] each: into the file, but for adapters
        self._proved: dict[tuple[str, int], tuple[int, bytes]] = {}  # (tensor, start) -> (length, digest)

    def apply(self, manifest: Manifest, store: Blobs) -> None:
        """Bring the mirror to this version: any newer anchor, or a delta on the version it holds.

        WeightsError: something is missing or wrong; `version` is 0 and only an anchor helps. ResourceError: no room.
        TransportError: the store is unreachable; the mirror keeps the version that it holds completely, if any.
        """
        self.apply_path([manifest], store)

    def apply_path(self, manifests: Sequence[Manifest], store: Blobs) -> None:
        """Apply each in turn (see `catch_up`), but verify only the final state, which is much faster."""
        touched: set[str] = set()
        try:
            self._refuse_unfit(manifests)
            reached, trouble = self._follow(manifests, store, touched)
            if reached is not None:
                self._prove(reached, touched, num_threads=threads_for(len(manifests)))
        except WeightsError:
            self.version = 0
            self._changes.lose()
            raise
        if trouble is not None:
            raise trouble

    def loaded(self) -> None:
        """Start logging changes: an engine holds all of this version."""
        self._changes.begin(self.version)

    def changed(self, *, since: int) -> Changed | None:
        """Return what changed since an engine held all of that version; None: unknown."""
        return self._changes.changed(self._views, since=since) if self.version else None

    def close(self) -> None:
        """Remove the file. Processes that have it mapped keep its contents."""
        self.version = 0
        self._changes.lose()
        self._layout, self._views = {}, {}
        self._proved.clear()
        self.path.unlink(missing_ok=True)

    def _refuse_unfit(self, manifests: Sequence[Manifest]) -> None:
        """Reject manifests that do not fit, before anything is fetched or written."""
        have, layout = self.version, self._layout
        for number, manifest in enumerate(manifests):
            name = f"version {show(manifest.version)}"
            held = show(have) if have else "nothing"
            if self._run_uid not in (None, manifest.run_uid):
                raise WeightsError(f"{name} belongs to run {manifest.run_uid!r}, not to {self._run_uid!r}")
            if manifest.version <= have:
                raise WeightsError(f"{name} is not newer than {held}, which the mirror holds")
            if manifest.base != have and (manifest.base or number):
                raise WeightsError(f"{name} is a delta on {show(manifest.base)}, but the mirror holds {held}")
            given = _layout(manifest.tensors)
            if manifest.base and given != layout:
                raise WeightsError(f"{name} is a delta on other tensors: {_first_difference(given, layout)}")
            have, layout = manifest.version, given

    def _follow(
        self, manifests: Sequence[Manifest], store: Blobs, touched: set[str]
    ) -> tuple[Manifest | None, TransportError | None]:
        """Patch the file; return (the version now in it, not verified yet; the error that stopped it before the last
        one).
        """
        shards = (shard for manifest in manifests for shard in manifest.shards)
        reached, at_most = None, self._ahead_bytes
        with closing(fetch_ahead(shards, store, ahead_bytes=at_most)) as fetched:
            for batch in batches(manifests, alone=lambda m: m.base == 0, size=lambda m: m.num_bytes, at_most=at_most):
                if batch[0].base == 0:
                    self._write_anchor(batch[0], fetched, touched)
                    reached = batch[0]
                    continue
                whole, blobs, trouble = _collect(batch, fetched)
                if whole:
                    self.version = 0  # until it is verified again
                    num_threads = threads_for(len(whole))
                    codec = self._codecs.get()
                    touched |= patch(
                        self._views, whole, blobs, num_threads=num_threads, codec=codec, changes=self._changes
                    )
                    reached = whole[-1]
                if trouble is not None:
                    return reached, trouble
        return reached, None

    def _write_anchor(self, manifest: Manifest, fetched: Fetched, touched: set[str]) -> None:
        self._changes.lose()
        for shard, blob in islice(fetched, len(manifest.shards)):
            self.version = 0  # until it is verified again
            self._prepare(manifest)
            for record, place in shard.placed_ranges():
                if record.coding is not Coding.RAW:
                    continue
                target = self._view(record)
                target[:] = np.frombuffer(memoryview(blob)[place], dtype=target.dtype)
                touched.add(record.tensor)

    def _prepare(self, manifest: Manifest) -> None:
        layout = _layout(manifest.tensors)
        if layout != self._layout:
            self._layout, self._views = {}, {}
            self._proved.clear()
            self._merging.forget()
            self._make_room(sum(tensor.num_bytes for tensor in manifest.served))
            views = create_file(self.path, manifest.served)
            others = {
                name: np.zeros(of.num_elements, BITS[of.dtype]) for name, of in layout.items() if name not in views
            }
            self._views = {**views, **others}
            self._layout = layout
            self._codecs.expect(sum(tensor.num_bytes for tensor in manifest.tensors))

    def _prove(self, manifest: Manifest, touched: set[str], *, num_threads: int) -> None:
        proved: dict[tuple[str, int], tuple[int, bytes]] = {}
        doubtful: list[RangeRecord] = []
        for record in (record for shard in manifest.shards for record in shard.ranges):
            if record.coding in (Coding.PRETRAINED, Coding.MERGED):
                continue
            key, claim = (record.tensor, record.start), (record.length, record.digest)
            if record.tensor in touched or self._proved.get(key) != claim:
                doubtful.append(record)
            proved[key] = claim

        def check(record: RangeRecord) -> None:
            if digest_of(self._view(record).data) != record.digest:
                where = f"{record.tensor} from element {record.start}"
                raise WeightsError(f"version {show(manifest.version)}: {where} does not agree with its digest")
            self._changes.read(record.tensor, record.start, self._views[record.tensor])

        side_by_side(check, doubtful, num_threads=num_threads)
        if manifest.adapters:
            self._changes.lose()  # merging does not log what it writes
            self._merging.bring(manifest, self._views, touched)
        self._proved = proved
        self.version = manifest.version

    def _view(self, record: RangeRecord) -> Bits:
        return self._views[record.tensor][record.start : record.start + record.length]


def _layout(tensors: Sequence[TensorMeta]) -> Layout:
    return {tensor.name: tensor for tensor in tensors}


def _first_difference(given: Layout, wanted: Layout) -> str:
    for name in sorted(given.keys() | wanted.keys()):
        if name not in given:
            return f"{name} is missing"
        if name not in wanted:
            return f"{name} is unknown"
        if given[name] != wanted[name]:
            found, expected = given[name], wanted[name]
            return f"{name} is {found.dtype} {list(found.shape)}, should be {expected.dtype} {list(expected.shape)}"
    return "the same tensors"


def _collect(
    batch: Sequence[Manifest], fetched: Fetched
) -> tuple[list[Manifest], dict[str, bytes], TransportError | None]:
    """Return (the manifests with all blobs present, blobs by name, the store's error), so that an error never leaves
    half a delta.
    """
    blobs: dict[str, bytes] = {}
    whole: list[Manifest] = []
    try:
        for manifest in batch:
            blobs.update((shard.blob_name, blob) for shard, blob in islice(fetched, len(manifest.shards)))
            whole.append(manifest)
    except TransportError as error:
        return whole, blobs, error
    return whole, blobs, None
