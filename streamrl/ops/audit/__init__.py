"""The judge of a run: issued = trained + dropped + dead + outstanding, nothing lost, nothing twice.

    terms/, checkpoints/*/manifest.json ─► commit ──┐
    journal/*.jsonl ──────────────────────► journal ─┼─► judge ─► Audit
    raw stream entries, by XRANGE ────────► streams ─┘

It only reads, and it decides each ticket number from what it finds, so it shares no code with those it judges: not the
transport, not the learner's ledger; the wire's codec, the names of keys and the layout of the run's folder are all that
both know. Blocks on the disk and, for some seconds at most, on Redis.
"""

from streamrl.ops.audit.judge import Audit, audit_folder

__all__ = ["Audit", "audit_folder"]
