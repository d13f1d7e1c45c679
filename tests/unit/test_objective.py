"""The gradient of a step against the objective written down plainly, in float64, one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.autograd.graph import saved_tensors_hooks

from streamrl.config import schema
from streamrl.learner.loading.load import _checkpoint, load_policy
from streamrl.learner.metrics.tally import Tally
from streamrl.learner.model.policy import Policy
from streamrl.learner.objective.gradients import Gradients
from streamrl.learner.packing.micro_batches import MicroBatch
from streamrl.learner.process.ranks import World
from streamrl.protocol.wire.group import Group
from streamrl.recipe.algorithms import make_algorithm
from streamrl.recipe.losses import k1, k2, k3
from tests.learner_cases import group_of, learner_config, random_groups
from tests.plain_objective import plain_logprobs, plain_loss, policy64
from tests.tiny_models import make_model

# The model's own norms and rotations round to fp32, whatever its dtype.
_LOSS, _GRADIENT = 1e-6, 1e-6
ALONE = World(rank=0, size=1, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), hidden=32)


@pytest.fixture(scope="module")
def reference_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("reference"), hidden=32, seed=1)


def make_gradients(
    policy: Policy, reference: Policy, config: schema.Config, *, beat: Callable[[], None] = lambda: None
) -> Gradients:
    def ask(batch: MicroBatch) -> torch.Tensor:
        with torch.no_grad():
            return reference(batch).logp

    return Gradients(
        policy=policy,
        reference=ask,
        algorithm=make_algorithm(config.algorithm),
        config=config,
        world=ALONE,
        beat=beat,
    )


def accumulate(policy: Policy, reference: Policy, groups: Sequence[Group], config: schema.Config) -> float:
    gradients = make_gradients(policy, reference, config)
    tally = Tally(sources=tuple(config.rewards), step=0, is_dead=lambda _version, _step: False)
    return gradients.accumulate(gradients.prepare(groups, tally), tally)


ALGORITHMS = {
    "default": {},
    "kl in the loss, k2": {"kl": schema.Kl(placement="loss", estimator="k2", coefficient=0.3)},
    "kl in the loss, k3": {"kl": schema.Kl(placement="loss", estimator="k3", coefficient=0.3)},
    "strong kl in the reward": {"kl": schema.Kl(coefficient=0.7)},
    "signed kl in the reward": {"kl": schema.Kl(coefficient=0.7, absolute=False)},
    "no kl": {"kl": schema.Kl(placement="none")},
    "beta 0": {"kl": schema.Kl(coefficient=0.0)},
    "beta 0 in the loss": {"kl": schema.Kl(placement="loss", estimator="k3", coefficient=0.0)},
    "unfinished teach too": {"mask_unfinished": False},
    "uncorrected": {"loss": "none"},
    "tight clamp": {"loss_args": {"clamp": 0.3}},
    "token mean": {"loss_mean": "token"},
    "sum over tokens": {"loss_mean": "sum"},
    "sum over tokens, by the longest": {"loss_mean": "max_tokens"},
    "kl in the loss, not weighed": {"kl": schema.Kl(placement="loss", estimator="k3", coefficient=0.3, weighted=False)},
    "kl in the reward, summed": {"kl": schema.Kl(coefficient=0.1, reduction="sum")},
    "less the group's mean": {"advantages": "group_mean"},
    "tis": {"loss": "tis"},
    "icepop": {"loss": "icepop"},
    "sequence mask": {"loss": "sequence_mask", "loss_args": {"low": 0.2, "high": 4.0}},
    "sequence mask as usual": {"loss": "sequence_mask"},
    "gspo": {"loss": "gspo", "loss_args": {"low": 0.5, "high": 2.0}},
    "gspo as usual, token mean": {"loss": "gspo", "loss_mean": "token"},
    "ppo": {"loss": "ppo"},
    "ppo, token mean, kl in the loss": {
        "loss": "ppo",
        "loss_mean": "token",
        "kl": schema.Kl(placement="loss", estimator="k3", coefficient=0.3),
    },
    "decoupled": {"loss": "decoupled"},
    "discounted": {"discount_factor": 0.7},
    "scaled by std": {"scale_by_std": True},
    "normalized over the batch": {"normalize_batch": True},
    "scaled, normalized, discounted": {"scale_by_std": True, "normalize_batch": True, "discount_factor": 0.9},
}
RS: dict[str, Any] = {"name": "rejection_sampling"}


@pytest.mark.parametrize("settings", ALGORITHMS.values(), ids=ALGORITHMS.keys())
def test_gradients_equal_the_objective_written_down_plainly(
    model_folder: Path, reference_folder: Path, settings: dict[str, Any]
) -> None:
    groups = random_groups(5)
    config = learner_config(model_folder, algorithm=schema.Algorithm(**settings))
    policy, reference = policy64(model_folder), policy64(reference_folder)
    loss = accumulate(policy, reference, groups, config)
    ours = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    truth, with_gradient = plain_loss(policy, reference, groups, config.algorithm)
    with_gradient.backward()
    assert loss == pytest.approx(truth, abs=_LOSS)
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, atol=_GRADIENT, rtol=0)


@pytest.mark.parametrize("max_tokens", [10_000, 40], ids=["one micro-batch", "many"])
def test_rejection_sampling_is_supervised_training_on_the_winners_and_on_no_padding(
    model_folder: Path, max_tokens: int
) -> None:
    groups = random_groups(4)
    training = schema.Training(micro_batch_tokens=max_tokens)
    config = learner_config(model_folder, algorithm=schema.Algorithm(**RS), training=training)
    policy = policy64(model_folder)
    gradients = make_gradients(policy, policy, config)
    tally = Tally(sources=tuple(config.rewards), step=0, is_dead=lambda _version, _step: False)
    batch = gradients.prepare(groups, tally)
    assert any((micro_batch.position_ids[:, -1] == 0).any() for micro_batch in batch.micro_batches), "rows are padded"
    loss = gradients.accumulate(batch, tally)
    finished = [[s for s in g.samples if s.finish_reason == "stop"] for g in groups]
    winners = [(g, max(ended, key=lambda s: s.reward)) for g, ended in zip(groups, finished, strict=True) if ended]
    terms = [-plain_logprobs(policy, group, winner.token_ids.tolist()).mean() for group, winner in winners]
    truth = torch.stack(terms).mean()
    assert loss == pytest.approx(float(truth.detach()), abs=_LOSS)
    ours = {name: p.grad.clone() for name, p in policy.named_parameters()}
    policy.zero_grad()
    truth.backward()
    torch.testing.assert_close(ours, {name: p.grad for name, p in policy.named_parameters()}, atol=_GRADIENT, rtol=0)


@pytest.mark.parametrize("settings", [*ALGORITHMS.values(), RS], ids=[*ALGORITHMS, "rejection sampling"])
def test_micro_batches_and_the_order_of_groups_do_not_change_the_gradient(
    model_folder: Path, reference_folder: Path, settings: dict[str, Any]
) -> None:
    groups = random_groups(6, seed=3)
    gradients: list[dict[str, torch.Tensor]] = []
    for max_tokens, order in ((10_000, 1), (10_000, -1), (60, 1), (1, 1)):
        config = learner_config(
            model_folder,
            algorithm=schema.Algorithm(**settings),
            training=schema.Training(micro_batch_tokens=max_tokens),
        )
        policy = policy64(model_folder)
        accumulate(policy, policy64(reference_folder), groups[::order], config)
        gradients.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], atol=_GRADIENT, rtol=0)


@pytest.mark.parametrize("settings", [*ALGORITHMS.values(), RS], ids=[*ALGORITHMS, "rejection sampling"])
def test_empty_and_unfinished_responses_and_lone_survivors_are_finite(
    model_folder: Path, settings: dict[str, Any]
) -> None:
    groups = [
        group_of(rewards=[1, 2], responses=[[], [8, 9]]),
        group_of(rewards=[1, 2], responses=[[], []], ticket=1),
        group_of(rewards=[1, 2], finished=[False, False], ticket=2),
        group_of(rewards=[1, 2], finished=[True, False], ticket=3),
        group_of(rewards=[1], ticket=4),
    ]
    for batch in (groups, groups[1:3], []):
        policy = policy64(model_folder)
        config = learner_config(model_folder, algorithm=schema.Algorithm(**settings))
        assert np.isfinite(accumulate(policy, policy64(model_folder), batch, config))
        gradients = [p.grad for p in policy.parameters() if p.grad is not None]
        assert all(torch.isfinite(g).all() for g in gradients)


def test_each_pass_of_the_reference_shows_that_the_step_gets_on(model_folder: Path) -> None:
    config = learner_config(model_folder, training=schema.Training(micro_batch_tokens=60))
    policy, beats = policy64(model_folder), list[int]()
    gradients = make_gradients(policy, policy, config, beat=lambda: beats.append(1))
    tally = Tally(sources=tuple(config.rewards), step=0, is_dead=lambda _version, _step: False)

    batch = gradients.prepare(random_groups(6), tally)

    assert len(beats) == len(batch.micro_batches) > 2


def test_kl_estimators_by_hand() -> None:
    logp, logref = torch.tensor([-1.0]), torch.tensor([-3.0])
    assert float(k1(logp, logref)) == 2.0
    assert float(k2(logp, logref)) == 2.0
    assert float(k3(logp, logref)) == pytest.approx(np.exp(-2) - 1 + 2)


def test_a_token_on_which_policy_and_reference_are_worlds_apart_has_a_finite_kl_and_gradient() -> None:
    logp = torch.tensor([-200.0, -1.0], requires_grad=True)
    kl = k3(logp, torch.tensor([-0.1, -3.0]))
    kl.sum().backward()
    assert kl.isfinite().all()
    assert logp.grad is not None
    assert logp.grad.isfinite().all()
    assert float(logp.grad[1]) == pytest.approx(1 - np.exp(-2))


def gradients_of(folder: Path, *, checkpointing: bool, on_host: bool = False) -> dict[str, torch.Tensor]:
    model = schema.Model(path=str(folder), dtype="float32", gradient_checkpointing=checkpointing)
    config = learner_config(folder, model=model)
    policy = load_policy(config, ALONE, (1,))
    if on_host:
        _checkpoint(policy.model, is_wished=True, on_host=True)
    accumulate(policy, policy64(folder), random_groups(3), config)
    return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def test_gradient_checkpointing_changes_no_gradient(model_folder: Path) -> None:
    again, kept = (gradients_of(model_folder, checkpointing=checkpointing) for checkpointing in (True, False))
    torch.testing.assert_close(again, kept, atol=1e-6, rtol=0)


def test_what_waits_on_the_host_are_inputs_of_layers_and_changes_no_gradient(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[torch.Size] = []

    def save_on_cpu(**_: Any) -> saved_tensors_hooks:
        """Without pinned memory, which needs a GPU."""

        def leave(tensor: torch.Tensor) -> torch.Tensor:
            left.append(tensor.shape)
            return tensor.clone()

        return saved_tensors_hooks(leave, torch.clone)

    monkeypatch.setattr(transformers.modeling_utils, "save_on_cpu", save_on_cpu)
    away, kept = (gradients_of(model_folder, checkpointing=True, on_host=on_host) for on_host in (True, False))
    torch.testing.assert_close(away, kept, atol=0, rtol=0)
    assert {shape[-1] for shape in left if shape.numel()} == {32}
    assert len([shape for shape in left if shape.numel()]) % 2 == 0, "two layers, of each micro-batch"


def test_a_second_pass_compares_with_the_policy_before_the_first(model_folder: Path) -> None:
    groups = random_groups(3)
    settings = {
        "loss": "decoupled",
        "loss_args": {"clamp": 1e6, "low": 1e-6, "high": 1e6},
        "kl": schema.Kl(placement="none"),
    }
    config = learner_config(model_folder, algorithm=schema.Algorithm(**settings))
    policy = policy64(model_folder)
    gradients = make_gradients(policy, policy, config)
    tally = Tally(sources=("made_up",), step=0, is_dead=lambda _version, _step: False)
    batch = gradients.prepare(groups, tally)
    first = gradients.accumulate(batch, tally)
    kept = [logprobs.clone() for logprobs in batch.proximal_logprobs]
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter -= 0.02 * parameter.grad
    policy.zero_grad()
    second = gradients.accumulate(batch, tally)
    assert second < first, "a step against the gradient lowers the loss on the same batch"
    assert all(torch.equal(now, before) for now, before in zip(batch.proximal_logprobs, kept, strict=True))
    # Without a bound that binds, pi_p cancels out: (pi_p / mu) (pi / pi_p) = pi / mu.
    ours = {name: p.grad.clone() for name, p in policy.named_parameters()}
    policy.zero_grad()
    plain = schema.Algorithm(**{**settings, "loss": "truncated", "loss_args": {"clamp": 1e6}})
    accumulate(policy, policy, groups, learner_config(model_folder, algorithm=plain))
    torch.testing.assert_close(ours, {name: p.grad for name, p in policy.named_parameters()}, atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("max_tokens", [10_000, 40], ids=["one micro-batch", "many"])
def test_engine_and_learner_are_compared_on_fresh_samples_alone_wherever_packing_puts_them(
    model_folder: Path, max_tokens: int
) -> None:
    policy = policy64(model_folder)
    config = learner_config(model_folder, training=schema.Training(micro_batch_tokens=max_tokens))
    responses = [[8, 9, 10, 1], [11, 1], [12, 13, 1], [9] * 7]

    def group(ticket: int, *, step: int, off: float) -> Group:
        plain = group_of(rewards=[0, 1, 2, 3], responses=responses, ticket=ticket)
        true = [plain_logprobs(policy, plain, tokens).detach().numpy() - off for tokens in responses]
        return group_of(rewards=[0, 1, 2, 3], responses=responses, logprobs=true, ticket=ticket, step=step)

    groups = [group(0, step=4, off=3.0), group(1, step=5, off=0.25), group(2, step=3, off=2.0)]
    tally = Tally(sources=("made_up",), step=5, is_dead=lambda _version, _step: False)
    gradients = make_gradients(policy, policy, config)
    batch = gradients.prepare(groups, tally)
    for _ in range(2):
        gradients.accumulate(batch, tally)
    metrics = tally.metrics(ALONE)
    assert metrics["policy/fresh_tokens"] == sum(map(len, responses))
    assert metrics["policy/fresh_mismatch"] == pytest.approx(0.25, abs=1e-6)
