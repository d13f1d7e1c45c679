"""The learner's half of the stream: tickets out, groups in, weights announced. Rank 0 writes; other ranks only `fetch`.

Every writing script carries the epoch and raises Fenced once another learner is there. Every call may block while Redis
is away or full, at most `give_up_after_s`, and is safe to repeat: appends carry a token that the server remembers, all
else sets what it sets. `read` blocks at most `block_ms` for groups; `issue` does not wait for room.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import redis
import structlog

from streamrl.crashpoints import crashpoint
from streamrl.errors import Fenced, RunGone, ServerFull, TransportError, WireError
from streamrl.telemetry.progress import Report
from streamrl.transport.ahead import PagedReader
from streamrl.transport.connection import bounded_block_ms
from streamrl.transport.keys import LONGEST_EVENTS, Keys
from streamrl.transport.report_codec import decode_reports
from streamrl.transport.scripts import for_learner as scripts
from streamrl.transport.scripts.call import Argument, Call, run
from streamrl.transport.scripts.fence import Fence
from streamrl.transport.tenure import Tenure
from streamrl.transport.thinning import history_streams, is_validation
from streamrl.transport.types import (
    START,
    Announcement,
    Entry,
    Orders,
    PresentGroup,
    PresentTicket,
    RunState,
    read_ticket,
    to_control,
)
from streamrl.versions import epoch_of, show
from streamrl.wire.ticket import PURPOSES, Purpose, Ticket, encode_ticket

T = TypeVar("T")

_TICKETS_A_CALL = 256
_IDS_A_CALL = 1000  # Lua's stack ends at some thousands of arguments
_ENTRIES_A_PAGE = 100  # the server reads whole groups to tell their numbers
_TELEMETRY_PATIENCE_S = 2.0


class LearnerStream:
    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        *,
        run_uid: str,
        epoch: int,
        holder: str,
        lease_s: float,
        give_up_after_s: float = 120.0,
    ) -> None:
        """`holder` names this job to others; who comes with the same name (a restarted torchrun) takes over at once."""
        self._client = client
        self._keys = keys
        self._fence = Fence(run_uid=run_uid, epoch=epoch, holder=holder)
        self._tenure = Tenure(client, keys, fence=self._fence, lease_s=lease_s, give_up_after_s=give_up_after_s)
        self._readers = {purpose: PagedReader(client, keys.groups(purpose)) for purpose in PURPOSES}

    # The run, and who learns it

    def claim(self, *, config_json: str, fingerprint: str, takeover: bool = False, wait_s: float) -> None:
        """Become the learner of the run, before any other write, and after `tenure.await_lease`: an epoch that is newer
        than the one Redis knows does not wait. Where Redis knows none, a stranger waits up to `wait_s` for the lease to
        end; TransportError then names its holder. ResourceError: the name belongs to another run. RunGone: the run was
        removed; `takeover` begins it anew."""
        self._tenure.claim(config_json=config_json, fingerprint=fingerprint, takeover=takeover, wait_s=wait_s)
        crashpoint("claim.written")

    def renew(self) -> None:
        """Keep the lease; several times per `lease_s`, from any thread. Notices a replaced server, too."""
        self._tenure.renew()

    def forget_end(self) -> None:
        """A drain or a stop that was said before this learner began is not for it, or it would end at once."""
        if (word := self.orders().control) in ("drain", "stop"):
            self.event("forgets", control=word)
        self._tenure.forget_end()

    def release(self, state: RunState) -> None:
        """Last act: the run is finished, stopped or failed, and another learner may begin at once."""
        self._tenure.release(state)
        crashpoint("release.written")

    def orders(self) -> Orders:
        def read() -> list[Any]:
            with self._client.pipeline(transaction=False) as pipe:
                pipe.hget(self._keys.control, "mode")
                pipe.hkeys(self._keys.retry_requests)
                return pipe.execute()

        word, requested = self._tenure.ask("read the operator's orders", read)
        retries = sorted(number for text in requested if (number := _to_number(text)) >= 0)
        return Orders(control=to_control(word), retries=tuple(retries))

    # Tickets out, groups in

    @property
    def disturbed(self) -> bool:
        """Redis was away, replaced or emptied since the last `restore`: what is in it may be older than we think."""
        return self._tenure.disturbed

    def restore(self, *, cursor: str, retried: Mapping[int, int] | None = None, eval_cursor: str = START) -> None:
        """First act after `claim` and of every reconcile: streams exist, new groups land beyond the cursors, and of
        tickets that repeat a dead one (by number) Redis knows which."""
        self._tenure.disturbed = False
        for reader in self._readers.values():
            reader.forget()
        call = scripts.restore(self._keys, self._fence, cursor=cursor, eval_cursor=eval_cursor, retried=retried or {})
        self._tenure.write("restore the streams", call)
        crashpoint("restore.written")

    def issue(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """A ticket with `retry_of` answers the request for it. Returns those that a full server refused: they are not
        waited for, since to train what is there, and to commit it, is what makes room."""
        refused: list[Ticket] = []
        for purpose in PURPOSES:
            for chunk in _chunks([ticket for ticket in tickets if ticket.purpose == purpose], _TICKETS_A_CALL):
                if refused or not self._issue(purpose, chunk):
                    refused += chunk
        return refused

    def _issue(self, purpose: Purpose, tickets: Sequence[Ticket]) -> bool:
        encoded = [(t.number, encode_ticket(t), t.retry_of) for t in tickets]
        call = scripts.issue(self._keys, self._fence, purpose, token=uuid.uuid4().hex, tickets=encoded)
        try:
            self._tenure.write("issue tickets", call, wait_for_room=False)
        except ServerFull:
            return False
        crashpoint("issue.written")
        return True

    def count_issued(self, issued: int) -> None:
        """What the audit goes by from here on: training tickets up to this number, exclusive, have been issued."""
        self._tenure.write("count the tickets", scripts.count_issued(self._keys, self._fence, issued=issued))
        crashpoint("reconcile.counted")

    def read(self, purpose: Purpose, *, after: str, count: int, block_ms: int) -> list[Entry]:
        """Groups beyond the entry id `after`; empty when none came within `block_ms` (at most some seconds)."""
        block = bounded_block_ms(self._client, block_ms) if block_ms > 0 else None
        reader = self._readers[purpose]
        found = self._tenure.ask("read groups", lambda: reader.read(after=after, count=count, block_ms=block))
        return [_to_entry(*entry) for entry in found]

    def fetch(self, purpose: Purpose, ids: Sequence[str]) -> list[Entry | None]:
        """These entries; None for one that is not there. Any rank may call it."""
        stream = self._keys.groups(purpose)

        def fetch_all() -> list[Any]:
            with self._client.pipeline(transaction=False) as pipe:
                for entry_id in ids:
                    pipe.xrange(stream, entry_id, entry_id)
                return pipe.execute()

        found = self._tenure.ask("fetch groups", fetch_all)
        return [_to_entry(*entries[0]) if entries else None for entries in found]

    def commit(self, *, step: int, cursor: str, trim_below: str, ended: Sequence[str] = ()) -> None:
        """After the checkpoint's rename: groups before `trim_below`, and the `ended` ones beyond it, are no longer
        needed by anybody."""
        call = scripts.commit(self._keys, self._fence, step=step, cursor=cursor, trim_below=trim_below, ended=ended)
        self._tenure.write("commit a step", call)
        crashpoint("commit.written")

    def trim_eval(self, *, below: str) -> None:
        """Evaluation is outside the audit: its groups go when validation has read them."""
        self._tenure.write("trim evaluation groups", scripts.trim_eval(self._keys, self._fence, below=below))

    def present_tickets(self, purpose: Purpose) -> list[PresentTicket]:
        """All that wait or are leased, and whatever else lies among them. Scan these before the groups: a delivery
        moves a ticket from here to there, never back."""
        stream, found, last = self._keys.tickets(purpose), list[PresentTicket](), START
        while page := self._tenure.ask("list tickets", partial(self._page, stream, after=last)):
            found += [self._to_present(purpose, *entry) for entry in page]
            last = found[-1].entry_id
        return found

    def present_groups(self, purpose: Purpose, *, after: str) -> list[PresentGroup]:
        """All groups beyond `after`, without their bodies."""
        stream, found, last = self._keys.groups(purpose), list[PresentGroup](), after
        while last:
            call = scripts.numbers(stream, self._fence.run_uid, after=last, count=_ENTRIES_A_PAGE)
            reached, page = self._tenure.ask("list groups", partial(run, self._client, call))
            last = reached.decode() if reached else ""
            found += [PresentGroup(entry_id=i.decode(), number=_to_number(n), num_bytes=size) for i, n, size in page]
        return found

    def delete_tickets(self, purpose: Purpose, entry_ids: Sequence[str]) -> None:
        for chunk in _chunks(entry_ids, _IDS_A_CALL):
            self._tenure.write("delete tickets", scripts.delete_tickets(self._keys, self._fence, purpose, chunk))

    def dead(self, ticket: Ticket, *, error: str) -> None:
        """Keep a ticket that is given up, for people and for `retry_of`."""
        fields: list[tuple[str, Argument]] = [
            ("p", ticket.purpose),
            ("n", ticket.number),
            ("u", ticket.run_uid),
            ("b", encode_ticket(ticket)),
            ("error", error[:2000]),
            ("at", time.time()),
        ]
        # Once per number, not per call: a failure read again after a restore finds its ticket dead already.
        once = (f"{self._keys.dead}:{ticket.purpose}:{ticket.number}", "dead")
        call = scripts.append(self._keys, self._fence, self._keys.dead, once=once, longest=0, fields=fields)
        self._tenure.write("dead-letter a ticket", call)
        crashpoint("dead.written")

    def retried(self) -> dict[int, int]:
        """By the number of a ticket that repeats a dead one, the dead one's."""
        found: Any = self._tenure.ask("read the retries", lambda: self._client.hgetall(self._keys.retried))
        pairs = ((_to_number(number), _to_number(dead)) for number, dead in found.items())
        return {number: dead for number, dead in pairs if 0 <= dead < number}

    # Weights and telemetry

    def reports(self) -> tuple[float, list[Report]]:
        """(the server's time, what the parts of the run say of themselves); waited for as briefly as telemetry."""

        def read() -> list[Any]:
            with self._client.pipeline(transaction=False) as pipe:
                pipe.time()
                pipe.hgetall(self._keys.progress)
                return pipe.execute()

        (seconds, microseconds), packed = self._tenure.ask(
            "read the reports", read, give_up_after_s=_TELEMETRY_PATIENCE_S
        )
        return seconds + microseconds / 1e6, decode_reports(packed)

    def announce(self, announcement: Announcement, *, keep: Sequence[int]) -> None:
        """The blobs are stored: from here on workers see the version. Manifests of versions not in `keep` go."""
        version = announcement.version
        assert epoch_of(version) == self._fence.epoch, f"version {show(version)} is of another epoch"
        call = scripts.announce(self._keys, self._fence, announcement, keep=keep, now=time.time())
        self._tenure.write(f"announce version {show(version)}", call)
        crashpoint("announce.written")

    def amend(self, announcement: Announcement, *, keep: Sequence[int]) -> None:
        """What followed the version, in its manifest: its anchor is stored beside it, and late workers begin with that.
        Manifests not in `keep` go, as those of what only led to older anchors."""
        call = scripts.amend(self._keys, self._fence, announcement, keep=keep)
        self._tenure.write(f"amend version {show(announcement.version)}", call)
        crashpoint("amended.written")

    def has_manifests(self, versions: Sequence[int]) -> bool:
        """Whether Redis has those of all these versions."""
        names = [str(version) for version in versions]
        found: Any = self._tenure.ask("look for manifests", lambda: self._client.hmget(self._keys.manifests, names))
        return all(manifest is not None for manifest in found)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step's metrics, and where history keeps them; values that are no numbers are left out."""
        values = {name: value for name, value in metrics.items() if math.isfinite(value)}
        streams = history_streams(self._keys, step, is_validation=is_validation(values))
        fields = self._stamped(("step", step), ("values", values))
        token = uuid.uuid4().hex
        self._tell("record metrics", scripts.record(self._keys, self._fence, streams, token=token, fields=fields))

    def event(self, kind: str, **detail: str | int | float) -> None:
        """One line of the journal."""
        stream, fields = self._keys.events, self._stamped(("kind", kind), ("detail", detail))
        once = (stream, uuid.uuid4().hex)
        call = scripts.append(self._keys, self._fence, stream, once=once, longest=LONGEST_EVENTS, fields=fields)
        self._tell("note an event", call)

    def _stamped(self, *fields: tuple[str, str | int | Mapping[str, Any]]) -> list[tuple[str, Argument]]:
        stamped = [*fields, ("epoch", self._fence.epoch), ("at", time.time())]
        return [(name, json.dumps(value) if isinstance(value, Mapping) else value) for name, value in stamped]

    def _tell(self, what: str, call: Call) -> None:
        """Telemetry is worth a short wait, and never the run."""
        try:
            self._tenure.write(what, call, give_up_after_s=_TELEMETRY_PATIENCE_S)
        except (Fenced, RunGone):
            raise
        except TransportError as error:
            structlog.get_logger().warning("telemetry_lost", what=what, error=str(error))

    def _page(self, stream: str, *, after: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
        entries: Any = self._client.xrange(stream, min=f"({after}", count=_ENTRIES_A_PAGE)
        return list(entries)

    def _to_present(self, purpose: Purpose, entry_id: bytes, fields: Mapping[bytes, bytes]) -> PresentTicket:
        number, uid = fields.get(b"n", b""), fields.get(b"u", b"")
        ours = uid == self._fence.run_uid.encode()
        try:
            read_ticket(fields.get(b"b", b""), purpose=purpose, number=number, uid=uid)
        except WireError as error:
            flaw: str | None = str(error)
        else:
            flaw = None if ours else "of another run"
        return PresentTicket(entry_id=entry_id.decode(), number=_to_number(number) if ours else -1, flaw=flaw)


def _chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _to_number(text: bytes) -> int:
    return int(text) if text.isdigit() and len(text) < 19 else -1


def _to_entry(entry_id: bytes, fields: Mapping[bytes, bytes]) -> Entry:
    return Entry(
        id=entry_id.decode(),
        number=_to_number(fields.get(b"n", b"")),
        run_uid=fields.get(b"u", b"").decode(errors="replace"),
        header=fields.get(b"h", b""),
        body=fields.get(b"b", b""),
    )
