"""Who is the learner: the lease keeps strangers out, the fence stops whoever was replaced."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import redis

from streamrl.errors import Fenced, ResourceError, RunGone, TransportError
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.learner_letters import LetterBox
from streamrl.protocol.transport.lease import await_lease
from streamrl.protocol.transport.operator import remove_run, set_control
from streamrl.protocol.transport.types import START, Announcement, Letter
from streamrl.versions import make_version
from tests.helpers import make_ticket, wait_until
from tests.redis.conftest import UID, MakeLearner

SHORT_S = 0.3
LONGER_S = 2.0  # a busy machine may take so long between two calls as SHORT_S

WRITES: dict[str, Callable[[LearnerStream], None]] = {
    "renew": lambda learner: learner.renew(),
    "restore": lambda learner: learner.restore(cursor=START),
    "issue": lambda learner: learner.issue([make_ticket(0)]),
    "count_issued": lambda learner: learner.count_issued(1),
    "commit": lambda learner: learner.commit(step=1, cursor="9-9", trim_below="9-9"),
    "trim_eval": lambda learner: learner.trim_eval(below="9-9"),
    "delete_tickets": lambda learner: learner.delete_tickets("train", ["1-1"]),
    "letters.put": lambda learner: learner.letters.put([(make_ticket(0), Letter("x", 1.0))]),
    "letters.remove": lambda learner: learner.letters.remove(["1-1"], requests=[1]),
    "announce": lambda learner: learner.announce(
        Announcement(version=make_version(1, 0), base=0, step=0, manifest=b"m"), keep=[]
    ),
    "amend": lambda learner: learner.amend(
        Announcement(version=make_version(1, 0), base=0, step=0, manifest=b"m"), keep=[]
    ),
    "record": lambda learner: learner.record(1, {"train_optim/loss": 1.0}),
    "event": lambda learner: learner.event("x"),
    "forget_end": lambda learner: learner.forget_end(began=time.monotonic()),
    "release": lambda learner: learner.release("stopped"),
}


def everything(client: redis.Redis) -> dict[bytes, object]:
    """All that is stored, to see that nothing was changed."""
    return {key: client.dump(key) for key in sorted(client.scan_iter())}


def test_every_writing_method_is_in_the_list_of_writes() -> None:
    reading = {"claim", "orders", "read", "fetch", "present_tickets", "present_groups", "waiting"}
    reading |= {"retried", "has_manifests", "reports", "letters.present", "letters.purged"}
    public = {name for name in vars(LearnerStream) if not name.startswith("_")}
    public |= {f"letters.{name}" for name in vars(LetterBox) if not name.startswith("_")}
    assert public == reading | set(WRITES)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_an_older_term_writes_nothing(
    write: Callable[[LearnerStream], None], make_learner: MakeLearner, client: redis.Redis
) -> None:
    old = make_learner(term=1)
    make_learner(term=2)  # the same job, restarted
    before = everything(client)
    with pytest.raises(Fenced):
        write(old)
    assert everything(client) == before


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_learner_whose_lease_another_took_writes_nothing_even_before_the_new_term(
    write: Callable[[LearnerStream], None], make_learner: MakeLearner, client: redis.Redis, keys: Keys
) -> None:
    old = make_learner(term=1)
    await_lease(client, keys, run_uid=lambda: UID, holder="stranger", lease_s=30.0, wait_s=0.0, takeover=True)
    before = everything(client)
    with pytest.raises(Fenced):
        write(old)
    assert everything(client) == before


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_learner_of_a_removed_run_writes_nothing(
    write: Callable[[LearnerStream], None], learner: LearnerStream, client: redis.Redis, keys: Keys
) -> None:
    remove_run(client, keys)
    before = everything(client)
    with pytest.raises(RunGone):
        write(learner)
    assert everything(client) == before


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_an_emptied_server_is_claimed_again_and_the_write_succeeds(
    write: Callable[[LearnerStream], None], learner: LearnerStream, client: redis.Redis, keys: Keys
) -> None:
    client.flushall()
    if write is WRITES["amend"]:
        with pytest.raises(TransportError, match="lost the weights"):  # there is nothing to lay it beside
            write(learner)
    else:
        write(learner)
    assert learner.disturbed or write is WRITES["restore"]
    meta = client.hgetall(keys.meta)
    assert (meta[b"uid"], meta[b"term"], meta[b"config"]) == (b"uid", b"1", b'{"name": "x"}')


def test_a_claim_that_a_restart_of_redis_forgot_is_made_again(
    make_learner: MakeLearner, client: redis.Redis, keys: Keys
) -> None:
    learner = make_learner(term=2)
    client.hset(keys.meta, "term", 1)  # the append-only file lost its last second
    learner.issue([make_ticket(0)])
    assert learner.disturbed
    assert client.hget(keys.meta, "term") == b"2"


def test_a_stranger_is_refused_while_the_holder_renews(
    learner: LearnerStream, make_learner: MakeLearner, client: redis.Redis, keys: Keys
) -> None:
    with pytest.raises(TransportError, match="job holds its lease"):
        await_lease(client, keys, run_uid=lambda: UID, holder="stranger", lease_s=30.0, wait_s=0.2)
    learner.issue([make_ticket(0)])
    assert client.hget(keys.meta, "term") == b"1"


def test_after_a_fail_over_a_learner_wins_over_the_one_that_it_had_replaced(
    learner: LearnerStream, make_learner: MakeLearner, client: redis.Redis, keys: Keys
) -> None:
    await_lease(client, keys, run_uid=lambda: UID, holder="another job", lease_s=30.0, wait_s=0.0, takeover=True)
    second = make_learner(term=2, holder="another job")
    client.hset(keys.meta, "term", 1)  # the copy of the data that is served now is from before
    client.set(keys.lease, "job")
    second.issue([make_ticket(0)])
    assert client.get(keys.lease) == b"another job"
    with pytest.raises(Fenced):
        learner.issue([make_ticket(1)])


def test_of_two_that_start_at_once_the_newer_term_wins_whoever_has_the_lease(
    make_learner: MakeLearner, client: redis.Redis, keys: Keys
) -> None:
    """Both records are durable by then, and the checkpoints of the older one are cut off."""
    older = make_learner(term=1, holder="older")
    make_learner(term=2, holder="newer")
    assert client.get(keys.lease) == b"newer"
    with pytest.raises(Fenced):
        older.renew()


def test_on_an_emptied_server_whoever_has_the_lease_keeps_it(
    learner: LearnerStream, client: redis.Redis, keys: Keys
) -> None:
    client.flushall()
    await_lease(client, keys, run_uid=lambda: UID, holder="stranger", lease_s=30.0, wait_s=0.0)
    with pytest.raises(Fenced, match="stranger has taken its lease"):
        learner.issue([make_ticket(0)])


def test_a_stranger_takes_over_when_the_lease_ends(make_learner: MakeLearner, client: redis.Redis, keys: Keys) -> None:
    began = time.monotonic()
    stopped = make_learner(lease_s=SHORT_S)
    await_lease(client, keys, run_uid=lambda: UID, holder="stranger", lease_s=30.0, wait_s=60.0)
    assert time.monotonic() - began > 0.5 * SHORT_S
    second = make_learner(term=2, holder="stranger")
    with pytest.raises(Fenced):
        stopped.commit(step=1, cursor="9-9", trim_below="9-9")
    second.issue([make_ticket(0)])


def test_renewing_keeps_the_lease_past_its_length(make_learner: MakeLearner, client: redis.Redis, keys: Keys) -> None:
    learner = make_learner(lease_s=LONGER_S)
    began = time.monotonic()

    def the_lease_has_passed() -> bool:
        learner.renew()
        assert client.get(keys.lease) == b"job"
        return time.monotonic() - began > 1.2 * LONGER_S

    wait_until(the_lease_has_passed, description="more than the length of the lease")


def test_an_expired_lease_that_nobody_took_is_renewed(
    make_learner: MakeLearner, client: redis.Redis, keys: Keys
) -> None:
    learner = make_learner(lease_s=LONGER_S)
    wait_until(lambda: client.get(keys.lease) is None, description="the lease runs out")
    learner.issue([make_ticket(0)])
    learner.renew()
    assert client.get(keys.lease) == b"job"


def test_the_same_job_takes_over_at_once(learner: LearnerStream, make_learner: MakeLearner) -> None:
    make_learner(term=2).renew()  # where a stranger would be refused, for its claim waits for 0 s
    with pytest.raises(TransportError, match="holds its lease"):
        make_learner(term=2, holder="stranger")


def test_a_takeover_is_done_when_asked_for(
    learner: LearnerStream, make_learner: MakeLearner, client: redis.Redis, keys: Keys
) -> None:
    await_lease(client, keys, run_uid=lambda: UID, holder="stranger", lease_s=30.0, wait_s=0.0, takeover=True)
    make_learner(term=2, holder="stranger")
    with pytest.raises(Fenced):
        learner.issue([make_ticket(0)])


def test_an_older_term_cannot_claim_even_an_abandoned_run(make_learner: MakeLearner) -> None:
    make_learner(term=5).release("stopped")
    with pytest.raises(Fenced):
        make_learner(term=4, holder="stranger")


def test_a_released_run_can_be_claimed_at_once_by_anybody(
    learner: LearnerStream, make_learner: MakeLearner, client: redis.Redis, keys: Keys
) -> None:
    set_control(client, keys, "stop", by="the test")
    learner.release("stopped")
    assert client.hget(keys.meta, "state") == b"stopped"
    second = make_learner(term=2, holder="stranger")
    assert second.orders().control == "run"
    assert client.hget(keys.meta, "state") == b"running"


def test_a_renewal_that_comes_after_the_release_takes_nothing(
    learner: LearnerStream, client: redis.Redis, keys: Keys
) -> None:
    learner.release("finished")
    learner.renew()
    assert not client.exists(keys.lease)


def test_a_name_that_another_run_has_is_refused_with_what_to_do(
    learner: LearnerStream, make_learner: MakeLearner, client: redis.Redis, keys: Keys
) -> None:
    learner.release("finished")
    with pytest.raises(ResourceError, match=r"holds another run of that name \(uid uid, finished\)"):
        make_learner(uid="another")
    remove_run(client, keys)
    make_learner(uid="another")
    with pytest.raises(RunGone):
        learner.issue([make_ticket(0)])


def test_a_removed_run_cannot_be_claimed_again(
    learner: LearnerStream, make_learner: MakeLearner, client: redis.Redis, keys: Keys
) -> None:
    assert remove_run(client, keys)
    assert not remove_run(client, keys)
    assert list(client.scan_iter()) == [keys.tombstone.encode()]
    assert client.pttl(keys.tombstone) > 0
    with pytest.raises(RunGone):
        make_learner(term=2)
    with pytest.raises(RunGone):
        learner.issue([make_ticket(0)])


def test_a_takeover_begins_a_removed_run_anew(
    learner: LearnerStream, make_learner: MakeLearner, client: redis.Redis, keys: Keys
) -> None:
    remove_run(client, keys)
    again = make_learner(term=2, claim=False)
    again.claim(config_json="{}", fingerprint="model", takeover=True, wait_s=0.0)
    again.issue([make_ticket(0)])
    assert client.get(keys.tombstone) is None
    with pytest.raises(Fenced):
        learner.issue([make_ticket(1)])
