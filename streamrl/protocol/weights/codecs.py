"""Chooses the delta codec: numpy passes or, for a large model, kernels compiled before the first delta.

The kernels cost half a second of imports and, the first time on a machine, some seconds of compiling: more than a small
model's deltas ever cost. A large model's first anchor announces that deltas will follow: from then on a thread compiles
beside whatever is done with the anchor. The first caller that needs the kernels blocks until they are ready.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import structlog

from streamrl.protocol.weights.sparse import Codec, InPasses

_WORTH_BYTES = 64 << 20  # of tensors: a delta of this size becomes some 30 ms cheaper

log = structlog.get_logger(__name__)


class Codecs:
    """The codec of one encoder or mirror."""

    def __init__(self) -> None:
        self._passes = InPasses()
        self._compiled: Future[Codec] | None = None

    def expect(self, num_bytes: int) -> None:
        """Prepare for deltas of tensors with this many bytes."""
        if self._compiled is None and num_bytes >= _WORTH_BYTES:
            thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kernels")
            self._compiled = thread.submit(_compiled)
            thread.shutdown(wait=False)

    def get(self) -> Codec:
        return self._passes if self._compiled is None else self._compiled.result()


def _compiled() -> Codec:
    try:
        from streamrl.protocol.weights.kernels import Compiled  # numba
    except ImportError as error:  # not installed, or not compatible with this numpy
        log.info("deltas_without_kernels", reason=str(error))
        return InPasses()
    return Compiled()
