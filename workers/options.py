"""What a worker is told on its command line (`workers.main`)."""

from __future__ import annotations

from dataclasses import dataclass

from streamrl.permissions import Permissions


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    redis_url: str
    run: str
    worker: str  # unique to this worker
    permissions: Permissions
    model: str | None = None  # overrides the run's
    join: str | None = None  # HOST:PORT of an engine's first host, to join it as a further host
    hosts: str = "0.0.0.0:9600"  # HOST:PORT where further hosts join its engine, if the run has any
    local_reward_url: str | None = None
    http: str | None = None  # HOST:PORT to serve probes and metrics on
    sessions: str = "127.0.0.1:0"  # HOST:PORT where agents call the model
    peers: str | None = None  # HOST:PORT where workers on other hosts fetch weights
    gpu_memory: float | None = None  # fraction of its GPUs' memory for its engine
    import_vllm: bool = False  # while waiting for the run
