"""The objective written plainly, in float64: one sequence at a time, sharing no code with the learner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from streamrl.config import schema
from streamrl.learner.loading.build import load_model
from streamrl.learner.model.logits import Head
from streamrl.learner.model.policy import Policy
from streamrl.protocol.wire.group import Group
from streamrl.protocol.wire.sample import Sample


def policy64(folder: Path) -> Policy:
    head = Head(end_ids=(1,), compute_dtype=torch.float64)
    return Policy(load_model(str(folder)).double(), head=head, min_tokens=1, dtype=torch.float64)


def plain_logits(policy: Policy, group: Group, tokens: Sequence[int]) -> torch.Tensor:  # [T, V]
    prompt = group.prompt_ids.tolist()
    logits = policy.model(input_ids=torch.tensor([prompt + list(tokens)])).logits[0, len(prompt) - 1 : -1].clone()
    logits[0, 1] = -torch.inf  # min_tokens = 1: no immediate end
    return logits


def plain_logprobs(policy: Policy, group: Group, tokens: Sequence[int]) -> torch.Tensor:  # [T]
    logp = plain_logits(policy, group, tokens).log_softmax(-1)
    return logp.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def logprobs_of_rows(policy: Policy, group: Group, sample: Sample) -> torch.Tensor:  # [T]
    """Compute row by row, each a sequence in which tokens follow all before them; a row starts with a turn."""
    tokens, prompt = sample.token_ids.tolist(), group.prompt_ids.tolist()
    starts = [0, *(branch.start for branch in sample.branches), len(tokens)]
    rows: list[list[int]] = []
    found: list[torch.Tensor] = []
    for at, (start, end) in enumerate(pairwise(starts)):
        branch = sample.branches[at - 1] if at else None
        before = rows[branch.row][: branch.keep] if branch else prompt
        rows.append(before + tokens[start:end])
        behind = replace(group, prompt_ids=np.array(before, np.int32))
        found.append(plain_logprobs(policy, behind, tokens[start:end]))
    return torch.cat(found)


def coefficients(
    logpi: torch.Tensor, behaviour_logprobs: torch.Tensor, advantage: torch.Tensor, settings: schema.Algorithm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For one response in the first pass (pi_p = pi): each token's loss is (value), its gradient -(slope) A d log pi,
    and the KL in the loss is weighed by (weight)."""
    r = torch.exp(logpi.detach() - behaviour_logprobs)
    g = torch.exp((logpi.detach() - behaviour_logprobs).mean()).expand(len(r))
    zero, one = torch.zeros_like(r), torch.ones_like(r)
    c = float(settings.loss_args.get("clamp", {"tis": 2.0}.get(settings.loss, 5.0)))
    usual = {"icepop": (0.5, 5.0), "sequence_mask": (0.99, 1.01), "gspo": (1 - 3e-4, 1 + 4e-4)}
    low, high = usual.get(settings.loss, (0.8, 1.2))
    low, high = float(settings.loss_args.get("low", low)), float(settings.loss_args.get("high", high))
    capped = torch.where(r > c, c * one, r)
    if settings.loss in ("truncated", "tis", "decoupled"):
        return -capped * advantage * (logpi.detach() if settings.loss != "decoupled" else 1), capped, capped
    if settings.loss in ("icepop", "sequence_mask"):
        judged, kept = (r, r) if settings.loss == "icepop" else (g, capped)
        slope = torch.where((judged >= low) & (judged <= high), kept, zero)
        return -slope * advantage * (logpi.detach() if settings.loss != "icepop" else 1), slope, slope
    if settings.loss in ("gspo", "ppo"):
        q = g if settings.loss == "gspo" else r
        bounded = torch.where(q < low, low * one, torch.where(q > high, high * one, q))
        free = (q * advantage) <= (bounded * advantage)
        return -torch.where(free, q, bounded) * advantage, torch.where(free, q, zero), bounded
    return -advantage * logpi.detach(), one, one


def may_teach(sample: Sample, settings: schema.Algorithm) -> bool:
    return sample.finish_reason == "stop" or not settings.mask_unfinished


def moments(values: Sequence[float]) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values)) + 1e-6


def baseline(reward: float, usable: Sequence[float], settings: schema.Algorithm) -> float:
    if settings.advantages == "group_mean":
        return sum(usable) / len(usable)
    return (sum(usable) - reward) / (len(usable) - 1)


def plain_advantages(
    groups: Sequence[Group], costs: list[list[float]], settings: schema.Algorithm
) -> list[list[float]]:
    """Advantages of samples that may teach; 0 for the others, which have no loss."""
    found: list[list[float]] = []
    for group, cost in zip(groups, costs, strict=True):
        rewards = [s.reward - c for s, c in zip(group.samples, cost, strict=True)]
        ends = [may_teach(s, settings) for s in group.samples]
        usable = [r for r, end in zip(rewards, ends, strict=True) if end]
        std = float(np.std(usable, ddof=1)) + 1e-6 if settings.scale_by_std and len(usable) > 1 else 1.0
        found.append(
            [
                (r - baseline(r, usable, settings)) / std if end and len(usable) > 1 else 0.0
                for r, end in zip(rewards, ends, strict=True)
            ]
        )
    if settings.normalize_batch:
        trained = [
            a
            for group, of_group in zip(groups, found, strict=True)
            for s, a in zip(group.samples, of_group, strict=True)
            if may_teach(s, settings)
        ]
        mean, std = moments(trained)
        found = [[(a - mean) / std for a in of_group] for of_group in found]
    return found


def plain_loss(
    policy: Policy, reference: Policy, groups: Sequence[Group], settings: schema.Algorithm
) -> tuple[float, torch.Tensor]:
    """The docstrings' formulas: the loss, and a term with its gradient."""
    beta = settings.kl.coefficient
    logpi = [[logprobs_of_rows(policy, g, s) for s in g.samples] for g in groups]
    with torch.no_grad():
        logref = [[logprobs_of_rows(reference, g, s) for s in g.samples] for g in groups]
    behaviour_logprobs = [[torch.from_numpy(s.logprobs.copy()).double() for s in g.samples] for g in groups]
    in_reward = beta if settings.kl.placement == "reward" else 0.0
    costs = [
        [
            in_reward * float(getattr(abs(m - f) if settings.kl.absolute else m - f, settings.kl.reduction)())
            for m, f in zip(*of_group, strict=True)
        ]
        for of_group in zip(behaviour_logprobs, logref, strict=True)
    ]
    advantages = plain_advantages(groups, costs, settings)
    values: list[float] = []
    slopes: list[torch.Tensor] = []
    num_tokens = 0
    for g, group in enumerate(groups):
        for i, sample in enumerate(group.samples):
            if not may_teach(sample, settings):
                continue
            length = len(sample.token_ids)
            to_go = torch.arange(length - 1, -1, -1, dtype=torch.float64)
            advantage = advantages[g][i] * settings.discount_factor**to_go
            value, slope, weight = coefficients(logpi[g][i], behaviour_logprobs[g][i], advantage, settings)
            gradient = -slope * advantage * logpi[g][i]
            if settings.kl.placement == "loss":
                d = logpi[g][i] - logref[g][i]
                kl = (
                    beta
                    * (weight if settings.kl.weighted else 1)
                    * (0.5 * d**2 if settings.kl.estimator == "k2" else torch.exp(-d) - 1 + d)
                )
                value, gradient = value + kl.detach(), gradient + kl
            num_tokens += length
            by_sequence = settings.loss_mean == "sequence"
            values.append(float(value.mean() if by_sequence else value.sum()))
            slopes.append(gradient.mean() if by_sequence else gradient.sum())
    count = num_tokens if settings.loss_mean == "token" else sum(len(group.samples) for group in groups)
    if settings.loss_mean == "max_tokens":
        count *= schema.Sampling().max_tokens
    return sum(values) / count, torch.stack(slopes).sum() / count
