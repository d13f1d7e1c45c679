"""How the learner's ranks divide a model, and which numbers of ranks a layout can do with."""

from __future__ import annotations

from math import prod

from streamrl.config import schema
from streamrl.errors import ConfigError

# Of each setting, within what its ranks lie: those of a context group are apart by as many as share each layer.
_WITHIN = {
    "replicas": (),
    "tensor": ("replicas",),
    "context": ("replicas", "tensor"),
    "experts": ("replicas",),
}


def refuse_layout(layout: schema.Layout, ranks: int) -> None:
    """ConfigError where these ranks cannot lie so. It is asked again whenever torchrun starts ranks, since machines may
    leave and come."""
    for name, unit in units(layout).items():
        if ranks % unit:
            others = [f"learner.layout.{o} = {getattr(layout, o)}" for o in _WITHIN[name] if getattr(layout, o) > 1]
            each = f" in each of {' and '.join(others)}" if others else ""
            told = f"learner.layout.{name} = {getattr(layout, name)}{each} does not divide the learner's ranks, {ranks}"
            raise ConfigError(
                f"{told}: set it to a divisor, or begin a multiple of {unit} ranks (learner.processes, or "
                "--nproc-per-node and --nodes)"
            )


def units(layout: schema.Layout) -> dict[str, int]:
    """Of each setting, what the number of ranks has to be a multiple of."""
    return {name: prod(getattr(layout, each) for each in (name, *within)) for name, within in _WITHIN.items()}
