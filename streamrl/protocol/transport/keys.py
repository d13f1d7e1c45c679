"""All Redis keys of a run, in one place.

All keys of a run begin with `streamrl:{name}:`. The braces are a hash tag: a clustered server keeps the run on one
node, so that scripts may use several of its keys.

Redis keeps recent records of a run's metrics in full, and fewer of the older ones:

    metrics                 every step                the last 2,000 or so
    metrics:1 ... :5        every 4th ... 1024th      the last 1,000 or so of each
    metrics:validation      every validation          the last 1,000 or so

So a curve of any length can be read at once, from first to last step, in at most some thousand points, and the writer
need not read what it wrote before. A step that is repeated after a crash is recorded again; readers take the record of
the later term. Pure.
"""

from __future__ import annotations

from collections.abc import Collection

from streamrl.protocol.wire.ticket import Purpose

WORKERS = "workers"  # the consumer group of the ticket streams
HANDED_BACK = "(handed back)"  # the consumer of tickets that no worker holds: any worker may claim them at once
# A run's name: without characters that mean something in patterns of keys.
RUN_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
LEADER = "learner/0"  # the rank that writes for all and obeys the operator, as named in reports
LONGEST_EVENTS = 10_000  # lines of the journal to keep, approximately
NUM_LEVELS = 5
LONGEST_RECENT = 2_000
LONGEST_THINNED = 1_000
_FACTOR = 4


class Keys:
    def __init__(self, name: str) -> None:
        self.name = name
        self.prefix = prefix = f"streamrl:{{{name}}}:"

        # Hash: uid, term, config (JSON), fingerprint, state, created_at, cursor, step; issued: the number of the next
        # training ticket, for the audit, set once a learner has reconciled.
        self.meta = f"{prefix}meta"
        # String that expires: the uid of the run that was removed.
        self.tombstone = f"{prefix}tombstone"
        # String that expires: the learner's holder name.
        self.lease = f"{prefix}lease"
        # Hash: `mode`, the operator's command to all processes.
        self.control = f"{prefix}control"

        # Fields of all entries: n the ticket's number, u the run's uid, d the ticket's identity, b a body, h a group's
        # header. Stream: tickets given up after too many failures. Fields p, n, u, d, b, error, at.
        self.dead = f"{prefix}dead"
        # Hash: number of a dead ticket that the learner should retry -> the id of its letter.
        self.retry_requests = f"{prefix}retry-requests"
        # Hash: number of a ticket that retries a dead one -> the dead one's; written together with the ticket.
        self.retried = f"{prefix}retried"
        # Set: numbers of dead tickets whose letters were purged; they are not listed again.
        self.purged = f"{prefix}purged"
        # Hash: event counts, for display.
        self.counters = f"{prefix}counters"
        # Hash: stream -> token of the learner's last append; a retried call finds its token and does nothing.
        self.appends = f"{prefix}appends"

        # Hash: weight version -> manifest.
        self.manifests = f"{prefix}manifests"
        # Hash: latest, base, step, at, published.
        self.weights = f"{prefix}weights"
        # Stream of one entry, whose id is the newest version: wakes waiting workers. Field u.
        self.announced = f"{prefix}announced"
        # Hash: blob name -> its size, chunks, digest, and whether it is complete.
        self.blobs = f"{prefix}blobs"

        # String: the secret with which workers on different hosts authenticate to each other.
        self.peers_secret = f"{prefix}peers-secret"

        # Hash: part -> its report.
        self.progress = f"{prefix}progress"
        # Sorted set: part -> when it last reported, by the server's clock.
        self.reported = f"{prefix}reported"
        # Bounded stream: one record per step, recent steps only. Fields step, term, at, values (JSON).
        self.metrics = f"{prefix}metrics"
        # Bounded stream: the same records of validations, which are too rare to thin out.
        self.validations = f"{prefix}metrics:validation"
        # Bounded stream: the journal. Fields kind, term, at, detail (JSON).
        self.events = f"{prefix}events"

    def tickets(self, purpose: Purpose) -> str:
        """Stream with the consumer group `workers`: tickets not yet delivered. Fields n, u, d, b."""
        return f"{self.prefix}tickets:{purpose}"

    def groups(self, purpose: Purpose) -> str:
        """Stream: groups delivered and not yet committed. Fields n, u, d, h, b and t.

        t is the id of the ticket's entry, which the group replaced. Only the delivery script of the lease's holder
        writes it; an entry without t was written in another way.
        """
        return f"{self.prefix}groups:{purpose}"

    def receipt(self, worker: str, lane: int | str) -> str:
        """String that expires: the last delivery call in this lane of the worker, with its outcomes, for a retried
        call.
        """
        return f"{self.prefix}receipt:{worker}:{lane}"

    def blob(self, name: str, chunk: int) -> str:
        return f"{self.prefix}blob:{name}:{chunk}"

    def peers(self, digest: str) -> str:
        """Hash that expires: address of a host -> bitmap of the pieces of this blob that it has."""
        return f"{self.prefix}peers:{digest}"

    def claims(self, digest: str) -> str:
        """Hash that expires: piece of this blob -> until when (ms) and by whom it is fetched from the store.

        `next` is the first piece that was not assigned yet.
        """
        return f"{self.prefix}claims:{digest}"

    def thinned(self, level: int) -> str:
        """Bounded stream: every 4^level-th record of `metrics`."""
        return f"{self.prefix}metrics:{level}"


def history_streams(keys: Keys, step: int, *, is_validation: bool) -> dict[str, int]:
    """Return the streams that get the record of this step, and how many records each keeps."""
    if is_validation:
        return {keys.metrics: LONGEST_RECENT, keys.validations: LONGEST_THINNED}
    levels = (level for level in range(1, NUM_LEVELS + 1) if step % _FACTOR**level == 0)
    return {keys.metrics: LONGEST_RECENT, **{keys.thinned(level): LONGEST_THINNED for level in levels}}


def is_validation(names: Collection[str]) -> bool:
    return any(name.startswith("val_rollouts/") for name in names)
