"""Detects vLLM's CPU build, and returns the environment for a process that imports it and forks others, including
engines. Imports neither vLLM nor torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

_PRELOAD = "LD_PRELOAD"


def is_cpu_build() -> bool:
    """Decide as vLLM does, without importing it."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return find_spec("vllm") is not None


def environment_of_import(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return variables read at process start or at the import of torch and vLLM, which a forked engine cannot set."""
    wanted = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    before = environment.get(_PRELOAD, "")
    if (library := _openmp()) is not None and "gomp" not in before:
        wanted[_PRELOAD] = ":".join(filter(None, [before, str(library)]))
    return wanted


def _openmp() -> Path | None:
    """Return torch's OpenMP library. vLLM loads it before anything else, so that threads bound to cores use it."""
    torch = find_spec("torch")
    roots = [Path(root) for root in (torch.submodule_search_locations or ())] if torch else []
    found = [
        path for root in roots for at in (root.parent / "torch.libs", root / "lib") for path in at.glob("libgomp*")
    ]
    return found[0] if found else None
