"""What a worker's operator allows it to use: what comes from Redis is data, never permission."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from streamrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    # Targets, in the configuration's form: `package.module:function`, `path/file.py:function`.
    reward_code: tuple[str, ...] = ()
    reward_network: tuple[str, ...] = ()  # those that may open connections
    reward_environment: tuple[str, ...] = ()  # variables that a reward function may be given
    model_roots: tuple[str, ...] = ()  # folders and hub names that models may come from
    hosts: tuple[str, ...] = ()  # hosts of reward servers, `name` or `name:port`
    trust_remote_code: bool = False  # run code in a model's folder


def allowed_model(configured: str, *, override: str | None, permissions: Permissions) -> str:
    """Return the model that this worker loads: its own `--model`, or the run's if that is under an allowed root."""
    if override is not None:
        return override
    if any(_is_under(configured, root) for root in permissions.model_roots):
        return configured
    raise ConfigError(
        f"model.path: this worker may not load {configured!r}; if you trust it, start the worker with "
        f"--model {configured}, or with --allow-model-root and a folder above it"
    )


def _is_under(model: str, root: str) -> bool:
    # A hub name is not a folder: it is compared as a string, and `org` stands for everything in `org/...`.
    if Path(model).exists():
        return Path(model).resolve().is_relative_to(Path(root).resolve())
    return model == root or model.startswith(f"{root}/")
