"""What bounds each off-policy loss, and the bounds it has where none are set; the formulas are the learner's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from streamrl.config.schema import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """None where the loss has no such limit."""

    clamp: float | None = None  # of a token's ratio, above
    bounds: tuple[float, float] | None = None  # of a ratio, below and above


DEFAULTS: Mapping[str, Limits] = {
    "truncated": Limits(clamp=5.0),
    "tis": Limits(clamp=2.0),
    "icepop": Limits(bounds=(0.5, 5.0)),
    "sequence_mask": Limits(clamp=5.0, bounds=(0.99, 1.01)),
    "gspo": Limits(bounds=(1 - 3e-4, 1 + 4e-4)),
    "ppo": Limits(bounds=(0.8, 1.2)),
    "decoupled": Limits(clamp=5.0, bounds=(0.8, 1.2)),
    "none": Limits(),
}


def limits(settings: Algorithm) -> Limits:
    """Those that are set, else the defaults of the loss."""
    default = DEFAULTS[settings.correction]
    return Limits(
        clamp=default.clamp if settings.ratio_clamp is None else settings.ratio_clamp,
        bounds=default.bounds if settings.ratio_bounds is None else settings.ratio_bounds,
    )
