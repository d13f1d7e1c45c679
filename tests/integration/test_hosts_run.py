"""A run whose worker has one engine over two hosts, as processes: real Redis, real vLLM on CPUs, a learner made up.

Both hosts are this machine, by two addresses of its loopback.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from streamrl.config import schema
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.snapshot import snapshot
from streamrl.protocol.wire.group import Group
from streamrl.telemetry.progress import Report
from tests.helpers import wait_until
from tests.made_up_learner import MadeUpLearner
from tests.tiny_models import make_model, response_logprobs
from tests.worker_processes import Workers, alive, descendants, shared_by

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600), pytest.mark.filterwarnings("ignore")]

TOLERANCE = 1e-4
START_S = 1200.0  # of vLLM on a machine that is busy
PROMPTS = ("sort 1 2:", "say a b", "3 + 4 =", "hello")


@pytest.fixture
def workers(tmp_path: Path, redis_url: str, run_name: str) -> Iterator[Workers]:
    made = Workers(tmp_path, redis_url, run_name)
    yield made
    made.end()


def make_config(name: str, model: Path, **engine_args: Any) -> schema.Config:
    return schema.Config(
        name=name,
        model=schema.Model(path=str(model)),
        data=schema.Data(train="prompts.jsonl", max_prompt_tokens=32),
        sampling=schema.Sampling(num_samples=3, max_tokens=100, min_tokens=100),
        rewards={"length": schema.FunctionReward(type="function", target="length_penalty", options=LENGTH)},
        weights=schema.Weights(dtype="float32", give_up_after_s=120.0, kv_cache="clear"),
        worker=schema.Worker(
            engine="vllm",
            threads=1,
            grace_s=2.0,
            lease_s=30.0,
            hosts=2,
            start_timeout_s=START_S,
            engine_args={"kv_cache_memory_bytes": 64 << 20, **engine_args},
        ),
    )


LENGTH = {"free_tokens": 4, "max_tokens": 100}


class TwoHosts:
    """The processes of one worker and of the further host of its engine, and a learner."""

    def __init__(self, workers: Workers, folder: Path, client: redis.Redis, keys: Keys) -> None:
        self.models = [make_model(folder / f"model-{seed}", seed=seed, kv_heads=2) for seed in range(3)]
        self.learner = MadeUpLearner(client, keys, make_config(keys.name, self.models[0], tensor_parallel_size=2))
        self.truth = {self.learner.publish(self.models[1]).version: self.models[1]}
        self._workers, self._client, self._keys = workers, client, keys
        self.first = workers.start("--model", str(self.models[0]), "--hosts", "127.0.0.1:0", "--import-vllm")
        self.waits_for_its_other_host(within_s=300)
        self.further = self.join()

    def join(self) -> subprocess.Popen[bytes]:
        at = str(self.report("worker", 0).detail["hosts_at"])
        return self._workers.start("--model", str(self.models[0]), "--join", at, number=1)

    def report(self, kind: str, number: int) -> Report:
        [found] = [one for one in self._reports() if one.part == f"{kind}/{self._workers.name}-{number}"]
        return found

    def waits_for_its_other_host(self, *, within_s: float) -> None:
        def waits() -> bool:
            return any(one.role == "worker" and one.doing == "hosts" for one in self._reports())

        wait_until(waits, description="the first host waits for the other one", timeout_s=within_s)

    def _reports(self) -> tuple[Report, ...]:
        return tuple(snapshot(self._client, self._keys).reports)


@pytest.fixture
def hosts(workers: Workers, tmp_path: Path, client: redis.Redis, keys: Keys) -> TwoHosts:
    return TwoHosts(workers, tmp_path, client, keys)


def test_versions_are_served_by_the_ranks_of_both_hosts_and_loaded_in_mid_sample(hosts: TwoHosts) -> None:
    learner, truth = hosts.learner, hosts.truth
    learner.issue(*PROMPTS, num_samples=3)
    for group in learner.groups(4, timeout_s=2 * START_S):
        assert_true(truth, group)
    learner.issue(*PROMPTS * 25, first=100, num_samples=3)
    learner.groups(1, timeout_s=START_S)
    second_version = learner.publish(hosts.models[2]).version
    truth[second_version] = hosts.models[2]
    learner.issue(PROMPTS[0], first=200, num_samples=3, min_version=second_version)
    groups = learner.groups(100, timeout_s=START_S)
    mixed = [group for group in groups if any(len(sample.spans) == 2 for sample in group.samples)]
    assert mixed
    for group in [*mixed[:4], groups[-1]]:
        assert_true(truth, group)
    assert hosts.report("host", 1).detail["version"] == second_version


def test_a_host_that_dies_ends_the_engine_at_once_and_the_run_goes_on_when_another_has_joined(
    hosts: TwoHosts, workers: Workers, record_property: Any
) -> None:
    waiting = hosts.report("worker", 0)
    assert (waiting.state, waiting.detail["hosts"], waiting.detail["hosts_wanted"]) == ("waiting", 1, 2)
    learner = hosts.learner
    learner.issue(*PROMPTS * 25, num_samples=3)
    learner.groups(1, timeout_s=2 * START_S)
    below = descendants(hosts.first.pid) | descendants(hosts.further.pid)
    ranks = {pid for pid in below if "Worker_" in Path(f"/proc/{pid}/cmdline").read_text()}
    shared = {path for path in shared_by(ranks) if path.name.startswith("psm_")}
    assert len(ranks) == 2
    assert shared

    hosts.further.kill()
    hosts.further.wait()
    died = time.monotonic()
    wait_until(lambda: not alive(ranks), description="no rank of the engine is left", timeout_s=30)
    record_property("figure", f"no rank is left {time.monotonic() - died:.1f} s after a further host was killed")
    hosts.waits_for_its_other_host(within_s=60)
    wait_until(lambda: not any(map(Path.exists, shared)), description="what ranks shared is gone", timeout_s=60)

    again = hosts.join()
    rest = learner.groups(99, timeout_s=2 * START_S)
    assert len({group.header.ticket for group in rest}) == 99
    assert not learner.stream.present_tickets("train")
    for group in rest[-4:]:
        assert_true(hosts.truth, group)

    below = descendants(hosts.first.pid) | descendants(again.pid)
    hosts.first.send_signal(signal.SIGTERM)
    assert hosts.first.wait(60) == 0
    assert again.wait(60) == 0
    wait_until(lambda: not alive(below), description="nothing of either host is left")
    assert not workers.left_behind()


def assert_true(truth: dict[int, Path], group: Group) -> None:
    """Log-probs are those of the versions that the spans name."""
    for sample in group.samples:
        for span in sample.spans:
            tokens = sample.token_ids.tolist()
            plain = response_logprobs(truth[span.version], group.prompt_ids.tolist(), tokens, min_tokens=len(tokens))
            off = np.abs(sample.logprobs - plain.numpy())[span.start : span.end]
            assert off.max() <= TOLERANCE
