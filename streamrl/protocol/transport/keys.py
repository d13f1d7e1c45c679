"""Every Redis key of a run, in one place.

All keys of a run begin with `streamrl:{name}:`. The braces are a hash tag: a clustered server keeps the run on one
node, so that scripts may touch several of its keys.

Which records of a run's metrics stay in Redis: the recent ones in full, of the older ones ever fewer.

    metrics                 every step                the last 2,000 or so
    metrics:1 ... :5        every 4th ... 1024th      the last 1,000 or so of each
    metrics:validation      every validation          the last 1,000 or so

So a curve of any length is there at once, from its first step to its last, in at most some thousand points, and the
writer need not look at what it wrote before. A step that is made again after a crash is recorded again; whoever reads
lets the later term count. Pure.
"""

from __future__ import annotations

from collections.abc import Collection

from streamrl.protocol.wire.ticket import Purpose

WORKERS = "workers"  # the consumer group of the ticket streams
HANDED_BACK = "(handed back)"  # the consumer who has what no worker holds: anybody may claim it at once
LEADER = "learner/0"  # the rank that speaks, and hears the operator, for all; so it is called in reports
LONGEST_EVENTS = 10_000  # about so many lines of the journal are kept
NUM_LEVELS = 5
LONGEST_RECENT = 2_000
LONGEST_THINNED = 1_000
_FACTOR = 4


class Keys:
    def __init__(self, name: str) -> None:
        self.name = name
        self.prefix = prefix = f"streamrl:{{{name}}}:"

        # Hash: uid, term, config (JSON), fingerprint, state, created_at, cursor, step; issued: the number of the next
        # training ticket, for the audit; once a learner has looked what Redis holds.
        self.meta = f"{prefix}meta"
        # String that expires: the uid of the run that was removed from here.
        self.tombstone = f"{prefix}tombstone"
        # String that expires: who the learner is.
        self.lease = f"{prefix}lease"
        # Hash: `mode`, the operator's word to all parts.
        self.control = f"{prefix}control"

        # Of all entries: n a ticket's number, u the run's uid, d the ticket's identity, b a body, h a group's header.
        # Stream: tickets given up after too many failures. Fields p, n, u, d, b, error, at.
        self.dead = f"{prefix}dead"
        # Hash: number of a dead ticket that the learner shall issue anew -> the id of its letter.
        self.retry_requests = f"{prefix}retry-requests"
        # Hash: number of a ticket that repeats a dead one -> the dead one's; written with the ticket itself.
        self.retried = f"{prefix}retried"
        # Set: numbers of dead tickets whose letters were thrown away; they are not listed again.
        self.purged = f"{prefix}purged"
        # Hash: what happened how often, for people.
        self.counters = f"{prefix}counters"
        # Hash: by stream, the token of the learner's last append; a repeated call finds its own and does nothing.
        self.appends = f"{prefix}appends"

        # Hash: weight version -> manifest.
        self.manifests = f"{prefix}manifests"
        # Hash: latest, base, step, at.
        self.weights = f"{prefix}weights"
        # Stream of one entry, whose id is the newest version: what wakes the workers that wait for it. Field u.
        self.announced = f"{prefix}announced"
        # Hash: blob name -> its size, chunks and digest, and whether it is whole.
        self.blobs = f"{prefix}blobs"

        # String: what workers of different hosts prove to each other that they are of this run.
        self.peers_secret = f"{prefix}peers-secret"

        # Hash: part -> its report.
        self.progress = f"{prefix}progress"
        # Sorted set: part -> when it last reported, by the server's clock.
        self.reported = f"{prefix}reported"
        # Bounded stream: one record a step, of the recent ones. Fields step, term, at, values (JSON).
        self.metrics = f"{prefix}metrics"
        # Bounded stream: the same records of validations, which come too seldom to be thinned.
        self.validations = f"{prefix}metrics:validation"
        # Bounded stream: the journal. Fields kind, term, at, detail (JSON).
        self.events = f"{prefix}events"

    def tickets(self, purpose: Purpose) -> str:
        """Stream with the group `workers`: what is asked for and not yet delivered. Fields n, u, d, b."""
        return f"{self.prefix}tickets:{purpose}"

    def groups(self, purpose: Purpose) -> str:
        """Stream: what was delivered and not yet committed. Fields n, u, d, h, b, and t: the id of the ticket's entry,
        whose place the group took. Only who held its lease could write it so; what lacks a t came by another road."""
        return f"{self.prefix}groups:{purpose}"

    def receipt(self, worker: str, lane: int | str) -> str:
        """String that expires: the last call that delivered in this lane of the worker, and its outcomes, so that the
        same call repeated learns them."""
        return f"{self.prefix}receipt:{worker}:{lane}"

    def blob(self, name: str, chunk: int) -> str:
        return f"{self.prefix}blob:{name}:{chunk}"

    def peers(self, digest: str) -> str:
        """Hash that expires: address of a host -> which pieces of this blob it has, a bit each."""
        return f"{self.prefix}peers:{digest}"

    def claims(self, digest: str) -> str:
        """Hash that expires: piece of this blob -> until when (ms) and by whom it is fetched from the store; `next`:
        the first that nobody was given yet."""
        return f"{self.prefix}claims:{digest}"

    def thinned(self, level: int) -> str:
        """Bounded stream: of the same records as `metrics`, every 4^level-th."""
        return f"{self.prefix}metrics:{level}"


def history_streams(keys: Keys, step: int, *, is_validation: bool) -> dict[str, int]:
    """The streams that get the record of this step, and how many records each keeps."""
    if is_validation:
        return {keys.metrics: LONGEST_RECENT, keys.validations: LONGEST_THINNED}
    levels = (level for level in range(1, NUM_LEVELS + 1) if step % _FACTOR**level == 0)
    return {keys.metrics: LONGEST_RECENT, **{keys.thinned(level): LONGEST_THINNED for level in levels}}


def is_validation(names: Collection[str]) -> bool:
    return any(name.startswith("val_rollouts/") for name in names)
