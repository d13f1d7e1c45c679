"""A judge of runs that believes nobody: it shares no code with streamrl, nor with what else tries it here.

    every entry that ever lay in the streams ─► recorder ─► record ─┐
    run folder, raw: terms, manifests, journal, metrics ─► history ─┼─► books ─► verdict ─► beside the audit's
    prompt file, and what was forged ───────────────────────────────┘
    published blobs, checkpoints' tensors, raw ─► weights

It imports the standard library, redis, msgpack and numpy alone (`tests/unit/test_judge_alone.py`), and knows of the
product what `docs/wire.md` says. What is done to the run while it looks is `tests/faults/judged`.
"""
