"""The worker's half of the stream: leases tickets and delivers groups; `announcements` watches weights.

Every call may block while Redis is down, at most `give_up_after_s`, and is safe to retry: a delivery leaves a receipt,
and after a lost reply to a lease the tickets pending under our name are read again. `lease` blocks at most `block_ms`
for tickets. RunGone: the run was removed, or another took its name; the worker has nothing left to do here.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

import redis
import redis.asyncio
import structlog

from streamrl.crashpoints import crashpoint
from streamrl.errors import WireError
from streamrl.protocol.transport import worker_scripts as scripts
from streamrl.protocol.transport.connection import bounded_block_ms
from streamrl.protocol.transport.entries import Deliveries, Delivery, one_of, read_ticket
from streamrl.protocol.transport.keys import HANDED_BACK, LEADER, WORKERS, Keys
from streamrl.protocol.transport.script import Argument
from streamrl.protocol.transport.types import CONTROLS, Control, Leased, RunInfo
from streamrl.protocol.transport.worker_run import AnnouncementReader, WorkerRun
from streamrl.protocol.wire.ticket import PURPOSES, Purpose

# A lease neither renewed nor ended for this many lease lengths is forgotten; its ticket may be leased again.
_FORGET_AFTER_LEASES = 3
# Interval between searches for expired leases, in lease lengths: a dead worker's tickets are taken up soon.
_LOOK_FOR_EXPIRED_EVERY = 1 / 16
_LEASING_ORDER: tuple[Purpose, ...] = ("eval", "train")  # evaluation is short, and people wait for it
_HANDED_BACK_IDLE_MS = 86_400_000  # longer than any lease, and not before the Unix epoch
assert set(_LEASING_ORDER) == set(PURPOSES)


class WorkerStream:
    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: Keys,
        *,
        worker: str,
        lease_s: float,
        give_up_after_s: float = 120.0,
    ) -> None:
        """`worker` must be unique; one that died and restarts under its name gets its leases back."""
        self._client = client
        self._keys = keys
        self._tickets = [keys.tickets(purpose) for purpose in _LEASING_ORDER]
        self._deliveries = Deliveries(self._deliver)
        self._worker = worker
        self._to_nobody = (WORKERS, worker, HANDED_BACK, _HANDED_BACK_IDLE_MS)
        self._lease_s = lease_s
        self._give_up_after_s = give_up_after_s
        self._held: dict[tuple[Purpose, str], float] = {}  # when each was last leased or renewed
        self._recover = True  # tickets we do not know of may be pending under our name
        self._look_for_expired_at = 0.0
        self._can_wait = True  # all streams exist, as far as we know
        self._run = WorkerRun(client, keys, give_up_after_s=give_up_after_s)
        self.announcements = AnnouncementReader(self._run)

    async def run_info(self) -> RunInfo | None:
        """Return the run, as `WorkerRun.info` does."""
        return await self._run.info()

    async def learner_report(self) -> bytes | None:
        """Return the learner's undecoded report, or None: if it changes, a learner is alive."""
        read = partial(self._client.hget, self._keys.progress, LEADER)
        found: Any = await self._run.retrying("look for a learner", read)
        return found if found is None else bytes(found)

    async def lease(self, *, max_tickets: int, block_ms: int) -> list[Leased]:
        """Lease up to `max_tickets` tickets, evaluation first; none if none arrive within `block_ms` (at most some
        seconds, and a small part of a lease). Never returns a ticket that the caller still holds and renews. One call
        at a time.
        """
        assert max_tickets >= 1, f"cannot lease {max_tickets} tickets"
        looks = self._recover or not self._can_wait or time.monotonic() >= self._look_for_expired_at
        if block_ms <= 0 or looks:
            taken = await self._run.with_uid("lease tickets", lambda uid: self._take(uid, max_tickets))
            if taken is None:
                await asyncio.sleep(bounded_block_ms(self._client, block_ms) / 1000)
                return []
            if taken[1] and len(taken[0]) >= max_tickets:
                self._look_for_expired_at = 0.0  # some had expired, and there may be more
            if (leased := self._adopt(taken[0], max_tickets)) or block_ms <= 0:
                return leased
        arrived = await self._run.retrying("wait for tickets", lambda: self._wait(max_tickets, block_ms))
        if self._recover:
            return await self.lease(max_tickets=max_tickets, block_ms=0)
        leased = self._adopt(arrived, len(arrived))
        if surplus := leased[max_tickets:]:  # a blocking read's count applies to each stream separately
            await self.hand_back(surplus)
            self._look_for_expired_at = 0.0  # finds them in the next call
        return leased[:max_tickets]

    async def renew(self, leased: Sequence[Leased]) -> list[Leased]:
        """Renew the leases of all tickets in progress; call it several times per `lease_s`. Returns those no longer
        ours: another worker has them, or the learner took them back.
        """
        if not leased:
            return []
        args = (WORKERS, self._worker, *_places(leased))
        reply = await self._run.call_script("renew leases", scripts.RENEW, self._tickets, *args)
        crashpoint("ticket.renewed")
        if reply is None:  # the server was emptied: the learner issues again what it still needs
            lost = list(leased)
        else:
            gone = {(_LEASING_ORDER[stream - 1], entry_id.decode()) for stream, entry_id in reply[0]}
            lost = [one for one in leased if (one.purpose, one.entry_id) in gone]
        self._hold(leased)
        self._let_go(lost)
        return lost

    async def deliver(self, leased: Leased, header: bytes, body: bytes) -> bool:
        """Replace the ticket by its group. False: drop the group, because another worker delivered the ticket, the
        learner took it back, or its lease expired and another worker holds it.
        """
        crashpoint("group.ready")
        delivered = await self._deliveries.add(Delivery(leased, header, body))
        crashpoint("group.delivered")
        self._let_go([leased])
        return delivered

    async def hand_back(self, leased: Sequence[Leased]) -> None:
        """Return these tickets, so that others may lease them at once."""
        if leased:
            args = (*self._to_nobody, *_places(leased))
            await self._run.call_script("hand tickets back", scripts.HAND_BACK, self._tickets, *args)
            crashpoint("ticket.handed_back")
            self._let_go(leased)

    async def leave(self) -> None:
        """Hand back everything pending under our name, even what a lost reply assigned to us: the last call. While
        Redis is down it waits like every call, so a caller in a hurry must set a timeout.
        """
        await self._run.call_script("leave the run", scripts.LEAVE, self._tickets, *self._to_nobody)
        crashpoint("worker.left")
        self._held.clear()

    async def control(self) -> Control:
        read = partial(self._client.hget, self._keys.control, "mode")
        word: Any = await self._run.retrying("read the control word", read)
        return one_of(CONTROLS, word, "run")

    # Leasing

    async def _take(self, uid: str, most: int) -> Any:
        recover, self._recover = self._recover, True  # until the reply arrives, unknown tickets may be ours
        args = (WORKERS, self._worker, int(self._lease_s * 1000), most, int(recover))
        reply = await self._run.call_script_once(uid, scripts.TAKE, self._tickets, *args)
        crashpoint("ticket.leased")
        self._recover = False
        self._look_for_expired_at = time.monotonic() + _LOOK_FOR_EXPIRED_EVERY * self._lease_s
        return reply

    async def _wait(self, most: int, block_ms: int) -> list[Any]:
        """Return new tickets as soon as there are some, as `_take` returns them. With `_recover` left set, tickets are
        or may be pending under our name, and `_take` finds out.
        """
        self._recover = True
        streams: dict[Any, Any] = dict.fromkeys(self._tickets, ">")
        block = bounded_block_ms(self._client, min(block_ms, int(_LOOK_FOR_EXPIRED_EVERY * self._lease_s * 1000)))
        try:
            reply: Any = await self._client.xreadgroup(WORKERS, self._worker, streams, count=most, block=block)
        except (redis.ConnectionError, redis.TimeoutError):
            return []  # waiting again would wait for other tickets
        except redis.ResponseError as error:
            if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
                raise
            # One of the streams does not exist yet, or was recreated; the script reads the other one.
            self._can_wait = False
            await asyncio.sleep(block / 1000)
            return []
        self._can_wait = True
        arrived = [
            (stream, entry_id, *(fields.get(name, b"") for name in (b"n", b"u", b"d", b"b")))
            for stream, entries in reply or []
            for entry_id, fields in entries
        ]
        if arrived:
            crashpoint("ticket.leased")
        # A ticket of another run: only the script can tell whether ours is gone.
        self._recover = self._run.uid is None or any(uid != self._run.uid.encode() for *_, uid, _, _ in arrived)
        return arrived

    def _adopt(self, entries: Sequence[Any], most: int) -> list[Leased]:
        oldest = time.monotonic() - _FORGET_AFTER_LEASES * self._lease_s
        self._held = {key: at for key, at in self._held.items() if at > oldest}
        adopted: list[Leased] = []
        for stream, entry_id, number, uid, identity, body in entries:
            purpose = _LEASING_ORDER[self._tickets.index(stream.decode())]
            if (purpose, entry_id.decode()) in self._held:
                continue
            if len(adopted) == most:
                self._recover = True  # the rest stays pending, and is returned next time
                break
            try:
                ticket = read_ticket(body, purpose=purpose, number=number, uid=uid, identity=identity)
            except WireError as error:
                # Left pending: a worker of another version may be able to read it, and the learner scans the tickets
                # periodically and issues again those that nobody can read.
                structlog.get_logger().warning("unreadable_ticket", entry=entry_id.decode(), error=str(error))
            else:
                adopted.append(Leased(entry_id=entry_id.decode(), ticket=ticket, purpose=purpose))
        self._hold(adopted)
        return adopted

    def _hold(self, leased: Sequence[Leased]) -> None:
        self._held.update({(one.purpose, one.entry_id): time.monotonic() for one in leased})

    def _let_go(self, leased: Sequence[Leased]) -> None:
        for one in leased:
            self._held.pop((one.purpose, one.entry_id), None)

    async def spend(self, what: str, num: int) -> int:
        """Count what this worker has spent; return the total of all workers of the run, as far as this Redis knows. A
        call whose reply was lost is retried, and may count twice.
        """
        args = (f"spent:{what}", num)
        reply = await self._run.call_script("count what is spent", scripts.SPEND, [self._keys.counters], *args)
        return num if reply is None else int(reply[0])

    async def secret(self) -> bytes | None:
        """Return the secret that authenticates hosts of this run to each other; None if there is no run."""
        fresh = secrets.token_hex(32)
        reply = await self._run.call_script("read the hosts' secret", scripts.SECRET, [self._keys.peers_secret], fresh)
        return None if reply is None else bytes(reply[0])

    # Delivering

    async def _deliver(self, lane: int, deliveries: Sequence[Delivery]) -> Sequence[bool]:
        k, receipt_ms = self._keys, int(2000 * self._give_up_after_s)
        keys = [k.receipt(self._worker, lane), k.counters]
        keys += [key for purpose in _LEASING_ORDER for key in (k.tickets(purpose), k.groups(purpose))]
        parts: list[Argument] = []
        for one in deliveries:
            ticket = one.leased.ticket
            parts += (one.leased.purpose, one.leased.entry_id, ticket.number, ticket.identity, one.header, one.body)
        args = (WORKERS, self._worker, uuid.uuid4().hex, receipt_ms, *parts)
        reply = await self._run.call_script("deliver groups", scripts.DELIVER, keys, *args)
        if reply is None:
            return [False] * len(deliveries)
        outcomes: bytes = reply[0]
        return [outcome == ord("1") for outcome in outcomes]


def _places(leased: Sequence[Leased]) -> list[Argument]:
    """Script arguments: the stream's number and the entry, per ticket."""
    return [part for one in leased for part in (_LEASING_ORDER.index(one.purpose) + 1, one.entry_id)]
