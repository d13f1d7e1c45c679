"""The engines that `worker.engine` can name; each is imported only by a worker that runs it.

An engine is a class constructed from `EngineSettings`, in its own module behind the interface in
`workers.engines.base`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class EngineEntry(NamedTuple):
    target: str  # module:class
    package: str | None = None  # required in addition to the worker's own packages
    extra: str = ""  # the extra of streamrl that installs the package
    or_extra: str | None = None  # another extra that does


ENGINES: Mapping[str, EngineEntry] = {
    "vllm": EngineEntry(
        "streamrl.workers.engines.vllm.engine:VllmEngine", package="vllm", extra="worker-cpu", or_extra="worker-gpu"
    ),
    "transformers": EngineEntry("streamrl.workers.engines.transformers_engine:TransformersEngine"),
}
