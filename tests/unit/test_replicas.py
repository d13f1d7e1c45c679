"""What copies of a model say to each other in a pass, on ranks that are not there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from streamrl.config import schema
from streamrl.learner.loading.load import load_policy
from streamrl.learner.metrics.tally import Tally
from streamrl.learner.model.policy import Policy
from streamrl.learner.objective.gradients import Gradients
from streamrl.learner.process.ranks import World
from streamrl.recipe.algorithms import make_algorithm
from tests.learner_cases import learner_config, random_groups
from tests.nowhere import Said, nowhere
from tests.tiny_models import make_model


@pytest.mark.parametrize("micro_batch_tokens", [40, 4096])
def test_replicas_add_up_their_gradients_once_a_pass_however_many_micro_batches_it_has(
    tmp_path: Path, micro_batch_tokens: int
) -> None:
    folder = make_model(tmp_path / "model")
    config = learner_config(
        folder,
        algorithm=schema.Algorithm(kl=schema.Kl(placement="none")),
        training=schema.Training(micro_batch_tokens=micro_batch_tokens),
    )
    with nowhere(4) as ranks:
        world = ranks.under(schema.Layout(replicas=2))
        policy = load_policy(config, world, ())
        num_trained = sum(parameter.numel() for parameter in policy.parameters())
        num_micro_batches, said = accumulated(policy, config, world)
    assert (num_micro_batches > 1) == (micro_batch_tokens == 40)
    assert said["_reduce_scatter_base_"] >= num_micro_batches * num_trained // 2 * 4
    control = 1000  # numbers of the batch, not of the model
    assert num_trained // 2 * 4 <= said["allreduce_"] <= num_trained // 2 * 4 + control
    assert all(parameter.grad is not None for parameter in policy.parameters())


def accumulated(policy: Policy, config: schema.Config, world: World) -> tuple[int, Counter[str]]:
    """(micro-batches of a pass, bytes of what this rank got in it)"""
    gradients = Gradients(
        policy=policy,
        reference=None,
        algorithm=make_algorithm(config.algorithm),
        config=config,
        world=world,
        beat=lambda: None,
    )
    tally = Tally(sources=tuple(config.rewards), step=0, is_dead=lambda _version, _step: False)
    batch = gradients.prepare(random_groups(3), tally)
    with Said() as said:
        gradients.accumulate(batch, tally)
    return len(batch.micro_batches), said.bytes_of
