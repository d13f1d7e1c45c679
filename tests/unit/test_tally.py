"""A step's metrics against numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from learner.algorithms.base import Advantages, TokenLosses
from learner.distributed import World
from learner.metrics.tally import Tally
from learner.policy.logprobs import LogProbs
from streamrl.telemetry.metrics import is_metric
from streamrl.versions import make_version
from streamrl.wire.group import Sample, Span
from tests.helpers import make_sample
from tests.learner_cases import group_of

ALONE = World(rank=0, size=1, device=torch.device("cpu"))


def make_tally(step: int = 5) -> Tally:
    return Tally(sources=("made_up",), step=step, is_dead=lambda version, _step: version < make_version(2, 0))


def test_rewards_lengths_and_lag_are_means_over_samples_and_tokens() -> None:
    tally = make_tally()
    judged = Advantages(values=np.zeros(2), baselines=np.array([1.0, 2.0]))
    fresh = group_of(rewards=[1, 3], responses=[[3], [3, 4, 5]], step=4, version=make_version(2, 1))
    stale = group_of(rewards=[2, 2], finished=[True, False], responses=[[3, 4], [5, 6]], step=1)
    tally.add_group(fresh, judged, np.array([0.0, 0.5]))
    tally.add_group(stale, judged, np.zeros(2))
    metrics = tally.metrics(ALONE)
    expected = {
        "train_rollouts/rollout_size": 4,
        "train_rollouts/rewards": 2,
        "train_rollouts/rewards/made_up": 2,
        "train_rollouts/rewards_std": 0.5**0.5,
        "train_rollouts/rewards_with_kl": 2 - 0.125,
        "train_rollouts/baseline": 1.5,
        "train_rollouts/response_lengths": 2,
        "train_rollouts/generation_length": 5,
        "train_rollouts/fraction_of_samples_properly_ended": 0.75,
        "train_rollouts/zero_variance_groups": 0.5,
        "lag/min": 1,
        "lag/max": 4,
        "lag/mean": (4 * 1 + 4 * 4) / 8,
        "lag/in_queue": 2.5,
        "lag/dead_lineage_tokens": 4,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_ratios_give_their_mean_and_the_effective_sample_size() -> None:
    tally = make_tally()
    logmu, logpi = torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([-1.0, -1.0, -1.0])
    ratio = torch.tensor([1.0, 1.0, 4.0])
    losses = TokenLosses(
        values=torch.zeros(3),
        ratio=ratio,
        weight=ratio.clamp(max=2.0),
        clipped=ratio > 2.0,
        masked=torch.tensor([True, False, False]),
    )
    tally.add_tokens(LogProbs(logp=logpi, entropy=torch.tensor([0.5, 0.5, 2.0])), logmu, losses, fresh=None)
    tally.add_tokens(LogProbs(logp=logpi[:0], entropy=logpi[:0]), logmu[:0], losses, fresh=None)
    metrics = tally.metrics(ALONE)
    assert metrics["policy/ratio_mean"] == pytest.approx(2)
    assert metrics["policy/ratio_max"] == 4
    assert metrics["policy/ess"] == pytest.approx(6**2 / 18 / 3)
    assert metrics["policy/clipped_fraction"] == pytest.approx(1 / 3)
    assert metrics["policy/mismatch_kl"] == pytest.approx(-1 / 3)
    assert metrics["policy/masked_fraction"] == pytest.approx(1 / 3)
    assert metrics["policy/token_mult_prob_error"] == pytest.approx((2 + np.e) / 3)
    assert metrics["policy/entropy"] == pytest.approx(1.0)


def fresh_metrics(*passes: tuple[list[float], list[float], list[bool] | None]) -> dict[str, float]:
    """Of passes with their log mu, log pi, and which tokens are fresh."""
    tally = make_tally()
    for logmu, logpi, fresh in passes:
        ones, no = torch.ones(len(logmu)), torch.zeros(len(logmu), dtype=torch.bool)
        losses = TokenLosses(values=ones, ratio=ones, weight=ones, clipped=no, masked=no)
        out = LogProbs(logp=torch.tensor(logpi), entropy=ones)
        tally.add_tokens(out, torch.tensor(logmu), losses, fresh=None if fresh is None else torch.tensor(fresh))
    return tally.metrics(ALONE)


def test_engine_and_learner_are_compared_on_fresh_tokens_before_the_batch_changes_the_weights() -> None:
    metrics = fresh_metrics(
        ([-1.0, -2.0, -3.0], [-1.5, -1.9, -9.0], [True, True, False]),
        ([-1.0, -2.0, -3.0], [-7.0, -7.0, -7.0], None),
    )
    assert metrics["policy/fresh_tokens"] == 2
    assert metrics["policy/fresh_mismatch"] == pytest.approx((0.5 + 0.1) / 2)
    k3 = (np.exp(-0.5) - 1 + 0.5 + np.exp(0.1) - 1 - 0.1) / 2
    assert metrics["policy/fresh_mismatch_kl"] == pytest.approx(k3, rel=1e-5)
    assert all(is_metric(name) for name in metrics)


def test_without_fresh_tokens_nothing_is_said_of_them() -> None:
    metrics = fresh_metrics(([-1.0, -2.0], [-1.5, -1.9], [False, False]))
    assert metrics["policy/fresh_tokens"] == 0
    assert not {"policy/fresh_mismatch", "policy/fresh_mismatch_kl"} & set(metrics)


def test_a_token_that_the_learner_takes_for_impossible_does_not_hide_the_others() -> None:
    metrics = fresh_metrics(([-1.0, -1.0], [-1e30, -1.5], [False, True]))
    assert metrics["policy/fresh_mismatch"] == pytest.approx(0.5)


def test_fresh_is_what_the_weights_of_this_step_and_lineage_made_wholly() -> None:
    tally = make_tally(step=5)
    alive, dead = make_version(2, 1), make_version(1, 9)

    def sample(*spans: tuple[int, int]) -> Sample:
        made = [Span(version=version, step=step, start=at, end=at + 1) for at, (version, step) in enumerate(spans)]
        return make_sample(num_tokens=len(spans))._replace(spans=tuple(made))

    assert tally.is_fresh(sample((alive, 5), (alive, 5)))
    assert not tally.is_fresh(sample((alive, 4)))
    assert not tally.is_fresh(sample((alive, 4), (alive, 5)))
    assert not tally.is_fresh(sample((dead, 5)))


def test_the_histogram_of_ratios_counts_up_to_each_edge() -> None:
    tally = make_tally()
    ratio = torch.tensor([0.1, 0.5, 1.0, 1.0, 1.2, 5.0, 5.1, 4e8])
    nothing = torch.zeros(8)
    losses = TokenLosses(values=nothing, ratio=ratio, weight=ratio, clipped=nothing.bool(), masked=nothing.bool())
    tally.add_tokens(LogProbs(logp=nothing, entropy=nothing), nothing, losses, fresh=None)
    mark = "policy/ratio_histogram/"
    shares = {name.removeprefix(mark): s for name, s in tally.metrics(ALONE).items() if name.startswith(mark)}
    assert all(is_metric(mark + edge) for edge in shares)
    assert {edge: share * 8 for edge, share in shares.items() if share} == {
        "0.5": 2,
        "1.01": 2,
        "1.25": 1,
        "5": 1,
        "inf": 2,
    }


def test_each_pass_counts_its_tokens_and_its_work() -> None:
    tally = make_tally()
    for _ in range(2):
        tally.add_work(num_tokens=10, flops=3e12)
    metrics = tally.metrics(ALONE)
    assert (metrics["throughput/tokens"], metrics["throughput/tflop"]) == (20, 6)


def test_a_rank_without_groups_adds_nothing_and_fails_nothing() -> None:
    assert make_tally().metrics(ALONE)["train_rollouts/rollout_size"] == 0
