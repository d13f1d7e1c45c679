"""How good the weights of a checkpoint are: the validation that was asked for at its step, beside its manifest.

    run folder/
      checkpoints/
        e000006-s00000120/
          manifest.json        sealed while the validation still ran
          validation.json      added when its answers were in; not there: not validated

Validation runs beside training, on the first version that got out with the checkpoint's weights or younger ones, and
workers may be further by then: `val_rollouts/min_version_step` and `max_version_step` say which steps answered. The
file goes with its checkpoint. Blocks on the disk only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from streamrl.durable import write_durably

if TYPE_CHECKING:
    from learner.checkpoints.checkpoint import Checkpoint

SCORE = "validation.json"
BEST_METRIC = "val_rollouts/rewards"  # higher is better

log = structlog.get_logger(__name__)


def write_score(folder: Path, metrics: Mapping[str, float]) -> None:
    """Add them to a checkpoint; nothing where there is none, or none any more."""
    if folder.is_dir():
        write_durably(folder / SCORE, json.dumps(dict(metrics), allow_nan=False).encode())


def read_score(folder: Path) -> float | None:
    """None: not validated, or nobody answered."""
    path = folder / SCORE
    if not path.exists():
        return None
    try:
        score = json.loads(path.read_bytes()).get(BEST_METRIC)
        return None if score is None else float(score)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        log.warning("score of a checkpoint ignored", path=str(path), error=str(error))
        return None


def best_first(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Those that were validated; of equally good ones the newest first."""
    scored = [(score, one.name, one) for one in checkpoints if (score := read_score(one.folder)) is not None]
    return [one for _, _, one in sorted(scored, key=lambda each: each[:2], reverse=True)]
