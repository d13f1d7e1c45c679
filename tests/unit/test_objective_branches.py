"""The gradient of rollouts with branches against the objective written down plainly, in float64, row by row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.config import schema
from streamrl.learner.metrics.tally import Tally
from streamrl.learner.objective.gradients import Gradients
from streamrl.learner.process.ranks import World
from streamrl.recipe.algorithms import make_algorithm
from tests.learner_cases import branched, learner_config, random_groups
from tests.plain_objective import plain_loss, policy64
from tests.tiny_models import make_model

TOLERANCE = 1e-6  # the model's own norms and rotations round to fp32, whatever its dtype


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), hidden=32)


@pytest.fixture(scope="module")
def reference_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("reference"), hidden=32, seed=1)


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "token mean": {"loss_mean": "token"},
    "sequence mask": {"loss": "sequence_mask", "loss_args": {"low": 0.2, "high": 4.0}},
    "gspo": {"loss": "gspo", "loss_args": {"low": 0.5, "high": 2.0}},
    "decoupled": {"loss": "decoupled"},
    "discounted": {"discount_factor": 0.7},
    "normalized over the batch": {"normalize_batch": True},
}


@pytest.mark.parametrize("max_tokens", [10_000, 40], ids=["one micro-batch", "many"])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "apart"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_of_rollouts_with_branches_each_counts_once_and_each_of_their_tokens(
    model_folder: Path, reference_folder: Path, settings: dict[str, Any], share: bool, max_tokens: int
) -> None:
    groups = branched(random_groups(4, seed=3))
    assert sum(len(sample.branches) for group in groups for sample in group.samples) > 20
    training = schema.Training(micro_batch_tokens=max_tokens)
    config = learner_config(model_folder, algorithm=schema.Algorithm(**settings), training=training)
    policy, reference = policy64(model_folder), policy64(reference_folder)
    policy.shape = reference.shape = replace(policy.shape, share_prompts=share)
    gradients = Gradients(
        policy=policy,
        reference=lambda batch: reference(batch).logp.detach(),
        algorithm=make_algorithm(config.algorithm),
        config=config,
        world=World(rank=0, size=1, device=torch.device("cpu")),
        beat=lambda: None,
    )
    tally = Tally(sources=tuple(config.rewards), step=0, is_dead=lambda _version, _step: False)
    loss = gradients.accumulate(gradients.prepare(groups, tally), tally)
    ours = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    truth, with_gradient = plain_loss(policy, reference, groups, config.algorithm)
    with_gradient.backward()
    assert loss == pytest.approx(truth, abs=TOLERANCE)
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, atol=TOLERANCE, rtol=0)
