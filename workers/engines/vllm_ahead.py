"""What a worker and its engine import of vLLM, for a process that both are forked from (`streamrl.demos.forking`).

Imported there alone, and for its effects. As in the engine's own server (`vllm_imported`), nothing here may start a
thread.
"""

from __future__ import annotations

import os
from importlib import import_module

from streamrl.workers.engines.vllm_forked import ENGINE
from streamrl.workers.engines.vllm_start import FRONT_END, quiet

os.environ.update(quiet())
for module in (*ENGINE, FRONT_END, "streamrl.workers.service"):
    import_module(module)
