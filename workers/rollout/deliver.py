"""Delivers a finished group, which ends its ticket, and counts what became of it. Blocks on Redis."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import structlog
from msgspec.structs import replace

from streamrl.errors import WireError
from streamrl.protocol.wire.group import Group, encode_group
from streamrl.telemetry.progress import Progress
from streamrl.workers.rollout.leases import Held
from streamrl.workers.rollout.roles import Counts, Tickets

log = structlog.get_logger(__name__)


class Deliverer:
    def __init__(self, tickets: Tickets, counts: Counts, progress: Progress) -> None:
        self._tickets = tickets
        self._counts = counts
        self._progress = progress

    async def deliver(self, held: Held, group: Group) -> None:
        try:
            header, body = await _encoded(group)
        except WireError as error:  # more than a message can hold: the learner must see it as a failed attempt
            group = _refused(group, error)
            header, body = await _encoded(group)
        held.leaving = True
        if await self._tickets.deliver(held.leased, header, body):
            self._count(group)
        else:
            self._counts.groups_late += 1
            log.info("group_came_late", ticket=held.leased.ticket.number)

    def _count(self, group: Group) -> None:
        self._counts.samples_failed += group.header.num_failed_samples
        if group.header.failed:
            self._counts.groups_failed += 1
            log.warning("ticket_failed", ticket=group.header.ticket, error=group.header.error)
        else:
            self._counts.groups_delivered += 1
        self._progress.advanced(**asdict(self._counts))


def _refused(group: Group, error: WireError) -> Group:
    """Return the failure that takes the place of a group that cannot be sent."""
    num_failed = group.header.num_failed_samples + len(group.samples)
    header = replace(group.header, num_failed_samples=num_failed, error=f"the group cannot be sent: {error}")
    return Group(header=header, prompt_ids=group.prompt_ids)


async def _encoded(group: Group) -> tuple[bytes, bytes]:
    """Encode off the event loop where the group has routes: they are large and compressed, and would block it."""
    if group.prompt_routes is None:
        return encode_group(group)
    return await asyncio.to_thread(encode_group, group)
