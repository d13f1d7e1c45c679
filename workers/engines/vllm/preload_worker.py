"""Imports what a worker and its engine need of vLLM, in a process that both fork from (`streamrl.ops.launch.forking`).

Imported only there, for its side effects. As in the engine's fork server (`preload_engine`), nothing here may start a
thread.
"""

from __future__ import annotations

import os
from importlib import import_module

from streamrl.workers.engines.vllm.forked import ENGINE
from streamrl.workers.engines.vllm.start import FRONT_END
from streamrl.workers.engines.vllm.variables import quiet

os.environ.update(quiet())
for module in (*ENGINE, FRONT_END, "streamrl.workers.service"):
    import_module(module)
