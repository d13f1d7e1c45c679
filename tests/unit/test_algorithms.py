"""Which samples are trained and with what advantage: numbers computed by hand."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from streamrl.config import schema
from streamrl.recipe.advantages import ScoredGroup, leave_one_out
from streamrl.recipe.algorithms import GroupAdvantages, make_algorithm
from streamrl.recipe.losses import Losses, TokenBatch
from streamrl.recipe.teaching import with_teacher_term
from tests.learner_cases import group_of


def scored(rewards: npt.NDArray[np.float64], may_teach: npt.NDArray[np.bool_]) -> ScoredGroup:
    return ScoredGroup(
        rewards=rewards,
        may_teach=may_teach,
        lengths=np.ones(len(rewards), dtype=np.int64),
        finish_reasons=("stop",) * len(rewards),
        masks=(np.ones(1, dtype=np.bool_),) * len(rewards),
        rewards_by_source={},
    )


def first_tokens(judged: GroupAdvantages) -> list[float]:
    """Of responses whose tokens are all worth the same."""
    assert all((values == values[0]).all() for values in judged.values)
    return [values[0] for values in judged.values]


def test_baselines_are_those_of_nemo_aligners_own_test() -> None:
    prompts = np.array(list("AABAABBB"))
    rewards = np.array([1, 0, 2, -3, 5, 7, -1, 0], dtype=np.float64)
    finished = np.array([1, 1, 1, 1, 1, 1, 1, 0], dtype=np.bool_)
    baselines = np.zeros(8)
    for prompt in "AB":
        group = prompts == prompt
        baselines[group] = rewards[group] - leave_one_out(scored(rewards[group], finished[group]))
    np.testing.assert_allclose(baselines, [2 / 3, 1, 3, 2, -2 / 3, 1 / 2, 9 / 2, 4], atol=1e-12)


def test_an_advantage_is_the_reward_less_the_kl_penalty_less_the_others_mean() -> None:
    algorithm = make_algorithm(schema.Algorithm())
    group = group_of(rewards=[1.0, 2.0, 4.0])
    advantages = algorithm.advantages(group, np.array([0.5, 0.0, 1.0]))
    np.testing.assert_allclose(first_tokens(advantages), [0.5 - 2.5, 2 - 1.75, 3 - 1.25])
    np.testing.assert_allclose(advantages.baselines, [2.5, 1.75, 1.25])


def test_a_source_that_applies_to_no_sample_of_a_group_is_nan_to_own_advantages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    algorithm = make_algorithm(schema.Algorithm(), {"right": 1.0, "environment": 1.0})
    seen: list[npt.NDArray[np.float64]] = []

    def by_name(group: ScoredGroup) -> npt.NDArray[np.float64]:
        seen.extend(group.rewards_by_source[name] for name in ("right", "environment.short"))
        with pytest.raises(KeyError):
            group.rewards_by_source["wrong"]
        return group.rewards

    monkeypatch.setattr(algorithm, "_advantages", by_name)
    algorithm.advantages(group_of(rewards=[1.0, 2.0]), np.zeros(2))
    assert [np.isnan(values).tolist() for values in seen] == [[True, True]] * 2


def test_a_sample_that_was_cut_off_teaches_nothing_and_is_nobodys_baseline() -> None:
    algorithm = make_algorithm(schema.Algorithm())
    group = group_of(rewards=[1.0, 3.0, 100.0], finished=[True, True, False])
    advantages = algorithm.advantages(group, np.zeros(3))
    np.testing.assert_allclose(first_tokens(advantages)[:2], [-2.0, 2.0])
    selection = algorithm.select(group)
    assert selection.trained.tolist() == [True, True, False]
    assert selection.counted.tolist() == [True, True, True]


def test_unfinished_samples_teach_when_the_setting_says_so() -> None:
    algorithm = make_algorithm(schema.Algorithm(mask_unfinished=False))
    group = group_of(rewards=[1.0, 3.0], finished=[True, False])
    assert algorithm.select(group).trained.all()
    np.testing.assert_allclose(first_tokens(algorithm.advantages(group, np.zeros(2))), [-2.0, 2.0])


@pytest.mark.parametrize("finished", [[True, False, False], [False, False, False]])
def test_fewer_than_two_usable_samples_have_no_advantage(finished: list[bool]) -> None:
    algorithm = make_algorithm(schema.Algorithm())
    group = group_of(rewards=[1.0, 3.0, 5.0], finished=finished)
    assert first_tokens(algorithm.advantages(group, np.zeros(3))) == [0, 0, 0]
    assert algorithm.drop_reason(group.header) == "too_few_finished"


def test_equal_rewards_are_dropped_unless_the_setting_keeps_them() -> None:
    header = group_of(rewards=[0.5, 0.5, 9.0], finished=[True, True, False]).header
    assert make_algorithm(schema.Algorithm()).drop_reason(header) == "zero_variance"
    assert make_algorithm(schema.Algorithm(drop_zero_variance=False)).drop_reason(header) is None


@pytest.mark.parametrize("scale", [1.0, -1e6, 1e307])
def test_sums_of_the_same_parts_are_equal_in_whatever_order_they_were_added(scale: float) -> None:
    algorithm = make_algorithm(schema.Algorithm())
    assert 0.1 + 0.2 != 0.3
    rounded = group_of(rewards=[(0.1 + 0.2) * scale, 0.3 * scale, 0.3 * scale]).header
    assert algorithm.drop_reason(rounded) == "zero_variance"
    assert algorithm.drop_reason(group_of(rewards=[(0.1 + 0.2) - 0.3, 0.0]).header) == "zero_variance"
    assert algorithm.drop_reason(group_of(rewards=[0.3 * scale, 0.3 * scale, 0.300001 * scale]).header) is None


def test_scaling_by_the_standard_deviation_is_of_usable_samples_only() -> None:
    algorithm = make_algorithm(schema.Algorithm(scale_by_std=True))
    group = group_of(rewards=[0.0, 2.0, 50.0], finished=[True, True, False])
    values = first_tokens(algorithm.advantages(group, np.zeros(3)))
    np.testing.assert_allclose(values[:2], np.array([-2.0, 2.0]) / np.sqrt(2), rtol=1e-5)


def test_the_penalty_is_the_absolute_k1_of_the_sampled_tokens() -> None:
    behaviour, reference = torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -1.0])
    absolute = make_algorithm(schema.Algorithm(kl=schema.Kl(coefficient=0.1)))
    signed = make_algorithm(schema.Algorithm(kl=schema.Kl(coefficient=0.1, absolute=False)))
    torch.testing.assert_close(absolute.penalty(behaviour, reference), torch.tensor([0.1, 0.2]))
    torch.testing.assert_close(signed.penalty(behaviour, reference), torch.tensor([0.1, -0.2]))


@pytest.mark.parametrize("kl", [schema.Kl(placement="none"), schema.Kl(coefficient=0.0)])
def test_without_kl_no_reference_is_asked_for(kl: schema.Kl) -> None:
    assert not make_algorithm(schema.Algorithm(kl=kl)).needs_reference


def test_without_advantages_only_a_kl_in_the_loss_asks_for_a_reference() -> None:
    in_loss = schema.Kl(placement="loss", estimator="k3")
    assert not make_algorithm(schema.Algorithm(advantages="none")).needs_reference
    assert make_algorithm(schema.Algorithm(advantages="none", kl=in_loss)).needs_reference


def follows_ratio(batch: TokenBatch) -> Losses:
    return -batch.logprobs, {"weight": (batch.logprobs - batch.behaviour_logprobs).exp()}


def test_nothing_is_taught_through_the_weight_of_a_loss() -> None:
    settings = schema.Algorithm(
        loss=f"{__name__}:follows_ratio", kl=schema.Kl(placement="loss", estimator="k2", coefficient=0.5)
    )
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    behaviour, reference, teacher = (logprobs.detach() + shift for shift in (0.3, 0.5, -0.4))
    batch = TokenBatch(
        logprobs=logprobs,
        behaviour_logprobs=behaviour,
        proximal_logprobs=logprobs.detach(),
        reference_logprobs=reference,
        teacher_logprobs=teacher,
        advantages=torch.ones(2),
        staleness=torch.zeros(2, dtype=torch.int64),
        sample=torch.zeros(2, dtype=torch.int64),
        num_samples=1,
    )
    values, _ = with_teacher_term(*make_algorithm(settings).loss(batch), batch, weight=0.7)
    values.sum().backward()
    ratio = np.exp(-0.3)  # -1, and the two pulls, of which each is weight times difference
    np.testing.assert_allclose(logprobs.grad, -1 + ratio * (0.5 * -0.5 + 0.7 * 0.4) * np.ones(2))


def test_rejection_sampling_trains_the_best_and_the_earlier_of_equals() -> None:
    algorithm = make_algorithm(schema.Algorithm(name="rejection_sampling", top_n=2))
    group = group_of(rewards=[1.0, 3.0, 3.0, 3.0])
    selection = algorithm.select(group)
    assert selection.trained.tolist() == [False, True, True, False]
    assert selection.counted.tolist() == selection.trained.tolist()
    assert first_tokens(algorithm.advantages(group, np.zeros(4))) == [1.0] * 4
    assert algorithm.drop_reason(group.header) is None
    assert not algorithm.needs_reference


def test_rejection_sampling_has_no_winner_among_unfinished_samples() -> None:
    algorithm = make_algorithm(schema.Algorithm(name="rejection_sampling", top_n=2))
    group = group_of(rewards=[1.0, 9.0, 9.0], finished=[True, False, False])
    assert algorithm.select(group).trained.tolist() == [True, False, False]
    nobody = group_of(rewards=[1.0, 9.0], finished=[False, False])
    assert algorithm.drop_reason(nobody.header) == "too_few_finished"
    assert not algorithm.select(nobody).trained.any()
