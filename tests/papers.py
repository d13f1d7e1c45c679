"""Objectives as in their papers, in float64, one response at a time, for autograd: uses nothing of streamrl.

For a response, `now` are the logprobs of the current policy, which carry the gradient, `old` those under which it was
sampled, `proximal` those of the policy before the first pass over the batch, `reference`, `teacher`. Tokens without a
loss are left out of all of them. A paper maximises its objective; each function returns the negative as a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FLOOR = 1e-6  # added to a standard deviation, as implementations do


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    reward: float
    finished: bool
    now: Tensor  # [T]
    old: Tensor  # [T]
    proximal: Tensor  # [T]
    reference: Tensor  # [T]
    teacher: Tensor  # [T]

    @property
    def ratio(self) -> Tensor:
        return torch.exp(self.now - self.old)


Responses = Sequence[Response]  # to one prompt


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return torch.min(ratio * advantage, torch.clamp(ratio, low, high) * advantage)


def normalized(group: Responses) -> list[float]:
    """(R - mean) / std."""
    rewards = torch.tensor([one.reward for one in group], dtype=torch.float64)
    return [float(a) for a in (rewards - rewards.mean()) / (rewards.std() + FLOOR)]


def rloo(batch: Sequence[Responses]) -> Tensor:
    """Equation 6: 1/k sum (R(y_i) - mean of the others' R) grad log pi(y_i), R = r - beta log pi_old(y) / pi_ref(y).
    Off-policy, each token's gradient is weighed by its ratio, at most 5."""
    total = torch.zeros((), dtype=torch.float64)
    for group in batch:
        worth = [one.reward - 0.05 * float((one.old - one.reference).sum()) for one in group]
        for i, one in enumerate(group):
            others = [value for j, value in enumerate(worth) if j != i]
            weight = one.ratio.detach().clamp(max=5.0)
            total = total + (worth[i] - sum(others) / len(others)) * (weight * one.now).sum()
    return -total / sum(map(len, batch))


def grpo(batch: Sequence[Responses]) -> Tensor:
    """Equation 3, with equation 4's KL: 1/G sum 1/|o| sum (min(r A, clip(r) A) - 0.04 (ref/pi - log ref/pi - 1))."""
    total = torch.zeros((), dtype=torch.float64)
    for group in batch:
        for one, advantage in zip(group, normalized(group), strict=True):
            away = one.reference - one.now
            kl = torch.exp(away) - away - 1
            total = total + (clipped(one.ratio, advantage, 0.8, 1.2) - 0.04 * kl).sum() / len(one.now)
    return -total / sum(map(len, batch))


def dapo(batch: Sequence[Responses]) -> Tensor:
    """Equation 8: 1 / sum |o| sum sum min(r A, clip(r, 0.8, 1.28) A), without truncated responses."""
    total, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for group in batch:
        ended = [one for one in group if one.finished]
        for one, advantage in zip(ended, normalized(ended), strict=True):
            total = total + clipped(one.ratio, advantage, 0.8, 1.28).sum()
            num_tokens += len(one.now)
    return -total / num_tokens


def dr_grpo(batch: Sequence[Responses], *, max_tokens: int) -> Tensor:
    """Section 3.2, with the constant of listing 1: 1/G sum sum min(r A, clip(r) A) / max_tokens, A = R - mean."""
    total = torch.zeros((), dtype=torch.float64)
    for group in batch:
        mean = sum(one.reward for one in group) / len(group)
        for one in group:
            total = total + clipped(one.ratio, one.reward - mean, 0.8, 1.2).sum() / max_tokens
    return -total / sum(map(len, batch))


def cispo(batch: Sequence[Responses]) -> Tensor:
    """Equation 4: 1 / sum |o| sum sum sg(min(r, 5)) A log pi."""
    total, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for group in batch:
        for one, advantage in zip(group, normalized(group), strict=True):
            total = total + (one.ratio.detach().clamp(max=5.0) * advantage * one.now).sum()
            num_tokens += len(one.now)
    return -total / num_tokens


def gspo(batch: Sequence[Responses]) -> Tensor:
    """Equations 5 and 7: 1/G sum min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A), s = (pi(y) / pi_old(y))^(1/|y|)."""
    total = torch.zeros((), dtype=torch.float64)
    for group in batch:
        for one, advantage in zip(group, normalized(group), strict=True):
            s = torch.exp((one.now.sum() - one.old.sum()) / len(one.now))
            total = total + clipped(s, advantage, 0.9997, 1.0004)
    return -total / sum(map(len, batch))


def icepop(batch: Sequence[Responses]) -> Tensor:
    """1/G sum 1/|y| sum M(pi_train_old / pi_infer_old) min(r A, clip(r) A), r = pi / pi_train_old, M(k) = k within
    [0.5, 5] and 0 otherwise."""
    total = torch.zeros((), dtype=torch.float64)
    for group in batch:
        for one, advantage in zip(group, normalized(group), strict=True):
            k = torch.exp(one.proximal - one.old)
            kept = torch.where((k >= 0.5) & (k <= 5.0), k, torch.zeros_like(k))
            moved = torch.exp(one.now - one.proximal)
            total = total + (kept * clipped(moved, advantage, 0.8, 1.2)).sum() / len(one.now)
    return -total / sum(map(len, batch))


def ppo_clip(batch: Sequence[Responses]) -> Tensor:
    """Equation 7: the mean over tokens of min(r A, clip(r) A), here with the rest of the group as baseline."""
    total, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for group in batch:
        for i, one in enumerate(group):
            others = [other.reward for j, other in enumerate(group) if j != i]
            total = total + clipped(one.ratio, one.reward - sum(others) / len(others), 0.8, 1.2).sum()
            num_tokens += len(one.now)
    return -total / num_tokens


def rejection_sampling(batch: Sequence[Responses]) -> Tensor:
    """The likelihood of the best finished response: 1/N sum 1/|y| sum log pi."""
    best = [max((one for one in group if one.finished), key=lambda one: one.reward) for group in batch]
    total = torch.stack([one.now.mean() for one in best]).sum()
    return -total / len(best)


def distillation(batch: Sequence[Responses]) -> Tensor:
    """Reverse KL by its gradient at sampled tokens, E[(log pi - log teacher) grad log pi], each token for itself, mean
    over tokens: (log pi - log teacher)^2 / 2 has it. Off-policy, each token is weighed by its ratio, at most 5."""
    total, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for group in batch:
        for one in group:
            weight = one.ratio.detach().clamp(max=5.0)
            total = total + (weight * (one.now - one.teacher) ** 2 / 2).sum()
            num_tokens += len(one.now)
    return total / num_tokens


def objectives(*, max_tokens: int) -> dict[str, Callable[[Sequence[Responses]], Tensor]]:
    return {
        "rloo": rloo,
        "grpo": grpo,
        "dapo": dapo,
        "dr_grpo": lambda batch: dr_grpo(batch, max_tokens=max_tokens),
        "cispo": cispo,
        "gspo": gspo,
        "icepop": icepop,
        "ppo_clip": ppo_clip,
        "rejection_sampling": rejection_sampling,
        "distillation": distillation,
    }
