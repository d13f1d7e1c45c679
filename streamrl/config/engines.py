"""The engines that `worker.engine` names; each is imported only by the worker that runs it.

An engine is a class made of `EngineSettings`, in a module of its own behind the seam of `workers.engines.base`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Entry(NamedTuple):
    target: str  # module:class
    package: str | None = None  # what it needs beside the worker's own packages
    extra: str = ""  # the extra of streamrl that brings the package
    or_extra: str | None = None  # another one that does


ENGINES: Mapping[str, Entry] = {
    "vllm": Entry(
        "streamrl.workers.engines.vllm_engine:VllmEngine", package="vllm", extra="worker-cpu", or_extra="worker-gpu"
    ),
    "transformers": Entry("streamrl.workers.engines.transformers_engine:TransformersEngine"),
}
