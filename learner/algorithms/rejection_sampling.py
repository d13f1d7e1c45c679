"""Rejection sampling: of each prompt's samples keep the `top_n` by reward and train on them as on given answers.

    loss_t = -log pi_t    for the tokens of the winners; nothing for the others

No reference, no baseline, and no correction: the winners are data. Among equal rewards the earlier sample wins. The
metrics of rewards and lengths still cover all samples.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from learner.algorithms.base import Advantages, Selection, TokenLosses, Tokens, usable
from learner.algorithms.losses.uncorrected import uncorrected
from streamrl.config import schema
from streamrl.wire.group import Group, GroupHeader


class RejectionSampling:
    needs_reference = False

    def __init__(self, settings: schema.Algorithm) -> None:
        self._settings = settings

    def keep(self, header: GroupHeader) -> str | None:
        may_win = usable(header.sample_finished, mask_unfinished=self._settings.mask_unfinished)
        return None if may_win.any() else "too_few_finished"

    def select(self, group: Group) -> Selection:
        may_win = usable(group.header.sample_finished, mask_unfinished=self._settings.mask_unfinished)
        rewards = np.where(may_win, group.header.sample_rewards, -np.inf)
        winners = np.zeros_like(may_win)
        winners[np.argsort(-rewards, kind="stable")[: self._settings.top_n]] = True
        winners &= may_win
        return Selection(trained=winners, counted=winners)

    def penalty(self, logmu: torch.Tensor, logref: torch.Tensor) -> torch.Tensor:  # [T]
        return torch.zeros_like(logmu)

    def advantages(self, group: Group, penalties: npt.NDArray[np.float64]) -> Advantages:
        ones = np.ones(len(group.samples))
        return Advantages(values=ones, baselines=np.zeros_like(ones))

    def loss(self, logpi: torch.Tensor, tokens: Tokens) -> TokenLosses:
        return uncorrected(logpi, tokens)
