"""A sequence for which logprobs are requested directly."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamrl.learner.packing.micro_batches import Piece


def probe(token_ids: npt.NDArray[np.int32], *, sample: int = 0, group: int = 0) -> Piece:
    """A piece that requests the logprob of every token but the first."""
    rest = token_ids[1:]
    return Piece(
        sample=sample,
        group=group,
        prompt_ids=token_ids[:1],
        token_ids=rest,
        behaviour_logprobs=np.zeros(len(rest), dtype=np.float32),
        mask=np.ones(len(rest), dtype=np.bool_),
    )
