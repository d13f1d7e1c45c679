"""Redis under Sentinels, by the component `redis-sentinel`: the master's pod goes in mid-run, and then the next one's.

The first is killed, the second one deleted, and each comes again as a replica of the other. KEDA has no part in it. Two
runs on two cores, with loads of 4 to 7 and of 8 and more: 116 and 185 s, 101 and 87 steps, lost 0, twice 0, the other
one chosen after 7 and 8 s, and after 12 and 8 s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import pytest

from tests.images.conftest import MakeDeployed
from tests.images.deployed import Deployed
from tests.images.ended import judged
from tests.images.pods import Pod

pytestmark = [pytest.mark.images, pytest.mark.timeout(2400)]
Say = Callable[[str], None]
READY_S = 420.0
PATIENCE_S = 240.0
RECOVERY_S = 60.0  # 5 until they call it down, the vote, and a step: 8 to 13; of a busy machine
SERVERS = ("redis-0", "redis-1")
_ASK_MASTERS = ("valkey-cli", "-p", "26379", "sentinel", "masters")
# The password goes in by a pipe, as the probe's does.
_ASK_ROLE = """
printf 'AUTH monitor %s\\nINFO replication\\n' "$(head -n 1 /run/secrets/redis/monitor)" | valkey-cli
"""


def test_a_run_goes_on_when_sentinels_make_the_other_redis_the_master(
    make_deployed: MakeDeployed, say: Say, record_property: Callable[[str, object], None]
) -> None:
    namespace = make_deployed("redis-sentinel")
    servers: dict[str, Pod] = {}
    for host in SERVERS:  # one after the other, as a StatefulSet starts them
        servers[host] = namespace.start("redis", host)
        servers[host].wait_until_ready(READY_S)
    sentinels = [namespace.start("sentinel", f"sentinel-{number}") for number in range(3)]
    others = [namespace.start(name, f"{name}-0") for name in ("reward", "monitor", "dashboard")]
    learner = namespace.start("learner", "learner-0")
    others += [namespace.start("worker", host) for host in ("worker-0", "worker-1")]
    for pod in (*sentinels, *others):
        pod.wait_until_ready(READY_S)
    namespace.wait_for_steps(3, timeout_s=PATIENCE_S)

    recoveries = [
        _fail_over(namespace, servers, sentinels, say, end=end, old=old, new=new)
        for end, old, new in ((Pod.kill, "redis-0", "redis-1"), (Pod.delete, "redis-1", "redis-0"))
    ]

    last = namespace.end_after(6)
    learner.delete()
    learner = namespace.start("learner", "learner-0")
    namespace.wait(lambda: learner.exit_code() is not None, description="the learner ends", timeout_s=PATIENCE_S)
    assert learner.exit_code() == 0, learner.log()[-4000:]
    found = f"{judged(namespace, last)}; a step {max(recoveries):.0f} s after a master was gone"
    say(found)
    record_property("figure", found)
    assert max(recoveries) <= RECOVERY_S
    for pod in sentinels:
        assert pod.ask("valkey-cli", "-p", "26379", "sentinel", "failover", "redis").stdout.startswith("NOPERM")


def _fail_over(
    namespace: Deployed,
    servers: dict[str, Pod],
    sentinels: Sequence[Pod],
    say: Say,
    *,
    end: Callable[[Pod], object],
    old: str,
    new: str,
) -> float:
    """Seconds from the master's end to another step; it has come again as a replica."""
    namespace.wait(
        lambda: all(_knows(pod, master=old) for pod in sentinels) and _role(servers[new]) == ("slave", "up"),
        description="the Sentinels know each other and the replica, and the replica all",
        timeout_s=PATIENCE_S,
    )
    before = servers[old]
    namespace.judge.follow(new)
    began = time.monotonic()
    end(before)
    namespace.wait(
        lambda: all(_master(pod).get("ip") == f"{new}.redis" for pod in sentinels),
        description=f"the Sentinels make {new} the master",
        timeout_s=PATIENCE_S,
    )
    chosen_s = time.monotonic() - began
    namespace.wait_for_steps(1, timeout_s=PATIENCE_S)
    took_s = time.monotonic() - began
    servers[old] = namespace.start("redis", old)
    servers[old].wait_until_ready(READY_S)
    namespace.wait(lambda: _role(servers[old]) == ("slave", "up"), description=f"{old} follows", timeout_s=PATIENCE_S)
    namespace.wait_for_steps(3, timeout_s=PATIENCE_S)
    say(f"step {namespace.step()}: {old} gone, {new} chosen after {chosen_s:.0f} s, a step after {took_s:.0f} s")
    return took_s


def _knows(sentinel: Pod, *, master: str) -> bool:
    told = _master(sentinel)
    wanted = {"ip": f"{master}.redis", "flags": "master", "num-slaves": "1", "num-other-sentinels": "2"}
    return wanted.items() <= told.items()


def _master(sentinel: Pod) -> Mapping[str, str]:
    """What a Sentinel says of it: names and values, a line each."""
    lines = sentinel.ask(*_ASK_MASTERS).stdout.splitlines()
    return dict(zip(lines[::2], lines[1::2], strict=False))


def _role(server: Pod) -> tuple[str, str]:
    """Of a server, and whether it has its master."""
    lines = server.ask("sh", "-c", _ASK_ROLE).stdout.splitlines()
    told = dict(line.strip().split(":", 1) for line in lines if ":" in line)
    return told.get("role", ""), told.get("master_link_status", "")
