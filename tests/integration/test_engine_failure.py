"""An engine that cannot start: vLLM's front end learns that its processes failed, and its user learns why."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.tiny_models import make_model

ROOT = Path(__file__).parents[2]


def test_the_reason_is_that_of_the_process_that_failed(tmp_path: Path) -> None:
    """As on a GPU with too little memory left."""
    model, arguments = make_model(tmp_path / "model"), json.dumps({"kv_cache_memory_bytes": 1})
    command = [sys.executable, "-m", "tests.integration.lone_engine", str(model), arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("streamrl.errors.EngineError: ")]
    assert len(errors) == 1
    assert errors[0].startswith("streamrl.errors.EngineError: vLLM did not start: ValueError: No available memory for")
    assert "root cause above" not in errors[0]
    assert errors[0].endswith(
        "; what counts here is worker.engine_args.kv_cache_memory_bytes, which is 1: raise it, or make the run's "
        "sequences shorter"
    )
