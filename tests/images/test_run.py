"""A run of the overlay `cpu` in its own images, while pods go, come again and are upgraded.

451 s on two cores with a load of 20: 72 steps, 304 tickets, lost 0, twice 0, no secret seen.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from streamrl.config import schema
from tests.images.conftest import UPGRADED, MakeDeployed
from tests.images.deployed import Deployed
from tests.images.judged import say_otherwise

pytestmark = [pytest.mark.images, pytest.mark.timeout(2400)]
Say = Callable[[str], None]
READY_S = 420.0  # kubelet gives a worker 300 to begin
PATIENCE_S = 420.0
SEED, MAX_LAG = schema.Config.model_fields["seed"].default, schema.Lag().hard_limit_steps
WORKER_IMAGE = "streamrl-worker-cpu:0.1.0"


def test_a_run_survives_what_befalls_pods_and_tells_no_secret(
    make_deployed: MakeDeployed, say: Say, record_property: Callable[[str, object], None]
) -> None:
    namespace = make_deployed()
    redis = namespace.start("redis", "redis-0")
    learner = namespace.start("learner", "learner-0")
    others = [namespace.start(name, f"{name}-0") for name in ("reward", "monitor", "dashboard")]
    workers = {host: namespace.start("worker", host) for host in ("worker-0", "worker-1")}
    for pod in (redis, *others, *workers.values()):
        pod.wait_until_ready(READY_S)
        say(f"{pod.name}: ready after {pod.ready_after_s:.0f} s")
    namespace.wait_for_steps(3, timeout_s=PATIENCE_S)

    workers["worker-0"].kill()
    workers["worker-0"] = namespace.start("worker", "worker-0")
    added = namespace.start("worker", "worker-2")
    for pod in (workers["worker-0"], added):
        pod.wait_until_ready(READY_S)
    namespace.wait_for_steps(3, timeout_s=PATIENCE_S)
    say(f"step {namespace.step()}: one worker killed and made anew, one added")

    took_s = redis.delete()
    redis = namespace.start("redis", "redis-0")
    redis.wait_until_ready(READY_S)
    namespace.wait_for_steps(3, timeout_s=PATIENCE_S)
    say(f"step {namespace.step()}: Redis deleted in {took_s:.1f} s and made anew")

    for host in ("worker-0", "worker-1"):  # maxSurge 0: one goes before the other comes
        took_s = workers[host].delete()
        workers[host] = namespace.start("worker", host, {WORKER_IMAGE: UPGRADED})
        workers[host].wait_until_ready(READY_S)
        say(f"step {namespace.step()}: {host} deleted in {took_s:.1f} s, and upgraded")
    namespace.wait_for_steps(3, timeout_s=PATIENCE_S)

    took_s = learner.delete()
    say(f"step {namespace.step()}: learner deleted in {took_s:.1f} s; made anew, with a last step")
    last = namespace.end_after(10)
    learner = namespace.start("learner", "learner-0")
    namespace.wait(lambda: learner.exit_code() is not None, description="the learner ends", timeout_s=PATIENCE_S)
    assert learner.exit_code() == 0, learner.log()[-4000:]

    found = _judge(namespace, last)
    say(found)
    record_property("figure", found)


def _judge(namespace: Deployed, last: int) -> str:
    """What was found, in short."""
    audit = namespace.ask("audit")
    assert (audit["step"], audit["lost"], audit["twice"], audit["clean"]) == (last, 0, 0, True), audit
    seen = namespace.ask("status")
    assert (seen["run"]["state"], seen["run"]["step"]) == ("finished", last)
    prompts = namespace.volumes.claim("models") / "data" / "train.jsonl"
    verdict = namespace.judge.verdict(namespace.run_folder, prompts, seed=SEED, max_lag=MAX_LAG)
    assert say_otherwise(verdict, audit) == []
    assert verdict.steps_checked > 0
    assert namespace.secrets_shown() == []
    started_again = {pod.name: pod.restarts for pod in namespace.pods if pod.restarts and "worker" not in pod.name}
    assert started_again == {}, "but workers, which a Deployment starts again when their run has ended"
    return (
        f"{last} steps, {audit['issued']} tickets: {audit['trained']} trained, lost {audit['lost']}, "
        f"twice {audit['twice']}; the judge made {verdict.steps_checked} of the steps again from what it saw"
    )
