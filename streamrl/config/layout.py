"""How the learner's ranks divide a model, and which numbers of ranks a layout allows."""

from __future__ import annotations

from math import prod

from streamrl.config import schema
from streamrl.errors import ConfigError

# For each setting, the settings that its rank groups are nested in: a context group's ranks are `tensor` ranks apart.
_WITHIN = {
    "replicas": (),
    "tensor": ("replicas",),
    "context": ("replicas", "tensor"),
    "experts": ("replicas",),
}


def refuse_layout(layout: schema.Layout, ranks: int) -> None:
    """ConfigError if the layout does not divide these ranks. Checked whenever torchrun starts ranks, since machines may
    leave and join."""
    for name, unit in units(layout).items():
        if ranks % unit:
            others = [f"learner.layout.{o} = {getattr(layout, o)}" for o in _WITHIN[name] if getattr(layout, o) > 1]
            each = f" in each of {' and '.join(others)}" if others else ""
            raise ConfigError(
                f"learner.layout.{name} = {getattr(layout, name)}{each} does not divide the learner's ranks, {ranks}: "
                f"set it to a divisor, or start a multiple of {unit} ranks (learner.processes, or --nproc-per-node and "
                "--nodes)"
            )


def units(layout: schema.Layout) -> dict[str, int]:
    """Return for each setting what the number of ranks must be a multiple of."""
    return {name: prod(getattr(layout, each) for each in (name, *within)) for name, within in _WITHIN.items()}
