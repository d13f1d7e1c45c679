"""What vLLM is told before it starts, without starting it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamrl.cpu_vllm import is_cpu_build
from streamrl.errors import ConfigError
from streamrl.workers.engines.base import EngineSettings, Meeting
from streamrl.workers.engines.model import read_model
from streamrl.workers.engines.vllm.arguments import engine_args, several_hosts
from streamrl.workers.engines.vllm.engine import VllmEngine, answer_limit_s
from streamrl.workers.engines.vllm.start import vllm_config
from streamrl.workers.engines.vllm.variables import (
    network_variables,
    platform_variables,
    process_variables,
    take_back_variables,
)
from tests.tiny_models import make_model
from tests.worker_world import worker_config

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def test_an_engine_has_longer_to_answer_while_it_may_be_loading_a_large_file(tmp_path: Path) -> None:
    """A decoy of 470 GB takes one thread four minutes to make."""
    weights = tmp_path / "weights"
    weights.touch()
    assert answer_limit_s(weights) == 120
    os.truncate(weights, 470_000_000_000)  # sparse
    assert answer_limit_s(weights) > 120 + 2 * 245


@pytest.mark.parametrize("before", [None, "fork", "spawn"])
def test_its_processes_are_spawned_whatever_anybody_said(
    before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By vLLM's own reading of it, which without a word is fork: its platform for GPUs says none."""
    from vllm.utils.system_utils import get_mp_context

    monkeypatch.delenv(METHOD, raising=False)
    assert get_mp_context().get_start_method() == "fork"
    if before is not None:
        monkeypatch.setenv(METHOD, before)
    monkeypatch.setattr(os, "environ", {**os.environ, **process_variables(worker_config().worker, tmp_path)})

    assert os.environ[METHOD] == "spawn"
    assert get_mp_context().get_start_method() == "spawn"


@pytest.mark.parametrize(
    ("worker", "gpu_memory", "expected"),
    [
        ({}, None, {}),
        ({}, 0.4, {"gpu_memory_utilization": 0.4}),
        ({"gpus": 4}, None, {"tensor_parallel_size": 4}),
        ({"gpus": 4, "engine_args": {"pipeline_parallel_size": 2}}, None, {"tensor_parallel_size": 2}),
        ({"engine_args": {"gpu_memory_utilization": 0.7}}, 0.4, {"gpu_memory_utilization": 0.7}),
        ({"gpus": 1}, None, {}),
        ({"gpus": 4, "hosts": 2}, None, {"tensor_parallel_size": 8}),
        ({"gpus": 1, "hosts": 2}, None, {"tensor_parallel_size": 2}),
    ],
)
def test_on_gpus_it_is_told_how_many_and_how_much(
    worker: dict[str, Any], gpu_memory: float | None, expected: dict[str, Any], tmp_path: Path
) -> None:
    facts = read_model(str(make_model(tmp_path / "model")), trust_remote_code=False)
    config = worker_config(**worker)
    settings = EngineSettings(model=facts, config=config, seed=1, gpu_memory=gpu_memory)

    found = engine_args(settings, on_cpu=False)
    assert {
        name: found[name] for name in ("tensor_parallel_size", "gpu_memory_utilization") if name in found
    } == expected
    on_cpu = engine_args(settings, on_cpu=True)
    assert on_cpu.get("gpu_memory_utilization") == config.worker.engine_args.get("gpu_memory_utilization")
    assert "tensor_parallel_size" not in on_cpu


def test_what_vllm_could_not_keep_is_refused_before_it_starts(tmp_path: Path) -> None:
    facts = read_model(str(make_model(tmp_path / "model")), trust_remote_code=False)

    def arguments(on_cpu: bool, **given: Any) -> dict[str, Any]:
        config = worker_config(engine_args=given)
        return engine_args(EngineSettings(model=facts, config=config, seed=1), on_cpu=on_cpu)

    with pytest.raises(ConfigError, match=r"worker\.engine_args\.nnodes = 2: .*set worker\.hosts"):
        arguments(False, nnodes=2)
    experts = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with pytest.raises(ConfigError, match=r"worker\.engine_args\.enable_expert_parallel: .*CPUs"):
        arguments(True, **experts)
    assert arguments(False, **experts)["enable_expert_parallel"]
    with pytest.raises(ConfigError, match=r"quantization = fp8_per_block: .*set fp8_per_channel"):
        arguments(True, quantization="fp8_per_block")
    assert arguments(True, quantization="fp8_per_channel")["quantization"] == "fp8_per_channel"


BIND, THREADS, PROCESSES = "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING"


@pytest.mark.parametrize(
    ("threads", "spread", "expected"),
    [
        (0, {}, {PROCESSES: "0"}),
        (4, {}, {PROCESSES: "0", BIND: "nobind"}),
        (4, {"tensor_parallel_size": 2}, {THREADS: "2", BIND: "nobind"}),
        (1, {"pipeline_parallel_size": 2}, {THREADS: "1", BIND: "nobind"}),
    ],
)
def test_ranks_on_cpus_share_the_threads_and_are_bound_to_no_node(
    threads: int, spread: dict[str, Any], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(BIND, raising=False)
    worker = worker_config(threads=threads, engine_args=spread).worker
    arguments: dict[str, Any] = {"enforce_eager": False, **spread}
    assert platform_variables(arguments, worker, on_cpu=True) == expected
    assert platform_variables(arguments, worker, on_cpu=False) == {}
    over_hosts = worker_config(threads=4, hosts=2, engine_args=spread).worker
    if spread:
        found = platform_variables(arguments, over_hosts, on_cpu=True)
        assert found == {THREADS: "4", BIND: "nobind"}  # one rank here, and the other on the other host
    monkeypatch.delenv(THREADS, raising=False)
    cores = len(os.sched_getaffinity(0))
    found = platform_variables({"enforce_eager": False, "tensor_parallel_size": 2}, worker_config().worker, on_cpu=True)
    assert found == {THREADS: str(max(1, cores // 2)), BIND: "nobind"}


TOLD = ("TORCHDYNAMO_DISABLE", THREADS, BIND, PROCESSES, "VLLM_HOST_IP")


@pytest.fixture
def of_the_user(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The environment of this process, without what engines are told; afterwards it is as before."""
    take_back_variables()
    environment = {name: value for name, value in os.environ.items() if name not in TOLD}
    monkeypatch.setattr(os, "environ", environment)
    yield environment
    take_back_variables()


@pytest.mark.skipif(not is_cpu_build(), reason="a GPU's vLLM is told other things")
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # torch, which imports its compiler
@pytest.mark.parametrize("given", [{}, {THREADS: "3", BIND: "all", "TORCHDYNAMO_DISABLE": "0", "VLLM_HOST_IP": "::1"}])
def test_an_engine_starts_in_the_user_s_environment_whatever_an_earlier_one_was_told(
    given: dict[str, str], of_the_user: dict[str, str], tmp_path: Path
) -> None:
    """A worker begins anew in its own process when the run comes back with other settings."""
    of_the_user.update(given)
    facts = read_model(str(make_model(tmp_path / "model")), trust_remote_code=False)

    def told(meeting: Meeting | None = None, **worker: Any) -> dict[str, str]:
        settings = EngineSettings(model=facts, config=worker_config(engine="vllm", **worker), seed=1)
        vllm_config(settings, tmp_path, meeting)
        return {name: of_the_user[name] for name in TOLD if name in of_the_user}

    eager = {**given, "TORCHDYNAMO_DISABLE": "1", PROCESSES: "0"}
    for own in ("127.0.0.2", "127.0.0.3"):
        place = Meeting(address="127.0.0.1", port=1234, own=own, node=0)
        assert told(place) == {"VLLM_HOST_IP": own, **eager}
    assert told(threads=2) == {BIND: "nobind", **eager, THREADS: "2"}
    assert told(engine_args={"enforce_eager": False}) == {**given, PROCESSES: "0"}
    assert told() == eager


def test_over_hosts_vllm_is_told_which_one_this_is_and_by_which_address_the_others_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    place = Meeting(address="127.0.0.1", port=1234, own="127.0.0.2", node=1)
    worker = worker_config(hosts=2, engine_args={"tensor_parallel_size": 2}).worker
    assert several_hosts(worker, place) == {
        "nnodes": 2,
        "node_rank": 1,
        "master_addr": "127.0.0.1",
        "master_port": 1234,
        "distributed_executor_backend": "mp",
    }
    assert network_variables(place) == {"VLLM_HOST_IP": "127.0.0.2"}
    monkeypatch.setenv("VLLM_HOST_IP", "10.1.1.1")
    assert network_variables(place) == {"VLLM_HOST_IP": "10.1.1.1"}


def test_an_engine_over_hosts_is_a_workers_alone(tmp_path: Path) -> None:
    """An evaluation has one host."""
    facts = read_model(str(make_model(tmp_path / "model")), trust_remote_code=False)
    config = worker_config(hosts=2, engine_args={"tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match=r"worker\.hosts = 2: only a worker .* set worker\.hosts=1"):
        VllmEngine(EngineSettings(model=facts, config=config, seed=1))
