"""The audit of a run: issued = trained + dropped + dead + outstanding; nothing lost, nothing twice.

    terms/, checkpoints/*/manifest.json ─► commit ──┐
    journal/*.jsonl ──────────────────────► journal ─┼─► judge ─► Audit
    raw stream entries, by XRANGE ────────► streams ─┘

It only reads, and determines the fate of each ticket from the evidence, so it shares no code with what it audits: not
the transport, not the learner's ledger. Only the wire codec, the key names and the layout of the run's folder are known
to both. Blocks on the disk and, for some seconds at most, on Redis.
"""

from streamrl.ops.audit.judge import Audit, audit_folder

__all__ = ["Audit", "audit_folder"]
