"""The model of a run as a worker has it, or a further host of its engine: allowed here, and the run's own."""

from __future__ import annotations

import asyncio

from streamrl.config import schema
from streamrl.errors import ConfigError
from streamrl.permissions import Permissions, allowed_model
from streamrl.protocol.transport.types import RunInfo
from streamrl.telemetry.progress import Progress
from streamrl.workers.engines.model import ModelFacts, read_model


async def find_model(
    config: schema.Config, info: RunInfo, *, override: str | None, permissions: Permissions, progress: Progress
) -> ModelFacts:
    """`override`: folder or hub name, instead of what the run says."""
    path = allowed_model(config.model.path, override=override, permissions=permissions)
    progress.working("load the tokenizer")
    model = await asyncio.to_thread(read_model, path, trust_remote_code=permissions.trust_remote_code)
    if model.fingerprint != info.fingerprint:
        raise ConfigError(
            f"the model at {model.path!r} has another tokenizer, end token or vocabulary size than the run's "
            f"({model.fingerprint}, the run has {info.fingerprint}): give this worker the run's model with --model"
        )
    return model
