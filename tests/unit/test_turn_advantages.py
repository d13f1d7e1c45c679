"""Advantages of turns: against the formula written plainly, and the gradient of a game that is known whole."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
import torch

from streamrl.config import schema
from streamrl.protocol.wire.group import Group, decode_body, decode_header, encode_group
from streamrl.protocol.wire.sample import Sample, Span
from streamrl.recipe.advantages import Advantages, ScoredGroup, leave_one_out, turns
from streamrl.recipe.algorithms import make_algorithm
from streamrl.versions import make_version
from tests.helpers import make_group, make_ticket
from tests.learner_cases import group_of


def rollout(
    turn_lengths: Sequence[int], turn_rewards: Sequence[float], *, whole: float = 0.0, ended: bool = True
) -> Sample:
    """Two tokens are given between two turns; `whole` is earned by no turn."""
    spans, runs, at = [], [], 0
    for length in turn_lengths:
        runs += [2] if spans else []
        at += 2 if spans else 0
        spans.append(Span(version=make_version(1, 0), step=0, start=at, end=at + length))
        runs.append(length)
        at += length
    return Sample(
        token_ids=np.arange(at, dtype=np.int32),
        logprobs=np.full(at, -0.5, np.float32),
        mask_runs=tuple(runs),
        spans=tuple(spans),
        finish_reason="stop" if ended else "length",
        rewards={"environment": sum(turn_rewards), "whole": whole},
        reward=sum(turn_rewards) + whole,
        turn_rewards=tuple(turn_rewards),
    )


def delivered(samples: Sequence[Sample]) -> Group:
    header, body = encode_group(make_group(make_ticket(1), samples=tuple(samples)))
    return decode_body(decode_header(header), body)


def random_rollout(rng: random.Random) -> Sample:
    lengths = [rng.randint(1, 3) for _ in range(rng.randint(1, 5))]
    rewards = [rng.gauss(0, 1) for _ in lengths]
    return rollout(lengths, rewards, whole=rng.gauss(0, 1), ended=rng.random() < 0.8)


def plain(samples: Sequence[Sample], penalties: Sequence[float], discount: float) -> list[list[float]]:
    """The formula, one token at a time."""
    returns: list[list[float]] = []
    for sample, penalty in zip(samples, penalties, strict=True):
        own = list(sample.turn_rewards)
        own[-1] += sample.rewards["whole"] - penalty
        returns.append([math.fsum(discount ** (n - k) * own[n] for n in range(k, len(own))) for k in range(len(own))])
    found = []
    for i, sample in enumerate(samples):
        others = [g for j, g in enumerate(returns) if j != i and samples[j].finish_reason == "stop"]
        values = [0.0] * len(sample.token_ids)
        for k, span in enumerate(sample.spans):
            at = min(k, max(map(len, others), default=0) - 1)
            came = [g[at] for g in others if len(g) > at >= 0]
            for token in range(span.start, span.end):
                teaches = sample.finish_reason == "stop" and came
                values[token] = returns[i][k] - math.fsum(came) / len(came) if teaches else 0.0
        found.append(values)
    return found


@pytest.mark.parametrize("discount", [0.0, 0.6, 1.0])
def test_advantages_are_those_of_the_formula(discount: float) -> None:
    rng = random.Random(0)
    settings = schema.Algorithm(advantages="turns", advantages_args={"discount": discount})
    algorithm = make_algorithm(settings)
    for _ in range(200):
        group = delivered([random_rollout(rng) for _ in range(rng.randint(1, 6))])
        penalties = np.array([rng.random() for _ in group.samples])
        judged = algorithm.advantages(group, penalties)
        expected = plain(group.samples, penalties.tolist(), discount)
        for values, formula in zip(judged.values, expected, strict=True):
            np.testing.assert_allclose(values, formula, atol=1e-12)


def test_of_rollouts_of_one_turn_they_are_the_rewards_less_the_others_mean() -> None:
    group = group_of(rewards=[1.0, 2.0, 4.0, 9.0], finished=[True, True, True, False])
    of_turns = make_algorithm(schema.Algorithm(advantages="turns")).advantages(group, np.zeros(4))
    of_rollouts = make_algorithm(schema.Algorithm()).advantages(group, np.zeros(4))
    for by_turn, by_rollout in zip(of_turns.values[:3], of_rollouts.values, strict=False):
        np.testing.assert_allclose(by_turn, by_rollout, atol=1e-12)
    np.testing.assert_allclose(of_turns.baselines[:3], of_rollouts.baselines[:3], atol=1e-12)


def test_a_turn_that_no_other_came_to_is_compared_with_the_last_that_one_of_them_came_to() -> None:
    group = delivered([rollout([1, 1, 1], [1, 10, 100]), rollout([1, 1], [2, 20]), rollout([1], [3])])
    values = make_algorithm(schema.Algorithm(advantages="turns")).advantages(group, np.zeros(3)).values
    assert [each.tolist() for each in values] == [
        [111 - (22 + 3) / 2, 0, 0, 110 - 20, 0, 0, 100 - 20],
        [22 - (111 + 3) / 2, 0, 0, 20 - 110],
        [3 - (111 + 22) / 2],
    ]


# A game known whole: the first move ends it or leads on to a second one; each move earns something.
FIRST, SECOND = torch.tensor([0.3, -0.4], dtype=torch.float64), torch.tensor([0.1, 0.5, -0.3], dtype=torch.float64)
PLAYS = ((0,), (1, 0), (1, 1), (1, 2))
EARNED = {(0,): [0.7], (1, 0): [-0.5, 2.0], (1, 1): [-0.5, 0.1], (1, 2): [-0.5, -1.0]}
NUM_SAMPLES = 3


def logprobs_of(play: Sequence[int], first: torch.Tensor, second: torch.Tensor) -> list[torch.Tensor]:
    policies = (first.log_softmax(0), second.log_softmax(0))
    return [policy[move] for policy, move in zip(policies, play, strict=False)]


def estimates(
    advantages: Callable[[ScoredGroup], Advantages],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Over all groups that there can be: how likely each is, and the gradient that it gives."""
    likely, gradients = [], []
    for plays in product(PLAYS, repeat=NUM_SAMPLES):
        first, second = FIRST.clone().requires_grad_(), SECOND.clone().requires_grad_()
        logprobs = [logprobs_of(play, first, second) for play in plays]
        group = ScoredGroup(
            rewards=np.array([sum(EARNED[play]) for play in plays]),
            may_teach=np.ones(NUM_SAMPLES, dtype=np.bool_),
            lengths=np.array([len(play) for play in plays]),
            finish_reasons=("stop",) * NUM_SAMPLES,
            masks=tuple(np.ones(len(play), dtype=np.bool_) for play in plays),
            rewards_by_source={},
            turns=tuple(tuple((k, k + 1) for k in range(len(play))) for play in plays),
            turn_rewards=tuple(np.array(EARNED[play]) for play in plays),
        )
        worth = [np.broadcast_to(a, len(play)) for a, play in zip(advantages(group), plays, strict=True)]
        terms = [
            a * p for each, of in zip(worth, logprobs, strict=True) for a, p in zip(each.tolist(), of, strict=True)
        ]
        objective = torch.stack(terms).sum() / NUM_SAMPLES
        found = torch.autograd.grad(objective, (first, second), allow_unused=True, materialize_grads=True)
        gradients.append(torch.cat(found).numpy())
        likely.append(math.exp(sum(float(p.detach()) for of in logprobs for p in of)))
    assert math.isclose(sum(likely), 1.0)
    return np.array(likely), np.array(gradients)


def exact_gradient() -> npt.NDArray[np.float64]:
    first, second = FIRST.clone().requires_grad_(), SECOND.clone().requires_grad_()
    worth = [torch.stack(logprobs_of(play, first, second)).sum().exp() * sum(EARNED[play]) for play in PLAYS]
    found: npt.NDArray[np.float64] = torch.cat(torch.autograd.grad(torch.stack(worth).sum(), (first, second))).numpy()
    return found


def test_in_expectation_the_gradient_is_that_of_the_expected_reward() -> None:
    for advantages in (turns, leave_one_out):
        likely, gradients = estimates(advantages)
        np.testing.assert_allclose(likely @ gradients, exact_gradient(), atol=1e-12)


def test_a_discount_asks_for_something_else() -> None:
    likely, gradients = estimates(lambda group: turns(group, discount=0.5))
    assert np.abs(likely @ gradients - exact_gradient()).max() > 0.05
