"""The command lines of the parts: everything they need, and no permission that the configuration does not imply."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import schema
from streamrl.config.load import Loaded, load_config
from streamrl.config.placement import place
from streamrl.errors import ConfigError, PartError, ResourceError
from streamrl.ops.cli.rewards.reward import serve
from streamrl.ops.launch.parts import (
    Cluster,
    RunFolder,
    learner_command,
    reward_command,
    worker_command,
)
from streamrl.ops.launch.processes import Command
from streamrl.ops.launch.redis_part import RedisPart
from streamrl.ops.monitor.doctor.requirements import REQUIREMENTS
from tests.gpus_world import made_up

FOLDER = RunFolder(Path("runs/run"))


def make_config(**changes: Any) -> schema.Config:
    fields: dict[str, Any] = {
        "model": {"path": "models/sft"},
        "data": {"train": "train.jsonl"},
        "rewards": {"exact": {"type": "function", "target": "exact_match"}},
    }
    return schema.Config.model_validate({**fields, **changes})


OVER_HOSTS = {"hosts": 2, "engine_args": {"tensor_parallel_size": 2}}


def loaded(changes: dict[str, Any]) -> Loaded:
    return load_config(make_config(**changes).model_dump(mode="json"))


def values(command: Command, option: str) -> list[str]:
    return [after for word, after in pairwise(command.arguments) if word == option]


def worker(config: schema.Config, reward_url: str | None = None) -> Command:
    return worker_command(config, FOLDER, number=3, redis_url="unix:///redis.sock", reward_url=reward_url)


def test_a_worker_is_told_where_the_run_is_and_who_it_is() -> None:
    command = worker(make_config(name="mine"))

    assert command.name == "worker/3"
    assert values(command, "--redis") == ["unix:///redis.sock"]
    assert values(command, "--run") == ["mine"]
    assert values(command, "--worker-id") == ["3"]
    assert values(command, "--model") == ["models/sft"]


def test_a_worker_may_run_the_code_and_ask_the_hosts_that_the_operator_has_written_down() -> None:
    rewards = {
        "exact": {"type": "function", "target": "exact_match"},
        "mine": {
            "type": "function",
            "target": "rewards/mine.py:score",
            "network": True,
            "environment": ["JUDGE_API_KEY"],
        },
        "theirs": {"type": "function", "target": "package.module:score"},
        "far": {"type": "http", "url": "http://judge:5555/v1", "replicas": ["http://twin:5556"]},
        "near": {"type": "http", "url": "local"},
    }
    command = worker(make_config(rewards=rewards), reward_url="http://127.0.0.1:4000")

    assert values(command, "--allow-reward-code") == ["rewards/mine.py:score", "package.module:score"]
    assert values(command, "--allow-reward-network") == ["rewards/mine.py:score"]
    assert values(command, "--allow-reward-env") == ["JUDGE_API_KEY"]
    assert values(command, "--allow-host") == ["judge:5555", "twin:5556"]
    assert values(command, "--local-reward-url") == ["http://127.0.0.1:4000"]


def test_a_worker_that_needs_no_permission_gets_none() -> None:
    assert not [word for word in worker(make_config()).arguments if word.startswith("--allow")]


def test_a_worker_imports_vllm_ahead_where_its_engine_is_vllm() -> None:
    assert "--import-vllm" in worker(make_config()).arguments
    assert "--import-vllm" not in worker(make_config(worker={"engine": "transformers"})).arguments


def test_each_worker_of_an_engine_over_hosts_listens_for_them_at_a_port_of_its_own() -> None:
    assert values(worker(make_config(worker={"hosts": 2})), "--hosts") == ["0.0.0.0:9603"]
    assert values(worker(make_config()), "--hosts") == []


def test_hosts_of_one_engine_need_a_redis_that_they_reach() -> None:
    with pytest.raises(ConfigError, match=r"worker\.hosts = 2: .*set redis\.url"):
        REQUIREMENTS["placement"](loaded({"worker": OVER_HOSTS}))
    REQUIREMENTS["placement"](loaded({"worker": OVER_HOSTS, "redis": {"url": "redis://first:6379"}}))
    REQUIREMENTS["placement"](loaded({}))


def test_the_learner_runs_under_torchrun_with_its_ranks_and_restarts() -> None:
    config = make_config(learner={"processes": 2, "max_restarts": 7, "threads": 3})

    command = learner_command(config, FOLDER, redis_url="unix:///redis.sock")

    assert command.arguments[1:3] == ("-m", "streamrl.learner.process.agent")
    assert {"--nproc-per-node=2", "--max-restarts=7"} <= set(command.arguments)
    [holder] = [word.removeprefix("--rdzv-id=") for word in command.arguments if word.startswith("--rdzv-id=")]
    assert values(command, "--config") == [f"runs/run/asked-{holder}.yaml"]
    assert command.environment == {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "3"}


@pytest.mark.parametrize(
    ("learner", "gpus", "variable", "threads"),
    [
        ({"processes": 8}, 8, None, "12"),
        ({"processes": 8, "threads": 3}, 8, None, "3"),
        ({"processes": 8}, 8, "5", None),  # which they inherit
        ({"processes": 8}, 0, None, None),
        ({"processes": 8, "gpus": 0}, 8, None, None),
        ({"processes": 1}, 8, None, None),
    ],
    ids=["shared", "set", "inherited", "no GPUs", "none of the GPUs", "one rank"],
)
def test_ranks_that_have_gpus_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, learner: dict[str, int], gpus: int, variable: str | None, threads: str | None
) -> None:
    monkeypatch.setattr("streamrl.ops.launch.parts.usable_cores", lambda: 96)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    config = make_config(learner=learner)
    placement = place(config, made_up(gpus), "learner")
    command = learner_command(config, FOLDER, redis_url="x", placement=placement)
    assert command.environment.get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(("nodes", "elastic"), [("4", False), ("4:4", False), ("1:4", True)])
def test_where_machines_may_leave_the_learner_is_told_so(nodes: str, elastic: bool) -> None:
    command = learner_command(
        make_config(), FOLDER, redis_url="x", cluster=Cluster(nodes=nodes, endpoint="trainer-0:29400")
    )
    assert ("--elastic" in command.arguments) is elastic


def test_a_learner_replaces_another_only_when_told_to() -> None:
    assert "--takeover" not in learner_command(make_config(), FOLDER, redis_url="x").arguments
    assert "--takeover" in learner_command(make_config(), FOLDER, redis_url="x", takeover=True).arguments
    assert "--standby" in learner_command(make_config(), FOLDER, redis_url="x", standby=True).arguments


def test_a_learner_of_the_same_folder_is_the_same_to_others_so_that_it_takes_over_at_once(tmp_path: Path) -> None:
    def holder(folder: Path) -> str:
        command = learner_command(make_config(), RunFolder(folder), redis_url="x")
        return next(word for word in command.arguments if word.startswith("--rdzv-id="))

    (tmp_path / "link").symlink_to(tmp_path / "run")

    assert holder(tmp_path / "run") == holder(tmp_path / "link")
    assert holder(tmp_path / "run") != holder(tmp_path / "other")


def test_what_a_launch_asks_for_is_the_runs_until_a_learner_has_taken_it_and_no_other_launchs(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)

    def asked(number: int, *holders: str) -> list[int]:
        folder.write_request(make_config(learner={"max_restarts": number}), holders[-1])
        files = (folder.config, *map(folder.requested_config, holders))
        return [load_config(path).config.learner.max_restarts for path in files]

    assert asked(1, "first") == [1, 1]
    assert asked(2, "first", "second") == [2, 1, 2]
    (tmp_path / "terms").mkdir()
    assert asked(3, "first", "second", "third") == [2, 1, 2, 3]


@pytest.mark.parametrize("cluster", [None, Cluster(nodes="1:4", endpoint="trainer-0:29400")])
def test_an_agent_removes_its_configuration_unless_other_machines_start_ranks_with_it(cluster: Cluster | None) -> None:
    command = learner_command(make_config(), FOLDER, redis_url="x", cluster=cluster)
    assert ("--own-config" in command.arguments) is (cluster is None)


def test_a_reward_server_with_a_negative_mean_gets_it_as_a_value() -> None:
    server = schema.OwnRewardServer(model="rm", reward_mean=-0.5, port=5555)

    command = reward_command(server, FOLDER, port=5555)

    assert "--reward-mean=-0.5" in command.arguments
    assert "--url-file=runs/run/reward.url" in command.arguments


def test_a_reward_server_gets_no_setting_that_is_none_of_its_options(tmp_path: Path) -> None:
    command = reward_command(schema.OwnRewardServer(model="rm"), RunFolder(tmp_path), port=0)

    words = command.arguments[command.arguments.index("serve") + 1 :]
    assert serve.make_context("serve", list(words)).params["model"] == "rm"


class _Dying:
    """An embedded Redis that has died by the time anybody looks."""

    url, running = "unix:///redis.sock", False

    refusal: OSError | None = None

    @classmethod
    def start(cls, folder: Path) -> _Dying:
        if cls.refusal is not None:
            raise cls.refusal
        return cls()

    def stop(self) -> None: ...


def test_a_redis_that_cannot_be_started_for_a_moment_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrl.ops.launch.redis_part.EmbeddedRedis", _Dying)
    now, said = [0.0], list[str]()
    part = RedisPart(tmp_path, notify=said.append, clock=lambda: now[0])
    monkeypatch.setattr(_Dying, "refusal", BlockingIOError(11, "Resource temporarily unavailable"))
    for _ in range(2):
        now[0] += 3
        part.look()
    assert said[-1] == "the embedded Redis could not be started: [Errno 11] Resource temporarily unavailable"
    monkeypatch.setattr(_Dying, "refusal", None)
    now[0] += 3
    part.look()
    assert (part.num_restarts, said[-1]) == (3, "the embedded Redis died; restarting it")


def test_a_redis_that_dies_now_and_then_is_always_started_again_and_one_that_does_not_live_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrl.ops.launch.redis_part.EmbeddedRedis", _Dying)
    now = [0.0]
    part = RedisPart(tmp_path, notify=lambda _: None, clock=lambda: now[0])
    for _ in range(20):
        now[0] += 3600
        part.look()
    for _ in range(4):
        now[0] += 3
        part.look()
    assert part.num_restarts == 24
    part.look()
    assert part.num_restarts == 24, "a pause after each start"
    now[0] += 3
    with pytest.raises(PartError, match=r"died 6 times, each before it had served for 120 s \(see .*redis\.log\)"):
        part.look()


def test_a_redis_that_is_killed_each_time_while_it_loads_for_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    class Loading(_Dying):
        @classmethod
        def start(cls, folder: Path) -> _Dying:
            now[0] += 130
            raise ResourceError("it exited at once")

    monkeypatch.setattr("streamrl.ops.launch.redis_part.EmbeddedRedis", _Dying)
    part = RedisPart(tmp_path, notify=lambda _: None, clock=lambda: now[0])
    monkeypatch.setattr("streamrl.ops.launch.redis_part.EmbeddedRedis", Loading)
    for _ in range(5):
        now[0] += 3
        part.look()
    with pytest.raises(PartError, match=r"died 6 times"):
        part.look()


def test_the_life_of_a_redis_counts_from_when_it_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Slow(_Dying):
        @classmethod
        def start(cls, folder: Path) -> _Dying:
            now[0] += 130
            return cls()

    monkeypatch.setattr("streamrl.ops.launch.redis_part.EmbeddedRedis", Slow)
    part = RedisPart(tmp_path, notify=lambda _: None, clock=lambda: now[0])
    for _ in range(5):
        now[0] += 3
        part.look()
    now[0] += 3
    with pytest.raises(PartError, match=r"died 6 times"):
        part.look()
