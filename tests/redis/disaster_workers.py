"""The workers of `test_any_order`: what each believes to hold, and leases that ran out while it was not looking."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from streamrl.crashpoints import SimulatedCrash
from streamrl.protocol.transport.keys import WORKERS, Keys
from streamrl.protocol.transport.types import Leased
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.protocol.wire.group import decode_header
from streamrl.protocol.wire.ticket import PURPOSES
from tests.feed_world import encode_answer, encode_failure
from tests.redis.disaster_site import LEASE_S, Peril, Site, facing

T = TypeVar("T")


class Hand:
    """A worker: its stream, and what it believes to hold."""

    def __init__(self, name: str, stream: WorkerStream) -> None:
        self.name, self.stream = name, stream
        self.held: list[Leased] = []


class Workers:
    def __init__(self, site: Site, keys: Keys) -> None:
        self.hands: dict[int, Hand] = {}
        self.late: list[tuple[WorkerStream, Leased]] = []  # ran out, or were delivered; whoever had them may not know
        self._num_hands = 0
        self._site, self._keys = site, keys

    def hand(self, who: int) -> Hand:
        if who not in self.hands:
            self._num_hands += 1
            name = f"w{self._num_hands}"
            stream = WorkerStream(
                self._site.async_client, self._keys, worker=name, lease_s=LEASE_S, give_up_after_s=5.0
            )
            self.hands[who] = Hand(name, stream)
        return self.hands[who]

    def work(self, who: int, peril: Peril, coroutine: Coroutine[Any, Any, T]) -> T | None:
        """One act of a worker; None: it died in it, and its leases will lapse."""
        try:
            with facing(peril, self._site.async_client, self._site.tally):
                return self._site.runner.run(coroutine, context=contextvars.copy_context())
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
        self._deliver(lambda: self._site.runner.run(stream.deliver(leased, *answer)), leased)

    def renew_leases(self, who: int, peril: Peril) -> None:
        hand = self.hand(who)
        for lost in self.work(who, peril, hand.stream.renew(hand.held)) or ():
            there = self._site.servers.admin.xrange(self._keys.tickets(lost.purpose), lost.entry_id, lost.entry_id)
            assert not there, "a lease that did not run out was given to somebody else"
            hand.held.remove(lost)  # the learner took the ticket back

    def lapse(self, who: int) -> None:
        """Its leases run out on the server, while it does not look."""
        hand = self.hand(who)
        self.late += [(hand.stream, leased) for leased in hand.held]
        hand.held = []
        self.let_lapse(hand.name)

    def redis_suffered(self) -> None:
        """What they hold may be with somebody else, or wait for anybody."""
        for hand in self.hands.values():
            self.late += [(hand.stream, leased) for leased in hand.held]
            hand.held = []

    def let_lapse(self, name: str | None = None) -> None:
        """As long as a lease goes by on the server, for what this worker holds; without a name, for all."""
        for purpose in PURPOSES:
            key = self._keys.tickets(purpose)
            if not self._site.client.exists(key) or not self._site.client.xinfo_groups(key):
                continue
            for lease in self._site.client.xpending_range(key, WORKERS, "-", "+", 1000, consumername=name):
                self._site.client.xclaim(
                    key, WORKERS, lease["consumer"], 0, [lease["message_id"]],
                    idle=int(1000 * LEASE_S) + 1, justid=True,
                )  # fmt: skip

    def answer_all(self) -> None:
        """As honest workers do, all that is asked for."""
        self.let_lapse()
        hand = self.hand(-1)
        run = self._site.runner.run
        while leased := run(hand.stream.lease(max_tickets=8, block_ms=0)):
            for each in leased:
                run(hand.stream.deliver(each, *encode_answer(each.ticket)))

    def _deliver(self, act: Callable[[], bool | None], leased: Leased) -> None:
        """Whatever is claimed: a group comes exactly where its ticket goes."""
        before = self._lengths(leased)
        delivered = act()
        after = self._lengths(leased)
        came, went = after[1] - before[1], before[0] - after[0]
        assert came == went <= 1, f"{went} tickets went and {came} groups came"
        assert delivered is not False or came == 0, "a delivery took effect that was said to be refused"

    def _lengths(self, leased: Leased) -> tuple[int, int]:
        admin = self._site.servers.admin
        return admin.xlen(self._keys.tickets(leased.purpose)), admin.xlen(self._keys.groups(leased.purpose))


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
