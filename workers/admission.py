"""How many more tickets a worker takes: enough to keep its engine busy, no more than it can soon begin.

What lies in a worker's queue is what another worker could have begun already, so the queue is kept at about one ticket:
a place that falls free is filled at once, and N workers share the work by speed, since each takes as it finishes.

    queue longer than a ticket, or cache nearly full ─► none          what runs still needs more of the cache
    else ─► as many again as are at work, up to the bound             the first look at a new load is a guess

Nothing waits for a whole batch. Blocks on nothing.
"""

from __future__ import annotations

from workers.engines.base import EngineStats

_KV_FULL = 0.8


def num_to_take(stats: EngineStats, *, num_at_work: int, samples_per_ticket: int, most: int) -> int:
    """`most`: the bound on tickets at work (`worker.max_groups_in_flight`)."""
    if num_at_work and (stats.num_waiting >= samples_per_ticket or stats.kv_used >= _KV_FULL):
        return 0
    return max(0, min(most - num_at_work, max(1, num_at_work)))
