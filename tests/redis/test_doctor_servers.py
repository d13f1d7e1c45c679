"""`streamrl doctor` before a Redis as people have it: managed, with other policies, without persistence, too small."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from streamrl.config.load import load_config
from streamrl.finding import Finding
from streamrl.ops.monitor.doctor.services import check_redis, fitness
from streamrl.protocol.transport.acl import rules
from tests.helpers import wait_until
from tests.redis.server_program import Guarded, answers, serve

POLICIES = (
    "allkeys-lru",
    "allkeys-lfu",
    "allkeys-random",
    "volatile-lru",
    "volatile-lfu",
    "volatile-random",
    "volatile-ttl",
)
CONFIG = """
model: {path: .}
data: {train: train.jsonl}
rewards: {exact: {type: function, target: exact_match}}
redis: {max_backlog_bytes: 1000000}
weights: {max_store_bytes: 100000}
"""


@contextlib.contextmanager
def served(folder: Path, *words: str, config: str = "") -> Iterator[Guarded]:
    with serve(folder, *words, config=config) as server:
        wait_until(lambda: answers(server.port), description="the server answers")
        yield server


def found(folder: Path, url: str) -> dict[str, Finding]:
    file = folder / "run.yaml"
    file.write_text(CONFIG)
    return {finding.name: finding for finding in check_redis(load_config(str(file), [f"redis.url={url}"]))}


def plain(server: Guarded) -> str:
    return server.url.replace("part@", "")


def test_a_managed_server_is_told_by_its_parameters(tmp_path: Path) -> None:
    """Which deny CONFIG, as the rename of a command does."""
    managed = 'rename-command CONFIG ""\nmaxmemory 2gb\nmaxmemory-policy volatile-lru\n'
    with served(tmp_path, config=managed) as server:
        findings = found(tmp_path, plain(server))
    policy, durability = findings["redis policy"], findings["redis durability"]
    assert (policy.level, durability.level) == ("error", "warning")
    for finding, setting in ((policy, "maxmemory-policy noeviction"), (durability, "appendonly yes")):
        assert "does not accept CONFIG" in finding.remedy
        assert f"set {setting} in the service's parameters" in finding.remedy


def test_who_may_not_change_it_is_told_that_another_must(tmp_path: Path) -> None:
    users = tmp_path / "users.acl"
    users.write_text(f"user part on nopass {rules('learner')}\nuser default off\n")
    with served(tmp_path, config=f"aclfile {users}\n") as server:
        durability = found(tmp_path, server.url.replace("part@", "part:any@"))["redis durability"]
    assert "redis-cli CONFIG SET appendonly yes, as a user with that right" in durability.remedy


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with served(tmp_path_factory.mktemp("own")) as server:
        yield server


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("limit", "level"), [("2gb", "error"), ("0", "warning")])
def test_every_policy_but_noeviction_is_found(
    own: Guarded, tmp_path: Path, policy: str, limit: str, level: str
) -> None:
    with redis.Redis(port=own.port, protocol=2) as admin:
        admin.config_set("maxmemory", limit)
        admin.config_set("maxmemory-policy", policy)
    finding = found(tmp_path, plain(own))["redis policy"]
    assert (finding.level, policy in finding.evidence) == (level, True)
    assert "redis-cli CONFIG SET maxmemory-policy noeviction" in finding.remedy


def test_memory_that_its_machine_does_not_have_is_found() -> None:
    told: dict[str, Any] = {"redis_version": "7.2.0", "total_system_memory": 8 << 30}
    assert fitness(told, 7 << 30, str)["memory"].level == "warning", "without a limit it is the kernel that ends it"
    assert fitness({**told, "maxmemory": 7 << 30}, 1, str)["memory"].level == "warning", "to write it down takes more"
    assert fitness({**told, "maxmemory": 6 << 30}, 1, str)["memory"].level == "ok"


def test_a_server_that_cannot_write_to_its_disk_is_found(tmp_path: Path) -> None:
    with served(tmp_path) as server, redis.Redis(port=server.port, protocol=2) as admin:
        assert found(tmp_path, plain(server))["redis durability"].level == "warning"
        (tmp_path / "dump.rdb").mkdir()  # in the place of its file
        admin.bgsave()
        wait_until(
            lambda: admin.info("persistence")["rdb_last_bgsave_status"] == "err", description="a save in the background"
        )
        finding = found(tmp_path, plain(server))["redis durability"]
    assert (finding.level, "rdb_last_bgsave_status is err" in finding.evidence) == ("error", True)
