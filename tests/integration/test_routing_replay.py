"""A tiny mixture of experts, trained end to end by `streamrl up`: by the transformers engine's routes, and on vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_families import make_family

CONFIG = """
name: mixture
dir: runs
model: {path: model, dtype: bfloat16}
data: {train: train.jsonl, max_prompt_tokens: 16}
sampling: {num_samples: 4, max_tokens: 24, min_tokens: 8}
rewards: {exact: {type: function, target: exact_match}}
algorithm: {routing_replay: rollout, drop_zero_variance: false, mask_unfinished: false}
optimizer: {lr: 1e-4, schedule: constant, warmup_steps: 0}
training: {groups_per_step: 4, max_steps: 5, micro_batch_tokens: 256}
lag: {max_steps: 1}
checkpoint: {every_steps: 2}
validation: {every_steps: 0, at_start: false, at_end: false}
worker: {engine: transformers, threads: 1, grace_s: 2.0}
learner: {threads: 1}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    changes = {"num_hidden_layers": 4, "num_experts": 16, "moe_intermediate_size": 64}
    make_family(tmp_path / "model", "qwen3_moe", scale=0.2, **changes)
    rows = [{"text": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def streamrl(folder: Path, *words: str) -> dict[str, Any]:
    """The last line that the command says."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "streamrl.ops.cli.main", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="rollout", marks=pytest.mark.long),  # by one rank what the last does by two
        pytest.param(
            ("algorithm.routing_replay=first_pass", "algorithm.reinforce_epochs=2", "learner.processes=2"),
            id="first pass, two ranks",
        ),
        pytest.param(
            ("learner.processes=2", "learner.layout.experts=2", "model.router_balance=0.001"),
            id="rollout, experts over two ranks, balanced",
        ),
    ],
)
def test_a_mixture_trains_by_routes_and_loses_nothing(folder: Path, overrides: tuple[str, ...]) -> None:
    summary = streamrl(folder, "up", "run.yaml", "--json", *overrides)
    assert summary["state"] == "finished"
    assert summary["trained"] == 20
    assert (summary["lost"], summary["twice"], summary["dead"], summary["clean"]) == (0, 0, 0, True)
    steps = [json.loads(line) for line in (folder / "runs" / "mixture" / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "train_optim/optim_step" in step]
    assert len(steps) == 5
    assert all(step["router/routes_missing"] == 0 for step in steps), "each token that was read has its route"
    assert all(0 <= step["router/routes_differ"] < 0.3 for step in steps)
    assert any(step["router/routes_differ"] > 0 for step in steps)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="one rank", marks=pytest.mark.long),
        pytest.param(("learner.processes=2", "learner.layout.experts=2"), id="experts over two ranks"),
    ],
)
def test_vllm_serves_a_mixture_as_it_is_trained(folder: Path, overrides: tuple[str, ...]) -> None:
    """In float32, where both sides choose the same experts: whatever else they would serve shows in the mismatch."""
    of_vllm = ("worker.engine=vllm", "model.dtype=float32", "weights.dtype=float32", "algorithm.routing_replay=none")
    apart = ("optimizer.lr=0.003", "lag.max_steps=0")
    summary = streamrl(folder, "up", "run.yaml", "--json", *of_vllm, *apart, *overrides)
    assert summary["state"] == "finished"
    assert summary["trained"] == 20
    assert (summary["lost"], summary["twice"], summary["dead"], summary["clean"]) == (0, 0, 0, True)
    steps = [json.loads(line) for line in (folder / "runs" / "mixture" / "metrics.jsonl").read_text().splitlines()]
    fresh = [step["policy/fresh_mismatch"] for step in steps if "policy/fresh_mismatch" in step]
    assert fresh
    assert max(fresh) < 1e-3
