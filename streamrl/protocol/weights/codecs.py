"""Who codes deltas: passes of numpy, or, where a model is large, kernels that are compiled before the first delta.

Half a second of imports and, the first time on a machine, some seconds of compiling are more than a small model's
deltas ever cost. Of a large model deltas are to be expected when there is an anchor: from then on a thread compiles,
beside whatever is done with the anchor. Who needs the kernels first waits for it.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import structlog

from streamrl.protocol.weights.sparse import Codec, InPasses

_WORTH_BYTES = 64 << 20  # of tensors: a delta of so many costs some 30 ms less

log = structlog.get_logger(__name__)


class Codecs:
    """Of one encoder or mirror."""

    def __init__(self) -> None:
        self._passes = InPasses()
        self._compiled: Future[Codec] | None = None

    def expect(self, num_bytes: int) -> None:
        """There will be deltas of so many bytes of tensors."""
        if self._compiled is None and num_bytes >= _WORTH_BYTES:
            thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kernels")
            self._compiled = thread.submit(_compiled)
            thread.shutdown(wait=False)

    def get(self) -> Codec:
        return self._passes if self._compiled is None else self._compiled.result()


def _compiled() -> Codec:
    try:
        from streamrl.protocol.weights.kernels import Compiled  # numba
    except ImportError as error:  # not installed, or not for this numpy
        log.info("deltas_without_kernels", reason=str(error))
        return InPasses()
    return Compiled()
