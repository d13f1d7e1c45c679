"""`streamrl doctor --for PART`: each machine is asked for what its own part needs, and for no more."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from streamrl.config.placement import StartedPart
from streamrl.errors import ConfigError, ResourceError
from streamrl.finding import Finding
from streamrl.ops.monitor.doctor import _SKIPPED, CHECKS, look
from streamrl.ops.monitor.doctor.requirements import check_packages
from tests.redis.doctor_world import load, make_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def test_each_machine_is_asked_for_what_its_own_part_needs(model: Path, redis_url: str) -> None:
    def seen(part: StartedPart, *overrides: str) -> dict[str, Finding]:
        return {one.name: one for _, one in look(load(model, redis_url, *overrides), part)}

    no_data = seen("worker", "data.train=nowhere.jsonl", "worker.count=0")
    assert [name for name, one in no_data.items() if one.level == "error"] == []
    assert "worker memory" in no_data
    assert not {"learner memory", "disk", "files", "run folder"} & set(no_data)
    away = "rewards.away={type: http, url: 'http://127.0.0.1:9', weight: 1}"
    learner = seen("learner", away)
    assert {"learner memory", "disk", "files"} <= set(learner)
    assert not {"worker memory", "reward away", "shared memory"} & set(learner)
    assert {name for skipped in _SKIPPED.values() for name in skipped} <= set(CHECKS)


def test_hosts_of_an_engine_must_reach_redis(model: Path, redis_url: str) -> None:
    loaded = load(model, redis_url, "redis.url=embedded", "worker.hosts=2", "worker.count=2")
    [told] = [one for _, one in look(loaded) if one.name == "hosts"]
    assert (told.level, "cannot reach the Redis" in told.evidence) == ("error", True)


def test_a_worker_needs_only_to_read_the_weights(
    model: Path, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_writing(path: Path, mode: int) -> bool:
        return not mode & os.W_OK

    monkeypatch.setattr(os, "access", no_writing)
    loaded = load(model, redis_url, f"weights.store=file:{tmp_path}", "worker.count=0")
    found = {part: {one.name: one.level for _, one in look(loaded, part)} for part in ("all", "worker")}
    assert found["worker"]["weights store"] == "ok"
    assert "run folder" not in found["worker"]
    assert found["all"]["weights store"] == "error"


def test_a_layout_is_checked_where_the_number_of_ranks_is_known(model: Path, redis_url: str) -> None:
    def wrong(part: StartedPart) -> set[str]:
        loaded = load(model, redis_url, "learner.layout.context=4", "learner.processes=2")
        return {one.name for _, one in look(loaded, part) if one.level == "error" and "context = 4" in one.evidence}

    assert wrong("all") == {"layout"}
    assert wrong("learner") == wrong("worker") == set(), "with more machines"


def test_a_worker_on_vllm_without_gpus_cannot_tell_routes(model: Path, redis_url: str) -> None:
    config = load(model, redis_url, "worker.engine=vllm", "algorithm.routing_replay=rollout").config
    with pytest.raises(ConfigError, match=r"vLLM reports routes on GPUs only.*worker\.engine=transformers"):
        check_packages(config, "worker")
    check_packages(config, "learner")


def test_the_other_parts_packages_are_not_asked_for(
    model: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(*packages: str) -> None:
        def find(name: str) -> object | None:
            return None if name in packages else find_spec(name)

        monkeypatch.setattr("streamrl.extras.importlib.util.find_spec", find)

    config = load(model, redis_url, "worker.engine=vllm").config
    find_spec = importlib.util.find_spec
    without("vllm")
    check_packages(config, "learner")
    for part in ("worker", "all"):
        with pytest.raises(ResourceError, match="vllm"):
            check_packages(config, part)  # type: ignore[arg-type]
    without("torch", "transformers")
    check_packages(config, "worker")
    with pytest.raises(ResourceError, match="the learner needs torch"):
        check_packages(config, "learner")
