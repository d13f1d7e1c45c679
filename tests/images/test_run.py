"""A run of the overlay `cpu` in its own images, while pods go, come again and are upgraded.

Workers fetch weights from each other (the component `peers`); KEDA's rules, by the monitor's page, say when they are to
go. 205 s on two cores with a load of 8: 97 steps, 404 tickets, lost 0, twice 0, 59 MB of weights from peers, no worker
25 s after the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.images.conftest import UPGRADED, MakeDeployed
from tests.images.deployed import Deployed
from tests.images.ended import judged
from tests.images.pods import Pod
from tests.images.scaled import Scaler

pytestmark = [pytest.mark.images, pytest.mark.timeout(2400)]
Say = Callable[[str], None]
READY_S = 420.0  # kubelet gives a worker 300 to begin
PATIENCE_S = 420.0
WORKER_IMAGE = "streamrl-worker-cpu:0.1.0"
NONE_LEFT_S = 60.0
FROM_PEERS = "streamrl_worker_weights_bytes_peers_total"


def test_a_run_survives_what_befalls_pods_and_tells_no_secret(
    make_deployed: MakeDeployed, say: Say, record_property: Callable[[str, object], None]
) -> None:
    namespace = make_deployed("peers")
    redis = namespace.start("redis", "redis-0")
    learner = namespace.start("learner", "learner-0")
    others = [namespace.start(name, f"{name}-0") for name in ("reward", "monitor", "dashboard")]
    workers = {host: namespace.start("worker", host) for host in ("worker-0", "worker-1")}
    for pod in (redis, *others, *workers.values()):
        pod.wait_until_ready(READY_S)
        say(f"{pod.name}: ready after {pod.ready_after_s:.0f} s")
    with Scaler(namespace) as scaler:
        namespace.wait_for_steps(3, timeout_s=PATIENCE_S)
        _befall(namespace, redis, workers, say)
        from_peers = _handed_on(namespace, list(workers.values()))

        took_s = learner.delete()
        say(f"step {namespace.step()}: learner deleted in {took_s:.1f} s; made anew, with a last step")
        last = namespace.end_after(10)
        learner = namespace.start("learner", "learner-0")
        namespace.wait(lambda: learner.exit_code() is not None, description="the learner ends", timeout_s=PATIENCE_S)
        assert learner.exit_code() == 0, learner.log()[-4000:]
        none_left_s = _scale_down(namespace, scaler, list(workers.values()))

    found = judged(namespace, last)
    found += f"; {from_peers:,.0f} bytes of weights from peers; no worker {none_left_s:.0f} s after the end"
    say(found)
    record_property("figure", found)
    assert none_left_s <= NONE_LEFT_S, scaler.polls


def _befall(namespace: Deployed, redis: Pod, workers: dict[str, Pod], say: Say) -> None:
    """Steps go on after each."""
    workers["worker-0"].kill()
    for host in ("worker-0", "worker-2"):
        workers[host] = namespace.start("worker", host)
    for host in ("worker-0", "worker-2"):
        workers[host].wait_until_ready(READY_S)
    namespace.wait_for_steps(3, timeout_s=PATIENCE_S)
    say(f"step {namespace.step()}: one worker killed and made anew, one added")

    took_s = redis.delete()
    namespace.start("redis", "redis-0").wait_until_ready(READY_S)
    namespace.wait_for_steps(3, timeout_s=PATIENCE_S)
    say(f"step {namespace.step()}: Redis deleted in {took_s:.1f} s and made anew")

    for host in ("worker-0", "worker-1"):  # maxSurge 0: one goes before the other comes
        took_s = workers[host].delete()
        workers[host] = namespace.start("worker", host, {WORKER_IMAGE: UPGRADED})
        workers[host].wait_until_ready(READY_S)
        say(f"step {namespace.step()}: {host} deleted in {took_s:.1f} s, and upgraded")
    namespace.wait_for_steps(3, timeout_s=PATIENCE_S)


def _handed_on(namespace: Deployed, workers: Sequence[Pod]) -> float:
    """Bytes of weights that workers have from each other."""

    def from_peers() -> float:
        return sum(namespace.counted(worker, FROM_PEERS) for worker in workers)

    namespace.wait(from_peers, description="a worker has weights from another", timeout_s=PATIENCE_S)
    return from_peers()


def _scale_down(namespace: Deployed, scaler: Scaler, workers: Sequence[Pod]) -> float:
    """Seconds from the run's end until KEDA had no worker and their pods were gone."""
    ended = time.monotonic()
    namespace.wait(lambda: not scaler.workers, description="KEDA has no worker", timeout_s=PATIENCE_S)
    with ThreadPoolExecutor() as pool:
        list(pool.map(Pod.delete, workers))
    return time.monotonic() - ended
