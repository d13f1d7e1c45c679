"""vLLM's build for CPUs: whether it is installed, and in which environment a process imports it from which others, its
engine too, are forked. Imports neither vLLM nor torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

_PRELOAD = "LD_PRELOAD"


def is_cpu_build() -> bool:
    """As vLLM finds it out, without an import of vLLM."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return find_spec("vllm") is not None


def environment_of_import(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What is read as the process begins, and as torch and vLLM are imported: that is over when an engine is forked."""
    wanted = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    before = environment.get(_PRELOAD, "")
    if (library := _openmp()) is not None and "gomp" not in before:
        wanted[_PRELOAD] = ":".join(filter(None, [before, str(library)]))
    return wanted


def _openmp() -> Path | None:
    """torch's, which vLLM loads before anything else, so that threads which are bound to cores find theirs."""
    torch = find_spec("torch")
    roots = [Path(root) for root in (torch.submodule_search_locations or ())] if torch else []
    found = [
        path for root in roots for at in (root.parent / "torch.libs", root / "lib") for path in at.glob("libgomp*")
    ]
    return found[0] if found else None
