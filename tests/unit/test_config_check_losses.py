"""What a configuration may not ask of each loss, and of rejection sampling."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config_world import problems


@pytest.mark.parametrize(
    ("loss", "override", "starts", "names"),
    [
        (
            "icepop",
            "loss_args.clamp=3",
            "algorithm.loss_args.clamp = 3: ",
            "takes low, high, clip_low and clip_high; remove it (used by truncated, tis, sequence_mask, decoupled)",
        ),
        ("ppo", "loss_args={low: 1.1, high: 1.2}", "algorithm.loss_args.low = 1.1: ", "from 0 to 1"),
        ("ppo", "loss_args={low: 0.5, high: 0.9}", "algorithm.loss_args.high = 0.9: ", "at least 1"),
        ("none", "reinforce_epochs=2", "algorithm.reinforce_epochs = 2: ", "choose another loss"),
        ("gspo", "advantages=turns", "algorithm.advantages = 'turns': ", "or leave_one_out"),
        ("ppo", "advantages_args={discount: 1}", "algorithm.advantages_args.discount = 1: ", "(used by turns, tokens)"),
        ("gspo", "discount_factor=0.9", "algorithm.discount_factor = 0.9: ", "must be 1"),
    ],
)
def test_each_loss_refuses_what_it_would_not_use(good: Path, loss: str, override: str, starts: str, names: str) -> None:
    [problem] = problems(good, f"algorithm.loss={loss}", f"algorithm.{override}")

    assert problem.startswith(starts)
    assert names in problem


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("loss=ppo", "loss"),
        ("loss_args.clamp=3", "loss_args"),
        ("advantages=mine:own", "advantages"),
        ("advantages_args.x=1", "advantages_args"),
        ("discount_factor=0.9", "discount_factor"),
        ("scale_by_std=true", "scale_by_std"),
        ("normalize_batch=true", "normalize_batch"),
    ],
)
def test_rejection_sampling_refuses_settings_of_losses_and_advantages(good: Path, override: str, key: str) -> None:
    [problem] = problems(good, "algorithm.name=rejection_sampling", f"algorithm.{override}")

    assert problem.startswith(f"algorithm.{key} = ")
    assert "algorithm.name=reinforce" in problem


@pytest.mark.parametrize("kl", ["{coefficient: 0.5}", "{placement: loss, estimator: k3}", "{reduction: sum}"])
def test_rejection_sampling_refuses_a_kl_that_it_would_ignore(good: Path, kl: str) -> None:
    [problem] = problems(good, "algorithm.name=rejection_sampling", f"algorithm.kl={kl}")

    assert problem.startswith("algorithm.kl.placement = ")
    assert "algorithm.name=reinforce" in problem


def test_rejection_sampling_has_no_more_winners_than_samples(good: Path) -> None:
    [problem] = problems(good, "algorithm.name=rejection_sampling", "algorithm.top_n=5")

    assert problem == "algorithm.top_n = 5: must not exceed sampling.num_samples = 4"
