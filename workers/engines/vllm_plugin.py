"""What vLLM loads in each of its own processes, through the entry point `vllm.general_plugins`.

vLLM's engine lives in child processes that know nothing of ours, so what must happen there happens here: our
weight-transfer engine is made known by name, the process is tied to the worker that wanted it, and its temporary files
lie where they are removed. Every vLLM on a machine with streamrl installed calls `register`, so it imports nothing
heavy and does nothing that others could feel.
"""

from __future__ import annotations

import os
import signal
import tempfile

from streamrl import process

# The names by which we and vLLM's own processes find each other.
WEIGHT_TRANSFER_BACKEND = "streamrl"
WORKER_EXTENSION = "streamrl.workers.proofs.read_back.ReadBackExtension"
READ_BACK = "streamrl_read_back"  # its methods
PLACES = "streamrl_places"
PREPARE = "streamrl_prepare"
OWNER_VARIABLE = "STREAMRL_VLLM_OWNER"  # pid of the worker, set by it before vLLM starts its processes
SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"  # vLLM's own: where its processes meet; of this engine alone


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
    process.die_with_parent()
    try:
        os.kill(owner, 0)
    except ProcessLookupError:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def _keep_temporary_files_in(folder: str) -> None:
    """Not by TMPDIR: the worker's reward functions would inherit it, and outlive this engine."""
    # What torch compiles is for the next engine too.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.geteuid()}")
    tempfile.tempdir = folder
