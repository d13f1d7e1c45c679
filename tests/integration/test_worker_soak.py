"""A worker at full load for minutes holds no more memory, tasks, threads or descriptors at the end than at the start.

What is compared is the worker at rest, all its processes, after a warm-up and after the load; `--soak-s` says for how
long that goes on.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
import redis

from streamrl.config import schema
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.snapshot import snapshot
from tests.helpers import wait_until
from tests.made_up_learner import MadeUpLearner
from tests.tiny_models import make_model
from tests.worker_processes import Workers, descendants

_LARGEST_GROWTH = 0.03
_WARM_UP_SHARE = 0.1
_SHORTEST_WARM_UP_S = 20.0
_UPDATE_EVERY_S = 2.0
_BATCH = 64
_AHEAD = 4  # batches of tickets that are out at any time
_LOOKS = 20  # at a worker at rest, of which tasks and descriptors breathe with its waits and with who asks it

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:transformers.*"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Of a worker and all processes below it."""

    rss_kb: int
    counts: dict[str, int]  # processes, threads, descriptors, tasks

    @classmethod
    def of(cls, pid: int, address: str) -> Self:
        pids = {pid, *descendants(pid)}
        return cls(
            rss_kb=sum(_rss_kb(one) for one in pids),
            counts={
                "tasks": _figure(address, "tasks"),
                "processes": len(pids),
                "threads": sum(len(os.listdir(f"/proc/{one}/task")) for one in pids),
                "descriptors": sum(len(os.listdir(f"/proc/{one}/fd")) for one in pids),
            },
        )


def _rss_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def _figure(address: str, name: str) -> int:
    text = httpx.get(f"http://{address}/metrics").text
    return int(float(text.partition(f"\nstreamrl_worker_{name} ")[2].split()[0]))


@pytest.fixture
def workers(tmp_path: Path, redis_url: str, run_name: str) -> Iterator[Workers]:
    made = Workers(tmp_path, redis_url, run_name)
    yield made
    made.end()


class Load:
    """More tickets than the worker can answer, a new version every two seconds, and what was read leaves Redis."""

    def __init__(self, learner: MadeUpLearner, models: list[Path]) -> None:
        self._learner = learner
        self._models = itertools.cycle(models)
        self._num_issued = 0
        self.num_groups = 0
        self.num_versions = 0

    def go_on_for(self, seconds: float) -> None:
        """Full load, and then rest: every ticket is answered."""
        for _ in range(_AHEAD):
            self._issue()
        until, publish_at = time.monotonic() + seconds, 0.0
        while (now := time.monotonic()) < until:
            if now >= publish_at:
                self._learner.publish(next(self._models))
                self.num_versions += 1
                publish_at = now + _UPDATE_EVERY_S
            self._take(_BATCH)
            self._issue()
        self._take(self._num_issued - self.num_groups)

    def _issue(self) -> None:
        texts = [f"{number} + 4 =" for number in range(_BATCH)]
        self._learner.issue(*texts, first=self._num_issued, num_samples=4)
        self._num_issued += _BATCH

    def _take(self, count: int) -> None:
        self.num_groups += len(self._learner.groups(count, timeout_s=240))
        self._learner.let_go()


@pytest.mark.parametrize(("engine", "share"), [("transformers", 0.2), ("vllm", 1.0)])
def test_a_worker_at_full_load_grows_in_nothing(
    engine: str,
    share: float,  # of the time: a run's worker has vLLM
    workers: Workers,
    client: redis.Redis,
    keys: Keys,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    record_property: Any,
) -> None:
    soak_s: float = share * pytestconfig.getoption("--soak-s")
    models = [make_model(tmp_path / f"model-{seed}", seed=seed) for seed in range(2)]
    learner = MadeUpLearner(client, keys, _config(keys.name, models[0], engine))
    learner.publish(models[0])
    process = workers.start("--model", str(models[0]), "--http", "127.0.0.1:0")
    load = Load(learner, models)

    load.go_on_for(0.0)  # the engine has started
    load.go_on_for(max(_SHORTEST_WARM_UP_S, _WARM_UP_SHARE * soak_s))
    (report,) = snapshot(client, keys).reports
    address = str(report.detail["http"])
    before = _at_rest(process.pid, address)
    num_warm, num_warm_versions = load.num_groups, load.num_versions
    load.go_on_for(soak_s)
    after = _at_rest(process.pid, address)

    growth = after[-1].rss_kb / before[-1].rss_kb - 1
    most = {name: max(look.counts[name] for look in before) for name in before[0].counts}
    least = {name: min(look.counts[name] for look in after) for name in most}
    record_property(
        "figure",
        f"{load.num_groups - num_warm} groups and {load.num_versions - num_warm_versions} versions in {soak_s:g} s: "
        f"RSS {growth:+.2%} of {before[-1].rss_kb / 1024:.0f} MB, "
        + ", ".join(f"{least[name]} {name} (before: {most[name]})" for name in most),
    )
    assert process.poll() is None
    assert growth < _LARGEST_GROWTH
    assert [name for name in most if least[name] > most[name]] == []


def _at_rest(pid: int, address: str) -> list[Footprint]:
    wait_until(lambda: _figure(address, "samples_in_flight") == 0, description="the engine is at rest")
    return [Footprint.of(pid, address) for _ in range(_LOOKS)]


def _config(name: str, model: Path, engine: str) -> schema.Config:
    length = {"free_tokens": 4, "max_tokens": 24}
    return schema.Config.model_validate(
        {
            "name": name,
            "model": {"path": str(model)},
            "data": {"train": "prompts.jsonl", "max_prompt_tokens": 32},
            "sampling": {"num_samples": 4, "max_tokens": 24},
            "rewards": {"length": {"type": "function", "target": "length_penalty", "options": length}},
            "weights": {"dtype": "float32"},
            "worker": {
                "engine": engine,
                "threads": 1,
                "engine_args": {"kv_cache_memory_bytes": 64 << 20} if engine == "vllm" else {},
            },
        }
    )
