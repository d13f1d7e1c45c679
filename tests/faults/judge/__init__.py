"""A judge of runs that trusts nobody: it shares no code with streamrl, nor with the other tests here.

    every entry that was ever in the streams ─► recorder ─► record ─┐
    run folder, raw: terms, manifests, journal, metrics ─► history ─┼─► books ─► verdict ─► compared with the audit's
    prompt file, and what was forged ───────────────────────────────┘
    published blobs, checkpoints' tensors, raw ─► weights

It imports only the standard library, redis, msgpack and numpy (`tests/unit/test_judge_alone.py`), and knows of the
product what `docs/wire.md` says. The faults that hit the run meanwhile are in `tests/faults/judged`.
"""
