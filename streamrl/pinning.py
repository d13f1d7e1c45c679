"""Pins existing host memory, so that a GPU copies to and from it at bus speed: registers it with CUDA.

torch's own pinned memory is rounded up to a power of two (16 GB for 8.1), and cannot be a file that others patch. So
the learner's copy of the weights and the workers' mirror are registered in place. Pages stay locked in memory until
`release`, or until the tensor is gone: CUDA must not keep an address that the system gives to other memory, since
copies from there then fail ("resource already mapped", seen on an H200). If registering is refused (ulimit -l, a file
outside of memory file systems), copies stay slow, and a warning says so.

CUDA keeps the error of a refused call, and torch raises it at the next kernel launch, where it looks like an error of
the model. So after a refusal `launch`, any kernel, is called to clear it.

The caller passes `torch.cuda.cudart()` and the kernel: nothing here imports torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import structlog

log = structlog.get_logger(__name__)

_SUCCESS = 0
_DEFAULT = 0  # cudaHostRegisterDefault
_REMEDY = "raise `ulimit -l`; a worker's mirror has to be in /dev/shm"


class CudaRuntime(Protocol):
    """Both functions return a cudaError_t."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int, /) -> Any: ...

    def cudaHostUnregister(self, address: int, /) -> Any: ...


class Memory(Protocol):
    """A tensor on the host."""

    @property
    def nbytes(self) -> int: ...

    def data_ptr(self) -> int: ...


class Pinned:
    """Pins the memory of at most one tensor at a time."""

    def __init__(self, runtime: CudaRuntime, launch: Callable[[], object]) -> None:
        """`launch`: runs any kernel on this process's GPU, which raises an error that an earlier call left."""
        self._runtime, self._launch = runtime, launch
        self._unpin: weakref.finalize[[int], Memory] | None = None

    def hold(self, memory: Memory) -> bool:
        """Pin this memory instead of the previous one, for as long as this very object lives; False if it stays
        unpinned."""
        self.release()
        address = memory.data_ptr()
        code = int(self._runtime.cudaHostRegister(address, memory.nbytes, _DEFAULT))
        if code != _SUCCESS:
            with suppress(RuntimeError):
                self._launch()
            log.warning("memory not pinned", num_bytes=memory.nbytes, cuda_error=code, remedy=_REMEDY)
            return False
        self._unpin = weakref.finalize(memory, self._runtime.cudaHostUnregister, address)
        self._unpin.atexit = False  # the driver ends with the process
        return True

    def release(self) -> None:
        """Unpin."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None


class CudaRuntimeDouble:
    """Records what is pinned; refuses ranges above its limit, and keeps the error for the next kernel as CUDA does."""

    def __init__(self, *, most_bytes: int = 1 << 62) -> None:
        self.pinned: dict[int, int] = {}  # bytes by address
        self._most_bytes = most_bytes
        self._refused = False

    def launch(self) -> None:
        """A kernel launch: torch checks for the last error."""
        refused, self._refused = self._refused, False
        if refused:
            raise RuntimeError("CUDA error: out of memory")

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int, /) -> int:
        assert flags == _DEFAULT
        assert address not in self.pinned
        if num_bytes > self._most_bytes:
            self._refused = True
            return 2  # cudaErrorMemoryAllocation
        self.pinned[address] = num_bytes
        return _SUCCESS

    def cudaHostUnregister(self, address: int, /) -> int:
        del self.pinned[address]
        return _SUCCESS
