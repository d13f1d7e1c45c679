"""Reads a run's groups as they are delivered, or those still in the stream; only reads, so that the run is not
affected.

The learner trims what it has committed, so a slow reader misses groups. Their number is exact if the server counts all
entries ever added (Redis 7, Valkey), and unknown on Redis 6.2. It is also unknown if the reader goes on from an entry
that has been trimmed: nobody has counted what came meanwhile. Blocks up to the requested time, and for half a minute
at most while Redis is away.

`record` is one recording session: from the tap to the files, until the run ends or the user stops it. It blocks on
Redis, in slices of a second, and on the disk. When it returns, everything is on disk; if the process is killed, at most
a second's groups are missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import redis
from redis.client import Pipeline

from streamrl.errors import DataError, RunGone
from streamrl.ops.record.recorded import POLL_S, is_entry_id
from streamrl.ops.record.write import RecordingWriter
from streamrl.protocol.transport.connection import bounded_block_ms, in_one_trip, repeat
from streamrl.protocol.transport.entries import one_of, to_entry
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.types import RUN_STATES, START, Entry, RunState, entry_order
from streamrl.protocol.wire.ticket import Purpose

T = TypeVar("T")

_GIVE_UP_AFTER_S = 30.0
_ENTRIES_A_READ = 16  # groups may be large, and a long reply delays the server's other clients


class Tap:
    def __init__(self, client: redis.Redis, keys: Keys, *, run_uid: str, purpose: Purpose = "train") -> None:
        self._client, self._keys, self._run_uid = client, keys, run_uid
        self._stream = keys.groups(purpose)
        self.after = START  # groups beyond this entry id are read
        self.num_missed: int | None = None  # since where it began; None: unknown
        self._has_gap: bool | None = None  # groups may have been trimmed before the first `look_back`; None: not known
        self._num_read = 0  # since the last `look_back`
        self._num_added: int | None = None  # entries ever added, at the last `look_back`

    def read(self, *, wait_s: float = 0.0) -> list[Entry]:
        """Return the next groups; none if none came within `wait_s`."""
        block = bounded_block_ms(self._client, int(wait_s * 1000)) if wait_s > 0 else None
        reply: Any = self.with_retries(
            "read groups",
            lambda: self._client.xread({self._stream: self.after}, count=_ENTRIES_A_READ, block=block),
        )
        return self._take(reply)

    def look_back(self) -> list[Entry]:
        """Read once more, and count groups that were missed. Call now and then, and at the end."""

        def count_and_read() -> list[Any]:
            with self._client.pipeline(transaction=False) as pipe:  # a full Redis refuses transactions
                pipe.xinfo_stream(self._stream)
                pipe.xread({self._stream: self.after}, count=_ENTRIES_A_READ)
                return pipe.execute(raise_on_error=False)

        begin = self.after
        info, reply = self.with_retries("look back", count_and_read)
        if self._has_gap is None:
            self._has_gap = isinstance(info, dict) and _begins_after(info, begin)
        entries = [] if isinstance(reply, Exception) else self._take(reply)
        if len(entries) < _ENTRIES_A_READ:  # otherwise there is more, of unknown number
            self._account(info if isinstance(info, dict) else {}, entries)
        return entries

    def run_state(self) -> RunState | None:
        """Return the state; None if the server does not know the run now. RunGone if it was removed."""
        keys = self._keys

        def read(pipe: Pipeline) -> None:  # in this order: removal replaces meta by the tombstone
            pipe.hmget(keys.meta, ["uid", "state"])
            pipe.get(keys.tombstone)

        (uid, state), tombstone = self.with_retries("read the run", partial(in_one_trip, self._client, read))
        if uid is None and tombstone == self._run_uid.encode():
            raise RunGone(f"run {keys.name!r} was removed from Redis")
        if not (isinstance(uid, bytes) and isinstance(state, bytes)):
            return None
        if uid != self._run_uid.encode():
            raise RunGone(f"run {keys.name!r} was removed from Redis, and another run has taken its name")
        return one_of(RUN_STATES, state, "failed")

    def _account(self, info: Mapping[str, Any], entries: list[Entry]) -> None:
        added, last = info.get("entries-added"), entry_order(info.get("last-generated-id", b"0-0").decode())
        num_later = sum(entry_order(entry.id) > last for entry in entries)  # read, and added after the count
        if added is not None and self._num_added is not None and added >= self._num_added and not self._has_gap:
            missed = max(0, added - self._num_added - (self._num_read - num_later))
            self.num_missed = (self.num_missed or 0) + missed
        self._num_added, self._num_read = added, num_later

    def _take(self, reply: Any) -> list[Entry]:
        entries = [to_entry(entry_id, fields) for _, found in reply or [] for entry_id, fields in found]
        if entries:
            self.after = entries[-1].id
        self._num_read += len(entries)
        return entries

    def with_retries(self, what: str, call: Callable[[], T]) -> T:
        """Run a command with retries."""
        return repeat(self._client, what, call, give_up_after_s=_GIVE_UP_AFTER_S)


def _begins_after(info: Mapping[str, Any], entry_id: str) -> bool:
    """Whether the stream holds neither this entry nor all that came after it, as far as it tells."""
    first = info["first-entry"][0] if info.get("first-entry") else info["last-generated-id"]
    return entry_id != START and entry_order(first.decode()) > entry_order(entry_id)


class LiveGroups(Tap):
    """The groups in a live run's stream: delivered, and not committed yet."""

    def latest(self, count: int) -> list[Entry]:
        """Return the newest groups, oldest first; `more` continues after them."""
        found = list(islice(self._newest_first(min(_ENTRIES_A_READ, max(1, count))), max(1, count)))
        if found:
            self.after = found[0].id
        return found[:count][::-1]

    def more(self) -> list[Entry] | None:
        """Return what came since, after about a second at most; None if nothing more can come."""
        ended = self.has_ended()  # asked first: what came before its end is still there
        entries = self.read(wait_s=POLL_S)
        return None if not entries and ended else entries

    def has_ended(self) -> bool:
        return self.run_state() not in ("running", None)

    def find(self, wanted: str) -> Entry:
        """Find a group by entry id or ticket number. DataError if it is not here."""
        if is_entry_id(wanted):
            found = self._range(wanted, wanted, 1)
        else:
            entries = self._newest_first(_ENTRIES_A_READ)
            found = list(islice((entry for entry in entries if entry.number == int(wanted)), 1))
        if not found:
            raise DataError(
                f"no group {wanted} is in Redis now: not delivered yet, or already trained and trimmed. `streamrl "
                "groups tail` shows what is there; `streamrl record` saves groups as they are delivered"
            )
        return found[0]

    def _newest_first(self, num_a_page: int) -> Iterator[Entry]:
        below = "+"
        while page := self._range(below, "-", num_a_page):
            yield from page
            below = f"({page[-1].id}"

    def _range(self, high: str, low: str, count: int) -> list[Entry]:
        found: Any = self.with_retries(
            "read groups", lambda: self._client.xrevrange(self._stream, high, low, count=count)
        )
        return [to_entry(entry_id, fields) for entry_id, fields in found]


_SLICE_S = 1.0
_LOOK_BACK_EVERY_S = 5.0


def record(
    tap: Tap,
    writer: RecordingWriter,
    *,
    stopped: Callable[[], bool],
    follow: bool,
    show: Callable[[], None],
) -> None:
    """Record; `follow=False`: only what is there now. `show` is called about once a second."""
    tap.after = writer.last_id
    looked_at = shown_at = time.monotonic()
    writer.append(tap.look_back())
    while not stopped():
        ended = not follow or tap.run_state() not in ("running", None)
        entries = tap.read(wait_s=0.0 if ended else _SLICE_S)
        writer.append(entries)
        now = time.monotonic()
        if now - looked_at >= _LOOK_BACK_EVERY_S:
            writer.append(tap.look_back())
            looked_at = now
        if now - shown_at >= _SLICE_S:
            writer.sync()
            show()
            shown_at = now
        if ended and not entries:
            break
    writer.append(tap.look_back())
    writer.sync()
