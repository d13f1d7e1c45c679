"""What the fork server of engines has imported before it forks one (`workers.engines.vllm_forked`), and how it behaves.

Imported by that server alone, and for its effects. Nothing here may start a thread or touch a device: neither survives
a fork. The server dies with the worker, and its engines with it, each by the kernel's word.
"""

from __future__ import annotations

import gc
import os
import signal
from importlib import import_module

from streamrl import process
from streamrl.workers.engines.vllm_forked import ENGINE
from streamrl.workers.engines.vllm_plugin import OWNER_VARIABLE

process.die_with_parent()
if os.getppid() != int(os.environ[OWNER_VARIABLE]):  # it died before we asked
    os.kill(os.getpid(), signal.SIGKILL)
for module in ENGINE:
    import_module(module)
import_module("vllm.utils.system_utils").set_process_title("ForkServer")  # as `ps` shows it: VLLM::ForkServer
gc.collect()
gc.freeze()  # or the first collection in an engine would copy every page that they share
