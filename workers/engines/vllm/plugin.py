"""Our vLLM plugin, loaded in each of vLLM's processes through the entry point `vllm.general_plugins`.

vLLM's engine runs in child processes that have not imported streamrl, so this runs there: it registers our
weight-transfer engine, ties the process to the life of its worker, keeps signals to the worker's group from it, records
why it did not start, and moves temporary files to a folder that is removed. Every vLLM on a machine with streamrl
installed calls `register`, so it imports nothing heavy and changes nothing for other users of vLLM.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from pathlib import Path

from streamrl import process
from streamrl.workers.engines.vllm.failure import record_failure

# Names shared between us and vLLM's processes.
WEIGHT_TRANSFER_BACKEND = "streamrl"
WORKER_EXTENSION = "streamrl.workers.proofs.read_back.ReadBackExtension"
READ_BACK = "streamrl_read_back"  # methods of the extension
PLACES = "streamrl_places"
PREPARE = "streamrl_prepare"
OWNER_VARIABLE = "STREAMRL_VLLM_OWNER"  # pid of the worker, which sets it before vLLM starts its processes
SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"  # vLLM's own variable: the folder of its sockets, private to this engine


def register() -> None:
    """Set up this process. vLLM calls it, possibly more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if WEIGHT_TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            WEIGHT_TRANSFER_BACKEND, "streamrl.workers.engines.vllm.loading.transfer", "MirrorWeightTransfer"
        )
    owner = os.environ.get(OWNER_VARIABLE)
    if owner is not None and owner != str(os.getpid()):
        _die_with(int(owner))
        leave_group_of(int(owner))
        record_failure(Path(os.environ[SOCKETS_VARIABLE]))
        keep_temporary_files_in(os.environ[SOCKETS_VARIABLE])


def _die_with(owner: int) -> None:
    """Die with the worker: one killed with -9 must not leave an engine that holds memory and cores."""
    process.die_with_parent()
    parent = multiprocessing.parent_process()  # of a rank: EngineCore, which may die while the worker lives on
    try:
        os.kill(owner, 0)
        died_before = parent is not None and not parent.is_alive()
    except ProcessLookupError:
        died_before = True
    if died_before:  # before die_with_parent took effect
        os.kill(os.getpid(), signal.SIGKILL)


def leave_group_of(owner: int) -> None:
    """Leave the worker's process group, and its terminal. A signal to the group, such as Ctrl-C, asks the worker to end
    in order, and it still needs its engine: vLLM, told to end, aborts all samples at once."""
    if os.getpgrp() == os.getpgid(owner):
        os.setsid()


def keep_temporary_files_in(folder: str) -> None:
    """Redirect `tempfile`, but not through TMPDIR: reward functions would inherit it, and they outlive this engine."""
    # Later engines share torch's compile cache.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.geteuid()}")
    tempfile.tempdir = folder
