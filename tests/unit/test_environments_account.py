"""What a worker tells of its rollouts."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from streamrl.errors import SampleError
from streamrl.workers.environments.playing import Account
from streamrl.workers.sessions.trace import Played, Trace


def played(*, model_s: float, environment_s: float) -> Played:
    made = Trace(np.zeros(1, np.int32)).played("stop", 0.0)
    return made._replace(model_s=model_s, environment_s=environment_s)


def test_it_tells_who_is_under_way_for_how_long_and_where_those_before_spent_their_time() -> None:
    now = [0.0]
    account = Account(clock=lambda: now[0])
    with account.rollout():
        now[0] = 20.0
        with account.rollout():
            now[0] = 30.0
            facts = account.facts()
            assert (facts["under_way"], facts["oldest_s"]) == (2, 30.0)
    for seconds in (1.0, 3.0):
        account.played(played(model_s=seconds, environment_s=2 * seconds))
    facts = account.facts()
    assert (facts["under_way"], facts["oldest_s"], facts["scored"], facts["failed"]) == (0, 0.0, 2, 0)
    assert (facts["model_s"], facts["latency_s"]) == (2.0, 4.0)


def test_an_outage_that_is_over_is_forgotten_after_a_hundred_rollouts() -> None:
    account = Account()
    for _ in range(50):
        with pytest.raises(SampleError), account.rollout():
            raise SampleError("the environment is away")
    assert (account.facts()["ended_lately"], account.facts()["failed_lately"]) == (50, 50)
    for _ in range(100):
        account.played(played(model_s=1.0, environment_s=1.0))
    assert (account.facts()["ended_lately"], account.facts()["failed_lately"]) == (100, 0)
    assert account.facts()["failed"] == 50


def test_a_failure_is_counted_with_its_words_and_one_that_was_given_up_is_none() -> None:
    account = Account()
    with pytest.raises(SampleError), account.rollout():
        raise SampleError("the environment failed in step: " + "x" * 1000)
    with pytest.raises(asyncio.CancelledError), account.rollout():
        raise asyncio.CancelledError
    facts = account.facts()
    assert (facts["failed"], facts["scored"], facts["under_way"]) == (1, 0, 0)
    assert str(facts["error"]).startswith("the environment failed in step: xxx")
    assert len(str(facts["error"])) == 200
