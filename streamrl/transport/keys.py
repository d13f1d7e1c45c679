"""Every Redis key of a run, in one place.

All keys of a run begin with `streamrl:{name}:`. The braces are a hash tag: a clustered server keeps the run on one
node, so that scripts may touch several of its keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamrl.wire.purpose import Purpose

WORKERS = "workers"  # the consumer group of the ticket streams
LEADER = "learner/0"  # the rank that speaks, and hears the operator, for all; so it is called in reports
LONGEST_EVENTS = 10_000  # about so many lines of the journal are kept


@dataclass(frozen=True, slots=True)
class Keys:
    name: str

    @property
    def prefix(self) -> str:
        return f"streamrl:{{{self.name}}}:"

    @property
    def meta(self) -> str:
        """Hash: uid, epoch, config (JSON), fingerprint, state, created_at, cursor, step; issued: the number of the next
        training ticket, for the audit; once a learner has looked what Redis holds."""
        return f"{self.prefix}meta"

    @property
    def tombstone(self) -> str:
        """String that expires: the uid of the run that was removed from here."""
        return f"{self.prefix}tombstone"

    @property
    def lease(self) -> str:
        """String that expires: who the learner is."""
        return f"{self.prefix}lease"

    @property
    def control(self) -> str:
        """Hash: `mode`, the operator's word to all parts."""
        return f"{self.prefix}control"

    def tickets(self, purpose: Purpose) -> str:
        """Stream with the group `workers`: what is asked for and not yet delivered. Fields n, u, b."""
        return f"{self.prefix}tickets:{purpose}"

    def groups(self, purpose: Purpose) -> str:
        """Stream: what was delivered and not yet committed. Fields n, u, h, b."""
        return f"{self.prefix}groups:{purpose}"

    def receipt(self, worker: str, lane: int | str) -> str:
        """String that expires: the last call that delivered in this lane of the worker, and its outcomes, so that the
        same call repeated learns them."""
        return f"{self.prefix}receipt:{worker}:{lane}"

    @property
    def dead(self) -> str:
        """Stream: tickets given up after too many failures. Fields p, n, u, b, error, at."""
        return f"{self.prefix}dead"

    @property
    def retry_requests(self) -> str:
        """Hash: number of a dead ticket that the learner shall issue anew -> the id of its letter."""
        return f"{self.prefix}retry-requests"

    @property
    def retried(self) -> str:
        """Hash: number of a ticket that repeats a dead one -> the dead one's; written with the ticket itself."""
        return f"{self.prefix}retried"

    @property
    def counters(self) -> str:
        """Hash: what happened how often, for people."""
        return f"{self.prefix}counters"

    @property
    def appends(self) -> str:
        """Hash: by stream, the token of the learner's last append; a repeated call finds its own and does nothing."""
        return f"{self.prefix}appends"

    @property
    def manifests(self) -> str:
        """Hash: weight version -> manifest."""
        return f"{self.prefix}manifests"

    @property
    def weights(self) -> str:
        """Hash: latest, base, step, at."""
        return f"{self.prefix}weights"

    @property
    def announced(self) -> str:
        """Stream of one entry, whose id is the newest version: what wakes the workers that wait for it. Field u."""
        return f"{self.prefix}announced"

    @property
    def blobs(self) -> str:
        """Hash: blob name -> its size, chunks and digest, and whether it is whole."""
        return f"{self.prefix}blobs"

    def blob(self, name: str, chunk: int) -> str:
        return f"{self.prefix}blob:{name}:{chunk}"

    @property
    def progress(self) -> str:
        """Hash: part -> its report."""
        return f"{self.prefix}progress"

    @property
    def reported(self) -> str:
        """Sorted set: part -> when it last reported, by the server's clock."""
        return f"{self.prefix}reported"

    @property
    def metrics(self) -> str:
        """Bounded stream: one record a step, of the recent ones. Fields step, epoch, at, values (JSON)."""
        return f"{self.prefix}metrics"

    def thinned(self, level: int) -> str:
        """Bounded stream: of the same records, every 4^level-th (`streamrl.transport.thinning`)."""
        return f"{self.prefix}metrics:{level}"

    @property
    def validations(self) -> str:
        """Bounded stream: the same records of validations, which come too seldom to be thinned."""
        return f"{self.prefix}metrics:validation"

    @property
    def events(self) -> str:
        """Bounded stream: the journal. Fields kind, epoch, at, detail (JSON)."""
        return f"{self.prefix}events"
