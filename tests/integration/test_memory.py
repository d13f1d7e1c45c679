"""A rank that loads a large model holds its own shard of it, and never the whole."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors

from tests.tiny_models import make_model

ROOT = Path(__file__).resolve().parents[2]


def num_parameters(folder: Path) -> int:
    with safetensors.safe_open(folder / "model.safetensors", framework="pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 - not a dict


@pytest.mark.long
def test_each_of_two_ranks_needs_less_memory_than_the_model(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    model = make_model(tmp_path / "model", hidden=768, layers=20, heads=12, kv_heads=12)
    tiny = make_model(tmp_path / "tiny")
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(f"--log-dir={tmp_path / 'logs'}", "-m", "tests.integration.memory_rank"),
            *(str(model), str(tiny), str(tmp_path / "grew")),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            # Else glibc keeps what gloo's threads free: twice the model, whatever the rank itself holds.
            "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
        },
        check=True,
        timeout=240,
    )
    whole = 4 * num_parameters(model)
    assert whole > 4 * 100e6
    peak = max(int(path.read_text()) for path in tmp_path.glob("grew-*"))
    record_property("figure", f"loading {whole / 1e6:.0f} MB at two ranks: {peak / whole:.2f} of it on each at most")
    assert peak < 0.8 * whole
