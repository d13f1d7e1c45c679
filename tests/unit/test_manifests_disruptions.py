"""k8s/: who is taken away first when nodes are short, and what a drained node may take at once."""

from __future__ import annotations

import math

import pytest

from tests.manifest_world import COMPONENT, OVERLAYS, Object, Rendered, render


@pytest.fixture(params=OVERLAYS)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return render(request.param)


def priorities(rendered: Rendered) -> dict[str, int]:
    """By component."""
    values = {one["metadata"]["name"]: one["value"] for one in rendered.of_kind("PriorityClass")}
    return {one.pod: values[one.template["spec"]["priorityClassName"]] for one in rendered.containers()}


def test_every_pod_has_a_priority_and_workers_go_first(rendered: Rendered) -> None:
    found = priorities(rendered)
    assert (
        found["redis"] == found["reward"] > found["learner"] > found["monitor"] == found["dashboard"] > found["worker"]
    )


def test_only_what_the_run_waits_for_takes_anothers_place(rendered: Rendered) -> None:
    policies = {one["metadata"]["name"]: one.get("preemptionPolicy") for one in rendered.of_kind("PriorityClass")}
    assert {name for name, policy in policies.items() if policy != "Never"} == {"streamrl-stream", "streamrl-learner"}


def budgets(rendered: Rendered) -> dict[str, Object]:
    """Each by the one component whose pods it means: the labels of its selector, no others."""
    found = {}
    for one in rendered.of_kind("PodDisruptionBudget"):
        wanted = one["spec"]["selector"]["matchLabels"].items()
        templates = [workload["spec"]["template"] for workload in rendered.workloads]
        meant = {labels[COMPONENT] for each in templates if wanted <= (labels := each["metadata"]["labels"]).items()}
        assert len(meant) == 1, f"{one['metadata']['name']} means {meant}"
        found[meant.pop()] = one["spec"]
    return found


def evicted_at_once(budget: Object, pods: int) -> int:
    """Of so many healthy pods, as the disruption controller counts: shares are rounded up."""
    most = budget["maxUnavailable"]
    if isinstance(most, str):
        most = math.ceil(pods * int(most.removesuffix("%")) / 100)
    return int(min(pods, most))


def test_a_drained_node_takes_no_redis_that_none_follows_one_reward_server_and_half_of_the_workers(
    rendered: Rendered,
) -> None:
    found = budgets(rendered)
    sentinel = found.pop("sentinel", None)
    assert set(found) == {"redis", "reward", "worker"}, "a Job has no scale, so a learner has none; it resumes"
    if sentinel:
        assert [evicted_at_once(one, pods) for one, pods in ((found["redis"], 2), (sentinel, 3))] == [1, 1]
    else:
        assert [evicted_at_once(found["redis"], pods) for pods in (1, 2)] == [0, 0]
    assert [evicted_at_once(found["reward"], pods) for pods in (1, 4)] == [1, 1]
    assert [evicted_at_once(found["worker"], pods) for pods in (1, 2, 7, 8)] == [1, 1, 4, 4]
