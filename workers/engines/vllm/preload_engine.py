"""What the engines' fork server imports before it forks one (`workers.engines.vllm.forked`), and how it behaves.

Imported only by that server, for its side effects. Nothing here may start a thread or touch a device: neither survives
a fork. The kernel kills the server with its worker, and the engines with the server, so a signal to the worker's group
must not end the server.
"""

from __future__ import annotations

import gc
import os
import signal
from importlib import import_module

from streamrl import process
from streamrl.workers.engines.vllm.forked import ENGINE
from streamrl.workers.engines.vllm.plugin import OWNER_VARIABLE, leave_group_of

process.die_with_parent()
if os.getppid() != int(os.environ[OWNER_VARIABLE]):  # it died before die_with_parent took effect
    os.kill(os.getpid(), signal.SIGKILL)
leave_group_of(os.getppid())
for module in ENGINE:
    import_module(module)
import_module("vllm.utils.system_utils").set_process_title("ForkServer")  # `ps` shows VLLM::ForkServer
gc.collect()
gc.freeze()  # else an engine's first collection would copy every shared page
