"""`streamrl doctor`: each thing that can be wrong is found, and told with its remedy."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import redis

from streamrl.ops.cli.main import main
from streamrl.ops.monitor.doctor import look, machine
from streamrl.ops.monitor.doctor.machine import worker_bytes
from streamrl.ops.monitor.doctor.services import fitness
from streamrl.ops.monitor.doctor.sizes import count_parameters, published_bytes, trained_parameters
from streamrl.terminal import size
from tests.gpus_world import machine_with
from tests.redis.doctor_world import TOKENS, found, load, make_model, write_config, write_tensors


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def test_cores_without_products_of_bfloat16_are_told_with_the_settings_that_suit_them(
    model: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "gpus_here", tuple)
    monkeypatch.setattr(machine, "computes_in_bfloat16", lambda: False)
    finding = found(model, redis_url, "model.dtype=float32")["precision"]
    assert (finding.level, finding.remedy) == ("warning", "set weights.dtype: float32")
    assert "precision" not in found(model, redis_url, "model.dtype=float32", "weights.dtype=float32")
    monkeypatch.setattr(machine, "computes_in_bfloat16", lambda: True)
    assert "precision" not in found(model, redis_url)


def test_a_sound_configuration_has_no_error(model: Path, redis_url: str) -> None:
    write_tensors(model, rows=1000)
    findings = found(model, redis_url, "weights.max_store_bytes=10000000")
    wrong = {name: one for name, one in findings.items() if one.level == "error"}
    assert wrong == {}
    looked_at = ("settings", "redis version", "redis latency", "model vocabulary", "learner memory", "disk", "limits")
    assert set(looked_at) <= set(findings)
    assert "1.0 million parameters" in findings["model"].evidence


def test_an_error_always_has_a_remedy(model: Path, tmp_path: Path) -> None:
    findings = found(
        model, f"unix://{tmp_path}/nowhere.sock", "redis.connect_timeout_s=0.1", "data.train=nowhere.jsonl"
    )
    assert (findings["redis"].level, findings["files"].level) == ("error", "error")
    assert all(finding.remedy for finding in findings.values() if finding.level != "ok")


def test_a_server_that_would_evict_or_is_too_small_is_found(model: Path, redis_url: str, client: redis.Redis) -> None:
    used: Any = client.info("memory")
    try:
        client.config_set("maxmemory", used["used_memory"] + 500_000)
        client.config_set("maxmemory-policy", "allkeys-lru")
        findings = found(model, redis_url)
        refused = found(model, redis_url, "weights.max_store_bytes=1000000000")["redis memory"]
    finally:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 0)
    assert (findings["redis policy"].level, findings["redis memory"].level) == ("error", "warning")
    assert (refused.level, "a quarter more than the data" in refused.evidence) == ("error", True)


@pytest.mark.parametrize(
    ("told", "name", "says"),
    [
        ({"role": "slave", "master_host": "primary", "master_port": 6379}, "redis role", "a replica of primary:6379"),
        ({"cluster_enabled": 1}, "redis cluster", "a node of a Redis Cluster"),
    ],
)
def test_a_server_that_takes_no_writes_of_ours_is_found(told: dict[str, Any], name: str, says: str) -> None:
    """As the endpoints of managed services may be: one for readers, one of a cluster."""
    found = fitness({"redis_version": "7.2.0", "role": "master", "cluster_enabled": 0, **told}, 0, str)
    finding = next(one for one in found.values() if one.name == name)
    assert finding.level == "error"
    assert says in finding.evidence


def test_a_server_that_does_not_say_all_of_itself_is_taken_at_its_word() -> None:
    assert {finding.level for finding in fitness({"redis_version": "7.2.0"}, 0, str).values()} == {"ok"}


def test_a_tokenizer_of_another_model_is_found(model: Path, redis_url: str) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 5}))
    vocabulary = found(model, redis_url)["model vocabulary"]
    assert (vocabulary.level, "ids up to 8, the model only 5 outputs" in vocabulary.evidence) == ("error", True)


@pytest.mark.parametrize(("end", "level"), [("<eos>", "warning"), ("<image>", "error")])
def test_tokens_of_larger_models_are_no_mistake_unless_they_end_a_response(
    model: Path, redis_url: str, end: str, level: str
) -> None:
    """As of Gemma 3's smallest models, which have the tokenizer of those that read images."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [{"content": "<image>", "id": len(TOKENS)}]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    vocabulary = found(model, redis_url)["model vocabulary"]
    assert vocabulary.level == level
    assert "ids up to 9, the model only 9 outputs" in vocabulary.evidence


def test_an_end_token_that_is_no_token_is_found(model: Path, redis_url: str) -> None:
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    assert found(model, redis_url)["model end token"].level == "error"


def test_a_model_that_cannot_fit_is_found_before_it_is_loaded(model: Path, redis_url: str) -> None:
    write_tensors(model, rows=10**9)
    assert count_parameters(model) == 10**12
    findings = found(model, redis_url)
    for name in ("memory", "shared memory", "disk"):
        assert findings[name].level == "error", findings[name]


def test_the_memory_of_a_machine_without_gpus_counts_the_engine_and_the_mirror(model: Path, redis_url: str) -> None:
    write_tensors(model, rows=10**6)
    assert worker_bytes(load(model, redis_url).config) == 2 * 2 * 10**9
    shown = found(model, redis_url, "worker.count=3")["shared memory"].evidence.partition("about ")[2]
    assert shown.partition(" for")[0] == size(3 * 2 * 10**9)


def test_weights_that_redis_may_not_hold_are_found_before_the_run(model: Path, redis_url: str) -> None:
    write_tensors(model, rows=7_616_000)
    findings = found(model, redis_url, "weights.max_store_bytes=16000000000")
    assert findings["weights store"].level == "error"
    assert "need 46457600000 bytes in Redis" in findings["weights store"].evidence
    assert found(model, redis_url, f"weights.store=file:{model.parent}")["weights store"].level == "ok"


def test_a_shared_folder_without_room_for_the_weights_is_found_before_the_run(model: Path, redis_url: str) -> None:
    assert "weights disk" not in found(model, redis_url)
    in_a_folder = f"weights.store=file:{model.parent / 'to be made'}"
    assert found(model, redis_url, in_a_folder)["weights disk"].level == "ok"
    write_tensors(model, rows=10**9)
    told = found(model, redis_url, in_a_folder)["weights disk"]
    assert (told.level, f"about {size(6.1e12)} for the weights" in told.evidence) == ("error", True), told
    folder = load(model, redis_url).config.folder
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    told = found(model, redis_url, in_a_folder)["weights disk"]
    assert (told.level, "which the run may have in part" in told.evidence) == ("warning", True), told


def test_of_adapters_redis_holds_these_alone(model: Path, redis_url: str) -> None:
    write_tensors(model, rows=7_616_000)
    lora = "model.lora.targets=[w]"
    assert found(model, redis_url, "weights.max_store_bytes=16000000000", lora)["weights store"].level == "ok"
    assert published_bytes(load(model, redis_url, lora).config) == 2 * 32 * (7_616_000 + 1000)


def test_checkpoints_of_adapters_are_small(model: Path, redis_url: str) -> None:
    write_tensors(model, rows=10**7)
    whole, adapters = load(model, redis_url).config, load(model, redis_url, "model.lora.targets=[w]").config
    assert trained_parameters(whole) == 10**10
    assert trained_parameters(adapters) == 32 * (10**7 + 1000)


@pytest.fixture
def reward_server() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="reward server")
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_reward_sources_are_asked_whether_they_are_there(model: Path, redis_url: str, reward_server: str) -> None:
    def reward(url: str) -> tuple[str, ...]:
        return ("rewards.judge.type=http", f"rewards.judge.url={url}")

    assert found(model, redis_url, *reward(reward_server))["reward judge"].level == "ok"
    assert found(model, redis_url, *reward(f"{reward_server}/deeper"))["reward judge"].level == "warning"
    assert found(model, redis_url, *reward("http://127.0.0.1:9"))["reward judge"].level == "error"


def test_a_teacher_behind_an_address_is_asked_whether_it_is_there(
    model: Path, redis_url: str, reward_server: str
) -> None:
    def levels(*urls: str) -> list[str]:
        loaded = load(model, redis_url, f"teacher.urls={json.dumps(urls)}")
        return [finding.level for _, finding in look(loaded) if finding.name == "teacher"]

    urls = (reward_server, f"{reward_server}/v1", f"{reward_server}/other", "http://127.0.0.1:9")
    assert levels(*urls) == ["ok", "ok", "warning", "error"]


@pytest.fixture
def on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A machine with so many, to a torch that could use them."""
    monkeypatch.setattr("streamrl.gpus.version", lambda _name: "2.13.0+cu130")

    def become(count: int) -> None:
        monkeypatch.setenv("PATH", machine_with(tmp_path, count)["PATH"])

    return become


def placements(model: Path, url: str, *overrides: str) -> list[str]:
    findings = [finding for _, finding in look(load(model, url, *overrides)) if finding.name == "placement"]
    return [f"{one.level}: {one.evidence}" for one in findings]


def test_gpus_are_listed_and_given_out(model: Path, redis_url: str, on_gpus: Callable[[int], None]) -> None:
    on_gpus(3)
    findings = found(model, redis_url, "worker.count=1")
    assert findings["gpu 0"].evidence == "NVIDIA H100 80GB HBM3, driver 580.65.06, 85.0 GB of 85.5 GB free"
    assert placements(model, redis_url, "worker.count=1") == [
        "ok: learner on GPU 0",
        "ok: worker/0 on GPU 1",
        "warning: no part of the run uses GPU 2",
    ]
    assert placements(model, redis_url, "learner.processes=4", "worker.count=0") == [
        "error: learner.processes = 4: each rank needs a GPU of its own, and there are 3 GPUs; "
        "set it to 3, or start the learner where there are more"
    ]


def test_one_gpu_is_shared_and_that_is_told(model: Path, redis_url: str, on_gpus: Callable[[int], None]) -> None:
    on_gpus(1)
    assert placements(model, redis_url) == [
        "warning: learner on GPU 0, 0.50 of its memory, shared with another process",
        "warning: worker/0 on GPU 0, 0.40 of its memory, shared with another process",
    ]
    write_tensors(model, rows=40_000_000)  # 80 GB as it is served
    worker = found(model, redis_url, "weights.max_store_bytes=999000000000")["worker on GPU"]
    assert worker.level == "error"
    assert "82.1 GB of weights and workspace per GPU, 34.2 GB available" in worker.evidence


def test_a_driver_that_is_broken_is_found(model: Path, redis_url: str, on_gpus: Callable[[int], None]) -> None:
    on_gpus(1)
    (model.parent / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert found(model, redis_url)["gpu"].level == "error"


def test_the_estimate_grows_with_the_reference_and_shrinks_with_ranks(model: Path, redis_url: str) -> None:
    with_reference = load(model, redis_url).config
    for without in ("kl.placement=none", "kl.coefficient=0", "name=rejection_sampling", "advantages=none"):
        plain = load(model, redis_url, f"algorithm.{without}").config
        assert machine.learner_bytes(plain, 1000) == 18_000, without
    assert machine.learner_bytes(with_reference, 1000) == 20_000
    assert machine.learner_bytes(load(model, redis_url, "learner.processes=4").config, 1000) == 5_000


def test_where_files_are_wrong_nothing_is_tried_with_them(
    model: Path, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(model, redis_url)
    (model / "config.json").unlink()
    assert main(["doctor", path]) == 2
    told = capsys.readouterr().out
    assert "ERROR    files" in told
    assert "rewards, prompts and model were not tried" in told


def test_a_second_copy_of_the_weights_is_not_counted(model: Path) -> None:
    count = count_parameters(model)
    shutil.copy(model / "model.safetensors", model / "consolidated.safetensors")
    assert count_parameters(model) == count > 0
    index = {"weight_map": {"a": "model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(model / "model.safetensors", model / "other.safetensors")
    assert count_parameters(model) == count
