"""`python -m workers` as a process: real Redis, real weights, a learner that is made up."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import redis

from streamrl.config import schema
from streamrl.cpu_vllm import environment_of_import
from streamrl.held_folders import remove_those_of_the_dead
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.keys import WORKERS, Keys
from streamrl.protocol.transport.snapshot import snapshot
from streamrl.protocol.wire.group import Group
from tests.helpers import wait_until
from tests.made_up_learner import MadeUpLearner
from tests.tiny_models import make_model, response_logprobs
from tests.worker_processes import Workers, alive, command_of, descendants

TOLERANCE = 1e-4
_GRACE_S, _TRIES = 0.5, 3
PROMPTS = ("sort 1 2:", "say a b", "3 + 4 =", "hello")

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:transformers.*")


@pytest.fixture
def workers(tmp_path: Path, redis_url: str, run_name: str) -> Iterator[Workers]:
    made = Workers(tmp_path, redis_url, run_name)
    yield made
    made.end()


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    return [make_model(tmp_path / f"model-{seed}", seed=seed) for seed in range(2)]


MakeLearner = Callable[..., MadeUpLearner]


@pytest.fixture
def make_learner(client: redis.Redis, keys: Keys, models: list[Path]) -> MakeLearner:
    def make(*, fingerprint: str | None = None, **worker: Any) -> MadeUpLearner:
        return MadeUpLearner(client, keys, make_config(keys.name, models[0], **worker), fingerprint=fingerprint)

    return make


def make_config(name: str, model: Path, **worker: Any) -> schema.Config:
    settings = {"engine": "transformers", "threads": 1, "grace_s": 2.0, **worker}
    return schema.Config(
        name=name,
        model=schema.Model(path=str(model)),
        data=schema.Data(train="prompts.jsonl", max_prompt_tokens=32),
        sampling=schema.Sampling(num_samples=3, max_tokens=24),
        rewards={"length": _length_reward()},
        weights=schema.Weights(dtype="float32"),
        worker=schema.Worker(**settings),
    )


def _length_reward() -> schema.FunctionReward:
    return schema.FunctionReward(type="function", target="length_penalty", options={"free_tokens": 4, "max_tokens": 24})


def assert_true_to(model: Path, group: Group, *, version: int) -> None:
    for sample in group.samples:
        assert {span.version for span in sample.spans} == {version}
        truth = response_logprobs(model, group.prompt_ids.tolist(), sample.token_ids.tolist(), min_tokens=1)
        assert np.abs(sample.logprobs - truth.numpy()).max() <= TOLERANCE


def test_tickets_become_groups_of_the_published_version_and_sigterm_ends_the_worker(
    make_learner: MakeLearner, workers: Workers, models: list[Path], client: redis.Redis, keys: Keys
) -> None:
    learner = make_learner()
    version = learner.publish(models[1]).version
    learner.issue(*PROMPTS, num_samples=3, min_version=version)
    process = workers.start("--model", str(models[0]), "--http", "127.0.0.1:0")

    groups = learner.groups(4)
    assert sorted(group.header.ticket for group in groups) == [0, 1, 2, 3]
    for group in groups:
        assert_true_to(models[1], group, version=version)

    newer = learner.publish(models[0]).version
    learner.issue(PROMPTS[0], first=10, num_samples=1, purpose="eval", min_version=newer)
    (answer,) = learner.groups(1, purpose="eval")
    assert answer.header.min_version == newer
    part = f"worker/{workers.name}-0"
    wait_until(
        lambda: {r.part: r.detail.get("version") for r in snapshot(client, keys).reports} == {part: newer},
        description="the worker reports the version that it serves",
    )

    (report,) = snapshot(client, keys).reports
    assert httpx.get(f"http://{report.detail['http']}/readyz").status_code == 200
    assert "streamrl_worker_groups_delivered_total 5.0" in httpx.get(f"http://{report.detail['http']}/metrics").text

    before = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    wait_until(lambda: not alive(before), description="nothing of the worker is left")
    assert not workers.left_behind()


def test_the_worker_leaves_when_the_run_is_finished(
    make_learner: MakeLearner, workers: Workers, models: list[Path]
) -> None:
    learner = make_learner()
    learner.publish(models[0])
    learner.issue(PROMPTS[0], num_samples=1)
    process = workers.start("--allow-model-root", str(models[0].parent))
    learner.groups(1)

    learner.stream.release("finished")
    assert process.wait(60) == 0


def test_a_worker_goes_on_with_the_settings_of_the_next_learner(
    make_learner: MakeLearner, workers: Workers, models: list[Path], client: redis.Redis, keys: Keys
) -> None:
    learner = make_learner()
    learner.publish(models[0])
    learner.issue(PROMPTS[0], num_samples=1)
    process = workers.start("--model", str(models[0]))
    learner.groups(1)

    validation = schema.Validation(sampling=schema.ValidationSampling(max_tokens=2))
    shorter = learner.config.model_copy(update={"validation": validation})
    run = snapshot(client, keys).run
    assert run is not None
    learner.stream.claim(config_json=shorter.model_dump_json(), fingerprint=run.fingerprint, wait_s=0.0)
    numbers = itertools.count(10)

    def is_short() -> bool:
        learner.issue(PROMPTS[0], first=next(numbers), num_samples=1, purpose="eval")
        (answer,) = learner.groups(1, purpose="eval")
        return len(answer.samples[0].token_ids) <= 2

    wait_until(is_short, description="the worker samples as the next learner wants it")
    assert process.poll() is None, "nobody might start it again"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert not workers.left_behind()


def test_a_killed_worker_loses_no_ticket_to_the_one_that_takes_its_place(
    make_learner: MakeLearner, workers: Workers, models: list[Path]
) -> None:
    learner = make_learner(lease_s=2.0)
    learner.publish(models[0])
    first = workers.start("--model", str(models[0]))
    learner.issue(PROMPTS[0], num_samples=1)
    learner.groups(1)

    learner.issue(*(PROMPTS * 10), first=100, num_samples=3)
    learner.groups(1)
    first.kill()
    first.wait()
    workers.start("--model", str(models[0]), number=1)
    rest = learner.groups(39)
    assert len({group.header.ticket for group in rest}) == 39
    assert not learner.stream.present_tickets("train")


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.long)])
def test_sigterm_in_mid_work_ends_the_worker_soon_after_its_grace_and_no_ticket_waits_for_a_lease(
    engine: str,
    make_learner: MakeLearner,
    tmp_path: Path,
    redis_url: str,
    models: list[Path],
    client: redis.Redis,
    keys: Keys,
    record_property: Any,
) -> None:
    """One that has not ended 2.5 s after its grace leaves at once, with 1. On a busy machine that may happen, so then
    another one is tried; a defect makes all of them do it."""
    arguments = {"kv_cache_memory_bytes": 64 << 20} if engine == "vllm" else {}
    learner = make_learner(grace_s=_GRACE_S, max_groups_in_flight=64, engine=engine, engine_args=arguments)
    learner.publish(models[0])
    learner.issue(*(PROMPTS * 1000), num_samples=3)
    for number in range(_TRIES):
        workers = Workers(tmp_path, redis_url, keys.name)
        try:
            process = workers.start("--model", str(models[0]), number=number)
            gone_s = _stop_in_mid_work(process, learner, worker=f"{workers.name}-{number}")
            left_behind = workers.left_behind()
        finally:
            workers.end()
        if process.returncode == 0:
            break
        assert process.returncode == 1
    record_property("figure", f"{engine}: gone {gone_s:.2f} s after SIGTERM, grace {_GRACE_S} s, try {number + 1}")
    assert process.returncode == 0
    assert not left_behind
    streams = snapshot(client, keys).streams["train"]
    assert streams.num_tickets > 0
    assert streams.leased_by.get(f"{workers.name}-{number}", 0) == 0 or _idle_is_over(client, keys)


def _stop_in_mid_work(process: subprocess.Popen[bytes], learner: MadeUpLearner, *, worker: str) -> float:
    """Return how many seconds it takes to end, with all that it has started."""
    wait_until(lambda: learner.groups(1)[0].header.worker == worker, description="it is at work", timeout_s=240)
    learner.groups(4)
    began, below = time.monotonic(), descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    gone_s = time.monotonic() - began
    wait_until(lambda: not alive(below), description="nothing of the worker is left")
    return gone_s


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "number"), [((), signal.SIGTERM), (("--import-vllm",), signal.SIGINT)], ids=["spawned", "forked"]
)
def test_a_signal_to_the_whole_group_leaves_the_worker_its_vllm_which_finishes_all_samples(
    words: tuple[str, ...],
    number: signal.Signals,
    make_learner: MakeLearner,
    workers: Workers,
    models: list[Path],
    tmp_path: Path,
) -> None:
    """Ctrl-C in a terminal is such a signal."""
    learner = make_learner(grace_s=30.0, engine="vllm", engine_args={"kv_cache_memory_bytes": 64 << 20})
    learner.publish(models[0])
    learner.issue(*(PROMPTS * 100), num_samples=3)
    process = workers.start("--model", str(models[0]), *words, leads_group=True)
    learner.groups(1)

    os.killpg(process.pid, number)
    assert process.wait(60) == 0
    num_left = len(learner.stream.present_tickets("train"))
    assert num_left > 0
    groups = learner.groups(400 - 1 - num_left)
    assert not any(group.header.failed or group.header.num_failed_samples for group in groups)
    log = (tmp_path / "worker-0.log").read_text()
    assert "engine_failed" not in log
    assert "tickets_handed_back" not in log


def test_a_worker_that_is_told_to_stop_does_not_wait_for_a_redis_that_hangs(
    tmp_path: Path, models: list[Path], redis_settings: schema.Redis
) -> None:
    with EmbeddedRedis.start(tmp_path / "redis") as server, connect(server.url, redis_settings) as client:
        keys = Keys("hangs")
        learner = MadeUpLearner(client, keys, make_config(keys.name, models[0], grace_s=_GRACE_S))
        learner.publish(models[0])
        learner.issue(PROMPTS[0], num_samples=1)
        workers = Workers(tmp_path, server.url, keys.name)
        try:
            process = workers.start("--model", str(models[0]))
            learner.groups(1, timeout_s=240)
            below = descendants(process.pid)
            os.kill(server.pid, signal.SIGSTOP)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 1
            assert "stopped_without_ending" in (tmp_path / "worker-0.log").read_text(), "it has waited for Redis"
            wait_until(lambda: not alive(below), description="nothing of the worker is left")
        finally:
            os.kill(server.pid, signal.SIGCONT)
            workers.end()


def _idle_is_over(client: redis.Redis, keys: Keys) -> bool:
    """What was handed back stays pending under its old name, idle for so long that anybody may claim it at once."""
    pending: Any = client.xpending_range(keys.tickets("train"), WORKERS, min="-", max="+", count=1000)
    return all(entry["time_since_delivered"] >= 60_000 for entry in pending)


@pytest.mark.long
def test_killed_again_and_again_two_workers_deliver_every_ticket_exactly_once(
    make_learner: MakeLearner, workers: Workers, models: list[Path]
) -> None:
    rng = random.Random(0)
    learner = make_learner(lease_s=2.0, max_groups_in_flight=8)
    learner.publish(models[0])
    alive_now = [workers.start("--model", str(models[0]), number=number) for number in range(2)]
    delivered: list[int] = []
    for kill in range(20):
        learner.issue(*(PROMPTS * 8), first=1000 * kill, num_samples=3)
        delivered += [group.header.ticket for group in learner.groups(rng.randint(1, 24), timeout_s=240)]
        victim = alive_now.pop(rng.randrange(2))
        victim.kill()
        victim.wait()
        alive_now.append(workers.start("--model", str(models[0]), number=2 + kill))
    delivered += [group.header.ticket for group in learner.groups(20 * 32 - len(delivered), timeout_s=240)]
    assert sorted(delivered) == [1000 * kill + number for kill in range(20) for number in range(32)]
    assert not learner.stream.present_tickets("train")


MISTAKES = {
    "a model that is not allowed": ({}, [], "--allow-model-root"),
    "reward code that is not allowed": (
        {"reward": "package.module:function"},
        ["--allow-model-root", "/"],
        "--allow-reward-code package.module:function",
    ),
    "another model than the run's": ({"fingerprint": "0123456789abcdef"}, ["--allow-model-root", "/"], "--model"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_the_operators_is_one_line_and_exit_code_2(
    mistake: str, make_learner: MakeLearner, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, arguments, remedy = MISTAKES[mistake]
    if "reward" in setup:
        foreign = schema.FunctionReward(type="function", target=setup["reward"])
        monkeypatch.setattr(f"{__name__}._length_reward", lambda: foreign)
    make_learner(fingerprint=setup.get("fingerprint"))
    process = workers.start(*arguments)

    assert process.wait(60) == 2
    errors = [line for line in workers.stderr().read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert remedy in errors[0]


_OF_ONE_IMPORT = """
import streamrl.workers.engines.vllm.preload_worker
from streamrl.workers.main import main
main()
"""


@pytest.mark.long
@pytest.mark.parametrize("how", ["spawned", "forked", "forked from the worker's own import"])
def test_a_vllm_that_dies_is_replaced_and_dies_with_its_worker_of_which_nothing_stays(
    make_learner: MakeLearner,
    workers: Workers,
    models: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    learner = make_learner(engine="vllm", engine_args={"kv_cache_memory_bytes": 64 << 20})
    version = learner.publish(models[1]).version
    words = ["--model", str(models[0])] + (["--import-vllm"] if how != "spawned" else [])
    if how.endswith("import"):
        process = workers.start(*words, program=("-c", _OF_ONE_IMPORT), **environment_of_import())
    else:
        process = workers.start(*words)
    learner.issue(PROMPTS[0], num_samples=2)
    assert_true_to(models[1], learner.groups(1, timeout_s=240)[0], version=version)

    learner.issue(*(PROMPTS * 20), first=100, num_samples=3)
    engines = [pid for pid in descendants(process.pid) if "EngineCore" in command_of(pid)]
    assert engines, "vLLM's engine runs in a process of its own"
    os.kill(engines[0], signal.SIGKILL)
    groups = learner.groups(80, timeout_s=240)
    assert len({group.header.ticket for group in groups}) == 80
    assert process.poll() is None

    before = descendants(process.pid)
    process.kill()
    process.wait()
    wait_until(lambda: not alive(before), description="no process of the killed worker is left")
    assert workers.left_behind()
    monkeypatch.setattr(tempfile, "tempdir", workers.temporary)
    remove_those_of_the_dead()
    assert not workers.left_behind()
