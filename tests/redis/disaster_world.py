"""A run to which anything may happen: what the machine of `disaster_machine` does, and the model it is held against.

    learner      one life at a time that counts, and zombies: lives that were replaced and do not know it yet
    workers      three at a time (`disaster_workers`)
    Redis        two servers behind one address; emptied, or replaced by an older copy of itself
    model        which tickets each life has trained, with the prompt that was meant; cut back to the commit at a crash

A learner that has not looked since Redis lost something cannot have put it right, so `looked` says whether everything
must be there at this moment. That nothing is trained twice holds at every moment.
"""

from __future__ import annotations

from collections.abc import Callable

from streamrl.config import schema
from streamrl.crashpoints import SimulatedCrash
from streamrl.errors import Fenced, ResourceError
from streamrl.learner.groups.fetch import fetch_groups
from streamrl.learner.groups.lag import oldest_trained_step
from streamrl.learner.groups.numbering import Retries
from streamrl.learner.groups.plan import GroupCheck, Kind
from streamrl.learner.metrics.record import ValidationResult
from streamrl.ops.audit import Audit, audit_folder
from streamrl.protocol.transport.keys import WORKERS, Keys
from streamrl.protocol.transport.operator import read_letters
from streamrl.protocol.wire.ticket import PURPOSES
from streamrl.versions import make_version
from tests.feed_world import Clock, rows_drawn
from tests.redis.disaster_learner import Life, make_prompts
from tests.redis.disaster_site import SAFE, Peril, Site, facing
from tests.redis.disaster_workers import Workers

NUM_PROMPTS = 7
NUM_TICKETS = 2 * NUM_PROMPTS
_MAX_ROUNDS = 300
_FAR_AHEAD_MS = 3_600_000


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
        self.workers = Workers(site, self.keys)
        self.copies = [site.servers.copy()]  # of Redis, the newest last
        self.looked = True
        self.at_risk = False  # tickets have ended in the learner's memory alone, and Redis has lost their groups
        self.unnoticed = False  # Redis was replaced, and the learner has not asked who is there
        self.newest_claim = 0  # term that Redis was told of, since it last lost something
        self.life: Life | None = None
        self.holder = "job"
        if clock_is_ahead:
            self._put_clock_ahead()
        self.start(SAFE)

    # The learner

    def start(self, peril: Peril, *, holder: str = "", takeover: bool = False) -> None:
        """A learner begins; one that was there is a zombie from the moment the new one's term is durable."""
        self.holder = holder or self.holder
        if not takeover and self.client.get(self.keys.lease) != self.holder.encode():
            self.client.pexpire(self.keys.lease, 0)  # a stranger has waited until it ran out
        before = self.life
        terms = self._terms()
        claimed = False
        self.tally.learners += 1
        try:
            with facing(peril, self.client, self.tally):
                life = Life(self, holder=self.holder, takeover=takeover)
                claimed = True
                self._published(life, life.publish())
        except SimulatedCrash:
            life = None
            self.client.pexpire(self.keys.lease, 0)  # in time
        if self._terms() > terms or claimed:
            if before is not None:
                self.zombies = [*self.zombies[-1:], before]
            self.life = life
            self.note_claim()
            self._forget()
        if life is not None:
            assert life.term > terms, "terms only grow, whatever is lost"

    def note_claim(self) -> None:
        term = self.client.hget(self.keys.meta, "term")
        self.newest_claim = int(term or 0)

    def learner_dies(self) -> None:
        self.life = None
        self._forget()

    def plan(self, peril: Peril, *, notices: bool) -> None:
        life = self.life
        assert life is not None
        try:
            with facing(peril, self.client, self.tally):
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
            with facing(peril, self.client, self.tally):
                oldest = oldest_trained_step(self.config.lag, plan.step)
                fetched = fetch_groups(life.stream, plan, rank=0, vocabulary=100, oldest_step=oldest)
                verdicts = [GroupCheck(int(verdict)) for verdict in fetched.verdicts]
                life.feed.settle(plan, verdicts, trained=finite)
                sound = [e.ticket for e, v in zip(plan.entries, verdicts, strict=True) if v is GroupCheck.SOUND]
                if not finite or not sound:
                    return
                places = Retries(life.feed.state().ledger.retries)
                for ticket, group in zip(sound, fetched.groups, strict=True):
                    prompt = self.prompts.rows[self._row_of(places.place(ticket))]
                    assert group.prompt_ids.tolist() == prompt.token_ids.tolist(), "an answer to another prompt"
                    self._check_lag(group.header.min_version, life.step)
                life.trained += sound
                life.step += 1
                self._published(life, life.publish())
        except SimulatedCrash:
            self.learner_dies()

    def copy(self) -> None:
        """A checkpoint begins, and is committed whenever that may be."""
        life = self.life
        assert life is not None
        self.trained_at[str(life.copy())] = tuple(life.trained)

    def commit(self, peril: Peril, *, told: bool) -> None:
        life = self.life
        assert life is not None
        if life.copied is None:
            self.copy()
        try:
            with facing(peril, self.client, self.tally):
                if told:
                    life.commit()
                else:
                    life.write_checkpoint()  # and Redis was away
                self.at_risk &= not self.looked or bool(life.feed.state().uncommitted)
        except SimulatedCrash:
            self.learner_dies()

    def validate(self) -> ValidationResult | None:
        life = self.life
        assert life is not None
        if not life.validation.running:
            life.validation.start(step=life.step, version=make_version(life.term, life.num_published - 1))
            return None
        result = life.validation.poll()
        if result is not None:
            assert 0 <= result.metrics["val_rollouts/num_prompts"] <= 2
        return result

    def zombie_acts(self, life: Life, act: Callable[[Life], object]) -> None:
        """It may still write to its own folder; Redis refuses it once it was told of a newer term."""
        replaced = self.newest_claim > life.term
        before = self._what_lasts()
        self.trained_at.setdefault(f"e{life.term:06d}-s{life.step:08d}", tuple(life.trained))
        self.tally.zombie_acts += 1
        try:
            act(life)
        except Fenced:
            self.zombies = [zombie for zombie in self.zombies if zombie is not life]
        after = self._what_lasts()
        if replaced:
            wrote = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
            self.tally.zombie_writes += bool(wrote)
            assert not wrote, f"term {life.term} wrote {wrote} after {self.newest_claim} was there"
        elif before != after:
            self.redis_suffered("zombie")

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
        self.workers.redis_suffered()

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
            self.workers.answer_all()
        else:
            raise AssertionError(f"no end after {_MAX_ROUNDS} rounds: {self.life and self.life.feed.metrics()}")
        self.looked = True
        life.feed.reconcile(step=life.step)
        if life.copied is not None:
            self.commit(SAFE, told=True)
        self.commit(SAFE, told=True)
        self.check()
        audit = self.audit()
        listed = [letter.number for letter in read_letters(self.client, self.keys)]
        assert sorted(listed) == sorted(life.feed.state().ledger.letters or ()), "letters that nobody may repeat"
        assert audit.dead_letters == len(listed)
        retries = len(life.feed.state().ledger.retries)
        assert (audit.issued, audit.outstanding) == (NUM_TICKETS + retries, 0), audit.to_json()

    # Inside

    def _row_of(self, place: int) -> int:
        on = self.config.data.curriculum
        return rows_drawn(self.config.folder)[place] if on else self.prompts.locate(place)[1]

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

    def _terms(self) -> int:
        folder = self.config.folder / "terms"
        return max((int(path.name) for path in folder.glob("[0-9]*")), default=0)
