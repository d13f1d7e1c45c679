"""A further host's copy of the weights, kept at exactly the version that the first host requests.

    bring ─► remove tag ─► patch in a thread, compare digests ─► write tag: ranks load it (`vllm.loading.host_mirror`)

Blocks on the store, and on Redis for manifests; the first host bounds the wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from streamrl.errors import WeightsError
from streamrl.files import write_durably
from streamrl.protocol.weights.catchup import way_to
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.manifest_bytes import decode_manifest
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.stores import Blobs
from streamrl.workers.engines.vllm.loading.host_mirror import tag_of


class Copy:
    def __init__(
        self,
        *,
        look_up: Callable[[int], Awaitable[bytes | None]],  # returns a version's manifest
        mirror: Mirror,
        reading: Callable[[Sequence[Manifest]], Blobs],
        num_read: Callable[[], int],  # bytes so far
    ) -> None:
        self._look_up, self._mirror, self._reading = look_up, mirror, reading
        self._num_read = num_read
        self._tag = tag_of(mirror.path)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mirror")
        self._patching: asyncio.Future[None] | None = None
        self._turn = asyncio.Lock()

    async def bring(self, version: int, *, refetch: bool) -> None:
        """Bring the copy to this version. Calls run one at a time, and wait for a patch that a cancelled call left."""
        async with self._turn:
            await self._bring(version, refetch=refetch)

    async def _bring(self, version: int, *, refetch: bool) -> None:
        if self._patching is not None:
            await asyncio.wait([self._patching])
        if refetch or self._mirror.version > version:
            self._tag.unlink(missing_ok=True)
            self._mirror.close()
        is_patched = self._mirror.version == version
        if is_patched and self._is_tagged(version):
            return
        self._tag.unlink(missing_ok=True)
        path = [] if is_patched else await self._path_to(version)

        def patch() -> None:
            if path:
                self._mirror.apply_path(path, self._reading(path))
            write_durably(self._tag, str(version).encode())

        self._patching = asyncio.get_running_loop().run_in_executor(self._thread, patch)
        await asyncio.shield(self._patching)

    def num_read(self) -> int:
        return self._num_read()

    def _is_tagged(self, version: int) -> bool:
        return self._tag.exists() and self._tag.read_text() == str(version)

    async def _path_to(self, version: int) -> list[Manifest]:
        encoded = await self._look_up(version)
        if encoded is None:
            raise WeightsError("its manifest is no longer in Redis: a newer version has replaced it")
        return await way_to(decode_manifest(encoded), self._look_up, have=self._mirror.version)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._tag.unlink(missing_ok=True)
        self._mirror.close()
