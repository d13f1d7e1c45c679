"""The learner's half of the stream: issues tickets, reads groups, announces weights.

Rank 0 writes; other ranks only `fetch`. Every writing script carries the term and raises Fenced once another learner
holds the run. Every call may block while Redis is down or full, at most `give_up_after_s`, and is safe to retry:
appends carry a token that the server remembers, all others are idempotent. `read` blocks at most `block_ms` for groups;
`issue` does not wait for room.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, Unpack

import redis
import structlog
from redis.client import Pipeline

from streamrl.crashpoints import crashpoint
from streamrl.errors import Fenced, Replaced, RunGone, ServerFull, StreamrlError, TransportError
from streamrl.protocol.transport import learner_scripts as scripts
from streamrl.protocol.transport.connection import Patience, bounded_block_ms, in_one_trip, repeat
from streamrl.protocol.transport.entries import PagedReader, decode_reports, one_of, to_entry, to_number
from streamrl.protocol.transport.keys import LONGEST_EVENTS, WORKERS, Keys, history_streams, is_validation
from streamrl.protocol.transport.learner_letters import LetterBox
from streamrl.protocol.transport.lease import await_lease, other_holder, refusal, wait_out
from streamrl.protocol.transport.present import Present
from streamrl.protocol.transport.script import Argument, Call, Fence, Script, run
from streamrl.protocol.transport.types import (
    CONTROLS,
    START,
    Announcement,
    Entry,
    Orders,
    PresentGroup,
    PresentTicket,
    RunState,
)
from streamrl.protocol.wire.codec import SCHEMA
from streamrl.protocol.wire.ticket import PURPOSES, Purpose, Ticket, encode_ticket
from streamrl.telemetry.progress import Report
from streamrl.versions import show, term_of

T = TypeVar("T")

_TICKETS_A_CALL = 256
_IDS_A_CALL = 1000  # Lua's stack is limited to some thousands of arguments
_TELEMETRY_PATIENCE_S = 2.0


class LearnerStream:
    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        *,
        run_uid: str,
        term: int,
        holder: str,
        lease_s: float,
        give_up_after_s: float = 120.0,
    ) -> None:
        """`holder` names this job to others; a process with the same name (a restarted torchrun) takes over at once."""
        self._client = client
        self._keys = keys
        self._fence = Fence(run_uid=run_uid, term=term, holder=holder)
        self._lease_ms = int(1000 * lease_s)
        # Redis was down, replaced or emptied since the last `restore`: its data may be older than the learner's.
        self.disturbed = False
        # Retries any idempotent call.
        self._ask = partial(repeat, client, give_up_after_s=give_up_after_s, on_trouble=self._note_trouble)
        self._present = Present(client, keys, run_uid=run_uid, ask=self._ask)
        self._claimed: tuple[str, str] | None = None  # (configuration, fingerprint)
        # Redis lost blobs with our claim or by a failover, perhaps also those that were put for the next version.
        self._has_lost_blobs = False
        self._without_blobs: set[int] = set()  # versions of which that may be so
        self._server_run_id = ""
        self.letters = LetterBox(client, keys, ask=self._ask, write=self._write, listed=self._present.letters)
        self._readers = {purpose: PagedReader(client, keys.groups(purpose)) for purpose in PURPOSES}

    # The run, and its learner

    def claim(self, *, config_json: str, fingerprint: str, takeover: bool = False, wait_s: float) -> None:
        """Become the learner of the run, before any other write and after `lease.await_lease`. A term newer than the
        one in Redis does not wait. Where Redis has none, another holder waits up to `wait_s` for the lease to end;
        Refused then names its holder. ResourceError: the name belongs to another run. RunGone: the run was removed;
        `takeover` starts it again.
        """
        if takeover:
            await_lease(
                self._client,
                self._keys,
                run_uid=lambda: self._fence.run_uid,
                holder=self._fence.holder,
                lease_s=self._lease_ms / 1000,
                wait_s=wait_s,
                takeover=True,
            )
        self._claimed = config_json, fingerprint
        wait_out(partial(self._try_claim, takeover=takeover), self._keys, wait_s)
        self._note_server()
        crashpoint("claim.written")

    def renew(self) -> None:
        """Renew the lease; call several times per `lease_s`, from any thread. Also notices a replaced server."""
        self._write("renew the learner's lease", scripts.RENEW, [], self._lease_ms)
        self._note_server()

    def forget_end(self, *, began: float) -> None:
        """Clear a drain or stop from before this learner began (`time.monotonic`), which would end it at once."""
        what, age_ms = "clear an earlier drain or stop", int(1000 * (time.monotonic() - began))
        for word in self._write(what, scripts.FORGET_END, [self._keys.control], age_ms):
            self.event("forgets", control=word.decode())

    def release(self, state: RunState) -> None:
        """Set the run's final state (finished, stopped or failed) and free the lease: the last call."""
        self._write("release the run", scripts.RELEASE, [self._keys.control], state)
        crashpoint("release.written")

    def orders(self) -> Orders:
        k = self._keys
        word, requested = self._ask_all(
            "read the operator's orders", lambda pipe: (pipe.hget(k.control, "mode"), pipe.hkeys(k.retry_requests))
        )
        retries = sorted(number for text in requested if (number := to_number(text)) >= 0)
        return Orders(control=one_of(CONTROLS, word, "run"), retries=tuple(retries))

    # Tickets and groups

    def restore(self, *, cursor: str, retried: Mapping[int, int | None] | None = None) -> None:
        """Restore the streams, first after `claim` and in every reconcile: create missing ones, make new groups land
        beyond the cursor, and record which tickets retry a dead one (by number) and which do not (None).
        """
        self.disturbed = False
        for reader in self._readers.values():
            reader.forget()
        streams = [*map(self._keys.tickets, PURPOSES), *map(self._keys.groups, PURPOSES)]
        pairs = _flat((number, "" if dead is None else dead) for number, dead in (retried or {}).items())
        keys = [*streams, self._keys.retried]
        self._write("restore the streams", scripts.RESTORE, keys, WORKERS, cursor, START, *pairs)
        crashpoint("restore.written")

    def issue(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Issue tickets; one with `retry_of` fulfills the retry request. Returns those that a full server refused: it
        does not wait for room, since training on and committing the groups that are there is what makes room.
        """
        refused: list[Ticket] = []
        for purpose in PURPOSES:
            for chunk in _chunks([ticket for ticket in tickets if ticket.purpose == purpose], _TICKETS_A_CALL):
                if refused or not self._issue(purpose, chunk):
                    refused += chunk
        return refused

    def _issue(self, purpose: Purpose, tickets: Sequence[Ticket]) -> bool:
        k = self._keys
        keys = [k.tickets(purpose), k.appends, k.counters, k.dead, k.retry_requests, k.retried]
        parts = _flat(
            (t.number, t.identity, encode_ticket(t), "" if t.retry_of is None else t.retry_of) for t in tickets
        )
        args = (WORKERS, uuid.uuid4().hex, purpose, *parts)
        try:
            self._write("issue tickets", scripts.ISSUE, keys, *args, wait_for_room=False)
        except ServerFull:
            return False
        crashpoint("issue.written")
        return True

    def count_issued(self, issued: int) -> None:
        """Set the count of issued training tickets (exclusive upper bound), which the audit uses."""
        self._write("count the tickets", scripts.COUNT_ISSUED, [], issued)
        crashpoint("reconcile.counted")

    def read(self, purpose: Purpose, *, after: str, count: int, block_ms: int) -> list[Entry]:
        """Return groups after the entry id `after`; empty if none arrive within `block_ms` (at most some seconds)."""
        block = bounded_block_ms(self._client, block_ms) if block_ms > 0 else None
        reader = self._readers[purpose]
        found = self._ask("read groups", lambda: reader.read(after=after, count=count, block_ms=block))
        return [to_entry(*entry) for entry in found]

    def fetch(self, purpose: Purpose, ids: Sequence[str]) -> list[Entry | None]:
        """Return these entries, None for a missing one. Any rank may call this."""
        stream = self._keys.groups(purpose)
        found = self._ask_all("fetch groups", lambda pipe: [pipe.xrange(stream, one, one) for one in ids])
        return [to_entry(*entries[0]) if entries else None for entries in found]

    def commit(self, *, step: int, cursor: str, trim_below: str, ended: Sequence[str] = ()) -> None:
        """Record the commit after the checkpoint's rename; delete groups before `trim_below`, and `ended` ones after
        it.
        """
        self._write("commit a step", scripts.COMMIT, [self._keys.groups("train")], step, cursor, trim_below, *ended)
        crashpoint("commit.written")

    def trim_eval(self, *, below: str) -> None:
        """Delete evaluation groups once validation has read them; the audit does not cover evaluation."""
        self._write("trim evaluation groups", scripts.TRIM, [self._keys.groups("eval")], below)

    def present_tickets(self, purpose: Purpose) -> list[PresentTicket]:
        """List all entries among the tickets, leased or not. Scan these before the groups: a delivery moves a ticket
        from here to there, never back.
        """
        return self._present.tickets(purpose)

    def present_groups(self, purpose: Purpose, *, after: str) -> list[PresentGroup]:
        """List all groups after `after`, without their bodies."""
        return self._present.groups(purpose, after=after)

    def waiting(self, purpose: Purpose) -> set[tuple[int, str]]:
        """Return number and identity of waiting and leased tickets; takes a millisecond or two for a thousand."""
        return self._present.waiting(purpose)

    def delete_tickets(self, purpose: Purpose, entry_ids: Sequence[str]) -> None:
        keys = [self._keys.tickets(purpose)]
        for chunk in _chunks(entry_ids, _IDS_A_CALL):
            self._write("delete tickets", scripts.DELETE_TICKETS, keys, WORKERS, *chunk)

    def retried(self) -> dict[int, int]:
        """Map the number of each retry ticket to the dead ticket's."""
        found: Any = self._ask("read the retries", lambda: self._client.hgetall(self._keys.retried))
        pairs = ((to_number(number), to_number(dead)) for number, dead in found.items())
        return {number: dead for number, dead in pairs if 0 <= dead < number}

    # Weights and telemetry

    def reports(self) -> tuple[float, list[Report]]:
        """Return (the server's time, the reports of all processes); waits as briefly as telemetry does."""
        (seconds, microseconds), packed = self._ask_all(
            "read the reports",
            lambda pipe: (pipe.time(), pipe.hgetall(self._keys.progress)),
            give_up_after_s=_TELEMETRY_PATIENCE_S,
        )
        return seconds + microseconds / 1e6, decode_reports(packed)

    def announce(self, announcement: Announcement, *, keep: Sequence[int]) -> None:
        """Announce a version whose blobs are stored, and delete manifests of versions not in `keep`."""
        a, k = announcement, self._keys
        assert term_of(a.version) == self._fence.term, f"version {show(a.version)} is of another term"
        what, keys = f"announce version {show(a.version)}", [k.manifests, k.weights, k.announced]
        self._write(what, scripts.ANNOUNCE, keys, a.version, a.base, a.step, time.time(), a.manifest, *keep)
        self._note_lost_blobs(a.version)
        crashpoint("announce.written")

    def amend(self, announcement: Announcement, *, keep: Sequence[int]) -> None:
        """Replace the manifest of an announced version, now that its anchor is stored beside it for late workers.
        Deletes manifests not in `keep`, such as those that only led to older anchors.
        """
        a, what = announcement, f"amend version {show(announcement.version)}"
        self._write(what, scripts.AMEND, [self._keys.manifests], a.version, a.manifest, *keep)
        self._note_lost_blobs(a.version)
        crashpoint("amended.written")

    def has_manifests(self, versions: Sequence[int]) -> bool:
        """Whether Redis has the manifests of all these versions, and cannot have lost their blobs before them."""
        if self._without_blobs.intersection(versions):
            return False
        names = [str(version) for version in versions]
        found: Any = self._ask("look for manifests", lambda: self._client.hmget(self._keys.manifests, names))
        return all(manifest is not None for manifest in found)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step's metrics in the streams that keep them; omits values that are not finite."""
        values = {name: value for name, value in metrics.items() if math.isfinite(value)}
        streams = history_streams(self._keys, step, is_validation=is_validation(values))
        self._append_telemetry("record metrics", streams, {"step": step, "values": json.dumps(values)})

    def event(self, kind: str, **detail: str | int | float) -> None:
        """Append one line to the journal."""
        self._append_telemetry(
            "note an event", {self._keys.events: LONGEST_EVENTS}, {"kind": kind, "detail": json.dumps(detail)}
        )

    def _append_telemetry(self, what: str, streams: Mapping[str, int], fields: Mapping[str, Argument]) -> None:
        """Append the same entry to each stream, which is trimmed to about its length; waits briefly and never fails the
        run.
        """
        keys, once = [self._keys.appends, *streams], (next(iter(streams)), uuid.uuid4().hex)
        stamped = _flat({**fields, "term": self._fence.term, "at": time.time()}.items())
        args = (*once, *streams.values(), *stamped)
        try:
            self._write(what, scripts.APPEND, keys, *args, give_up_after_s=_TELEMETRY_PATIENCE_S)
        except (Fenced, RunGone):
            raise
        except TransportError as error:
            structlog.get_logger().warning("telemetry_lost", what=what, error=str(error))

    # Calls

    def _ask_all(self, what: str, fill: Callable[[Pipeline], object], **patience: Unpack[Patience]) -> list[Any]:
        return self._ask(what, partial(in_one_trip, self._client, fill), **patience)

    def _write(
        self, what: str, script: Script, keys: Sequence[str], *args: Argument, **patience: Unpack[Patience]
    ) -> list[Any]:
        """Run a fenced, idempotent script and return its reply after OK; ServerFull at once unless it may wait."""
        ask = partial(self._ask, what, partial(run, self._client, self._fence.call(script, self._keys, keys, *args)))
        reply = ask(**patience)
        if reply[0] == b"LOST":
            self._claim_again()
            reply = ask(**patience)
        if reply[0] != b"OK":
            raise self._refusal(what, reply)
        return list(reply[1:])

    def _try_claim(self, *, takeover: bool = False) -> str | None:
        """Try to claim the run; return None on success, else the holder."""
        assert self._claimed is not None, "claim the run before anything is written"
        keys = (self._keys.meta, self._keys.tombstone, self._keys.lease)
        about = (*self._claimed, SCHEMA, time.time())
        call = Call(scripts.CLAIM, keys, (*self._fence, self._lease_ms, int(takeover), *about))
        reply = self._ask("claim the run", partial(run, self._client, call))
        if reply[0] not in (b"OK", b"HELD"):
            raise self._refusal("claim the run", reply)
        return other_holder(reply)

    def _claim_again(self) -> None:
        """Claim again, because Redis has lost our claim: it was emptied, or restored from an older copy."""
        self.disturbed = self._has_lost_blobs = True
        if (other := self._try_claim()) is not None:
            raise Replaced(f"run {self._keys.name!r} was lost from Redis, and {other} has taken its lease")

    def _refusal(self, what: str, reply: list[Any]) -> StreamrlError:
        return refusal(self._client, self._keys, self._fence, what=what, reply=reply)

    def _note_trouble(self, error: redis.RedisError) -> None:
        # A server that is merely full has lost nothing.
        self.disturbed |= isinstance(error, redis.ConnectionError | redis.TimeoutError | redis.ReadOnlyError)

    def _note_lost_blobs(self, version: int) -> None:
        """After its manifest was written: a server that has just taken over knows the version, and may lack blobs."""
        self._note_server()
        if self._has_lost_blobs:
            self._has_lost_blobs = False
            self._without_blobs.add(version)

    def _note_server(self) -> None:
        """Detect a server that was replaced between calls, which only its run id shows."""
        try:
            run_id = str(self._ask("read the server's info", lambda: self._client.info("server"))["run_id"])
        except TransportError as error:
            if isinstance(error.__cause__, redis.exceptions.NoPermissionError):
                return  # INFO may be forbidden; lost connections and the fence still detect most replacements
            raise
        if self._server_run_id not in ("", run_id):
            self.disturbed = self._has_lost_blobs = True
        self._server_run_id = run_id


def _chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _flat(rows: Iterable[Iterable[Argument]]) -> list[Argument]:
    return [part for row in rows for part in row]
