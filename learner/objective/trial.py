"""Calls the user's loss and advantages once on synthetic data, before anything is spent on a run.

A function that raises, or whose results have the wrong shape, are not finite or carry no gradient, fails with one
ConfigError that names its setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from streamrl.config import schema
from streamrl.errors import ConfigError
from streamrl.recipe.advantages import ScoredGroup
from streamrl.recipe.algorithms import Reinforce
from streamrl.recipe.losses import Metric, TokenBatch
from streamrl.recipe.own import describe

_GROUPS = {
    "four samples, one of them cut off and one empty": ((1.0, 0.0, 0.5, 2.0), (True, True, False, True)),
    "four samples with the same reward": ((1.0, 1.0, 1.0, 1.0), (True, True, True, True)),
    "four samples of which one ended by itself": ((1.0, 0.0, 0.5, 2.0), (False, True, False, False)),
}
_LENGTHS = (3, 5, 2, 0)
_TURNS = (((0, 3),), ((0, 2), (3, 5)), ((0, 2),), ())  # the third token of the second sample was not generated


def try_out(config: schema.Config) -> None:
    settings = config.algorithm
    if settings.name != "reinforce":
        return  # no user code involved
    algorithm = Reinforce(settings, {})
    for what, (rewards, finished) in _GROUPS.items():
        group = _synthetic_group(rewards, finished, config)
        with _trying(f"algorithm.advantages = {settings.advantages!r}", what):
            algorithm.judge(group)
    key = f"algorithm.loss = {settings.loss!r}"
    # A rank without tokens still takes part in the step, so the loss must accept an empty batch.
    for what, samples in {"five tokens of three samples": [0, 0, 1, 2, 2], "no tokens": []}.items():
        batch = _synthetic_tokens(samples, algorithm, has_teacher=config.teacher is not None)
        with _trying(key, what):
            values, metrics = algorithm.loss(batch)
        problem = _find_problem(values, metrics, batch)
        if problem:
            raise ConfigError(f"{key}: on a synthetic batch with {what} {problem}")


@contextmanager
def _trying(key: str, what: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        hint = " (inputs that the loss does not ask for are None: docs/recipes.md)" if "NoneType" in str(error) else ""
        raise ConfigError(f"{key}: it fails on a synthetic batch with {what}: {describe(error)}{hint}") from error


def _find_problem(values: torch.Tensor, metrics: Mapping[str, Metric], batch: TokenBatch) -> str:
    if not values.isfinite().all():
        return f"its values are not finite: {values.tolist()}"
    for name, metric in metrics.items():
        parts = metric if isinstance(metric, tuple) else (metric,)
        if not all(torch.as_tensor(part).isfinite().all() for part in parts):
            return f"its metric {name!r} is not finite: {metric}"
    if not values.requires_grad:
        return "its values carry no gradient: compute them from batch.logprobs or batch.entropy, without `detach`"
    learning = [tensor for tensor in (batch.logprobs, batch.entropy) if tensor is not None]
    gradients = torch.autograd.grad(values.sum(), learning, allow_unused=True)
    if not all(gradient.isfinite().all() for gradient in gradients if gradient is not None):
        return "the gradient of its values is not finite"
    return ""


def _synthetic_tokens(samples: list[int], algorithm: Reinforce, *, has_teacher: bool) -> TokenBatch:
    """Return a batch with the inputs that a run of this configuration has."""
    some = torch.linspace(-3.0, -0.1, len(samples))
    return TokenBatch(
        logprobs=some.clone().requires_grad_(),
        behaviour_logprobs=some.flip(0) * 0.9,
        proximal_logprobs=some * 1.1,
        reference_logprobs=some - 0.5 if algorithm.needs_reference else None,
        teacher_logprobs=some - 0.2 if has_teacher else None,
        entropy=(some + 4).requires_grad_() if algorithm.needs_entropy else None,
        advantages=torch.linspace(-1.0, 1.0, len(samples)),
        staleness=torch.arange(len(samples)),
        sample=torch.tensor(samples, dtype=torch.int64),
        num_samples=3,
    )


class _BySource(dict[str, npt.NDArray[np.float64]]):
    """Has what a sample may have: an agent's names are known only once it plays."""

    def __init__(self, config: schema.Config, rewards: npt.NDArray[np.float64]) -> None:
        super().__init__(dict.fromkeys(config.reward_sources, rewards))
        self._config, self._rewards = config, rewards

    def __missing__(self, name: str) -> npt.NDArray[np.float64]:
        if not self._config.may_have_reward(name):
            raise KeyError(name)
        return self._rewards


def _synthetic_group(rewards: tuple[float, ...], finished: tuple[bool, ...], config: schema.Config) -> ScoredGroup:
    return ScoredGroup(
        rewards=np.array(rewards),
        may_teach=np.array(finished),
        lengths=np.array(_LENGTHS),
        finish_reasons=tuple("stop" if ended else "length" for ended in finished),
        masks=tuple(_trained(*made) for made in zip(_LENGTHS, _TURNS, strict=True)),
        rewards_by_source=_BySource(config, np.array(rewards)),
        turns=_TURNS,
        token_rewards=tuple(np.full(n, r / max(1, n)) for r, n in zip(rewards, _LENGTHS, strict=True)),
        turn_rewards=tuple(np.full(len(each), r / max(1, len(each))) for r, each in zip(rewards, _TURNS, strict=True)),
    )


def _trained(length: int, turns: tuple[tuple[int, int], ...]) -> npt.NDArray[np.bool_]:  # [T]
    mask = np.zeros(length, dtype=np.bool_)
    for begin, end in turns:
        mask[begin:end] = True
    return mask
