"""Host memory that a GPU copies to and from at the speed of its bus: made elsewhere, and registered with CUDA here.

torch's own pinned memory is rounded up to a power of two, 16 GB for 8.1, and cannot be a file that others patch. So
the learner's copy of the weights and the workers' mirror are registered as they are. Pages stay locked in memory until
`release`; where a limit forbids that (ulimit -l, a container's), copies go on as slowly as before, and a line says so.

The runtime is handed in, `torch.cuda.cudart()` in earnest: nothing here imports torch. No GPU has run this.
"""

from __future__ import annotations

from typing import Any, Protocol

import structlog

log = structlog.get_logger(__name__)

_SUCCESS = 0
_DEFAULT = 0  # cudaHostRegisterDefault


class CudaRuntime(Protocol):
    """Both answer with a cudaError_t."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int, /) -> Any: ...

    def cudaHostUnregister(self, address: int, /) -> Any: ...


class Pinned:
    """At most one stretch of memory at a time."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._address: int | None = None

    def hold(self, address: int, num_bytes: int) -> bool:
        """This stretch instead of the one before; False where it stays as it is."""
        self.release()
        code = int(self._runtime.cudaHostRegister(address, num_bytes, _DEFAULT))
        if code != _SUCCESS:
            log.warning("memory not pinned", num_bytes=num_bytes, cuda_error=code, remedy="raise `ulimit -l`")
            return False
        self._address = address
        return True

    def release(self) -> None:
        """Before the memory goes."""
        if self._address is not None:
            self._runtime.cudaHostUnregister(self._address)
            self._address = None


class CudaRuntimeDouble:
    """Notes what is pinned; refuses what is larger than its limit."""

    def __init__(self, *, most_bytes: int = 1 << 62) -> None:
        self.pinned: dict[int, int] = {}  # bytes by address
        self._most_bytes = most_bytes

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int, /) -> int:
        assert flags == _DEFAULT
        assert address not in self.pinned
        if num_bytes > self._most_bytes:
            return 2  # cudaErrorMemoryAllocation
        self.pinned[address] = num_bytes
        return _SUCCESS

    def cudaHostUnregister(self, address: int, /) -> int:
        del self.pinned[address]
        return _SUCCESS
