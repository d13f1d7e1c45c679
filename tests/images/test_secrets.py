"""Every secret is changed under pods that speak TLS to Redis, by docs/operations.md, and none is seen anywhere.

Redis is started anew three times: with the old and the new ones, with the new ones and another certificate, and when
everybody knows that certificate's authority alone. 225 s on two cores with a load of 6: 26 steps, lost 0, twice 0.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

import pytest

from streamrl.protocol.transport.acl import ROLES
from tests.images.conftest import REDIS_WITH_TLS, MakeDeployed, redis_image
from tests.images.deployed import Deployed
from tests.images.ended import judged
from tests.images.pods import Pod

pytestmark = [pytest.mark.images, pytest.mark.timeout(2400)]
Say = Callable[[str], None]
READY_S = 420.0
PATIENCE_S = 420.0
AUTHORITY = ("redis-tls", "ca.crt")
REWARD, DASHBOARD = ("reward-token", "token"), ("dashboard-token", "token")
Values = Mapping[tuple[str, str], str]


def test_every_secret_is_changed_under_pods_and_none_is_told(
    make_deployed: MakeDeployed, say: Say, record_property: Callable[[str, object], None]
) -> None:
    namespace = make_deployed("redis-tls")
    pods = {"redis": namespace.start("redis", "redis-0", {redis_image(): REDIS_WITH_TLS})}
    learner = namespace.start("learner", "learner-0")
    pods |= {name: namespace.start(name, f"{name}-0") for name in ("reward", "monitor", "dashboard", "worker")}
    for pod in pods.values():
        pod.wait_until_ready(READY_S)
    namespace.wait_for_steps(3, timeout_s=PATIENCE_S)
    first = dict(namespace.volumes.values)

    _change_all(namespace, pods, first, say)

    last = namespace.end_after(6)
    learner.delete()
    learner = namespace.start("learner", "learner-0")
    namespace.wait(lambda: learner.exit_code() is not None, description="the learner ends", timeout_s=PATIENCE_S)
    assert learner.exit_code() == 0, learner.log()[-4000:]
    found = judged(namespace, last)
    say(found)
    record_property("figure", found)


def _change_all(namespace: Deployed, pods: dict[str, Pod], first: Values, say: Say) -> None:
    """Steps go on after each of three rounds."""
    anothers = {("redis-passwords", role): secrets.token_hex(32) for role in ROLES}
    certificate = namespace.volumes.certificate()
    both = {name: f"{first[name]}\n{value}\n" for name, value in anothers.items()}
    rounds: Mapping[str, Values] = {
        "the old and the new passwords, both authorities": {
            **both,
            AUTHORITY: first[AUTHORITY] + certificate[AUTHORITY],
        },
        "the new passwords, another certificate": {
            **anothers,
            **{name: value for name, value in certificate.items() if name != AUTHORITY},
        },
        "its authority, the tokens of the reward server and the dashboard": {
            AUTHORITY: certificate[AUTHORITY],
            REWARD: secrets.token_hex(32),
            DASHBOARD: secrets.token_hex(32),
        },
    }
    for title, values in rounds.items():
        namespace.volumes.change(values)
        pods["redis"] = namespace.anew(pods["redis"], {redis_image(): REDIS_WITH_TLS})
        if REWARD in values:  # both read theirs at their start
            pods["reward"], pods["dashboard"] = namespace.anew(pods["reward"]), namespace.anew(pods["dashboard"])
        namespace.wait_for_steps(3, timeout_s=PATIENCE_S)
        say(f"step {namespace.step()}: {title}")

    old = namespace.asked("status", password=first["redis-passwords", "operator"])
    assert old.returncode != 0, "the first password is good for nothing"
    assert namespace.ask("status")["run"]["state"] == "running"
    shown = {
        token: namespace.page("http://dashboard:8420/api/view", token=token)[0] for token in _tokens(namespace, first)
    }
    assert list(shown.values()) == [401, 200]


def _tokens(namespace: Deployed, first: Values) -> tuple[str, str]:
    """Of the dashboard: the first one, and the one that it has."""
    return first[DASHBOARD], namespace.volumes.secret(*DASHBOARD)
