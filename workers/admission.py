"""How many more tickets a worker takes: enough to keep its engine busy, no more than it can soon begin.

What lies in a worker's queue is what another worker could have begun already, so the queue is kept at about one ticket:
a place that falls free is filled at once, and N workers share the work by speed, since each takes as it finishes.

    queue longer than a ticket, or cache nearly full ─► none          what runs still needs more of the cache
    else ─► as many again as are at work, up to the bound             the first look at a new load is a guess

The bound is in samples. Answers are long-tailed: of a ticket's samples most are done long before the last one, and if
tickets were counted, the places of those that are done would stay empty until then (of 8 samples with geometric lengths
more than half). Nothing waits for a whole batch. Blocks on nothing.
"""

from __future__ import annotations

from workers.engines.base import EngineStats

_KV_FULL = 0.8


def num_to_take(stats: EngineStats, *, num_at_work: int, num_open: int, samples_per_ticket: int, most: int) -> int:
    """`num_open`: samples of the tickets at work that are not made and scored yet; `most`: the bound on these, counted
    in tickets (`worker.max_groups_in_flight`). The last ticket may go beyond it in part, so that no place waits.
    """
    if num_at_work and (stats.num_waiting >= samples_per_ticket or stats.kv_used >= _KV_FULL):
        return 0
    room = most * samples_per_ticket - num_open
    return max(0, min(-(-room // samples_per_ticket), max(1, num_at_work)))
