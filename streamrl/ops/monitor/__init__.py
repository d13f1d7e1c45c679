"""Seeing a run: one model of it, read from Redis by anyone who may read, and everything that shows the model.

    Redis ─► transport.snapshot ─► build ─► View ─► status, top, why, the dashboard, the exporter, the launcher
                    history ─────────┘        └─ causes: what holds the run back, and the remedy

Nothing here writes to Redis, and nothing imports torch or vLLM. What a command needs to answer at once (`view`,
`build`, `causes`, `text`) imports no more than the Redis client does.
"""
