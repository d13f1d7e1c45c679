"""How rank 0 is admitted to a run: what it finds in Redis decides, and who is refused leaves no trace."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from streamrl.config import schema
from streamrl.config.load import load_config
from streamrl.errors import ConfigError, Ended, Fenced, Refused, Replaced, ResourceError, RunGone
from streamrl.learner.admission.admit import Admitted, admit
from streamrl.learner.admission.server import Server, holding_lease, take_lease, was_restarted
from streamrl.learner.checkpoints.resume import REPLAY
from streamrl.learner.checkpoints.terms import claim_run
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.operator import remove_run, set_control
from streamrl.protocol.transport.snapshot import snapshot
from streamrl.protocol.transport.types import Control
from tests.feed_world import MODEL, make_config, make_prompts

Come = Callable[..., Admitted]
_LONG_S = 3600.0


@pytest.fixture
def config(tmp_path: Path, keys: Keys) -> schema.Config:
    return make_config().model_copy(update={"name": keys.name, "dir": tmp_path})


@pytest.fixture
def come(config: schema.Config, learner_client: redis.Redis, keys: Keys) -> Come:
    """Be admitted, as one rank 0 after the other under the same agent."""

    def come(
        *, takeover: bool = False, ago_s: float = 0.0, wanted: schema.Config = config, holder: str = "job"
    ) -> Admitted:
        began = time.monotonic() - ago_s
        server = Server(client=learner_client, keys=keys, holder=holder, takeover=takeover, began=began)
        take_lease(wanted, server, takeover=takeover)
        with holding_lease(wanted, server) as keeper:
            return admit(config=wanted, server=server, keeper=keeper, prompts=make_prompts(4), fingerprint=MODEL)

    return come


def terms(config: schema.Config) -> list[str]:
    return sorted(path.name for path in (config.folder / "terms").iterdir())


def test_a_run_that_was_removed_is_refused_without_a_trace_and_told_how_it_goes_on(
    come: Come, config: schema.Config, client: redis.Redis, keys: Keys
) -> None:
    come()
    remove_run(client, keys)

    with pytest.raises(RunGone, match=r"was removed from Redis at .*: use --takeover to continue it there"):
        come()

    assert terms(config) == ["000001"]


def test_a_takeover_of_another_run_by_the_same_name_is_refused_and_the_learner_goes_on(
    come: Come, config: schema.Config, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    first = come()
    for num_terms in (0, 1):  # an empty folder, and that of a run
        elsewhere = config.model_copy(update={"dir": tmp_path / str(num_terms)})
        if num_terms:
            claim_run(elsewhere.folder)
        for takeover in (True, False):
            with pytest.raises(ResourceError, match=r"holds another run of that name \(uid .*, running\)"):
                come(wanted=elsewhere, holder="another", takeover=takeover)
    first.stream.renew()
    assert client.get(keys.lease) == b"job"


def test_a_learner_that_is_refused_leaves_no_lease_to_wait_for(
    come: Come, config: schema.Config, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    come().stream.release("finished")
    with pytest.raises(ResourceError, match=r"\(uid .*, finished\)"):
        come(wanted=config.model_copy(update={"dir": tmp_path / "elsewhere"}))
    assert not client.exists(keys.lease)
    (config.folder / REPLAY).touch()
    with pytest.raises(ConfigError, match="is the replay of a recording"):
        come()
    assert not client.exists(keys.lease)
    (config.folder / REPLAY).unlink()
    remove_run(client, keys)
    with pytest.raises(RunGone):
        come()
    assert not client.exists(keys.lease)


def test_the_configuration_of_the_run_is_that_of_whoever_was_admitted(
    come: Come, config: schema.Config, client: redis.Redis, keys: Keys
) -> None:
    def changed(max_restarts: int) -> schema.Config:
        return config.model_copy(update={"learner": schema.Learner(max_restarts=max_restarts)})

    def shown() -> int:
        return load_config(config.folder / "config.yaml").config.learner.max_restarts

    come(wanted=changed(1))
    assert shown() == 1
    come(wanted=changed(2))
    assert shown() == 2
    remove_run(client, keys)
    with pytest.raises(RunGone):
        come(wanted=changed(3))
    assert shown() == 2


def test_a_takeover_begins_a_removed_run_anew(
    come: Come, config: schema.Config, client: redis.Redis, keys: Keys
) -> None:
    before = come()
    remove_run(client, keys)

    again = come(takeover=True)

    assert (again.start.run_uid, again.start.term) == (before.start.run_uid, 2)
    assert client.hget(keys.meta, "state") == b"running"
    assert come().start.term == 3, "once begun anew it is a run like others"


@pytest.mark.parametrize("word", ["stop", "drain"])
def test_a_learner_that_is_started_anew_does_not_end_by_a_word_to_the_one_before_it(
    come: Come, client: redis.Redis, keys: Keys, word: Control
) -> None:
    come()  # and dies
    set_control(client, keys, word, by="the test")

    assert come(ago_s=_LONG_S).stream.orders().control == word, "its ranks have been started again"
    assert come().stream.orders().control == "run"
    journal = [(event.kind, dict(event.detail)) for event in snapshot(client, keys).events]
    assert journal == [("control", {"mode": word, "by": "the test"}), ("forgets", {"control": word})]
    set_control(client, keys, word, by="the test")
    assert come(ago_s=_LONG_S).stream.orders().control == word


@pytest.mark.parametrize("word", ["stop", "drain"])
def test_a_word_that_ends_the_run_is_for_every_learner_that_had_begun_by_then(
    come: Come, config: schema.Config, client: redis.Redis, keys: Keys, word: Control
) -> None:
    first = come(holder="the first")
    set_control(client, keys, word, by="the test")
    with pytest.raises(Ended, match="was told to drain or stop after this learner started: start a new learner"):
        come(ago_s=_LONG_S, holder="waiting")  # while the first still obeys
    first.stream.release("stopped")
    for holder, takeover in (("waiting", False), ("waiting", True), ("the first", False)):
        with pytest.raises(Ended):
            come(ago_s=_LONG_S, holder=holder, takeover=takeover)
    assert terms(config) == ["000001"], "who ends leaves no trace"
    assert client.exists(keys.lease) == 0

    second = come(holder="started after it")
    assert (second.start.term, second.stream.orders().control) == (2, "run")
    with pytest.raises(Ended):
        come(ago_s=_LONG_S, holder="waiting")
    second.stream.release("finished")
    with pytest.raises(Ended):
        come(ago_s=_LONG_S, holder="waiting")


def test_a_word_that_nobody_is_left_to_obey_is_obeyed_by_whoever_had_begun(
    come: Come, client: redis.Redis, keys: Keys
) -> None:
    come(holder="dead")
    client.delete(keys.lease)
    set_control(client, keys, "stop", by="the test")
    assert come(ago_s=_LONG_S, holder="waiting").stream.orders().control == "stop"


def test_a_word_that_was_taken_back_ends_nobody(come: Come, client: redis.Redis, keys: Keys) -> None:
    first = come(holder="the first")
    set_control(client, keys, "drain", by="the test")
    set_control(client, keys, "run", by="the test")
    first.stream.release("finished")
    assert come(ago_s=_LONG_S, holder="waiting").start.term == 2


def test_a_stop_of_a_run_that_has_ended_ends_those_that_would_take_it_up(
    come: Come, client: redis.Redis, keys: Keys
) -> None:
    come().stream.release("stopped")
    assert not set_control(client, keys, "stop", by="the test")
    with pytest.raises(Ended):
        come(ago_s=_LONG_S)
    assert come().stream.orders().control == "run"


def test_a_word_that_is_said_again_counts_from_then_on(come: Come, client: redis.Redis, keys: Keys) -> None:
    come()
    set_control(client, keys, "stop", by="the test")
    client.hset(keys.control, "end_at", (time.time() - _LONG_S) * 1000)
    assert not set_control(client, keys, "stop", by="the test")
    assert come(ago_s=_LONG_S / 2).stream.orders().control == "stop"


def test_a_word_that_a_clock_set_back_makes_one_of_the_future_ends_nobody(
    come: Come, client: redis.Redis, keys: Keys
) -> None:
    come().stream.release("stopped")
    client.hset(keys.meta, "end_at", (time.time() + 3600) * 1000)
    assert come().start.term == 2


def test_a_learner_that_meets_another_one_is_refused_and_told_what_it_may_do(
    come: Come, config: schema.Config, learner_client: redis.Redis, keys: Keys
) -> None:
    come(holder="the first")
    hasty = config.model_copy(update={"learner": schema.Learner(lease_s=0.01)})
    with pytest.raises(Refused, match=r"the first holds its lease.*--takeover.*--standby") as refused:
        come(holder="another", wanted=hasty)
    assert refused.value.exit_code == 2
    goes_on = iter((True, True, False))
    server = Server(client=learner_client, keys=keys, holder="another", began=time.monotonic())
    assert not take_lease(hasty, server, standby=True, go_on=lambda: next(goes_on))
    assert not list(goes_on)


class Overtaken:
    """A client; before its first script, which finds Redis away or not, something else happens."""

    def __init__(self, client: redis.Redis, act: Callable[[], object], *, is_away: bool) -> None:
        self._client, self._is_away = client, is_away
        self._acts = [act]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def evalsha(self, *args: Any) -> Any:
        if self._acts:
            self._acts.pop()()
            if self._is_away:
                raise redis.ConnectionError("away")
        return self._client.evalsha(*args)


@pytest.mark.parametrize("is_away", [True, False])
def test_of_two_that_begin_a_run_at_once_the_later_one_waits_for_the_other(
    come: Come, config: schema.Config, learner_client: redis.Redis, keys: Keys, is_away: bool
) -> None:
    """Its folder gets the run's uid from the other, after it was read."""
    overtaken: Any = Overtaken(learner_client, lambda: come(holder="the first"), is_away=is_away)
    server = Server(client=overtaken, keys=keys, holder="another", began=time.monotonic())
    assert not take_lease(config, server, standby=True, go_on=lambda: False)


def test_a_word_said_while_a_learner_waits_for_redis_is_for_it_as_well(
    come: Come, config: schema.Config, client: redis.Redis, learner_client: redis.Redis, keys: Keys
) -> None:
    come().stream.release("stopped")
    overtaken: Any = Overtaken(learner_client, lambda: set_control(client, keys, "stop", by="the test"), is_away=True)
    server = Server(client=overtaken, keys=keys, holder="job", began=time.monotonic() - 0.005)
    with pytest.raises(Ended):
        take_lease(config, server)


def test_a_learner_that_was_replaced_is_told_apart_from_one_whose_own_ranks_were_started_again(come: Come) -> None:
    first = come(holder="the first")
    come(holder="the first")
    with pytest.raises(Fenced) as fenced:
        first.stream.renew()
    assert not isinstance(fenced.value, Replaced)
    come(holder="another", takeover=True)
    with pytest.raises(Replaced, match="as another has taken over"):
        first.stream.renew()


def test_a_pause_is_for_whoever_comes(come: Come, client: redis.Redis, keys: Keys) -> None:
    come()
    set_control(client, keys, "pause", by="the test")

    assert come().stream.orders().control == "pause"


@pytest.mark.parametrize(("count", "expected"), [(None, False), ("0", False), ("1", True)])
def test_ranks_that_torchrun_starts_again_are_the_learner_that_was_there(count: str | None, expected: bool) -> None:
    assert was_restarted({} if count is None else {"TORCHELASTIC_RESTART_COUNT": count}) is expected
