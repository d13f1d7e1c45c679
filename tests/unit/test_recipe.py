"""Losses and advantages of the user's own: found, tried out before a run, and in the gradient of a step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streamrl.config import schema
from streamrl.errors import ConfigError
from streamrl.learner.loading.build import load_model
from streamrl.learner.metrics.tally import Tally
from streamrl.learner.model.logits import Head
from streamrl.learner.model.policy import Policy
from streamrl.learner.objective.gradients import Gradients
from streamrl.learner.objective.trial import try_out
from streamrl.learner.packing.micro_batches import MicroBatch
from streamrl.learner.process.ranks import World
from streamrl.protocol.wire.group import Group
from streamrl.recipe.algorithms import make_algorithm
from streamrl.telemetry.metrics import is_metric
from tests.learner_cases import group_of, learner_config, random_groups
from tests.plain_objective import plain_logits, plain_logprobs
from tests.tiny_models import make_model

ALONE = World(rank=0, size=1, device=torch.device("cpu"))

CODE = '''
import numpy as np
import torch

from streamrl.recipe.losses import needs, truncated

@needs("entropy")
def with_bonus(batch, *, bonus=0.5, clamp=3.0):
    values, metrics = truncated(batch, clamp=clamp)
    return values - bonus * batch.entropy, {**metrics, "entropy": batch.entropy, "old": old(batch)}

def old(batch):
    return (batch.staleness.sum(), len(batch.staleness))

@needs("reference")
def towards_reference(batch):
    return (batch.logprobs - batch.reference_logprobs) ** 2, {}

def to_go(group, *, gamma=1.0):
    """The reward less the mean, and a little more for each token that is still to come."""
    values = group.rewards - group.rewards.mean()
    return [value + gamma * np.arange(length, 0, -1.0) for value, length in zip(values, group.lengths)]

def seen(group):
    assert group.finish_reasons == ("stop", "length", "stop"), group
    assert [mask.sum() for mask in group.masks] == [3, 3, 3]
    return group.rewards_by_source["made_up"] * group.may_teach

def one_number(batch): return batch.logprobs.mean(), {}
def nothing(batch): return None
def not_finite(batch): return batch.logprobs / 0, {}
def no_gradient(batch): return batch.logprobs.detach(), {}
def bad_gradient(batch): return (batch.logprobs * 0).sqrt(), {}
def wrong_metric(batch): return -batch.logprobs, {"own": batch.logprobs.mean()}
def pair_for_weight(batch): return -batch.logprobs, {"weight": (1.0, 1)}
def metric_not_finite(batch): return -batch.logprobs, {"own": batch.logprobs.detach() / 0}
def fails_without_tokens(batch): return -batch.logprobs * batch.logprobs.max(), {}
def reads_teacher(batch): return batch.teacher_logprobs - batch.logprobs, {}
def reads_reference(batch): return batch.reference_logprobs - batch.logprobs, {}
def reads_entropy(batch): return -0.1 * batch.entropy - batch.logprobs, {}
def by_source(group): return group.rewards_by_source["answer"]
def by_name(group): return group.rewards_by_source["environment.right"]
def raises(batch): raise KeyError("what")
def two(batch, other): return -batch.logprobs, {}
def too_short(group): return group.rewards[:2]
def a_nan(group): return group.rewards * float("nan")
def a_token_too_many(group): return [np.zeros(length + 1) for length in group.lengths]
def alone(group): return group.rewards / (group.may_teach.sum() - 1 if group.may_teach.sum() > 1 else None)
number = 3
'''


@pytest.fixture
def code(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(CODE)
    return str(path)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), hidden=32)


def configured(**settings: Any) -> schema.Config:
    return schema.Config.model_validate(
        {
            "model": {"path": "none"},
            "data": {"train": "none"},
            "rewards": {"answer": {"type": "function", "target": "exact_match"}},
            "algorithm": schema.Algorithm(**settings),
        }
    )


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        try_out(configured(**settings))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("one_number", "it must return a value for each of 5 tokens; it returned a Tensor of shape []"),
        ("nothing", "it fails on a synthetic batch with five tokens of three samples: TypeError: cannot unpack"),
        ("not_finite", "its values are not finite: [-inf"),
        ("no_gradient", "its values carry no gradient: compute them from batch.logprobs"),
        ("bad_gradient", "the gradient of its values is not finite"),
        ("wrong_metric", "its metric 'own' must be a tensor of 5 or a pair (sum, count); it is a Tensor of shape []"),
        ("pair_for_weight", "its metric 'weight' must be a tensor of 5; it is a tuple"),
        ("metric_not_finite", "its metric 'own' is not finite"),
        ("fails_without_tokens", "it fails on a synthetic batch with no tokens: "),
        ("raises", "it fails on a synthetic batch with five tokens of three samples: KeyError: 'what' (own.py:"),
        (
            "two",
            "cannot use it: TypeError: two(batch, **options) cannot be called: missing a required argument: 'other'",
        ),
        ("number", "cannot use it: TypeError: "),
        ("absent", "own.py has no 'absent'"),
    ],
)
def test_a_loss_that_cannot_be_used_is_one_line_that_names_the_setting(code: str, name: str, words: str) -> None:
    error = refusal(loss=f"{code}:{name}")
    assert error.startswith(f"algorithm.loss = '{code}:{name}'")
    assert words in error


@pytest.mark.parametrize("name", ["too_short", "a_nan", "a_token_too_many"])
def test_advantages_of_a_wrong_form_are_one_line_that_names_the_setting(code: str, name: str) -> None:
    error = refusal(advantages=f"{code}:{name}")
    assert error.startswith(f"algorithm.advantages = '{code}:{name}': it must return 4 finite numbers")


def test_advantages_are_tried_out_on_a_group_of_which_one_sample_alone_may_teach(code: str) -> None:
    assert "four samples of which one ended by itself: TypeError" in refusal(advantages=f"{code}:alone")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss": "no.such.module:f"}, "algorithm.loss = 'no.such.module:f': cannot use it: ModuleNotFoundError"),
        ({"loss": "no/such/file.py:f"}, "FileNotFoundError: no such file: no/such/file.py"),
        ({"loss": "ppoo"}, "must be one of truncated, tis, icepop"),
        ({"loss": "ppo", "loss_args": {"clamp": 3}}, "algorithm.loss_args = {'clamp': 3}: cannot use it: TypeError"),
        (
            {"advantages": "nobody"},
            "algorithm.advantages = 'nobody': must be one of leave_one_out, group_mean, turns, tokens, none, or",
        ),
        ({"advantages_args": {"x": 1}}, "algorithm.advantages_args = {'x': 1}: cannot use it: TypeError"),
    ],
)
def test_what_cannot_be_found_or_called_is_one_line(settings: Mapping[str, Any], words: str) -> None:
    assert words in refusal(**settings)


def test_a_module_in_the_working_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    (tmp_path / "found_in_cwd.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    try_out(configured(loss="found_in_cwd:with_bonus", loss_args={"bonus": 0.1}))


def test_what_comes_with_us_passes_its_own_trial() -> None:
    try_out(configured())
    try_out(configured(kl=schema.Kl(placement="loss", estimator="k3"), loss="none"))
    try_out(configured(name="rejection_sampling"))


def test_what_a_run_has_is_there_in_the_trial(code: str) -> None:
    try_out(configured(advantages=f"{code}:by_source"))
    plays = schema.Environment(target="game.py:rollout")
    try_out(configured(advantages=f"{code}:by_name").model_copy(update={"environment": plays}))
    taught = configured(loss=f"{code}:reads_teacher")
    try_out(taught.model_copy(update={"teacher": schema.Teacher(path="teacher")}))


@pytest.mark.parametrize("name", ["reads_teacher", "reads_reference", "reads_entropy"])
def test_what_a_run_does_not_have_is_not_there_in_the_trial(code: str, name: str) -> None:
    error = refusal(loss=f"{code}:{name}", kl=schema.Kl(placement="none"))
    assert "'NoneType'" in error
    assert "inputs that the loss does not ask for are None: docs/recipes.md" in error


def policy64(folder: Path) -> Policy:
    head = Head(end_ids=(1,), compute_dtype=torch.float64)
    return Policy(load_model(str(folder)).double(), head=head, min_tokens=1, dtype=torch.float64)


def step(
    policy: Policy, groups: list[Group], config: schema.Config, *, number: int = 0
) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    """Of one pass over the groups: the loss, its gradient, and the metrics."""

    def ask(batch: MicroBatch) -> torch.Tensor:
        return torch.full_like(batch.behaviour_logprobs, -1.0, dtype=torch.float64)

    gradients = Gradients(
        policy=policy,
        reference=ask,
        algorithm=make_algorithm(config.algorithm),
        config=config,
        world=ALONE,
        beat=lambda: None,
    )
    tally = Tally(sources=("made_up",), step=number, is_dead=lambda _version, _step: False)
    loss = gradients.accumulate(gradients.prepare(groups, tally), tally)
    found = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    return loss, found, tally.metrics(ALONE)


@pytest.mark.parametrize("max_tokens", [10_000, 40], ids=["one micro-batch", "many"])
def test_an_entropy_bonus_in_a_loss_of_ones_own_has_the_gradient_of_plain_autograd(
    code: str, model_folder: Path, max_tokens: int
) -> None:
    groups = random_groups(3)
    algorithm = schema.Algorithm(
        loss=f"{code}:with_bonus", loss_args={"bonus": 0.7}, kl=schema.Kl(placement="none"), mask_unfinished=False
    )
    config = learner_config(model_folder, algorithm=algorithm, training=schema.Training(micro_batch_tokens=max_tokens))
    policy = policy64(model_folder)
    loss, found, metrics = step(policy, groups, config)

    total, entropies = torch.zeros((), dtype=torch.float64), []
    for group in groups:
        rewards = np.array([sample.reward for sample in group.samples])
        for i, sample in enumerate(group.samples):
            logp = plain_logits(policy, group, sample.token_ids.tolist()).log_softmax(-1)
            entropy = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(-1)
            logprobs = logp.gather(1, torch.tensor(sample.token_ids.tolist())[:, None])[:, 0]
            advantage = rewards[i] - np.delete(rewards, i).mean()
            weight = torch.exp(logprobs.detach() - torch.from_numpy(sample.logprobs.copy())).clamp(max=3.0)
            total = total + (-weight * advantage * logprobs - 0.7 * entropy).mean() / (len(groups) * len(rewards))
            entropies += entropy.tolist()
    total.backward()

    assert loss == pytest.approx(float(total.detach()), abs=1e-6)
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-6, rtol=0)
    assert metrics["loss/entropy"] == metrics["policy/entropy"] == pytest.approx(np.mean(entropies), abs=1e-6)
    assert metrics["loss/weight"] > 0
    assert all(is_metric(name) for name in metrics)


def test_a_loss_that_does_not_ask_gets_neither_entropy_nor_reference(model_folder: Path) -> None:
    algorithm = make_algorithm(schema.Algorithm(kl=schema.Kl(placement="none")))
    assert not algorithm.needs_entropy
    assert not algorithm.needs_reference


def test_a_loss_that_asks_for_the_reference_gets_it_without_kl(code: str, model_folder: Path) -> None:
    algorithm = schema.Algorithm(loss=f"{code}:towards_reference", kl=schema.Kl(placement="none"))
    assert make_algorithm(algorithm).needs_reference
    loss, _, metrics = step(policy64(model_folder), random_groups(2), learner_config(model_folder, algorithm=algorithm))
    assert loss > 0
    assert "train_rollouts/init_policy_kl" in metrics


def test_tokens_are_as_stale_as_the_weights_that_made_them(code: str, model_folder: Path) -> None:
    algorithm = schema.Algorithm(loss=f"{code}:with_bonus")
    groups = [group_of(rewards=[0, 1], responses=[[8, 9, 1], [9, 1]], step=made, ticket=made) for made in (1, 4)]
    _, _, metrics = step(policy64(model_folder), groups, learner_config(model_folder, algorithm=algorithm), number=5)
    assert metrics["loss/old"] == pytest.approx((4 + 1) / 2)


@pytest.mark.parametrize(
    "settings", [{}, {"discount_factor": 0.5}, {"normalize_batch": True}, {"scale_by_std": True}], ids=str
)
def test_advantages_of_tokens_reach_just_these_tokens(
    code: str, model_folder: Path, settings: Mapping[str, Any]
) -> None:
    groups = [
        group_of(rewards=[1, 2, 4], responses=[[8, 9, 10, 1], [11, 1], [12, 13, 1]]),
        group_of(rewards=[0, 5], responses=[[9], [9, 10, 11, 12, 13]], ticket=1),
    ]
    algorithm = schema.Algorithm(
        loss="none",
        advantages=f"{code}:to_go",
        advantages_args={"gamma": 0.3},
        kl=schema.Kl(placement="none"),
        **settings,
    )
    policy = policy64(model_folder)
    _, found, _ = step(policy, groups, learner_config(model_folder, algorithm=algorithm))

    advantages: list[list[Any]] = []
    for group in groups:
        rewards = [sample.reward for sample in group.samples]
        std = np.std(rewards, ddof=1) + 1e-6 if algorithm.scale_by_std else 1.0
        each = [
            r - np.mean(rewards) + 0.3 * np.arange(len(s.token_ids), 0, -1)
            for r, s in zip(rewards, group.samples, strict=True)
        ]
        advantages.append([values / std for values in each])
    if algorithm.normalize_batch:
        means = [values.mean() for of_group in advantages for values in of_group]
        mean = np.mean(means)
        squares = [((values - mean) ** 2).mean() for of_group in advantages for values in of_group]
        std = np.sqrt(np.mean(squares)) + 1e-6
        advantages = [[(values - mean) / std for values in of_group] for of_group in advantages]
    terms = []
    for group, of_group in zip(groups, advantages, strict=True):
        for sample, values in zip(group.samples, of_group, strict=True):
            to_go = np.arange(len(values) - 1, -1, -1)
            weights = torch.from_numpy(values * algorithm.discount_factor**to_go)
            logprobs = plain_logprobs(policy, group, sample.token_ids.tolist())
            terms.append((-weights * logprobs).mean())
    torch.stack(terms).mean().backward()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-6, rtol=0)


def test_advantages_see_masks_reasons_and_rewards_of_each_source(code: str) -> None:
    group = group_of(rewards=[1, 2, 3], finished=[True, False, True])
    judged = make_algorithm(schema.Algorithm(advantages=f"{code}:seen")).advantages(group, np.array([0.5, 0, 0]))
    assert [values.tolist() for values in judged.values] == [[1.0] * 3, [0.0] * 3, [3.0] * 3]
    assert judged.baselines.tolist() == [-0.5, 2, 0]
