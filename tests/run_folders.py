"""Folders of ended runs as their learners and launchers leave them: written by hand, with a configuration whose Redis
is gone."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

from streamrl.config.load import dump_config, load_config
from streamrl.versions import make_version

NUM_STEPS = 12
GONE = 2**22 + 1  # a process id that Linux never assigns


def make_folder(root: Path, name: str, state: str, *, error: str = "", slope: float = 1.0, **settings: Any) -> Path:
    """`state`: the learner's last; "running" with a dead process means a crash."""
    words = [f"{key}={value}" for key, value in settings.items()]
    loaded = load_config("conf/reinforce.yaml", [f"name={name}", f"dir={root}", "training.max_steps=12", *words])
    folder = loaded.config.folder
    (folder / "terms").mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(loaded.config))
    (folder / "run.json").write_text(json.dumps({"run_uid": f"uid-{name}"}))
    told = {"state": state, "term": 1, "at": time.time() - 60, "error": error}
    told |= {"host": socket.gethostname(), "pid": GONE, "process_began": "1"}
    (folder / "state.json").write_text(json.dumps(told))
    lines = [*map(json.dumps, _records(slope)), '{"step": 13, "ter']  # truncated by a crash
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(_rollout(step)) + "\n" for step in range(1, NUM_STEPS)))
    if state == "finished":
        summary = {"name": name, "state": state, "issued": 60, "trained": 48, "lost": 0, "twice": 0, "seconds": 9.5}
        (folder / "summary.json").write_text(json.dumps(summary | {"export": str(folder / "export")}))
    return folder


def _records(slope: float) -> list[dict[str, float]]:
    steps = [_record(step, slope) for step in range(1, NUM_STEPS + 1)]
    held_out = {"val_rollouts/rewards": 0.4 * slope, "val_rollouts/rewards/exact": 0.4 * slope}
    return [*steps, {"step": 6, "term": 1, "at": time.time() - 100, **held_out}]


def _record(step: int, slope: float) -> dict[str, float]:
    return {
        "step": step,
        "term": 1,
        "at": time.time() - 200 + 10 * step,
        "train_rollouts/rewards": slope * step / NUM_STEPS,
        "train_rollouts/response_lengths": 50.0,
        "train_rollouts/rollout_size": 16.0,
        "stream/groups_trained": 4.0 * step,
        "stream/groups_dropped": 1.0,
        "lag/mean": 1.5,
        "lag/max": 3.0,
        "timers/step": 2.0,
        "timers/train": 1.0,
        "timers/rollout": 0.5,
        "weights/version": make_version(1, step),
    }


def _rollout(step: int) -> dict[str, Any]:
    spans = [{"version": f"1.{step - 1}", "step": step - 1, "start": 0, "end": 3}]
    sample = {
        "reward": 0.5,
        "rewards": {"exact": 0.5},
        "finish_reason": "stop",
        "spans": spans,
        "text": f"it is {step}",
    }
    of_group = {"ticket": 100 + step, "run_uid": "uid", "worker": "w", "attempt": 0, "error": ""}
    return {"id": f"{step}-{100 + step}", "at": 1.0, "step": step, "term": 1, **of_group} | {
        "num_failed_samples": 0,
        "generate_s": 0.1,
        "reward_s": 0.1,
        "prompt": f"what is {step}?",
        "samples": [sample, {**sample, "reward": 1.0}],
    }
