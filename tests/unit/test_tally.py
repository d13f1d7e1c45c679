"""A step's metrics against numbers computed by hand."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from streamrl.learner.groups.fetch import mask_before
from streamrl.learner.metrics.tally import Tally
from streamrl.learner.process.ranks import World
from streamrl.protocol.wire.sample import Sample, Span
from streamrl.recipe.losses import TokenBatch
from streamrl.telemetry.metrics import is_metric
from streamrl.versions import make_version
from streamrl.workers.engines.base import Generated
from streamrl.workers.sessions.trace import Trace
from tests.helpers import make_group, make_sample, make_ticket
from tests.learner_cases import group_of

ALONE = World(rank=0, size=1, device=torch.device("cpu"))


class Rank:
    """One of several ranks whose collectives meet at a barrier, each on its own thread."""

    def __init__(self, number: int, told: list[Any], barrier: threading.Barrier) -> None:
        self._number, self._told, self._barrier = number, told, barrier

    def _exchange(self, mine: Any) -> list[Any]:
        self._told[self._number] = mine
        self._barrier.wait(timeout=240)
        told = list(self._told)
        self._barrier.wait(timeout=240)
        return told

    gather_bytes = _exchange
    reports_samples = True

    def total(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.sum(self._exchange(values), axis=0)

    def largest(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.max(self._exchange(values), axis=0)


def metrics_over_ranks(*tallies: Tally) -> list[dict[str, float]]:
    told: list[Any] = [None] * len(tallies)
    barrier = threading.Barrier(len(tallies))
    with ThreadPoolExecutor(len(tallies)) as pool:
        ranks = [Rank(number, told, barrier) for number in range(len(tallies))]
        return list(pool.map(lambda tally, rank: tally.metrics(rank), tallies, ranks))


def test_metrics_of_a_loss_are_means_over_all_ranks_also_where_one_had_no_tokens_and_another_other_names() -> None:
    first, second, idle = make_tally(), make_tally(), make_tally()
    two = tokens_of([-1.0, -1.0], [-1.0, -1.0])
    first.add_tokens(two, torch.zeros(2), {"own": torch.tensor([1.0, 2.0]), "of_some": (6.0, 3)}, fresh=None)
    first.add_tokens(two, torch.zeros(2), {"own": torch.tensor([3.0, 4.0])}, fresh=None)
    second.add_tokens(tokens_of([-1.0], [-1.0]), torch.zeros(1), {"own": torch.tensor([10.0]), "z": (0, 0)}, fresh=None)
    idle.add_tokens(tokens_of([], []), torch.zeros(0), {"own": torch.zeros(0)}, fresh=None)

    found = metrics_over_ranks(first, second, idle)

    assert found[0] == found[1] == found[2]
    assert {name: value for name, value in found[0].items() if name.startswith("loss/")} == {
        "loss/own": pytest.approx((1 + 2 + 3 + 4 + 10) / 5),
        "loss/of_some": 2.0,
    }
    assert all(is_metric(name) for name in found[0])


def test_a_loss_without_bounds_clips_and_masks_nothing() -> None:
    tally = make_tally()
    tally.add_tokens(tokens_of([-1.0], [-1.0]), torch.zeros(1), {}, fresh=None)
    metrics = tally.metrics(ALONE)
    assert (metrics["policy/clipped_fraction"], metrics["policy/masked_fraction"]) == (0, 0)


def make_tally(step: int = 5) -> Tally:
    return Tally(sources=("made_up",), step=step, is_dead=lambda version, _step: version < make_version(2, 0))


def test_rewards_lengths_and_lag_are_means_over_samples_and_tokens() -> None:
    tally = make_tally()
    baselines = np.array([1.0, 2.0])
    fresh = group_of(rewards=[1, 3], responses=[[3], [3, 4, 5]], step=4, version=make_version(2, 1))
    stale = group_of(rewards=[2, 2], finished=[True, False], responses=[[3, 4], [5, 6]], step=1)
    tally.add_group(fresh, baselines, np.array([0.0, 0.5]))
    tally.add_group(stale, baselines, np.zeros(2))
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


def test_the_lag_is_that_of_the_tokens_that_are_trained() -> None:
    old, new = make_version(1, 1), make_version(1, 2)
    sample = make_sample(num_tokens=4)._replace(spans=(Span(old, 0, 0, 3), Span(new, 3, 3, 4)))
    group, num_masked = mask_before(make_group(make_ticket(0), samples=(sample,)), 2)
    assert num_masked == 3
    tally = make_tally()
    tally.add_group(group, np.zeros(1), np.zeros(1))
    metrics = tally.metrics(ALONE)
    assert (metrics["lag/mean"], metrics["lag/min"], metrics["lag/max"]) == (2, 2, 2)


def test_a_group_has_no_variance_where_its_rewards_differ_by_rounding_only() -> None:
    tally = make_tally()
    for rewards in ([0.1 + 0.2, 0.3], [0.1 + 0.2, 0.4]):
        tally.add_group(group_of(rewards=rewards), np.zeros(2), np.zeros(2))
    assert tally.metrics(ALONE)["train_rollouts/zero_variance_groups"] == 0.5


def test_steps_of_a_sample_are_counted_between_its_oldest_and_its_newest_weights() -> None:
    """A trace has its rows one after the other: an agent that returns to an earlier conversation ends in old tokens."""
    trace = Trace(np.array([5, 6, 7], dtype=np.int32))

    def turn(context: Sequence[int], token: int, step: int) -> None:
        made = Generated(
            token_ids=np.array([token], dtype=np.int32),
            logprobs=np.zeros(1, dtype=np.float32),
            spans=(Span(version=make_version(2, step), step=step, start=0, end=1),),
            finish_reason="stop",
            text="",
        )
        trace.take(np.array(context, dtype=np.int32), made)

    turn([5, 6, 7], 20, 10)
    turn([5, 6, 7, 40], 30, 10)  # another agent
    turn([5, 6, 7, 20, 21], 22, 12)  # the first goes on
    sample = trace.played("stop", 1.0).sample
    assert [span.step for span in sample.spans] == [10, 12, 10]

    tally = make_tally(step=13)
    scored = sample._replace(reward=1.0, rewards={"made_up": 1.0})
    tally.add_group(make_group(make_ticket(0), samples=(scored,)), np.zeros(1), np.zeros(1))
    metrics = tally.metrics(ALONE)
    assert (metrics["lag/in_flight"], metrics["lag/in_queue"]) == (2, 1)


def test_a_source_that_does_not_apply_to_a_sample_has_its_mean_over_the_others() -> None:
    tally = Tally(sources=("math", "code", "poems"), step=5, is_dead=lambda version, step: False)
    both = make_sample(reward=3.0, rewards={"math": 1.0, "code": 2.0})
    one = make_sample(reward=4.0, rewards={"code": 4.0})
    tally.add_group(make_group(make_ticket(0), samples=(both, one)), np.zeros(2), np.zeros(2))
    metrics = tally.metrics(ALONE)
    found = {name: metrics.get(f"train_rollouts/rewards/{name}") for name in ("math", "code", "poems")}
    assert found == {"math": 1.0, "code": 3.0, "poems": None}


def test_rewards_that_an_agent_names_are_means_over_all_ranks_also_where_one_has_seen_no_such_name() -> None:
    named, other, idle = (
        Tally(sources=("math", "environment"), step=5, is_dead=lambda version, step: False) for _ in range(3)
    )
    right = make_sample(reward=1.5, rewards={"environment": 1.5, "environment.right": 1.0, "environment.short": 0.5})
    wrong = make_sample(reward=0.0, rewards={"environment": 0.0, "environment.right": 0.0})
    foreign = make_sample(reward=2.0, rewards={"math": 2.0, "elsewhere": 1.0, "elsewhere.right": 1.0})
    named.add_group(make_group(make_ticket(0), samples=(right, wrong)), np.zeros(2), np.zeros(2))
    other.add_group(make_group(make_ticket(1), samples=(right, foreign)), np.zeros(2), np.zeros(2))

    found = metrics_over_ranks(named, other, idle)

    assert found[0] == found[1] == found[2]
    by_source = {name: value for name, value in found[0].items() if name.startswith("train_rollouts/rewards/")}
    assert by_source == {
        "train_rollouts/rewards/math": 2.0,
        "train_rollouts/rewards/environment": 1.0,
        "train_rollouts/rewards/environment.right": pytest.approx(2 / 3),
        "train_rollouts/rewards/environment.short": 0.5,
    }
    deviation = found[0]["train_rollouts/rewards_std_by_source/environment.right"]
    assert deviation == pytest.approx((2 / 9) ** 0.5)


def tokens_of(behaviour: Sequence[float], logprobs: Sequence[float]) -> TokenBatch:
    at, nothing = torch.tensor(logprobs, dtype=torch.float64), torch.zeros(len(logprobs), dtype=torch.int64)
    return TokenBatch(
        logprobs=at,
        behaviour_logprobs=torch.tensor(behaviour, dtype=torch.float64),
        proximal_logprobs=at,
        advantages=at,
        staleness=nothing,
        sample=nothing,
        num_samples=1,
    )


def test_ratios_give_their_mean_and_the_effective_sample_size() -> None:
    tally = make_tally()
    batch = tokens_of([-1.0, -1.0, -1.0 - math.log(4)], [-1.0, -1.0, -1.0])
    own = {"clipped": torch.tensor([False, False, True]), "masked": torch.tensor([True, False, False])}
    tally.add_tokens(batch, torch.tensor([0.5, 0.5, 2.0]), own, fresh=None)
    tally.add_tokens(tokens_of([], []), torch.zeros(0), {}, fresh=None)
    metrics = tally.metrics(ALONE)
    assert metrics["policy/ratio_mean"] == pytest.approx(2)
    assert metrics["policy/ratio_max"] == pytest.approx(4)
    assert metrics["policy/ess"] == pytest.approx(6**2 / 18 / 3)
    assert metrics["policy/clipped_fraction"] == pytest.approx(1 / 3)
    assert metrics["policy/mismatch_kl"] == pytest.approx(-math.log(4) / 3)
    assert metrics["policy/masked_fraction"] == pytest.approx(1 / 3)
    assert metrics["policy/token_mult_prob_error"] == pytest.approx((2 + 4) / 3)
    assert metrics["policy/entropy"] == pytest.approx(1.0)


def fresh_metrics(*passes: tuple[list[float], list[float], list[bool] | None]) -> dict[str, float]:
    """Of passes with their log mu, log pi, and which tokens are fresh."""
    tally = make_tally()
    for behaviour, logprobs, fresh in passes:
        told = None if fresh is None else torch.tensor(fresh)
        tally.add_tokens(tokens_of(behaviour, logprobs), torch.ones(len(logprobs)), {}, fresh=told)
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
    ratios = [0.1, 0.5, 1.0, 1.0, 1.2, 5.0, 5.1, 4e8]
    batch = tokens_of([-math.log(ratio) for ratio in ratios], [0.0] * 8)
    tally.add_tokens(batch, torch.zeros(8), {}, fresh=None)
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
