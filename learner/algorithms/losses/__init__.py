"""How a token that an older policy sampled counts in the loss of today's: one small file a loss, chosen by name.

Everywhere r = pi / mu is a token's ratio of today's policy to the one that sampled it, A the token's advantage, pi_p
the policy before the first pass over the batch, g the geometric mean of r over a response's trained tokens, and sg the
stop-gradient. C is `ratio_clamp`; lo and hi are `ratio_bounds`; `streamrl.config.losses` has their defaults.

    truncated, tis   -sg(min(r, C)) A log pi                                      C = 5 (also known as CISPO), C = 2
    icepop           -sg(r 1[lo <= r <= hi]) A log pi
    sequence_mask    -sg(min(r, C) 1[lo <= g <= hi]) A log pi
    gspo             -min(g A, clip(g, lo, hi) A)                                 for each token of the response
    ppo              -min(r A, clip(r, lo, hi) A)
    decoupled        -sg(min(pi_p / mu, C)) min(q A, clip(q, lo, hi) A)           q = pi / pi_p
    none             -A log pi                                                    plain REINFORCE

In expectation over mu, the gradient of `truncated`, `tis` and `decoupled` is that of today's policy where no ratio
reaches the clamp; that of `icepop`, `ppo` and, for responses of one token, `gspo` where none leaves the bounds. Beyond,
they are biased by construction, to keep single tokens from ruling the batch. `sequence_mask` is so for the responses
that it keeps. `none` is so only when nothing is stale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from learner.algorithms.base import TokenLosses, Tokens
from learner.algorithms.losses.decoupled import decoupled
from learner.algorithms.losses.gspo import gspo
from learner.algorithms.losses.icepop import icepop
from learner.algorithms.losses.ppo import ppo
from learner.algorithms.losses.sequence_mask import sequence_mask
from learner.algorithms.losses.truncated import truncated
from learner.algorithms.losses.uncorrected import uncorrected
from streamrl.config import schema
from streamrl.config.losses import Limits, limits

Loss = Callable[[torch.Tensor, Tokens], TokenLosses]

LOSSES: Mapping[str, Callable[[Limits], Loss]] = {
    "truncated": lambda found: partial(truncated, clamp=found.clamp),
    "tis": lambda found: partial(truncated, clamp=found.clamp),
    "icepop": lambda found: partial(icepop, bounds=found.bounds),
    "sequence_mask": lambda found: partial(sequence_mask, bounds=found.bounds, clamp=found.clamp),
    "gspo": lambda found: partial(gspo, bounds=found.bounds),
    "ppo": lambda found: partial(ppo, bounds=found.bounds),
    "decoupled": lambda found: partial(decoupled, bounds=found.bounds, clamp=found.clamp),
    "none": lambda _: uncorrected,
}


def make_loss(settings: schema.Algorithm) -> Loss:
    return LOSSES[settings.correction](limits(settings))
