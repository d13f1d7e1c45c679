"""Which records of a run's metrics stay in Redis: the recent ones in full, of the older ones ever fewer.

    metrics                 every step                the last 2,000 or so
    metrics:1 ... :5        every 4th ... 1024th      the last 1,000 or so of each
    metrics:validation      every validation          the last 1,000 or so

So a curve of any length is there at once, from its first step to its last, in at most some thousand points, and the
writer need not look at what it wrote before. A step that is made again after a crash is recorded again; whoever reads
lets the later term count. Pure.
"""

from __future__ import annotations

from collections.abc import Collection

from streamrl.protocol.transport.keys import Keys

NUM_LEVELS = 5
LONGEST_RECENT = 2_000
LONGEST_THINNED = 1_000
_FACTOR = 4


def history_streams(keys: Keys, step: int, *, is_validation: bool) -> dict[str, int]:
    """The streams that get the record of this step, and how many records each keeps."""
    if is_validation:
        return {keys.metrics: LONGEST_RECENT, keys.validations: LONGEST_THINNED}
    levels = (level for level in range(1, NUM_LEVELS + 1) if step % _FACTOR**level == 0)
    return {keys.metrics: LONGEST_RECENT, **{keys.thinned(level): LONGEST_THINNED for level in levels}}


def is_validation(names: Collection[str]) -> bool:
    return any(name.startswith("val_rollouts/") for name in names)
