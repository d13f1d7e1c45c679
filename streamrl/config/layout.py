"""How the learner's ranks divide a model, and which numbers of ranks a layout can do with."""

from __future__ import annotations

from streamrl.config import schema
from streamrl.errors import ConfigError


def refuse_layout(layout: schema.Layout, ranks: int) -> None:
    """ConfigError where these ranks cannot lie so. It is asked again whenever torchrun starts ranks, since machines may
    leave and come."""
    for name, unit in units(layout).items():
        if ranks % unit:
            copies = "" if unit == getattr(layout, name) else f" in each of learner.layout.replicas = {layout.replicas}"
            told = (
                f"learner.layout.{name} = {getattr(layout, name)}{copies} does not divide the learner's ranks, {ranks}"
            )
            raise ConfigError(
                f"{told}: set it to a divisor, or begin a multiple of {unit} ranks (learner.processes, or "
                "--nproc-per-node and --nodes)"
            )


def units(layout: schema.Layout) -> dict[str, int]:
    """Of each setting, what the number of ranks has to be a multiple of."""
    return {
        "replicas": layout.replicas,
        "context": layout.replicas * layout.context,
        "experts": layout.replicas * layout.experts,
    }
