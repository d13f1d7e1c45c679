"""The gradient of a step against the objective written down plainly, in float64, one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learner.algorithms import make_algorithm
from learner.algorithms.base import Tokens
from learner.algorithms.corrections import make_correction
from learner.algorithms.kl import k1, k2, k3
from learner.distributed import World
from learner.gradients import Gradients
from learner.logprobs import Head
from learner.model import Policy, load_model, load_policy
from learner.packing import MicroBatch
from learner.tally import Tally
from streamrl.config import schema
from streamrl.wire.group import Group
from tests.learner_cases import group_of, learner_config, random_groups
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


def policy64(folder: Path) -> Policy:
    head = Head(end_ids=(1,), compute_dtype=torch.float64)
    return Policy(load_model(str(folder)).double(), head=head, min_tokens=1, dtype=torch.float64)


def accumulate(policy: Policy, reference: Policy, groups: Sequence[Group], config: schema.Config) -> float:
    def ask(batch: MicroBatch) -> torch.Tensor:
        with torch.no_grad():
            return reference(batch).logp

    gradients = Gradients(
        policy=policy,
        reference=ask,
        algorithm=make_algorithm(config.algorithm),
        config=config,
        world=ALONE,
        beat=lambda: None,
    )
    tally = Tally(sources=tuple(config.rewards), step=0, is_dead=lambda _version, _step: False)
    return gradients.accumulate(groups, tally).loss


def plain_logprobs(policy: Policy, group: Group, tokens: Sequence[int]) -> torch.Tensor:
    prompt = group.prompt_ids.tolist()
    ids = torch.tensor([prompt + list(tokens)])
    logits = policy.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].clone()
    logits[0, 1] = -torch.inf  # min_tokens = 1: no end at once
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]


def plain_loss(policy: Policy, reference: Policy, groups: Sequence[Group], settings: schema.Algorithm) -> torch.Tensor:
    """The formulas of the docstrings, with no packing, no chunks and no shared code."""
    beta = settings.kl.coefficient
    per_sequence: list[torch.Tensor] = []
    num_samples = num_tokens = 0
    for group in groups:
        num_samples += len(group.samples)
        ends = [sample.finish_reason == "stop" for sample in group.samples]
        logpi = [plain_logprobs(policy, group, s.token_ids.tolist()) for s in group.samples]
        with torch.no_grad():
            logref = [plain_logprobs(reference, group, s.token_ids.tolist()) for s in group.samples]
        logmu = [torch.from_numpy(s.logprobs.copy()).double() for s in group.samples]
        rewards = [s.reward for s in group.samples]
        if settings.kl.placement == "reward":
            rewards = [r - beta * float((m - f).abs().mean()) for r, m, f in zip(rewards, logmu, logref, strict=True)]
        usable = [r for r, end in zip(rewards, ends, strict=True) if end]
        for i in range(len(rewards)):
            if not ends[i]:
                continue
            advantage = rewards[i] - (sum(usable) - rewards[i]) / (len(usable) - 1) if len(usable) > 1 else 0.0
            ratio = torch.exp(logpi[i].detach() - logmu[i])
            weight = ratio.clamp(max=settings.ratio_clamp) if settings.correction == "truncated" else torch.ones(())
            loss = -weight * advantage * logpi[i]
            if settings.kl.placement == "loss":
                d = logpi[i] - logref[i]
                loss = loss + beta * weight * (0.5 * d**2 if settings.kl.estimator == "k2" else torch.exp(-d) - 1 + d)
            num_tokens += len(loss)
            per_sequence.append(loss.mean() if settings.loss_mean == "sequence" else loss.sum())
    return torch.stack(per_sequence).sum() / (num_samples if settings.loss_mean == "sequence" else num_tokens)


ALGORITHMS = {
    "default": {},
    "kl in the loss, k2": {"kl": schema.Kl(placement="loss", estimator="k2", coefficient=0.3)},
    "kl in the loss, k3": {"kl": schema.Kl(placement="loss", estimator="k3", coefficient=0.3)},
    "strong kl in the reward": {"kl": schema.Kl(coefficient=0.7)},
    "no kl": {"kl": schema.Kl(placement="none")},
    "uncorrected": {"correction": "none"},
    "tight clamp": {"ratio_clamp": 0.3},
    "token mean": {"loss_mean": "token"},
}


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
    truth = plain_loss(policy, reference, groups, config.algorithm)
    truth.backward()
    assert loss == pytest.approx(float(truth.detach()), abs=_LOSS)
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, atol=_GRADIENT, rtol=1e-5)


def test_rejection_sampling_is_supervised_training_on_the_winners(model_folder: Path) -> None:
    groups = random_groups(4)
    config = learner_config(model_folder, algorithm=schema.Algorithm(name="rejection_sampling"))
    policy = policy64(model_folder)
    loss = accumulate(policy, policy, groups, config)
    finished = [[s for s in g.samples if s.finish_reason == "stop"] for g in groups]
    winners = [(g, max(ended, key=lambda s: s.reward)) for g, ended in zip(groups, finished, strict=True) if ended]
    terms = [-plain_logprobs(policy, group, winner.token_ids.tolist()).mean() for group, winner in winners]
    assert loss == pytest.approx(float(torch.stack(terms).mean().detach()), abs=_LOSS)


@pytest.mark.parametrize("loss_mean", ["sequence", "token"])
def test_micro_batches_and_the_order_of_groups_do_not_change_the_gradient(
    model_folder: Path, reference_folder: Path, loss_mean: str
) -> None:
    groups = random_groups(6, seed=3)
    gradients: list[dict[str, torch.Tensor]] = []
    for max_tokens, order in ((10_000, 1), (10_000, -1), (60, 1), (1, 1)):
        config = learner_config(
            model_folder,
            algorithm=schema.Algorithm(loss_mean=loss_mean),
            training=schema.Training(micro_batch_tokens=max_tokens),
        )
        policy = policy64(model_folder)
        accumulate(policy, policy64(reference_folder), groups[::order], config)
        gradients.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], atol=_GRADIENT, rtol=1e-5)


@pytest.mark.parametrize("settings", [*ALGORITHMS.values(), {"name": "rejection_sampling"}], ids=str)
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


def test_the_truncated_ratio_weighs_each_token_and_carries_no_gradient() -> None:
    logpi = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    tokens = Tokens(
        logmu=torch.tensor([-1.0, -2.0, -9.0], dtype=torch.float64),
        logref=None,
        advantage=torch.tensor([2.0, 2.0, -1.0], dtype=torch.float64),
    )
    losses = make_correction(schema.Algorithm(ratio_clamp=5.0))(logpi, tokens)
    e = float(np.e)
    torch.testing.assert_close(losses.values, torch.tensor([2.0, 2 * e, -5.0], dtype=torch.float64))
    torch.testing.assert_close(losses.ratio, torch.tensor([1.0, e, np.exp(8)], dtype=torch.float64))
    [gradient] = torch.autograd.grad(losses.values.sum(), logpi)
    torch.testing.assert_close(gradient, torch.tensor([-2.0, -2 * e, 5.0], dtype=torch.float64))


def test_an_absurd_ratio_stays_finite() -> None:
    logpi = torch.zeros(1, requires_grad=True)
    tokens = Tokens(logmu=torch.tensor([-1e9]), logref=None, advantage=torch.zeros(1))
    losses = make_correction(schema.Algorithm())(logpi, tokens)
    losses.values.sum().backward()
    assert torch.isfinite(losses.values).all()
    assert torch.isfinite(logpi.grad).all()


def test_kl_estimators_by_hand() -> None:
    logp, logref = torch.tensor([-1.0]), torch.tensor([-3.0])
    assert float(k1(logp, logref)) == 2.0
    assert float(k2(logp, logref)) == 2.0
    assert float(k3(logp, logref)) == pytest.approx(np.exp(-2) - 1 + 2)


def test_gradient_checkpointing_changes_no_gradient(model_folder: Path) -> None:
    groups = random_groups(3)
    gradients: list[dict[str, torch.Tensor]] = []
    for checkpointing in (False, True):
        model = schema.Model(path=str(model_folder), dtype="float32", gradient_checkpointing=checkpointing)
        config = learner_config(model_folder, model=model)
        policy = load_policy(config, ALONE, (1,))
        accumulate(policy, policy64(model_folder), groups, config)
        gradients.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=1e-5)
