"""Monitoring: one model of a run, read from Redis with read access only, and everything that displays the model.

    Redis ─► transport.snapshot ─► build ─► View ─► status, top, why, the dashboard, the exporter, the launcher
                    history ─────────┘        └─ causes: what holds the run back, and the remedy

Nothing here writes to Redis, and nothing imports torch or vLLM. Modules that commands need for a quick answer (`view`,
`build`, `causes`, `text`) import nothing heavier than the Redis client.
"""
