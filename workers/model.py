"""Finds the model for a worker or a further host, checking that it is permitted and matches the run's."""

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
    """Read the model's facts. `override`: folder or hub name that replaces the run's. ConfigError if they differ."""
    path = allowed_model(config.model.path, override=override, permissions=permissions)
    progress.starting("load the tokenizer")
    model = await asyncio.to_thread(read_model, path, trust_remote_code=permissions.trust_remote_code)
    if model.fingerprint != info.fingerprint:
        raise ConfigError(
            f"the model at {model.path!r} has another tokenizer, end token or vocabulary size than the run's "
            f"({model.fingerprint}, the run has {info.fingerprint}): give this worker the run's model with --model"
        )
    return model
