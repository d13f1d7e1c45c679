"""What vLLM loads in each of its own processes, through the entry point `vllm.general_plugins`.

vLLM's engine lives in child processes that know nothing of ours, so what must happen there happens here: our
weight-transfer engine is made known by name, the process is tied to the worker that wanted it, and its temporary files
lie where they are removed. Every vLLM on a machine with streamrl installed calls `register`, so it imports nothing
heavy and does nothing that others could feel.
"""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile

from streamrl.workers.engines.vllm_names import OWNER_VARIABLE, SOCKETS_VARIABLE, WEIGHT_TRANSFER_BACKEND

_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Called by vLLM, possibly more than once in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if WEIGHT_TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            WEIGHT_TRANSFER_BACKEND, "streamrl.workers.engines.vllm_weights", "MirrorWeightTransfer"
        )
    owner = os.environ.get(OWNER_VARIABLE)
    if owner is not None and owner != str(os.getpid()):
        _die_with(int(owner))
        _keep_temporary_files_in(os.environ[SOCKETS_VARIABLE])


def _die_with(owner: int) -> None:
    """A worker killed with -9 must not leave an engine that keeps the memory and the cores."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.kill(owner, 0)
    except ProcessLookupError:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def _keep_temporary_files_in(folder: str) -> None:
    """Not by TMPDIR: the worker's reward functions would inherit it, and outlive this engine."""
    # What torch compiles is for the next engine too.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.geteuid()}")
    tempfile.tempdir = folder
