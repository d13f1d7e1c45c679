"""Pins existing host memory, so that a GPU copies to and from it at bus speed: registers it with CUDA.

torch's own pinned memory is rounded up to a power of two (16 GB for 8.1), and cannot be a file that others patch. So
the learner's copy of the weights and the workers' mirror are registered in place. Pages stay locked in memory until
`release`; if a limit forbids that (ulimit -l, a container's), copies stay slow, and a warning says so.

The CUDA runtime is passed in, in production `torch.cuda.cudart()`: nothing here imports torch. No GPU has run this.
"""

from __future__ import annotations

from typing import Any, Protocol

import structlog

log = structlog.get_logger(__name__)

_SUCCESS = 0
_DEFAULT = 0  # cudaHostRegisterDefault


class CudaRuntime(Protocol):
    """Both functions return a cudaError_t."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int, /) -> Any: ...

    def cudaHostUnregister(self, address: int, /) -> Any: ...


class Pinned:
    """Pins at most one memory range at a time."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._address: int | None = None

    def hold(self, address: int, num_bytes: int) -> bool:
        """Pin this range instead of the previous one; False if it stays unpinned."""
        self.release()
        code = int(self._runtime.cudaHostRegister(address, num_bytes, _DEFAULT))
        if code != _SUCCESS:
            log.warning("memory not pinned", num_bytes=num_bytes, cuda_error=code, remedy="raise `ulimit -l`")
            return False
        self._address = address
        return True

    def release(self) -> None:
        """Unpin; call this before freeing the memory."""
        if self._address is not None:
            self._runtime.cudaHostUnregister(self._address)
            self._address = None


class CudaRuntimeDouble:
    """Records what is pinned; refuses ranges above its limit."""

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
