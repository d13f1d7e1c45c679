"""What Redis holds of the training tickets and groups: how many bytes, and what is too much or missing there.

Bytes of training groups: how many are there, how many are to come, and whether more may be asked for.

    what is read, until a commit lets it go     counted, entry by entry
    what is asked for and not read yet          estimated by the sizes of the latest groups

That m groups together take `m * mean + 3 * deviation * sqrt(m)` bytes or less is as good as sure, if they differ from
each other as the latest did; before any has come, all are taken to be as large as they can be. Redis takes about a
quarter more for the same bytes. A commit frees what has ended, and nothing else does; so where room is short and that
would make some, the feed asks for a commit before its time. Pure, but for taking the inventory, which asks Redis.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from streamrl.config import schema
from streamrl.learner.groups.ledger import Ledger
from streamrl.protocol.transport.types import START, GroupStream, PresentGroup, PresentTicket, entry_order
from streamrl.protocol.wire.routes import RouteShape

_LATEST = 256  # groups whose mean size is expected of the next ones


class Backlog:
    def __init__(self, *, max_bytes: int, largest_group: int) -> None:
        """`largest_group` is expected of a group, in bytes, until some have come."""
        self.max_bytes = max_bytes
        self._sizes: dict[str, int] = {}  # by entry id, of what is read and still in the stream
        self._largest_group = largest_group
        self._latest: deque[int] = deque(maxlen=_LATEST)  # sizes
        self.num_bytes = 0  # of what is read and still in the stream

    def add(self, entry_id: str, num_bytes: int) -> None:
        """An entry was read; read again, it still counts once."""
        self.num_bytes += num_bytes - self._sizes.get(entry_id, 0)
        self._sizes[entry_id] = num_bytes

    def expect(self, num_bytes: int) -> None:
        """A ticket's answer was so large: the next ones will be alike."""
        self._latest.append(num_bytes)

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
        places = {entry_id: entry_order(entry_id) for entry_id in self._sizes if entry_id not in kept}
        ended = {entry_id: place for entry_id, place in places.items() if place <= last}
        self.num_bytes -= sum(map(self._sizes.pop, ended))
        return [entry_id for entry_id, place in ended.items() if place >= lowest]

    @property
    def _mean(self) -> float:
        return max(1.0, sum(self._latest) / len(self._latest)) if self._latest else self._largest_group

    @property
    def _deviation(self) -> float:
        count, squares = len(self._latest), sum(size**2 for size in self._latest)
        return math.sqrt(count * squares - sum(self._latest) ** 2) / max(1, count)  # of whole numbers, so exact


def largest_group(config: schema.Config, routes: RouteShape | None = None) -> int:
    """Bytes of a group whose responses are all as long as they may be, and bring such routes."""
    num_samples, num_prompt = config.sampling.num_samples, config.data.max_prompt_tokens
    per_sample = 8 * config.max_response_tokens + 256  # a token id and a log-prob a token
    of_routes = routes.plain_bytes(num_prompt + num_samples * config.max_response_tokens) if routes else 0
    return num_samples * per_sample + 4 * num_prompt + of_routes


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    tickets: Sequence[PresentTicket]
    groups: Sequence[PresentGroup]  # all that no commit has trimmed
    retried: Mapping[int, int]  # which ticket repeats which dead one
    letters: Sequence[PresentGroup]  # the dead ones
    purged: Set[int]  # tickets whose letters an operator threw away

    @staticmethod
    def take(stream: GroupStream) -> Inventory:
        # Tickets first: delivering turns a ticket into a group, so one that moves in between is seen at least once.
        tickets = stream.present_tickets("train")
        return Inventory(
            tickets=tickets,
            groups=stream.present_groups("train", after=START),
            retried=stream.retried(),
            letters=stream.letters.present(),  # and then what was purged, or a letter might be missing without a reason
            purged=stream.letters.purged(),
        )

    def shown(self, *, cursor: str, unread: Sequence[str]) -> set[tuple[int, str]]:
        """Number and identity of the tickets that workers can take up, or have, and of those whose groups are there and
        will be read."""
        last, again = entry_order(cursor), set(unread)
        asked = {(ticket.number, ticket.identity) for ticket in self.tickets if ticket.sound}
        to_read = (g for g in self.groups if entry_order(g.entry_id) > last or g.entry_id in again)
        return asked | {(group.number, group.identity) for group in to_read if group.number >= 0}

    def unreadable(self, ledger: Ledger) -> dict[int, str]:
        """Tickets whose entries no worker can read, and why. They would go round from lease to lease for ever."""
        return {t.number: t.flaw for t in self.tickets if t.flaw is not None and _is_asked(t, ledger)}

    def of_another_branch(self, ledger: Ledger) -> list[PresentTicket]:
        """They ask for something else than their numbers stand for."""
        return [t for t in self.tickets if t.sound and ledger.is_open(t.number) and not _is_asked(t, ledger)]

    def superfluous(self, ledger: Ledger) -> list[str]:
        """Entries among the tickets that nobody should take up: unreadable, of tickets that have ended or are of
        another branch, or a second one of the same ticket."""
        found: list[str] = []
        seen: set[int] = set()
        for ticket in self.tickets:
            if not ticket.sound or ticket.number in seen or not _is_asked(ticket, ledger):
                found.append(ticket.entry_id)
            else:
                seen.add(ticket.number)
        return found

    def listed(self, ledger: Ledger) -> dict[int, str]:
        """By the number of a dead ticket, its letter: the first one. All others are nobody's."""
        letters = reversed(self.letters)
        return {
            letter.number: letter.entry_id
            for letter in letters
            if (known := ledger.letters.get(letter.number)) and known.identity in ("", letter.identity)
        }


def _is_asked(ticket: PresentTicket, ledger: Ledger) -> bool:
    return ledger.is_open(ticket.number) and ledger.asks(ticket.number, ticket.identity)
