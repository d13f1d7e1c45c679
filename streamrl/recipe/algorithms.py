"""What is learnt from a group: whether it is trained, which samples, with what advantages and what loss.

An algorithm answers these calls, in this order, and never blocks:

    drop_reason(header)     rank 0, before a group is planned: why it is not to be trained, or None
    select(group)           which samples have a loss, and which count in the mean
    penalty(mu, reference)  each token's cost to its sample's reward, averaged over the sample's tokens
    advantages(group, ...)  a number per token, from this group's samples only, so that ranks need not communicate
    loss(batch)             a number per token; the loop weighs and sums them, once per pass over the batch:

    loss = sum over tokens of  weight_t * loss_t,   weight_t = 1 / (N * T_i)   loss_mean: sequence
                                                    weight_t = 1 / T           loss_mean: token
                                                    weight_t = 1 / N           loss_mean: sum
                                                    weight_t = 1 / (N * L)     loss_mean: max_tokens

where N is the number of samples that `select` counts and T that of trained tokens, both over the whole global batch,
and L is the longest allowed response: so the loss does not depend on how the batch is split into micro-batches and
ranks. Costly inputs must be requested: the reference's logprobs (`needs_reference`), and an entropy with a gradient
(`needs_entropy`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamrl.errors import ConfigError
from streamrl.protocol.wire.group import Group, GroupHeader
from streamrl.protocol.wire.sample import Sample
from streamrl.recipe.advantages import ADVANTAGES, PerToken, ScoredGroup, per_token, scaled_by_std, standardized
from streamrl.recipe.losses import KL_ESTIMATES, LOSSES, Losses, Metric, TokenBatch, uncorrected, weight_of
from streamrl.recipe.names import source_of
from streamrl.recipe.own import FORMS, bind, describe, is_own, load_function

if TYPE_CHECKING:
    import torch

    from streamrl.recipe.settings import Algorithm as Settings

_PER_TOKEN = ("weight", "clipped", "masked")  # metrics with a meaning here
_ROUNDING = 1e-9  # rewards no further apart are equal; relative, if they are above 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    trained: npt.NDArray[np.bool_]  # [n] has a loss
    counted: npt.NDArray[np.bool_]  # [n] is one of the N in a mean over sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """A group's advantages."""

    values: PerToken  # n times [T_i]
    baselines: npt.NDArray[np.float64]  # [n] subtracted from the reward, averaged over a sample's trained tokens


class Reinforce:
    """REINFORCE, corrected for stale samples. For sample i of a group and its token t, with the settings' names:

        R_i = r_i - beta * mean over tokens of |log mu - log pi_ref|   KL in the reward; without |.| if not `absolute`,
                                                                       the sum if `reduction` says so
        A_t = `advantages` of R, then `scale_by_std`; see `streamrl.recipe.advantages`
        loss_t = `loss`(log pi_t, A_t) + beta * w_t * k(log pi_t, log pi_ref_t)    the second term: KL in the loss
                 - `entropy_bonus` * H(pi(. | t))                                  of the current policy, with gradient

    The penalty in the reward uses the logprobs under which the sample was made, so it needs no extra forward pass of
    the policy. w_t is the loss's own weight, which makes the KL that of the current policy, not of the one that
    sampled. If not `weighted`, it is 1.
    """

    def __init__(self, settings: Settings, weights: Mapping[str, float]) -> None:
        self._settings, self._weights = settings, weights
        self._loss = _function(settings, "loss", LOSSES, "batch")
        self._advantages = _function(settings, "advantages", ADVANTAGES, "group")
        self._estimate_kl = KL_ESTIMATES[settings.kl.estimator]
        needs: frozenset[str] = getattr(self._loss.func, "needs", frozenset())
        self.needs_reference = settings.kl_in != "none" or "reference" in needs
        self.needs_entropy = "entropy" in needs or settings.entropy_bonus > 0

    def drop_reason(self, header: GroupHeader) -> str | None:
        if not self._settings.drop_zero_variance or rewards_differ(header, self._settings):
            return None
        return "too_few_finished" if usable(header, self._settings).sum() < 2 else "zero_variance"

    def select(self, group: Group) -> Selection:
        may_teach = usable(group.header, self._settings)
        return Selection(trained=may_teach, counted=np.ones_like(may_teach))

    def penalty(self, behaviour_logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:  # [T]
        if self._settings.kl_in != "reward":
            return behaviour_logprobs.new_zeros(behaviour_logprobs.shape)
        difference = self._estimate_kl(behaviour_logprobs, reference_logprobs)
        return self._settings.kl.coefficient * (difference.abs() if self._settings.kl.absolute else difference)

    def advantages(self, group: Group, penalties: npt.NDArray[np.float64]) -> GroupAdvantages:
        header, samples = group.header, group.samples
        may_teach = usable(header, self._settings)
        by_source = _RewardsBySource(samples, self._weights)
        rewards = np.asarray(header.sample_rewards, dtype=np.float64)
        if self._settings.normalize_sources:
            rewards = standardized(by_source, self._weights, may_teach)
        rewards = rewards - penalties
        scored = ScoredGroup(
            rewards=rewards,
            may_teach=may_teach,
            lengths=np.asarray(header.sample_lengths, dtype=np.int64),
            finish_reasons=tuple(sample.finish_reason for sample in samples),
            masks=tuple(sample.loss_mask() for sample in samples),
            rewards_by_source=by_source,
            turns=tuple(tuple(sample.turns()) for sample in samples),
            turn_rewards=tuple(map(_by_turn, samples, rewards)),
            token_rewards=tuple(map(_by_token, samples, rewards)),
        )
        return self.judge(scored)

    def judge(self, group: ScoredGroup) -> GroupAdvantages:
        given_back = self._advantages(group)
        values = per_token(given_back, group.lengths)
        if values is None:
            returned = " ".join(str(given_back).split())
            raise ConfigError(
                f"algorithm.advantages = {self._settings.advantages!r}: it must return {len(group.rewards)} finite "
                "numbers, one for each sample, or for each sample an array of them, one for each token; for rewards "
                f"{group.rewards.tolist()!s:.100} and lengths {group.lengths.tolist()!s:.100} it returned "
                f"{returned:.200}"
            )
        means = np.array([_mean(value, mask) for value, mask in zip(given_back, group.masks, strict=True)])
        return GroupAdvantages(
            values=scaled_by_std(values, group) if self._settings.scale_by_std else values,
            baselines=group.rewards - means,
        )

    def loss(self, batch: TokenBatch) -> Losses:
        values, metrics = self._loss(batch)
        wrong = _misshapen(values, metrics, batch)
        if wrong:
            raise ConfigError(f"algorithm.loss = {self._settings.loss!r}: {wrong}")
        if self._settings.entropy_bonus > 0:
            assert batch.entropy is not None, "the loss needs it"
            values = values - self._settings.entropy_bonus * batch.entropy
        if self._settings.kl_in != "loss":
            return values, metrics
        assert batch.reference_logprobs is not None, "KL in the loss needs the reference's log-probs"
        weight = weight_of(metrics) if self._settings.kl.weighted else 1.0
        kl = self._estimate_kl(batch.logprobs, batch.reference_logprobs)
        return values + self._settings.kl.coefficient * weight * kl, metrics


class _RewardsBySource(dict[str, npt.NDArray[np.float64]]):
    """The rewards of a group's samples by source: NaN where one does not apply, perhaps to any of them."""

    def __init__(self, samples: Sequence[Sample], weights: Mapping[str, float]) -> None:
        names = sorted({name for sample in samples for name in sample.rewards})
        super().__init__({n: np.array([sample.rewards.get(n, np.nan) for sample in samples]) for n in names})
        self._num_samples, self._weights = len(samples), weights

    def __missing__(self, name: str) -> npt.NDArray[np.float64]:
        if source_of(name) not in self._weights:
            raise KeyError(name)
        return np.full(self._num_samples, np.nan)


class RejectionSampling:
    """Keep the `top_n` of each prompt's samples by reward, and train on them as on given answers:

        loss_t = -log pi_t    for the tokens of the winners; nothing for the others

    No reference, no baseline, and no correction: the winners are data. Among equal rewards the earlier sample wins. As
    every group has winners, `drop_zero_variance` does not apply. The metrics of rewards and lengths still cover all
    samples.
    """

    needs_reference = False
    needs_entropy = False

    def __init__(self, settings: Settings, weights: Mapping[str, float]) -> None:
        self._settings = settings

    def drop_reason(self, header: GroupHeader) -> str | None:
        return None if usable(header, self._settings).any() else "too_few_finished"

    def select(self, group: Group) -> Selection:
        may_win = usable(group.header, self._settings)
        rewards = np.where(may_win, group.header.sample_rewards, -np.inf)
        winners = np.zeros_like(may_win)
        winners[np.argsort(-rewards, kind="stable")[: self._settings.top_n]] = True
        winners &= may_win
        return Selection(trained=winners, counted=winners)

    def penalty(self, behaviour_logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:  # [T]
        return behaviour_logprobs.new_zeros(behaviour_logprobs.shape)

    def advantages(self, group: Group, penalties: npt.NDArray[np.float64]) -> GroupAdvantages:
        values = tuple(np.ones(length) for length in group.header.sample_lengths)
        return GroupAdvantages(values=values, baselines=np.zeros_like(penalties))

    def loss(self, batch: TokenBatch) -> Losses:
        return uncorrected(batch)


Algorithm = Reinforce | RejectionSampling
ALGORITHMS: Mapping[str, type[Algorithm]] = {"reinforce": Reinforce, "rejection_sampling": RejectionSampling}


def make_algorithm(settings: Settings, weights: Mapping[str, float] = MappingProxyType({})) -> Algorithm:
    """Build the algorithm. ConfigError if a user's function cannot be loaded or called. `weights`: by source."""
    return ALGORITHMS[settings.name](settings, weights)


def _by_turn(sample: Sample, reward: float) -> npt.NDArray[np.float64]:  # [turns]
    """Split a sample's reward by turn; what no turn has earned counts for the last."""
    found = np.zeros(len(sample.turns()))
    found[: len(sample.turn_rewards)] = sample.turn_rewards
    found[-1:] += reward - found.sum()
    return found


def _by_token(sample: Sample, reward: float) -> npt.NDArray[np.float64]:  # [T]
    """Split a sample's reward by token; what no token has earned counts for the last."""
    found = np.zeros(len(sample.token_ids))
    if sample.token_rewards is not None:
        found += sample.token_rewards
    found[-1:] += reward - found.sum()
    return found


def usable(header: GroupHeader, settings: Settings) -> npt.NDArray[np.bool_]:  # [n]
    """Return which samples may teach: those that ended by themselves, or all if the setting says so."""
    ended = np.asarray(header.sample_finished, dtype=np.bool_)
    return ended if settings.mask_unfinished else np.ones_like(ended)


def rewards_differ(header: GroupHeader, settings: Settings) -> bool:
    """Whether the samples that may teach have different rewards."""
    rewards = np.asarray(header.sample_rewards)[usable(header, settings)]
    return num_alike(rewards) < len(rewards)


def num_alike(rewards: Sequence[float] | npt.NDArray[np.float64]) -> int:
    """Return how many samples have the most frequent reward: sums of the same parts differ in their last bits."""
    values = np.sort(np.asarray(rewards, dtype=np.float64))
    values /= max(1.0, np.abs(values).max(initial=0.0))
    ends = np.searchsorted(values, values + _ROUNDING, side="right")
    return int((ends - np.arange(len(values))).max(initial=0))


def _function(settings: Settings, key: str, known: Mapping[str, Callable[..., Any]], parameter: str) -> partial[Any]:
    target, arguments = getattr(settings, key), getattr(settings, f"{key}_args")
    if target not in known and not is_own(target):
        raise ConfigError(f"algorithm.{key} = {target!r}: must be one of {', '.join(known)}, or {FORMS}")
    try:
        return bind(load_function(target, known), arguments, parameter)
    except Exception as error:  # user code may raise anything while it is imported
        place = f"algorithm.{key} = {target!r}" + (f", algorithm.{key}_args = {dict(arguments)}" if arguments else "")
        raise ConfigError(f"{place}: cannot use it: {describe(error)}") from error


def _mean(value: float | npt.NDArray[np.float64], mask: npt.NDArray[np.bool_]) -> float:
    trained = np.asarray(value) if np.ndim(value) == 0 else np.asarray(value)[mask]
    return float(trained.mean()) if trained.size else 0.0


def _misshapen(values: torch.Tensor, metrics: Mapping[str, Metric], batch: TokenBatch) -> str:
    """Say what is wrong with the form of a loss's result. Reads no values, which would synchronise with the GPU."""
    expected = batch.logprobs.shape
    if getattr(values, "shape", None) != expected:
        return f"it must return a value for each of {len(batch.logprobs)} tokens; it returned {_shape(values)}"
    for name, metric in metrics.items():
        is_pair = isinstance(metric, tuple) and len(metric) == 2
        if not (getattr(metric, "shape", None) == expected or (is_pair and name not in _PER_TOKEN)):
            also = "" if name in _PER_TOKEN else " or a pair (sum, count)"
            return f"its metric {name!r} must be a tensor of {len(batch.logprobs)}{also}; it is {_shape(metric)}"
    return ""


def _shape(value: object) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" of shape {list(shape)}" if shape is not None else "")
