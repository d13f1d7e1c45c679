"""Advantages: what a sample is worth relative to its group, computed from one prompt's samples alone.

For sample i of n, with m_j = 1 where sample j may teach (it ended by itself, or `mask_unfinished` is off):

    leave_one_out   A_i = R_i - sum over j != i of m_j R_j / (sum over j of m_j - 1)     RLOO; 0 for a lone teacher
    group_mean      A_i = R_i - sum over j of m_j R_j / sum over j of m_j                GRPO
    none            A_i = 0                                                              rewards are only reported
    turns           A_t = G_ik - mean of G_jk over j != i that may teach and reached turn k      t in turn k of sample i
                    G_ik = sum over l >= k of discount^(l - k) R_il                               return to go
    tokens          the same, with each token as a turn

R_ik is turn k's part of R_i; the reward of the whole sample, and the KL penalty, count for the last turn. If no other
sample reached turn k, the last turn that one of them reached is used. A baseline uses only other samples, whatever turn
it is for, so the gradient of `turns` with a discount of 1 is unbiased, like that of `leave_one_out`. With a discount
below 1 a turn is credited more for rewards that follow soon, at 0 only for its own: less noise, but another objective.

R is the weighted sum over sources; with `normalize_sources`, which GDPO calls decoupled, it is

    R_i = sum over sources s of w_s (r_is - mean of r_s) / std of r_s     over the samples that may teach and have r_s

where a source that does not apply to a sample, or is constant in the group, adds nothing. A KL penalty is subtracted.

A function takes a `ScoredGroup` and returns [n] numbers, or a list of n arrays with one number per token. The settings
of `algorithm` then apply to its result in this order, with A_t = A_i at first for each token t of T_i:

    A_t = A_t / std of R over the samples that may teach     `scale_by_std`
    A_t = (A_t - mean of A) / std of A                       `normalize_batch`: over the batch, each trained sample once
    A_t = gamma^(T_i - 1 - t) A_t                            `discount_factor` gamma
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

PerToken = tuple[npt.NDArray[np.float64], ...]  # n times [T_i]
Advantages = npt.NDArray[np.float64] | Sequence[npt.NDArray[np.float64]]  # [n], or n times [T_i]

STD_FLOOR = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """The samples of one prompt."""

    rewards: npt.NDArray[np.float64]  # [n] minus the KL penalty, if that is in the reward
    may_teach: npt.NDArray[np.bool_]  # [n] samples with a loss; the others are in no baseline
    lengths: npt.NDArray[np.int64]  # [n] tokens of the response
    finish_reasons: tuple[str, ...]  # [n] "stop", "length", ...
    masks: tuple[npt.NDArray[np.bool_], ...]  # n times [T_i] tokens with a loss
    rewards_by_source: Mapping[str, npt.NDArray[np.float64]]  # [n] each; unweighted, NaN where it does not apply
    turns: tuple[tuple[tuple[int, int], ...], ...] = ()  # n times: tokens [begin, end) of each turn of the model
    turn_rewards: tuple[npt.NDArray[np.float64], ...] = ()  # n times [turns] each turn's part of `rewards`
    token_rewards: tuple[npt.NDArray[np.float64], ...] = ()  # n times [T_i] each token's part


def leave_one_out(group: ScoredGroup) -> npt.NDArray[np.float64]:  # [n]
    """Exclude each sample's own reward from the sum, rather than subtracting it, which would leave a rounding error."""
    if group.may_teach.sum() < 2:
        return np.zeros_like(group.rewards)
    others = group.may_teach & ~np.eye(len(group.rewards), dtype=np.bool_)  # [n, n] row i: the baseline of sample i
    baselines = np.where(others, group.rewards, 0.0).sum(axis=1) / (group.may_teach.sum() - 1)
    values: npt.NDArray[np.float64] = group.rewards - baselines
    return values


def group_mean(group: ScoredGroup) -> npt.NDArray[np.float64]:  # [n]
    """Include each sample's own reward in its baseline: (n - 1) / n of `leave_one_out`."""
    if not group.may_teach.any():
        return np.zeros_like(group.rewards)
    values: npt.NDArray[np.float64] = group.rewards - group.rewards[group.may_teach].mean()
    return values


def turns(group: ScoredGroup, *, discount: float = 1.0) -> list[npt.NDArray[np.float64]]:  # n times [T_i]
    """Compute advantages per turn; given tokens have none."""
    values = [np.zeros(length) for length in group.lengths]
    of_turns = _beside_others(group.turn_rewards, group.may_teach, discount)
    for of_sample, places, earned in zip(values, group.turns, of_turns, strict=True):
        for (begin, end), value in zip(places, earned, strict=True):
            of_sample[begin:end] = value
    return values


def tokens(group: ScoredGroup, *, discount: float = 1.0) -> list[npt.NDArray[np.float64]]:  # n times [T_i]
    return _beside_others(group.token_rewards, group.may_teach, discount)


def _beside_others(
    rewards: Sequence[npt.NDArray[np.float64]], may_teach: npt.NDArray[np.bool_], discount: float
) -> list[npt.NDArray[np.float64]]:
    """Return each reward's return to go, minus the mean of the others' from the same place on."""
    if not 0 <= discount <= 1:
        raise ValueError(f"discount must be from 0 to 1, not {discount}")
    to_go = [_to_go(of_sample, discount) for of_sample in rewards]
    values = [np.zeros(len(own)) for own in to_go]
    for i, own in enumerate(to_go):
        others = [to_go[j] for j in np.flatnonzero(may_teach) if j != i and len(to_go[j])]
        if not may_teach[i] or not others:
            continue
        total, count = np.zeros((2, max(map(len, others))))
        for other in others:
            total[: len(other)] += other
            count[: len(other)] += 1
        at = np.minimum(np.arange(len(own)), len(total) - 1)
        values[i] = own - (total / count)[at]
    return values


def _to_go(rewards: npt.NDArray[np.float64], discount: float) -> npt.NDArray[np.float64]:
    backwards = accumulate(rewards[::-1].tolist(), lambda later, reward: reward + discount * later)
    return np.array(list(backwards), dtype=np.float64)[::-1]


def none(group: ScoredGroup) -> npt.NDArray[np.float64]:  # [n]
    """Ignore rewards; a teacher or a KL loss teaches instead."""
    return np.zeros_like(group.rewards)


ADVANTAGES: Mapping[str, Callable[..., Advantages]] = {
    "leave_one_out": leave_one_out,
    "group_mean": group_mean,
    "turns": turns,
    "tokens": tokens,
    "none": none,
}


def standardized(
    by_source: Mapping[str, npt.NDArray[np.float64]],  # [n] each, NaN where it does not apply
    weights: Mapping[str, float],
    may_teach: npt.NDArray[np.bool_],
) -> npt.NDArray[np.float64]:  # [n]
    total = np.zeros(len(may_teach))
    for name, rewards in by_source.items():
        known = rewards[may_teach & ~np.isnan(rewards)]
        if len(known) > 1 and (known != known[0]).any():
            scaled = (rewards - known.mean()) / (known.std(ddof=1) + STD_FLOOR)
            total += weights.get(name, 0.0) * np.nan_to_num(scaled, nan=0.0)
    return total


def scaled_by_std(values: PerToken, group: ScoredGroup) -> PerToken:
    if group.may_teach.sum() < 2:
        return values
    std = group.rewards[group.may_teach].std(ddof=1) + STD_FLOOR
    return tuple(each / std for each in values)


def discounted(values: PerToken, gamma: float) -> PerToken:
    if gamma == 1:
        return values
    return tuple(each * gamma ** np.arange(len(each) - 1, -1, -1.0) for each in values)


def per_token(values: Advantages, lengths: Sequence[int] | npt.NDArray[np.int64]) -> PerToken | None:
    """Expand to one number per token. None if shapes are wrong or a number is not finite."""
    if len(values) != len(lengths):
        return None
    arrays = [np.asarray(value, dtype=np.float64) for value in values]
    each = tuple(np.full(n, a) if a.ndim == 0 else a for a, n in zip(arrays, lengths, strict=True))
    right = all(a.shape == (n,) and np.isfinite(a).all() for a, n in zip(each, lengths, strict=True))
    return each if right else None
