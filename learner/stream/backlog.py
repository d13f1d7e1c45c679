"""Bytes of training groups in Redis: how many are there, how many are to come, and whether more may be asked for.

    what is read, until a commit lets it go     counted, entry by entry
    what is asked for and not read yet          estimated by the sizes of the latest groups

That m groups together take `m * mean + 3 * deviation * sqrt(m)` bytes or less is as good as sure, if they differ from
each other as the latest did; before any has come, all are taken to be as large as they can be. Redis takes about a
quarter more for the same bytes. A commit frees what has ended, and nothing else does; so where room is short and that
would make some, the feed asks for a commit before its time. Pure: nothing here waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable

from streamrl.config import schema
from streamrl.transport.types import Entry, PresentGroup, entry_order

_LATEST = 256  # groups whose mean size is expected of the next ones


class Backlog:
    def __init__(self, *, max_bytes: int, largest_group: int) -> None:
        """`largest_group` is expected of a group, in bytes, until some have come."""
        self.max_bytes = max_bytes
        self._sizes: dict[str, int] = {}  # by entry id, of what is read and still in the stream
        self._latest: deque[int] = deque([largest_group], maxlen=_LATEST)
        self._sum, self._sum_of_squares = largest_group, largest_group**2  # of the latest: whole numbers, so exact
        self._is_guess = True
        self.num_bytes = 0  # of what is read and still in the stream

    def add(self, entry: Entry) -> None:
        """An entry was read; read again, it still counts once."""
        size = len(entry.header) + len(entry.body)
        self.num_bytes += size - self._sizes.get(entry.id, 0)
        self._sizes[entry.id] = size

    def expect(self, num_bytes: int) -> None:
        """A ticket's answer was so large: the next ones will be alike."""
        if self._is_guess:
            self._latest.clear()
            self._sum = self._sum_of_squares = 0
            self._is_guess = False
        forgotten = self._latest[0] if len(self._latest) == _LATEST else 0
        self._latest.append(num_bytes)
        self._sum += num_bytes - forgotten
        self._sum_of_squares += num_bytes**2 - forgotten**2

    def recount(self, groups: Iterable[PresentGroup], *, cursor: str) -> None:
        """Of what was read, this is still in the stream."""
        last = entry_order(cursor)
        self._sizes = {group.entry_id: group.num_bytes for group in groups if entry_order(group.entry_id) <= last}
        self.num_bytes = sum(self._sizes.values())

    def room(self, num_expected: int) -> int:
        """For how many further groups there is room, when so many are on their way."""
        mean, margin = self._mean, 3 * self._deviation
        left = max(0, self.max_bytes - self.num_bytes)
        root = (math.sqrt(margin**2 + 4 * mean * left) - margin) / (2 * mean)  # of m * mean + margin * sqrt(m) = left
        return int(root**2 + 1e-9) - num_expected

    def num_groups_in(self, num_bytes: int) -> int:
        """How many groups are about so large together; at least one."""
        return max(1, int(num_bytes / self._mean))

    def expected(self, num_expected: int) -> float:
        """Bytes that are there, and of so many groups that are on their way."""
        return self.num_bytes + num_expected * self._mean

    def freeable(self, held: Iterable[str]) -> int:
        """Bytes that a commit now would free: all but those of the entries that are still needed."""
        return self.num_bytes - sum(self._sizes.get(entry_id, 0) for entry_id in held)

    def let_go(self, *, cursor: str, carry: Collection[str], trim_below: str) -> list[str]:
        """A commit with this cursor and carry is about to trim: forget what it frees. Returns the entries that have
        ended and lie above the trim, among those that have not."""
        kept, last, lowest = set(carry), entry_order(cursor), entry_order(trim_below)
        ended = [i for i in self._sizes if i not in kept and entry_order(i) <= last]
        self.num_bytes -= sum(self._sizes.pop(entry_id) for entry_id in ended)
        return [entry_id for entry_id in ended if entry_order(entry_id) >= lowest]

    @property
    def _mean(self) -> float:
        return max(1.0, self._sum / len(self._latest))

    @property
    def _deviation(self) -> float:
        count = len(self._latest)
        return math.sqrt(count * self._sum_of_squares - self._sum**2) / count


def largest_group(config: schema.Config) -> int:
    """Bytes of a group whose responses are all as long as they may be."""
    per_sample = 8 * config.sampling.max_tokens + 256  # a token id and a log-prob a token
    return config.sampling.num_samples * per_sample + 4 * config.data.max_prompt_tokens
