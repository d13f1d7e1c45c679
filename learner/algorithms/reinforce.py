"""REINFORCE with a leave-one-out baseline (RLOO), corrected for stale samples.

For sample i of a group, with m_j = 1 where sample j may teach (it ended by itself, or `mask_unfinished` is off):

    R_i = r_i - beta * mean over tokens of |log mu - log pi_ref|      KL in the reward; without |.| if not `absolute`
    b_i = sum over j != i of m_j R_j / (sum over j of m_j - 1)
    A_i = R_i - b_i                                                   0 when fewer than two samples may teach
    A_i = A_i / std of R over the group                               if `scale_by_std`
    A_i = (A_i - mean of A) / std of A                                if `normalize_batch`: over all trained samples
    A_t = gamma^(T_i - 1 - t) A_i                                     token t of T_i; gamma is `discount_factor`
    loss_t = policy_loss(log pi_t, A_t) + beta * w_t * k(log pi_t, log pi_ref_t)  the second term: KL in the loss

The penalty in the reward uses the log-probs under which the sample was made, so it needs no further forward pass of
the policy. w_t is the policy loss's own weight: the KL is that of today's policy, not of the one that sampled. The two
lines that look beyond the group, A over the batch and A_t, are computed in `learner.policy.gradients`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from learner.algorithms.base import Advantages, Selection, TokenLosses, Tokens, usable
from learner.algorithms.kl import ESTIMATORS
from learner.algorithms.losses import make_loss
from streamrl.config import schema
from streamrl.wire.group import Group, GroupHeader

_STD_FLOOR = 1e-6


class Reinforce:
    def __init__(self, settings: schema.Algorithm) -> None:
        self._settings = settings
        self._policy_loss = make_loss(settings)
        self._kl_in = settings.kl.placement if settings.kl.coefficient > 0 else "none"
        self._estimate_kl = ESTIMATORS[settings.kl.estimator]
        self.needs_reference = self._kl_in != "none"

    def keep(self, header: GroupHeader) -> str | None:
        may_teach = usable(header.sample_finished, mask_unfinished=self._settings.mask_unfinished)
        rewards = np.asarray(header.sample_rewards)[may_teach]
        if not self._settings.drop_zero_variance:
            return None
        if len(rewards) < 2:
            return "too_few_finished"
        return "zero_variance" if (rewards == rewards[0]).all() else None

    def select(self, group: Group) -> Selection:
        may_teach = usable(group.header.sample_finished, mask_unfinished=self._settings.mask_unfinished)
        return Selection(trained=may_teach, counted=np.ones_like(may_teach))

    def penalty(self, logmu: torch.Tensor, logref: torch.Tensor) -> torch.Tensor:  # [T]
        if self._kl_in != "reward":
            return torch.zeros_like(logmu)
        difference = self._estimate_kl(logmu, logref)
        return self._settings.kl.coefficient * (difference.abs() if self._settings.kl.absolute else difference)

    def advantages(self, group: Group, penalties: npt.NDArray[np.float64]) -> Advantages:
        rewards = np.asarray(group.header.sample_rewards, dtype=np.float64) - penalties
        may_teach = usable(group.header.sample_finished, mask_unfinished=self._settings.mask_unfinished)
        if may_teach.sum() < 2:
            return Advantages(values=np.zeros_like(rewards), baselines=np.zeros_like(rewards))
        baselines = leave_one_out(rewards, may_teach)
        values = rewards - baselines
        if self._settings.scale_by_std:
            values = values / (rewards[may_teach].std(ddof=1) + _STD_FLOOR)
        return Advantages(values=values, baselines=baselines)

    def loss(self, logpi: torch.Tensor, tokens: Tokens) -> TokenLosses:
        losses = self._policy_loss(logpi, tokens)
        if self._kl_in != "loss":
            return losses
        assert tokens.logref is not None, "KL in the loss needs the reference's log-probs"
        kl = self._settings.kl.coefficient * losses.weight * self._estimate_kl(logpi, tokens.logref)
        return replace(losses, values=losses.values + kl)


def leave_one_out(rewards: npt.NDArray[np.float64], may_teach: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """[n] baselines; each sample's own reward is left out, not subtracted again, so that no rounding of it stays."""
    others = may_teach & ~np.eye(len(rewards), dtype=np.bool_)  # [n, n] row i: who speaks for sample i
    return np.where(others, rewards, 0.0).sum(axis=1) / (may_teach.sum() - 1)
