"""Prompts that a library makes: tasks of reasoning-gym, games of textarena. Made once, and kept as a file.

    ~/.cache/streamrl/made/chain_sum-DIGEST.jsonl     the digest is of the library's version and of all settings

A process of its own makes them (`making`): it draws the same on every machine, and keeps to itself what the library
imports.
Blocks for as long as the library takes, and gives up where it makes no item for minutes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash

from streamrl.data.dataset import BETWEEN_SEEDS, Dataset
from streamrl.data.making import FAILED, STALL_S
from streamrl.errors import DataError
from streamrl.extras import need
from streamrl.files import check_writable, write_durably

_FORMAT = 1  # of the rows; another number makes them anew


def made_file(dataset: Dataset, key: str) -> Path:
    """Where the rows lie; `key` is the setting that named them, for errors."""
    library = dataset.source
    need(f"{key} = {getattr(dataset, library)!r}", library, extra=library.replace("_", "-"))
    wanted = _wanted(dataset)
    digest = xxhash.xxh3_64_hexdigest(json.dumps([_FORMAT, version(library), wanted], sort_keys=True).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamrl" / "made"
    path = cache / f"{wanted['name']}-{digest}.jsonl"
    if not path.exists():
        rows = _make(wanted, key)
        check_writable(cache, what=f"{key}, the folder that keeps what was made (XDG_CACHE_HOME moves it)")
        cache.mkdir(parents=True, exist_ok=True)
        write_durably(path, rows)
    return path


def _wanted(dataset: Dataset) -> dict[str, Any]:
    return {
        "library": dataset.source,
        "name": getattr(dataset, dataset.source),
        "size": dataset.size,
        "seed": dataset.seed * BETWEEN_SEEDS,
        "level": dataset.level,
        "options": dataset.options,
        "asks": dataset.prompt is None,
    }


def _make(wanted: dict[str, Any], key: str) -> bytes:
    # Some tasks draw from sets, whose order is the interpreter's: without a seed for it each process has another.
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    with tempfile.TemporaryDirectory(prefix="streamrl-made-") as folder:
        path = Path(folder) / "rows"
        told = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "streamrl.data.making", str(path)],
            input=json.dumps(wanted),
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            env=environment,
        )
        if told.returncode:
            raise DataError(f"{key} = {wanted['name']!r}: {_why(told)}")
        return path.read_bytes()


def _why(told: subprocess.CompletedProcess[str]) -> str:
    if told.returncode == -signal.SIGALRM:
        return f"no item came in {STALL_S} s; take another level, or options that make it easier"
    return told.stdout.strip() if told.returncode == FAILED else f"its process ended with status {told.returncode}"
