"""Validation metrics of checkpoints.

`validation.json` holds the result of the validation that was requested at the checkpoint's step:

    run folder/
      checkpoints/
        e000006-s00000120/
          manifest.json        sealed while the validation still ran
          validation.json      added when its answers were in; missing: not validated

Validation runs beside training, on the first published version with the checkpoint's weights or newer ones, and workers
may be further ahead: `val_rollouts/min_version_step` and `max_version_step` say which steps answered. The file is
removed with its checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import structlog

from streamrl.files import MISSING, naming, write_durably

BEST_METRIC = "val_rollouts/rewards"  # the default; higher is better
SCORE = "validation.json"

log = structlog.get_logger(__name__)


def write_score(folder: Path, metrics: Mapping[str, float]) -> None:
    """Add validation metrics to a checkpoint, if it exists (still)."""
    if folder.is_dir():
        write_durably(folder / SCORE, json.dumps(dict(metrics), allow_nan=False).encode())


def read_score(folder: Path, metric: str = BEST_METRIC) -> float | None:
    """The metric's value; None if it was not validated, or without answers. OSError if that cannot be known now: the
    best checkpoint would be removed as one without a score."""
    path = folder / SCORE
    try:
        with naming(path):
            score = json.loads(path.read_bytes()).get(metric)
        return None if score is None else float(score)
    except MISSING:
        return None
    except (ValueError, AttributeError, TypeError) as error:
        log.warning("checkpoint score ignored", path=str(path), error=str(error))
        return None
