"""Hosts, and what the manifests put on them; where the machine has no network namespaces the tests say so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import transformers

from streamrl.demos.quickstart import write_base_model, write_data
from tests.manifest_world import render
from tests.root.cluster import Cluster
from tests.root.hosts import hosts, why_not

HOSTS = ("redis-0", "redis-1", "reward-0", "monitor-0", "learner-0", "learner-1", "worker-0", "worker-1", "worker-2")
SERVICES = {"redis": "redis-0", "reward": "reward-0", "monitor": "monitor-0"}
# The overlay's run with the quickstart's model: two workers with vLLM would not fit on the cores of one small machine.
SMALL = """
sampling: {num_samples: 4, max_tokens: 8}
training: {groups_per_step: 4, max_epochs: 50}
data: {max_prompt_tokens: 16}
algorithm: {mask_unfinished: false}  # few samples end within eight tokens
checkpoint: {every_steps: 4}
redis: {connect_timeout_s: 2.0, reply_timeout_s: 5.0}
validation: {every_steps: 0, at_start: false, max_prompts: 16, sampling: {max_tokens: 8}}
worker: {count: 0, threads: 1, engine: transformers, lease_s: 10.0, max_groups_in_flight: 4}
learner: {threads: 1}
"""

MakeCluster = Callable[..., Cluster]


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[MakeCluster]:
    """The overlay `cpu` on hosts, nothing of it started yet; settings of the test's own as keyword arguments."""
    if reason := why_not():
        pytest.skip(f"hosts are network namespaces: {reason}")
    with ExitStack() as stack:

        def make(*, max_steps: int = -1) -> Cluster:
            world = stack.enter_context(hosts(HOSTS, tmp_path / "logs", services=SERVICES))
            changes = SMALL.replace("max_epochs: 50", f"max_epochs: 50, max_steps: {max_steps}")
            cluster = Cluster(world, render("cpu"), tmp_path, changes=changes)
            fill(cluster.volumes / "models")
            return cluster

        yield make


def fill(models: Path) -> None:
    """As k8s/README.md says: policy/, reward/, and data/."""
    write_base_model(models / "policy", seed=1)
    write_data(models / "data", seed=1)
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(models / "policy", num_labels=1)
    judge.save_pretrained(models / "reward")
    transformers.AutoTokenizer.from_pretrained(models / "policy").save_pretrained(models / "reward")
