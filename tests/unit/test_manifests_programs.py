"""k8s/: what the containers run exists, and the run's configuration is one that these programs take."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import click
import huggingface_hub.constants
import pytest

from bench.memory import sizes_of
from bench.memory_cases import Case
from streamrl.config.check import check_config
from streamrl.config.load import load_config
from streamrl.config.schema import Config, HttpReward
from streamrl.ops.cli.commands import COMMANDS
from streamrl.ops.launch.parts import DRAIN_S
from streamrl.protocol.weights.stores import budget_in_redis
from tests.manifest_world import COMPONENT, K8S, OVERLAYS, ROOT, Container, Rendered, render

UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "mb": 1 << 20, "gb": 1 << 30}
# Read by others than us: where Python and its libraries keep what they keep, and that nothing is fetched from a hub.
READ_BY_OTHERS = {"HOME", "HF_HUB_OFFLINE"}
# Where the program of a component says what it answers over HTTP. The monitor's is prometheus_client's, which answers
# every path with the metrics (`tests/redis/test_exporter.py`).
ANSWERED_BY = {
    "worker": "workers/http.py",
    "reward": "workers/reward_server/server.py",
    "dashboard": "streamrl/ops/monitor/web/server.py",
}


@pytest.fixture(params=OVERLAYS)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return render(request.param)


def num_bytes(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)(\w*)", text).groups()  # type: ignore[union-attr]
    return float(number) * UNITS[unit]


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that these words call, and the words that are left for it."""
    assert words[0] == "streamrl", words
    module, attribute = COMMANDS[words[1]].target.split(":")
    command, rest = getattr(importlib.import_module(module), attribute), words[2:]
    while isinstance(command, click.Group) and rest:
        if rest[0] in command.commands:
            command, rest = command.commands[rest[0]], rest[1:]
        else:
            command = command.commands["live"]  # which `streamrl record RUN_FOLDER` stands for; no other group has it
    return command, rest


def run_by_streamrl(rendered: Rendered) -> list[Container]:
    return [one for one in rendered.containers() if one.spec["image"].startswith("streamrl-")]


def told(container: Container) -> list[str]:
    """The words of the program; of a shell's line, those before it sends the output elsewhere."""
    words = container.words
    return words[2].partition(" > ")[0].split() if words[:2] == ["sh", "-c"] else words


def test_every_flag_exists_and_none_that_is_needed_is_missing(rendered: Rendered) -> None:
    for container in run_by_streamrl(rendered):
        command, words = command_of(told(container))
        found, left, _ = command.make_parser(click.Context(command)).parse_args(list(words))
        needed = {parameter.name for parameter in command.params if parameter.required}
        assert needed <= set(found), container.spec["name"]
        assert left == []


def test_a_flag_that_does_not_exist_is_found() -> None:
    command, words = command_of([*told(render("cpu").container("worker")), "--no-such-flag"])
    with pytest.raises(click.NoSuchOption):
        command.make_parser(click.Context(command)).parse_args(words)


def test_every_variable_is_read_by_the_program_or_stands_in_its_words(rendered: Rendered) -> None:
    ours = "".join(path.read_text() for part in ("streamrl", "workers") for path in (ROOT / part).rglob("*.py"))
    for container in run_by_streamrl(rendered):
        words = " ".join(container.spec["args"])
        for name in container.variables:
            known = name in READ_BY_OTHERS or name.removesuffix("_FILE") in ours
            assert known or f"$({name})" in words, (container.spec["name"], name)
    assert "HF_HUB_OFFLINE" in Path(huggingface_hub.constants.__file__).read_text()


def test_every_path_that_a_probe_or_prometheus_asks_for_is_answered(rendered: Rendered) -> None:
    asked = {
        (container.pod, container.spec[probe]["httpGet"]["path"])
        for container in rendered.containers()
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
        if "httpGet" in container.spec.get(probe, {})
    }
    for monitor in rendered.of_kind("PodMonitor", "ServiceMonitor"):
        (endpoint,) = monitor["spec"].get("endpoints") or monitor["spec"]["podMetricsEndpoints"]
        asked.add((monitor["spec"]["selector"]["matchLabels"][COMPONENT], endpoint["path"]))
    assert {("worker", "/readyz"), ("monitor", "/metrics")} <= asked
    for component, path in asked - {("monitor", "/metrics")}:
        assert f'"{path}"' in (ROOT / ANSWERED_BY[component]).read_text(), (component, path)


@pytest.mark.parametrize("file", sorted((K8S / "overlays").glob("*/run.yaml")), ids=lambda file: file.parent.name)
def test_a_learner_ends_only_with_its_run_for_nothing_starts_a_job_that_has_succeeded(file: Path) -> None:
    assert load_config(file).config.training.max_time is None


@pytest.fixture
def config(rendered: Rendered, tmp_path: Path) -> Config:
    for name, text in rendered.named("ConfigMap", "run")["data"].items():
        (tmp_path / name).write_text(text)
    name = f"name={rendered.place['RUN_NAME']}"
    loaded = load_config(tmp_path / "run.yaml", (name,))
    check_config(loaded.config, loaded.origin)
    return loaded.config


def test_every_file_that_the_configuration_names_lies_in_a_volume(config: Config, rendered: Rendered) -> None:
    learner, worker = rendered.container("learner"), rendered.container("worker")
    for path in (config.model.path, config.data.train, str(config.data.validation)):
        assert learner.mount_of(path) == "models"
    assert learner.mount_of(str(config.dir)) == "runs"
    assert f"--model={config.model.path}" in worker.words
    for source in config.rewards.values():
        if isinstance(source, HttpReward):
            assert source.token_file is not None
            assert learner.mount_of(source.token_file) == worker.mount_of(source.token_file) == "token"
            assert f"--allow-host={source.url.removeprefix('http://')}" in worker.words
    if config.weights.store.startswith("file:"):
        folder = config.weights.store.removeprefix("file:")
        assert learner.mount_of(folder) == worker.mount_of(folder) == "weights"
    assert config.worker.count == 0
    assert config.reward_server is None


def test_redis_may_hold_the_backlog_and_its_pod_what_redis_may_hold(config: Config, rendered: Rendered) -> None:
    redis = rendered.container("redis")
    words = redis.words
    max_memory = num_bytes(words[words.index("--maxmemory") + 1])
    assert 1.25 * (config.redis.max_backlog_bytes + budget_in_redis(config.weights)) < max_memory
    assert 1.25 * max_memory < num_bytes(redis.spec["resources"]["limits"]["memory"])


def test_every_part_has_the_time_that_it_takes_to_end(config: Config, rendered: Rendered) -> None:
    grace = {one.pod: one.template["spec"].get("terminationGracePeriodSeconds", 30) for one in rendered.containers()}
    assert grace["learner"] > DRAIN_S
    assert grace["worker"] > config.worker.grace_s + 30


def test_a_program_on_cpus_starts_no_more_threads_than_it_may_use_cores(config: Config, rendered: Rendered) -> None:
    """By themselves torch and vLLM count those of the node."""
    [of_reward] = re.findall(r"--threads=(\d+)", " ".join(rendered.container("reward").words))
    told = {"reward": int(of_reward), "worker": config.worker.threads, "learner": config.learner.threads}
    limits = {name: rendered.container(name).spec["resources"]["limits"] for name in told}
    on_cpus = {name: int(limit["cpu"]) for name, limit in limits.items() if "nvidia.com/gpu" not in limit}
    assert "reward" in on_cpus
    assert {name for name, cpus in on_cpus.items() if not 0 < told[name] <= cpus} == set()


def test_how_many_pods_a_learner_may_have_is_said_by_the_place(rendered: Rendered) -> None:
    fewest, most = map(int, rendered.place["LEARNERS"].split(":"))
    assert f"--nodes={fewest}:{most}" in rendered.container("learner").words
    assert fewest <= rendered.named("Job", "learner")["spec"]["parallelism"] <= most


def test_the_ranks_of_a_pod_are_as_many_as_its_gpus(config: Config, rendered: Rendered) -> None:
    gpus = rendered.container("learner").spec["resources"]["limits"].get("nvidia.com/gpu", 1)
    assert int(gpus) == config.learner.processes


@pytest.mark.parametrize(("rendered", "size"), [("gpu-small", "1.5B"), ("gpu-large", "7B")], indirect=["rendered"])
def test_volumes_hold_what_a_model_of_this_size_leaves_in_them(config: Config, rendered: Rendered, size: str) -> None:
    """Of a checkpoint masters and moments, 12 bytes a weight; of one that is written, and of one whose validation is
    under way, likewise; the finished model. Of served weights an anchor, the next one, and two for who is late."""
    weights = sizes_of(Case(size=size, ranks=1)).trained

    def room(claim: str) -> float:
        return num_bytes(rendered.named("PersistentVolumeClaim", claim)["spec"]["resources"]["requests"]["storage"])

    kept = config.checkpoint.keep_last + config.checkpoint.keep_best + 2
    assert (12 * kept + 4) * weights < room("runs")
    assert 2 * weights < room("models")
    if config.weights.store.startswith("file:"):
        assert 4 * 2 * weights < room("weights")


def test_learners_of_several_pods_have_the_device_that_connects_them(rendered: Rendered) -> None:
    learner = rendered.container("learner")
    pods = rendered.named("Job", "learner")["spec"]["parallelism"]
    is_on_gpus = "nvidia.com/gpu" in learner.spec["resources"]["limits"]
    has_device = any(name.startswith("rdma/") for name in learner.spec["resources"]["limits"])
    assert has_device == (pods > 1 and is_on_gpus)
