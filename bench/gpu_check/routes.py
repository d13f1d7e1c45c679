"""A mixture of experts trained without its engine's routes, and by them (`algorithm.routing_replay`).

Each token that the learner reads must have its route, and with replay engine and learner must be closer than without.
vLLM captures routes on GPUs only; without one the transformers engine does.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

from bench.gpu_check.rows import Row, Scale
from bench.gpu_check.runs import running
from bench.routes import write_model
from streamrl.errors import ResourceError
from streamrl.held_folders import scratch_folder

_STEPS = 5
_LIMIT_S = 200.0  # of one run
_APART = 0.5  # as `bench routes`
_CONFIG = f"""
name: mixture
model: {{dtype: bfloat16}}
data: {{max_prompt_tokens: 16}}
sampling: {{num_samples: 8, max_tokens: 48, min_tokens: 24}}
rewards: {{exact: {{type: function, target: exact_match}}}}
algorithm: {{drop_zero_variance: false, mask_unfinished: false}}
optimizer: {{lr: 1e-5, schedule: constant, warmup_steps: 0}}
training: {{groups_per_step: 4, max_steps: {_STEPS}, micro_batch_tokens: 2048}}
lag: {{max_steps: 0}}
validation: {{every_steps: 0, at_start: false, at_end: false}}
"""


def check(scale: Scale) -> Iterator[Row]:
    apart = {}
    for replay in ("compare", "rollout"):
        with scratch_folder() as folder:
            _write(folder)
            _train(folder, replay, engine="transformers" if scale.is_reduced else "vllm")
            metrics = _metrics(folder / "runs" / "mixture" / "metrics.jsonl")
        yield Row(what=f"{replay}: steps made", value=len(metrics["router/routes_missing"]), unit="", goal=_STEPS)
        yield Row(
            what=f"{replay}: routes missing",
            value=max(metrics["router/routes_missing"]),
            unit="",
            goal=0,
            better="lower",
        )
        yield Row(what=f"{replay}: routes that differ", value=max(metrics["router/routes_differ"]), unit="")
        apart[replay] = sum(metrics["policy/fresh_mismatch"]) / len(metrics["policy/fresh_mismatch"])
        yield Row(what=f"{replay}: engine and learner apart", value=apart[replay], unit="nats")
    yield Row(
        what="apart with replay / without",
        value=apart["rollout"] / apart["compare"],
        unit="x",
        goal=_APART,
        better="lower",
    )


def _write(folder: Path) -> None:
    write_model(folder / "model", seed=1)
    rows = [{"text": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(_CONFIG)


def _train(folder: Path, replay: str, *, engine: str) -> None:
    settings = {
        "dir": folder / "runs",
        "model.path": folder / "model",
        "data.train": folder / "train.jsonl",
        "algorithm.routing_replay": replay,
        "worker.engine": engine,
    }
    with running(folder / "run.yaml", settings) as run:
        try:
            code = run.wait(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise ResourceError(f"the run with routing_replay={replay} took longer than {_LIMIT_S:g} s") from None
    if code:
        raise ResourceError(f"the run with routing_replay={replay} ended with code {code}")


def _metrics(path: Path) -> dict[str, list[float]]:
    """Return the values of each metric, by step."""
    found: dict[str, list[float]] = {}
    for line in path.read_text().splitlines():
        for name, value in json.loads(line).items():
            if isinstance(value, int | float):
                found.setdefault(name, []).append(value)
    return found
