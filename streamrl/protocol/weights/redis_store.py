"""Blobs in the run's own Redis: needs no other service, good for small and medium-sized models.

    put:  index "begun" ─► chunks ─► index "whole"          get: index ─► chunks, counted
    delete:                chunks ─► index

The index exists from the first chunk to the last, so that whatever a crash leaves is listed and can be deleted.

Blocks on Redis for a few seconds at most, then raises TransportError. Every command may be retried, since a name always
stands for the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from streamrl.crashpoints import crashpoint
from streamrl.errors import WeightsError, WireError
from streamrl.protocol.transport.connection import repeat
from streamrl.protocol.weights.format import check_blob_name, digest_of
from streamrl.protocol.wire.codec import fields_of, pack, unpack

if TYPE_CHECKING:
    import redis

    from streamrl.protocol.transport.keys import Keys

_CHUNK_BYTES = 8 << 20  # one large value would block the server for all other clients
_PATIENCE_S = 5.0  # for a lost connection; callers have longer timeouts of their own
_MAX_BLOB_BYTES = 1 << 40
_MAX_CHUNKS = 1 << 20  # each is requested separately


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    num_bytes: int
    chunk_bytes: int
    digest: bytes
    whole: bool  # every chunk was stored

    @property
    def num_chunks(self) -> int:
        return -(-self.num_bytes // self.chunk_bytes)


class RedisStore:
    def __init__(self, client: redis.Redis, keys: Keys, *, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._client = client
        self._ask = partial(repeat, client, give_up_after_s=_PATIENCE_S)
        self._keys = keys
        self._chunk_bytes = chunk_bytes

    def put(self, name: str, data: bytes) -> None:
        check_blob_name(name)
        digest = digest_of(data)
        there = self._index(name)
        if there is not None and there.digest != digest:
            raise WeightsError(f"blob {name} already exists with other bytes")
        if there is not None and there.whole:
            return
        # An unfinished blob keeps its chunk size: another would leave chunks that the index does not count.
        chunk_bytes = self._chunk_bytes if there is None else there.chunk_bytes
        index = _Index(num_bytes=len(data), chunk_bytes=chunk_bytes, digest=digest, whole=False)
        self._note(name, index)
        crashpoint("blob.begun")
        for chunk in range(index.num_chunks):
            piece = memoryview(data)[chunk * chunk_bytes : (chunk + 1) * chunk_bytes]
            self._ask("store a blob", partial(self._client.set, self._keys.blob(name, chunk), piece))
            crashpoint("blob.chunk")
        self._note(name, replace(index, whole=True))
        crashpoint("blob.stored")

    def get(self, name: str) -> bytes:
        index = self._whole(name)
        chunks: list[bytes] = []
        for chunk in range(index.num_chunks):
            data: Any = self._ask("read a blob", partial(self._client.get, self._keys.blob(name, chunk)))
            if len(data or b"") != min(index.chunk_bytes, index.num_bytes - chunk * index.chunk_bytes):
                raise WeightsError(f"blob {name} is not whole in Redis: chunk {chunk} of {index.num_chunks}")
            chunks.append(data)
        return b"".join(chunks)

    def part(self, name: str, place: slice) -> bytes:
        index = self._whole(name)
        start, stop = place.start, min(place.stop, index.num_bytes)
        found: list[bytes] = []
        while start < stop:
            chunk, begin = divmod(start, index.chunk_bytes)
            end = min(begin + stop - start, index.chunk_bytes)
            key = self._keys.blob(name, chunk)
            data: Any = self._ask("read a blob", partial(self._client.getrange, key, begin, end - 1))
            if len(data) != end - begin:
                raise WeightsError(f"blob {name} is not whole in Redis: chunk {chunk} of {index.num_chunks}")
            found.append(data)
            start += end - begin
        return b"".join(found)

    def delete(self, *names: str) -> None:
        for name in names:
            self._delete(name)

    def _delete(self, name: str) -> None:
        check_blob_name(name)
        index = self._index(name)
        if index is None:
            return
        for chunk in range(index.num_chunks):
            self._ask("delete a blob", partial(self._client.unlink, self._keys.blob(name, chunk)))
        crashpoint("blob.unlinked")
        self._ask("delete a blob", partial(self._client.hdel, self._keys.blobs, name))
        crashpoint("blob.deleted")

    def list(self, prefix: str = "") -> dict[str, int]:
        found: Any = self._ask("list blobs", partial(self._client.hgetall, self._keys.blobs))
        names = {name.decode(errors="replace"): packed for name, packed in found.items()}
        return {name: self._size(name, packed) for name, packed in sorted(names.items()) if name.startswith(prefix)}

    def _note(self, name: str, index: _Index) -> None:
        packed = pack({**fields_of(index), "whole": int(index.whole)})
        self._ask("store a blob", partial(self._client.hset, self._keys.blobs, name, packed))

    def _whole(self, name: str) -> _Index:
        check_blob_name(name)
        index = self._index(name)
        if index is None or not index.whole:
            raise WeightsError(f"blob {name} is not in Redis, or incomplete")
        return index

    def _index(self, name: str) -> _Index | None:
        packed: Any = self._ask("read a blob", partial(self._client.hget, self._keys.blobs, name))
        return None if packed is None else self._read(name, packed)

    def _size(self, name: str, packed: bytes) -> int:
        try:
            return self._read(name, packed).num_bytes
        except WeightsError:  # list it all the same
            return 0

    def _read(self, name: str, packed: bytes) -> _Index:
        try:
            with unpack(packed, max_bytes=1024) as f:
                index = _Index(
                    num_bytes=f.integer("num_bytes", low=0, high=_MAX_BLOB_BYTES),
                    chunk_bytes=f.integer("chunk_bytes", low=1, high=_MAX_BLOB_BYTES),
                    digest=f.blob("digest"),
                    whole=f.integer("whole", low=0, high=1) == 1,
                )
            if index.num_chunks > _MAX_CHUNKS:
                raise WireError(f"{index.num_chunks} chunks; the limit is {_MAX_CHUNKS}")
        except WireError as error:
            raise WeightsError(f"the index of blob {name} cannot be read: {error}") from None
        return index
