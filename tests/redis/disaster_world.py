"""A run to which anything may happen: what the machine of `test_any_order` does, and the model it is held against.

    learner      one life at a time that counts, and zombies: lives that were replaced and do not know it yet
    workers      three at a time, each with what it believes to hold, and leases that ran out while it was not looking
    Redis        two servers behind one address; emptied, or replaced by an older copy of itself
    model        which tickets each life has trained, with the prompt that was meant; cut back to the commit at a crash

A learner that has not looked since Redis lost something cannot have put it right, so `looked` says whether everything
must be there at this moment. That nothing is trained twice holds at every moment.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from learner.stream.data import NumSkipped, Prompt, PromptSet
from learner.stream.fetch import fetch_groups
from learner.stream.lag import oldest_trained_step
from learner.stream.numbering import Retries
from learner.stream.plan import Kind, Plan, Verdict
from learner.validation import Validation, ValidationResult
from streamrl.audit import Audit, audit_folder
from streamrl.config import schema
from streamrl.crashpoints import Point, SimulatedCrash, armed
from streamrl.errors import Fenced, ResourceError
from streamrl.transport.keys import WORKERS, Keys
from streamrl.transport.types import Announcement, Leased
from streamrl.transport.worker import WorkerStream
from streamrl.versions import make_version
from streamrl.wire.group import decode_header
from streamrl.wire.ticket import PURPOSES
from tests.feed_world import MODEL, Clock, encode_answer, encode_failure
from tests.redis.run_world import Learner
from tests.redis.two_servers import LossyAsyncRedis, LossyRedis, TwoServers

T = TypeVar("T")

LEASE_S = 600.0  # nothing lapses by itself
NUM_PROMPTS = 7
NUM_TICKETS = 2 * NUM_PROMPTS
_MAX_ROUNDS = 300
_FAR_AHEAD_MS = 3_600_000


@dataclass(slots=True)
class Tally:
    """What happened in all runs of a test together."""

    steps: int = 0
    runs: int = 0
    learners: int = 0
    passed: Counter[str] = field(default_factory=Counter)  # crash points
    deaths: Counter[str] = field(default_factory=Counter)  # by crash point
    losses: Counter[str] = field(default_factory=Counter)  # of Redis
    replies_lost: int = 0
    zombie_acts: int = 0
    zombie_writes: int = 0  # accepted
    lost: int = 0
    twice: int = 0

    def __str__(self) -> str:
        return (
            f"{self.steps} steps in {self.runs} runs, audited after each: lost {self.lost}, twice {self.twice}; "
            f"{self.learners} learners, {self.deaths.total()} deaths at {len(self.deaths)} crash points, "
            f"{self.replies_lost} replies lost, Redis lost data {self.losses.total()} times, "
            f"{self.zombie_acts} acts of zombies, writes accepted {self.zombie_writes}"
        )


@dataclass(slots=True, kw_only=True)
class Site:
    """What is the same for all runs of a test."""

    servers: TwoServers
    client: LossyRedis
    async_client: LossyAsyncRedis
    runner: asyncio.Runner
    folder: Path
    tally: Tally = field(default_factory=Tally)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peril:
    """What may befall a process in one act: it dies at a crash point, or a reply does not reach it."""

    dies_at: Point | None = None
    loses_reply: int = 0  # to the nth command; 0: none


SAFE = Peril()


class Life(Learner):
    """A learner as far as the stream is concerned: what it has trained, and when it last looked at Redis as a whole."""

    def __init__(self, world: DisasterWorld, *, holder: str, takeover: bool) -> None:
        super().__init__(world, holder=holder, takeover=takeover, lease_s=LEASE_S, clock=world.clock)
        self.trained = list(world.trained_at[str(self.parent.name)]) if self.parent else []
        self.plan_in_work: Plan | None = None
        self.num_looks = 0
        self.num_late = self.feed.state().ledger.ignored.get("late_failure", 0)
        self.num_published = 0
        self.validation = Validation(
            stream=self.stream,
            prompts=make_prompts(2),
            settings=schema.Validation(),
            run_uid=self.uid,
            epoch=self.epoch,
            fingerprint=MODEL,
            max_attempts=2,
            clock=world.clock,
        )
        reconcile = self.feed.reconcile

        def counted(*, step: int) -> None:
            reconcile(step=step)
            self.num_looks += 1

        self.feed.reconcile = counted  # type: ignore[method-assign]

    def publish(self) -> int:
        """Announce the weights of now; the version."""
        version = make_version(self.epoch, self.num_published)
        announcement = Announcement(version=version, base=0, step=self.step, manifest=b"m")
        self.stream.announce(announcement, keep=[])
        if self.num_published:
            self.feed.note_version(version, self.step)
        self.num_published += 1
        return version


class Hand:
    """A worker: its stream, and what it believes to hold."""

    def __init__(self, name: str, stream: WorkerStream) -> None:
        self.name, self.stream = name, stream
        self.held: list[Leased] = []


class DisasterWorld:
    patience_s = 5.0

    def __init__(self, site: Site, config: schema.Config, *, clock_is_ahead: bool) -> None:
        site.tally.runs += 1
        site.servers.admin.flushall()
        self.site, self.tally, self.servers = site, site.tally, site.servers
        self.keys, self.client, self.clock = Keys("any-order"), site.client, Clock()
        self.config = config.model_copy(update={"name": self.keys.name, "dir": site.folder / str(site.tally.runs)})
        self.prompts = make_prompts(NUM_PROMPTS)
        self.trained_at: dict[str, tuple[int, ...]] = {}  # by checkpoint
        self.steps_of: dict[int, int] = {}  # by version
        self.zombies: list[Life] = []
        self.hands: dict[int, Hand] = {}
        self.num_hands = 0
        self.late: list[tuple[WorkerStream, Leased]] = []  # ran out, or were delivered; whoever had them may not know
        self.copies = [site.servers.copy()]  # of Redis, the newest last
        self.looked = True
        self.at_risk = False  # tickets have ended in the learner's memory alone, and Redis has lost their groups
        self.unnoticed = False  # Redis was replaced, and the learner has not asked who is there
        self.newest_claim = 0  # epoch that Redis was told of, since it last lost something
        self.life: Life | None = None
        self.holder = "job"
        if clock_is_ahead:
            self._put_clock_ahead()
        self.start(SAFE)

    # The learner

    def start(self, peril: Peril, *, holder: str = "", takeover: bool = False) -> None:
        """A learner begins; one that was there is a zombie from the moment the new one's epoch is durable."""
        self.holder = holder or self.holder
        if not takeover and self.client.get(self.keys.lease) != self.holder.encode():
            self.client.pexpire(self.keys.lease, 0)  # a stranger has waited until it ran out
        before = self.life
        epochs = self._epochs()
        claimed = False
        self.tally.learners += 1
        try:
            with self._facing(peril, self.client):
                life = Life(self, holder=self.holder, takeover=takeover)
                claimed = True
                self._published(life, life.publish())
        except SimulatedCrash:
            life = None
            self.client.pexpire(self.keys.lease, 0)  # in time
        if self._epochs() > epochs or claimed:
            if before is not None:
                self.zombies = [*self.zombies[-1:], before]
            self.life = life
            self.note_claim()
            self._forget()
        if life is not None:
            assert life.epoch > epochs, "epochs only grow, whatever is lost"

    def note_claim(self) -> None:
        epoch = self.client.hget(self.keys.meta, "epoch")
        self.newest_claim = int(epoch or 0)

    def learner_dies(self) -> None:
        self.life = None
        self._forget()

    def plan(self, peril: Peril, *, notices: bool) -> None:
        life = self.life
        assert life is not None
        try:
            with self._facing(peril, self.client):
                if notices:
                    self.renew(life)
                plan = life.feed.plan(step=life.step, world_size=1, timeout_s=0.0)
        except SimulatedCrash:
            return self.learner_dies()
        self.note_claim()
        if life.num_looks > self._mark and not life.stream.disturbed and not self.unnoticed:
            self.looked = True
            self.at_risk &= bool(life.feed.state().uncommitted)
        late = life.feed.state().ledger.ignored.get("late_failure", 0)
        if late > life.num_late:  # it was told to look again, and will before the next batch
            life.num_late, self.looked, self._mark = late, False, life.num_looks
        if plan is not None and plan.kind is Kind.COMMIT:
            self.commit(SAFE, told=True)
        elif plan is not None and plan.kind is Kind.STEP:
            assert 0 < len(plan.entries) <= self.config.training.groups_per_step
            life.plan_in_work = plan
        return None

    def renew(self, life: Life) -> None:
        """What the thread of the lease does several times a lease; it also sees that the server was replaced."""
        life.stream.renew()
        self.unnoticed = False

    def train(self, peril: Peril, *, finite: bool = True) -> None:
        life = self.life
        assert life is not None
        plan, life.plan_in_work = life.plan_in_work, None
        assert plan is not None
        try:
            with self._facing(peril, self.client):
                oldest = oldest_trained_step(self.config.lag, plan.step)
                fetched = fetch_groups(life.stream, plan, rank=0, vocabulary=100, oldest_step=oldest)
                verdicts = [Verdict(int(verdict)) for verdict in fetched.verdicts]
                life.feed.settle(plan, verdicts, trained=finite)
                sound = [e.ticket for e, v in zip(plan.entries, verdicts, strict=True) if v is Verdict.SOUND]
                if not finite or not sound:
                    return
                places = Retries(life.feed.state().ledger.retries)
                for ticket, group in zip(sound, fetched.groups, strict=True):
                    prompt = self.prompts.rows[self.prompts.locate(places.place(ticket))[1]]
                    assert group.prompt_ids.tolist() == prompt.token_ids.tolist(), "an answer to another prompt"
                    self._check_lag(group.header.min_version, life.step)
                life.trained += sound
                life.step += 1
                self._published(life, life.publish())
        except SimulatedCrash:
            self.learner_dies()

    def commit(self, peril: Peril, *, told: bool) -> None:
        life = self.life
        assert life is not None
        self.trained_at[f"e{life.epoch:06d}-s{life.step:08d}"] = tuple(life.trained)
        try:
            with self._facing(peril, self.client):
                if told:
                    life.commit()
                else:
                    life.write_checkpoint(life.feed.state())  # and Redis was away
                self.at_risk &= not self.looked
        except SimulatedCrash:
            self.learner_dies()

    def validate(self) -> ValidationResult | None:
        life = self.life
        assert life is not None
        if not life.validation.running:
            life.validation.start(step=life.step, version=make_version(life.epoch, life.num_published - 1))
            return None
        result = life.validation.poll()
        if result is not None:
            assert 0 <= result.num_answered <= result.num_prompts == 2
        return result

    def zombie_acts(self, life: Life, act: Callable[[Life], object]) -> None:
        """It may still write to its own folder; Redis refuses it once it was told of a newer epoch."""
        replaced = self.newest_claim > life.epoch
        before = self._what_lasts()
        self.trained_at.setdefault(f"e{life.epoch:06d}-s{life.step:08d}", tuple(life.trained))
        self.tally.zombie_acts += 1
        try:
            act(life)
        except Fenced:
            self.zombies = [zombie for zombie in self.zombies if zombie is not life]
        after = self._what_lasts()
        if replaced:
            wrote = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
            self.tally.zombie_writes += bool(wrote)
            assert not wrote, f"epoch {life.epoch} wrote {wrote} after {self.newest_claim} was there"
        elif before != after:
            self.redis_suffered("zombie")

    # Workers

    def hand(self, who: int) -> Hand:
        if who not in self.hands:
            self.num_hands += 1
            name = f"w{self.num_hands}"
            stream = WorkerStream(self.site.async_client, self.keys, worker=name, lease_s=LEASE_S, give_up_after_s=5.0)
            self.hands[who] = Hand(name, stream)
        return self.hands[who]

    def work(self, who: int, peril: Peril, coroutine: Coroutine[Any, Any, T]) -> T | None:
        """One act of a worker; None: it died in it, and its leases will lapse."""
        try:
            with self._facing(peril, self.site.async_client):
                return self.site.runner.run(coroutine, context=contextvars.copy_context())
        except SimulatedCrash:
            self.lapse(who)
            del self.hands[who]
            return None

    def lease(self, who: int, count: int, peril: Peril) -> None:
        hand = self.hand(who)
        leased = self.work(who, peril, hand.stream.lease(max_tickets=count, block_ms=0))
        for new in leased or ():
            holders = [h.name for h in self.hands.values() if _same(new, h.held)]
            assert not holders, f"{new.entry_id} was leased to {hand.name} and is with {holders}"
        hand.held += leased or ()

    def deliver(self, who: int, leased: Leased, answer: tuple[bytes, bytes], peril: Peril) -> None:
        hand = self.hand(who)
        hand.held.remove(leased)
        self.late.append((hand.stream, leased))
        self._deliver(lambda: self.work(who, peril, hand.stream.deliver(leased, *answer)), leased)

    def deliver_late(self, pick: int) -> None:
        """Its lease has run out, or it has been delivered before; both sides may have forgotten."""
        stream, leased = self.late[pick % len(self.late)]
        answer = encode_answer(leased.ticket)
        self._deliver(lambda: self.site.runner.run(stream.deliver(leased, *answer)), leased)

    def renew_leases(self, who: int, peril: Peril) -> None:
        hand = self.hand(who)
        for lost in self.work(who, peril, hand.stream.renew(hand.held)) or ():
            there = self.servers.admin.xrange(self.keys.tickets(lost.purpose), lost.entry_id, lost.entry_id)
            assert not there, "a lease that did not run out was given to somebody else"
            hand.held.remove(lost)  # the learner took the ticket back

    def lapse(self, who: int) -> None:
        """Its leases run out on the server, while it does not look."""
        hand = self.hand(who)
        self.late += [(hand.stream, leased) for leased in hand.held]
        hand.held = []
        self._let_lapse(hand.name)

    # Redis

    def lose(self, kind: str, back: int) -> None:
        self.tally.losses[kind] += 1
        if kind == "flush":
            self.servers.admin.flushall()
        elif kind == "fail over":
            if self.unnoticed and self.life is not None:
                self.renew(self.life)  # a third server would have a name of its own; ours come by turns
            self.servers.fail_over(self.copies[max(0, len(self.copies) - 1 - back)])
            self.unnoticed = self.life is not None
            self.client.connection_pool.disconnect()
            self.site.runner.run(self.site.async_client.connection_pool.disconnect())
        else:
            self.servers.admin.delete(kind)
        self.redis_suffered(kind)

    def redis_suffered(self, kind: str) -> None:
        self.newest_claim = 0
        self.looked, self.at_risk = False, True
        self._mark = self.life.num_looks if self.life is not None else 0
        for hand in self.hands.values():  # what they hold may be with somebody else, or wait for anybody
            self.late += [(hand.stream, leased) for leased in hand.held]
            hand.held = []

    def remember(self) -> None:
        self.copies = [*self.copies[-7:], self.servers.copy()]

    # What holds

    def audit(self) -> Audit:
        return audit_folder(self.config.folder, redis_url=self.servers.url)

    def check(self) -> None:
        try:
            audit = self.audit()
        except ResourceError:
            assert not self.looked, "Redis does not hold the run, and the learner has looked"
            audit = audit_folder(self.config.folder)
        self.tally.twice += audit.twice
        assert (audit.twice, audit.contradictory, audit.unproven, audit.problems) == (0, 0, 0, ()), audit.to_json()
        trained = self.trained_at.get(audit.checkpoint, ()) if audit.checkpoint else ()
        assert audit.trained == len(trained) == len(set(trained)), (audit.to_json(), trained)
        if self.looked:
            lost = set(audit.examples.get("lost", ()))
            excused = {number for number in lost if self._is_excused(number)}
            self.tally.lost += len(lost - excused)
            assert lost == excused, audit.to_json()
            assert audit.clean or excused, audit.to_json()

    def finish(self) -> None:
        """From wherever it came to: an honest learner, honest workers, and every ticket ends."""
        if self.life is None:
            self.start(SAFE, takeover=True)
        for _ in range(_MAX_ROUNDS):
            life = self.life
            assert life is not None
            self.clock.advance(130.0)
            if life.plan_in_work is None:
                self.renew(life)
                plan = life.feed.plan(step=life.step, world_size=1, timeout_s=0.0)
                if plan is not None and plan.kind is Kind.END:
                    break
                if plan is not None and plan.kind is Kind.COMMIT:
                    self.commit(SAFE, told=True)
                life.plan_in_work = plan if plan is not None and plan.kind is Kind.STEP else None
            if life.plan_in_work is not None:
                self.train(SAFE)
            self._answer_all()
        else:
            raise AssertionError(f"no end after {_MAX_ROUNDS} rounds: {self.life and self.life.feed.metrics()}")
        self.looked = True
        self.commit(SAFE, told=True)
        self.check()
        audit = self.audit()
        retries = len(life.feed.state().ledger.retries)
        assert (audit.issued, audit.outstanding) == (NUM_TICKETS + retries, 0), audit.to_json()

    # Inside

    @contextmanager
    def _facing(self, peril: Peril, client: LossyRedis | LossyAsyncRedis) -> Iterator[None]:
        def pass_point(point: Point) -> None:
            self.tally.passed[point] += 1
            if point == peril.dies_at:
                self.tally.deaths[point] += 1
                raise SimulatedCrash(point)

        client.luck.lose_reply(peril.loses_reply)
        try:
            with armed(pass_point):
                yield
        finally:
            client.luck.lose_reply(0)

    def _deliver(self, act: Callable[[], bool | None], leased: Leased) -> None:
        """Whatever is claimed: a group comes exactly where its ticket goes."""
        before = self._lengths(leased)
        delivered = act()
        after = self._lengths(leased)
        came, went = after[1] - before[1], before[0] - after[0]
        assert came == went <= 1, f"{went} tickets went and {came} groups came"
        assert delivered is not False or came == 0, "a delivery took effect that was said to be refused"

    def _lengths(self, leased: Leased) -> tuple[int, int]:
        admin = self.servers.admin
        return admin.xlen(self.keys.tickets(leased.purpose)), admin.xlen(self.keys.groups(leased.purpose))

    def _let_lapse(self, name: str | None = None) -> None:
        """As long as a lease goes by on the server, for what this worker holds; without a name, for all."""
        for purpose in PURPOSES:
            key = self.keys.tickets(purpose)
            if not self.client.exists(key) or not self.client.xinfo_groups(key):
                continue
            for lease in self.client.xpending_range(key, WORKERS, "-", "+", 1000, consumername=name):
                self.client.xclaim(
                    key, WORKERS, lease["consumer"], 0, [lease["message_id"]],
                    idle=int(1000 * LEASE_S) + 1, justid=True,
                )  # fmt: skip

    def _answer_all(self) -> None:
        self._let_lapse()
        hand = self.hand(-1)
        run = self.site.runner.run
        while leased := run(hand.stream.lease(max_tickets=8, block_ms=0)):
            for each in leased:
                run(hand.stream.deliver(each, *encode_answer(each.ticket)))

    def _put_clock_ahead(self) -> None:
        """A server whose clock is behind the one before it gives ids by counting on from the last; here from the
        beginning, so that after a fail-over ids are given again."""
        for purpose in PURPOSES:
            for key in (self.keys.tickets(purpose), self.keys.groups(purpose)):
                self.client.xgroup_create(key, WORKERS, mkstream=True)
                seconds, _ = self.client.time()
                self.client.execute_command("XSETID", key, f"{1000 * seconds + _FAR_AHEAD_MS}-0")
            self.client.xgroup_destroy(self.keys.groups(purpose), WORKERS)
        self.copies = [self.servers.copy()]

    def _published(self, life: Life, version: int) -> None:
        assert version > max(self.steps_of, default=0), "versions only grow, whatever is lost"
        self.steps_of[version] = life.step

    def _check_lag(self, min_version: int, step: int) -> None:
        if self.config.lag.stale in ("wait", "drop") and min_version in self.steps_of:
            assert step - self.steps_of[min_version] <= self.config.lag.max_steps

    def _forget(self) -> None:
        """What a learner had in memory alone is gone with it; the next one has to look what that was."""
        if self.at_risk:
            self.looked = False
        self._mark = 0

    def _is_excused(self, number: int) -> bool:
        """What the audit cannot see once Redis has lost something: tickets that have ended in the learner's memory, and
        are safe as long as it lives."""
        if self.life is None or not self.at_risk:
            return False
        return any(ending.ticket == number for ending in self.life.feed.state().uncommitted)

    def _what_lasts(self) -> dict[bytes, object]:
        """All of Redis but what may run out while one looks."""
        found: dict[bytes, object] = {key: value for key, (value, ttl) in self.servers.copy().items() if not ttl}
        for key in found:
            if self.client.type(key) == b"hash":  # whose dump depends on how far the server has come in tidying it up
                found[key] = self.client.hgetall(key)
        return found

    def _epochs(self) -> int:
        folder = self.config.folder / "epochs"
        return max((int(path.name) for path in folder.glob("[0-9]*")), default=0)


def make_prompts(count: int) -> PromptSet:
    """Each has token ids of its own, so that its answers can be told from others."""
    rows = [
        Prompt(line=i + 1, text=f"prompt {i}", token_ids=np.array([i, i], dtype=np.int32), fields={})
        for i in range(count)
    ]
    return PromptSet(rows, seed=1, shuffle=True, num_skipped=NumSkipped(malformed=0, overlong=0))


def encode(leased: Leased, kind: str) -> tuple[bytes, bytes]:
    """A worker's answer: as asked, with equal rewards so that it is dropped, a failure, or one of another model."""
    answers: Mapping[str, Callable[[], Any]] = {
        "good": lambda: encode_answer(leased.ticket),
        "dull": lambda: encode_answer(leased.ticket, rewards=(1.0, 1.0)),
        "failed": lambda: encode_failure(leased.ticket),
        "foreign": lambda: encode_answer(leased.ticket, fingerprint="another"),
    }
    header, body = answers[kind]()
    decode_header(header)
    return header, body


def _same(leased: Leased, held: list[Leased]) -> bool:
    return any((one.purpose, one.entry_id) == (leased.purpose, leased.entry_id) for one in held)
