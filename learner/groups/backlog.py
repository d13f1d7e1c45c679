"""Bytes of training groups in Redis, present and expected, and whether more tickets fit; and Redis' inventory.

    read, until a commit frees it      counted, entry by entry
    asked for and not read yet         estimated by the sizes of the latest groups

m groups together almost surely take at most `m * mean + 3 * deviation * sqrt(m)` bytes, if their sizes vary as the
latest ones did; before any has come, each is assumed to have the maximum size. Redis uses about a quarter more memory
than these bytes. Only a commit frees what has ended, so when room is short and a commit would make some, the feed
requests an early one. Pure, except for `Inventory.take`, which queries Redis.
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

_LATEST = 256  # groups that predict the size of the next ones


class Backlog:
    def __init__(self, *, max_bytes: int, largest_group: int) -> None:
        """`largest_group`: the size in bytes assumed for a group until some have come."""
        self.max_bytes = max_bytes
        self._sizes: dict[str, int] = {}  # by entry id, of entries read and still in the stream
        self._largest_group = largest_group
        self._latest: deque[int] = deque(maxlen=_LATEST)  # sizes
        self.num_bytes = 0  # of entries read and still in the stream

    def add(self, entry_id: str, num_bytes: int) -> None:
        """Count an entry that was read; one that is read again still counts once."""
        self.num_bytes += num_bytes - self._sizes.get(entry_id, 0)
        self._sizes[entry_id] = num_bytes

    def expect(self, num_bytes: int) -> None:
        """Note the size of a ticket's group, to predict the next ones."""
        self._latest.append(num_bytes)

    def recount(self, groups: Iterable[PresentGroup], *, cursor: str) -> None:
        """Recount what was read and is still in the stream."""
        last = entry_order(cursor)
        self._sizes = {group.entry_id: group.num_bytes for group in groups if entry_order(group.entry_id) <= last}
        self.num_bytes = sum(self._sizes.values())

    def room(self, num_expected: int) -> int:
        """How many further groups fit, with `num_expected` on their way."""
        mean, margin = self._mean, 3 * self._deviation
        left = max(0, self.max_bytes - self.num_bytes)
        root = (math.sqrt(margin**2 + 4 * mean * left) - margin) / (2 * mean)  # of m * mean + margin * sqrt(m) = left
        return int(root**2 + 1e-9) - num_expected

    def num_groups_in(self, num_bytes: int) -> int:
        """How many groups take about so many bytes; at least one."""
        return max(1, int(num_bytes / self._mean))

    def expected(self, num_expected: int) -> float:
        """Bytes present, plus those expected of the groups on their way."""
        return self.num_bytes + num_expected * self._mean

    def freeable(self, held: Iterable[str]) -> int:
        """Bytes that a commit now would free: all but the entries still needed."""
        return self.num_bytes - sum(self._sizes.get(entry_id, 0) for entry_id in held)

    def forget_freed(self, *, cursor: str, carry: Collection[str], trim_below: str) -> list[str]:
        """Forget the entries that a commit with this cursor and carry frees.

        Returns those that have ended but lie above the trim, between entries that have not.
        """
        carried, last, lowest = set(carry), entry_order(cursor), entry_order(trim_below)
        orders = {entry_id: entry_order(entry_id) for entry_id in self._sizes if entry_id not in carried}
        ended = {entry_id: order for entry_id, order in orders.items() if order <= last}
        self.num_bytes -= sum(map(self._sizes.pop, ended))
        return [entry_id for entry_id, order in ended.items() if order >= lowest]

    @property
    def _mean(self) -> float:
        return max(1.0, sum(self._latest) / len(self._latest)) if self._latest else self._largest_group

    @property
    def _deviation(self) -> float:
        count, squares = len(self._latest), sum(size**2 for size in self._latest)
        return math.sqrt(count * squares - sum(self._latest) ** 2) / max(1, count)  # of integers, so exact


def largest_group(config: schema.Config, routes: RouteShape | None = None) -> int:
    """Bytes of a group whose responses all have the maximum length, with these routes."""
    num_samples, num_prompt = config.sampling.num_samples, config.data.max_prompt_tokens
    per_sample = 8 * config.max_response_tokens + 256  # a token id and a log-prob per token
    of_routes = routes.plain_bytes(num_prompt + num_samples * config.max_response_tokens) if routes else 0
    return num_samples * per_sample + 4 * num_prompt + of_routes


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    tickets: Sequence[PresentTicket]
    groups: Sequence[PresentGroup]  # not yet trimmed by a commit
    retried: Mapping[int, int]  # ticket number -> the dead ticket it retries
    letters: Sequence[PresentGroup]  # dead letters
    purged: Set[int]  # tickets whose letters an operator purged

    @staticmethod
    def take(stream: GroupStream) -> Inventory:
        # Tickets first: delivery turns a ticket into a group, so one that moves in between is seen at least once.
        tickets = stream.present_tickets("train")
        return Inventory(
            tickets=tickets,
            groups=stream.present_groups("train", after=START),
            retried=stream.retried(),
            letters=stream.letters.present(),  # before `purged`, or a letter might be missing without a reason
            purged=stream.letters.purged(),
        )

    def live_identities(self, *, cursor: str, unread: Sequence[str]) -> set[tuple[int, str]]:
        """(number, identity) of tickets that are queued or leased, and of groups present that will be read."""
        last, to_read_again = entry_order(cursor), set(unread)
        queued = {(ticket.number, ticket.identity) for ticket in self.tickets if ticket.sound}
        to_read = (g for g in self.groups if entry_order(g.entry_id) > last or g.entry_id in to_read_again)
        return queued | {(group.number, group.identity) for group in to_read if group.number >= 0}

    def unreadable(self, ledger: Ledger) -> dict[int, str]:
        """Tickets whose entries no worker can read, with the reason; they would be leased again and again forever."""
        return {t.number: t.flaw for t in self.tickets if t.flaw is not None and _is_wanted(t, ledger)}

    def of_another_lineage(self, ledger: Ledger) -> list[PresentTicket]:
        """Open tickets whose entries ask for something other than their numbers stand for."""
        return [t for t in self.tickets if t.sound and ledger.is_open(t.number) and not _is_wanted(t, ledger)]

    def superfluous(self, ledger: Ledger) -> list[str]:
        """Ticket entries to delete: unreadable, ended, of another lineage, or a second one of the same ticket."""
        found: list[str] = []
        seen: set[int] = set()
        for ticket in self.tickets:
            if not ticket.sound or ticket.number in seen or not _is_wanted(ticket, ledger):
                found.append(ticket.entry_id)
            else:
                seen.add(ticket.number)
        return found

    def listed(self, ledger: Ledger) -> dict[int, str]:
        """Dead ticket -> its letter, the first one present; further letters belong to no ticket."""
        letters = reversed(self.letters)
        return {
            letter.number: letter.entry_id
            for letter in letters
            if (known := ledger.letters.get(letter.number)) and known.identity in ("", letter.identity)
        }


def _is_wanted(ticket: PresentTicket, ledger: Ledger) -> bool:
    return ledger.is_open(ticket.number) and ledger.confirm_identity(ticket.number, ticket.identity)
