"""Reads fields of a run's configuration and of reports, which another version or a stranger may have written: what is
not of the expected type counts as absent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from streamrl.ops.monitor import view
from streamrl.protocol.transport.entries import LARGEST
from streamrl.protocol.transport.snapshot import Snapshot


def config_of(snapshot: Snapshot) -> Mapping[str, Any]:
    """Return the run's configuration; empty if it cannot be read."""
    try:
        config = json.loads(snapshot.run.config_json) if snapshot.run else {}
    except (ValueError, RecursionError):
        config = {}
    return config if isinstance(config, dict) else {}


def limits_of(config: Mapping[str, Any]) -> view.Limits:
    stale = section(config, "lag").get("stale")
    return view.Limits(
        max_lag_steps=integer(section(config, "lag"), "max_steps"),
        groups_per_step=integer(section(config, "training"), "groups_per_step"),
        max_backlog_bytes=integer(section(config, "redis"), "max_backlog_bytes"),
        idle_timeout_s=number(section(config, "learner"), "idle_timeout_s"),
        max_attempts=integer(section(config, "worker"), "max_attempts"),
        stale=stale if isinstance(stale, str) else None,
        checkpoint_timeout_s=number(section(config, "checkpoint"), "timeout_s"),
        model_dtype=_dtype(config, "model"),
        weights_dtype=_dtype(config, "weights"),
        arithmetic=_arithmetic(config),
        reward_sources=tuple(section(config, "rewards")),
    )


def _arithmetic(config: Mapping[str, Any]) -> str | None:
    types = [_dtype(config, name) for name in ("weights", "model")]
    return None if None in types else "bfloat16" if "bfloat16" in types else "float32"


def _dtype(config: Mapping[str, Any], name: str) -> str | None:
    found = section(config, name).get("dtype")
    return found if isinstance(found, str) else None


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section; empty if it is no map, since another version or a stranger may have written it."""
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def number(detail: Mapping[str, Any], name: str) -> float | None:
    value = detail.get(name)
    return value if isinstance(value, int | float) and abs(value) < LARGEST else None


def integer(detail: Mapping[str, Any], name: str) -> int | None:
    value = number(detail, name)
    return None if value is None else int(value)
