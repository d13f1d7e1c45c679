"""Entropy bonus and sources brought to one scale, beside their formulas in float64, which use nothing of streamrl."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from streamrl.config import schema
from streamrl.config.algorithm import check_algorithm
from streamrl.config.check import check_config
from streamrl.config.load import load_config
from streamrl.errors import ConfigError
from streamrl.learner.metrics.tally import Tally
from streamrl.learner.model.logprobs import LogProbs
from streamrl.learner.model.policy import Policy
from streamrl.learner.objective.gradients import Gradients
from streamrl.learner.packing.micro_batches import MicroBatch, Piece, Shape
from streamrl.learner.process.ranks import World
from streamrl.protocol.wire.group import Group
from streamrl.protocol.wire.sample import Sample
from streamrl.recipe.advantages import standardized
from streamrl.recipe.algorithms import make_algorithm
from streamrl.recipe.rewards import length_penalty
from tests.learner_cases import group_of

VOCABULARY = 7
WEIGHTS = {"right": 1.0, "brief": 0.25}


class _NoFlops:
    def of_pass(self, pieces: Sequence[Piece]) -> float:
        return 0.0


class TableOfLogits:
    """A policy that holds the logits of each token of each sample: parameters of their own."""

    shape = Shape(hidden_size=8, share_prompts=True)
    flops = _NoFlops()
    model, replay = torch.nn.Identity(), None  # it has no routers

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        self.logits = logits.clone().requires_grad_()  # [samples, places, VOCABULARY]
        self._tokens = tokens  # [samples, places]

    def __call__(self, batch: MicroBatch, *, entropy_learns: bool = False) -> LogProbs:
        each = self.logits[batch.sample, batch.position].log_softmax(-1)
        logp = each.gather(-1, self._tokens[batch.sample, batch.position][:, None])[:, 0]
        entropy = -(each.exp() * each).sum(-1)
        return LogProbs(logp=logp, entropy=entropy if entropy_learns else entropy.detach())


def with_sources(group: Group, rewards: Sequence[dict[str, float]]) -> Group:
    samples: list[Sample] = [
        sample._replace(rewards=of, reward=sum(WEIGHTS[name] * value for name, value in of.items()))
        for sample, of in zip(group.samples, rewards, strict=True)
    ]
    return Group(header=group.header, prompt_ids=group.prompt_ids, samples=tuple(samples))


def gradients_of(settings: dict[str, Any], table: TableOfLogits) -> Gradients:
    config = schema.Config.model_validate(
        {
            "model": {"path": "model", "dtype": "float32"},
            "data": {"train": "prompts.jsonl"},
            "algorithm": {"kl": {"placement": "none"}, **settings},
        }
    )
    return Gradients(
        policy=cast("Policy", table),
        reference=None,
        algorithm=make_algorithm(config.algorithm, WEIGHTS),
        config=config,
        world=World(rank=0, size=1, device=torch.device("cpu")),
        beat=lambda: None,
    )


def test_the_bonus_is_the_mean_entropy_of_todays_policy_off_the_loss_with_its_gradient() -> None:
    rng = torch.Generator().manual_seed(3)
    lengths, rewards = (4, 2, 5), [1.0, 0.0, 0.5]
    logits = torch.randn(3, 5, VOCABULARY, dtype=torch.float64, generator=rng)
    group = group_of(rewards=rewards, responses=[[8 + i] * length for i, length in enumerate(lengths)])
    tokens = torch.zeros(3, 5, dtype=torch.int64)
    for i, sample in enumerate(group.samples):
        tokens[i, : lengths[i]] = torch.from_numpy(sample.token_ids.astype(np.int64)) % VOCABULARY

    def found(bonus: float) -> tuple[float, torch.Tensor]:
        table = TableOfLogits(logits, tokens)
        gradients = gradients_of({"loss": "truncated", "loss_args": {"clamp": 1e9}, "entropy_bonus": bonus}, table)
        tally = Tally(sources=(), step=1, is_dead=lambda _version, _step: False)
        loss = gradients.accumulate(gradients.prepare([group], tally), tally)
        assert table.logits.grad is not None
        return loss, table.logits.grad

    apart = logits.clone().requires_grad_()
    probabilities = torch.exp(apart) / torch.exp(apart).sum(-1, keepdim=True)
    entropy = -(probabilities * torch.log(probabilities)).sum(-1)
    bonus = -0.03 * torch.stack([entropy[i, :length].mean() for i, length in enumerate(lengths)]).mean()
    bonus.backward()

    (without, grad_without), (with_bonus, grad_with) = found(0.0), found(0.03)
    assert apart.grad is not None
    assert with_bonus - without == pytest.approx(float(bonus.detach()), abs=1e-9)
    assert float((grad_with - grad_without - apart.grad).abs().max()) < 1e-9
    assert float(apart.grad.abs().max()) > 1e-4, "there is something to compare"


def test_without_a_bonus_the_entropy_carries_no_gradient() -> None:
    assert not make_algorithm(schema.Algorithm()).needs_entropy
    assert make_algorithm(schema.Algorithm(entropy_bonus=0.01)).needs_entropy


def test_each_source_is_brought_to_one_scale_before_its_weight() -> None:
    """GDPO's equation: the sum over sources of w (r - mean) / std, each within the group."""
    right, brief = [1.0, 0.0, 0.0, 1.0, 1.0], [-300.0, -20.0, -40.0, -100.0, -5.0]
    rewards = [{"right": a, "brief": b} for a, b in zip(right, brief, strict=True)]
    group = with_sources(group_of(rewards=[0.0] * 5), rewards)
    algorithm = make_algorithm(
        schema.Algorithm(normalize_sources=True, advantages="group_mean", kl=schema.Kl(placement="none")), WEIGHTS
    )
    penalties = np.array([0.1, 0.0, 0.2, 0.0, 0.0])
    judged = algorithm.advantages(group, penalties)

    expected = []
    for i in range(5):
        total = 0.0
        for weight, of in ((1.0, right), (0.25, brief)):
            mean = sum(of) / 5
            deviation = (sum((r - mean) ** 2 for r in of) / 4) ** 0.5
            total += weight * (of[i] - mean) / (deviation + 1e-6)
        expected.append(total - penalties[i])
    mean = sum(expected) / 5
    np.testing.assert_allclose([values[0] for values in judged.values], [e - mean for e in expected], atol=1e-9)


def test_what_does_not_apply_or_says_the_same_of_all_or_is_only_watched_adds_nothing() -> None:
    nan = np.nan
    by_source = {
        "right": np.array([1.0, 3.0, nan, 100.0]),
        "alike": np.array([7.0, 7.0, 7.0, 9.0]),
        "lone": np.array([5.0, nan, nan, nan]),
        "watched": np.array([1.0, 2.0, 3.0, 4.0]),
    }
    may_teach = np.array([True, True, True, False])
    weights = {"right": 2.0, "alike": 1.0, "lone": 1.0}
    total = standardized(by_source, weights, may_teach)
    scale = 2.0 / (2**0.5 + 1e-6)
    np.testing.assert_allclose(total, [-scale, scale, 0.0, 98 * scale], atol=1e-9)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            "{advantages: turns, normalize_sources: true}",
            "algorithm.normalize_sources = True: must be false: with algorithm.adv",
        ),
        (
            "{advantages: tokens, scale_by_std: true}",
            "algorithm.scale_by_std = True: must be false: with algorithm.advantages=tokens",
        ),
        ("{name: rejection_sampling, loss: none, entropy_bonus: 0.1}", "algorithm.entropy_bonus = 0.1"),
        (
            "{advantages: 'own.py:mine', scale_by_std: true, drop_zero_variance: false}",
            "algorithm.scale_by_std = True: set false, or .* the advantages of own.py:mine would be divided",
        ),
        (
            "{scale_by_std: true, drop_zero_variance: false}",
            r"algorithm.scale_by_std = True: set false, or .* the KL penalty \(algorithm.kl.placement=reward\)",
        ),
        (
            "{normalize_sources: true, scale_by_std: true}",
            "algorithm.scale_by_std = True: set false, or algorithm.normalize_sources=false: .* the KL penalty",
        ),
        (
            "{advantages: 'own.py:mine', normalize_sources: true, scale_by_std: true, kl: {placement: none}}",
            "algorithm.scale_by_std = True: set false, or algorithm.normalize_sources=false: .* of own.py:mine would",
        ),
        (
            "{normalize_sources: true, scale_by_std: true, drop_zero_variance: false}",
            "set false, or algorithm.normalize_sources=false and algorithm.drop_zero_variance=true: ",
        ),
    ],
)
def test_what_they_cannot_go_with_is_refused(settings: str, words: str, tmp_path: Path) -> None:
    rest = "rewards: {a: {type: function, target: exact_match}}\nvalidation: {every_steps: 0}\n"
    (tmp_path / "run.yaml").write_text(f"model: {{path: m}}\ndata: {{train: p}}\n{rest}algorithm: {settings}\n")
    loaded = load_config(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=words):
        check_config(loaded.config, loaded.origin)


def test_scaled_rewards_of_normalized_sources_are_accepted_where_no_kl_is_scaled_with_them() -> None:
    for kl in ({"placement": "none"}, {"placement": "loss", "estimator": "k3"}, {"coefficient": 0.0}):
        algorithm = {"normalize_sources": True, "scale_by_std": True, "kl": kl}
        config = schema.Config.model_validate(
            {"model": {"path": "m"}, "data": {"train": "p"}, "algorithm": algorithm},
        )
        assert list(check_algorithm(config)) == [], kl


@pytest.mark.parametrize("loss", ["gspo", "sequence_mask"])
def test_a_loss_with_narrow_bounds_refuses_dropout_of_adapters(loss: str) -> None:
    config = schema.Config.model_validate(
        {
            "model": {"path": "m", "lora": {"rank": 4, "dropout": 0.05}},
            "data": {"train": "p"},
            "algorithm": {"loss": loss, "kl": {"placement": "none"}},
        }
    )
    assert [problem.key for problem in check_algorithm(config)] == ["model.lora.dropout"]


def test_the_length_penalty_is_dapos_soft_overlong_punishment() -> None:
    """Equation 13, with L_max = 20 and L_cache = 8."""

    def punishment(length: int) -> float:
        if length <= 20 - 8:
            return 0.0
        return ((20 - 8) - length) / 8 if length <= 20 else -1.0

    for length in range(30):
        ours = length_penalty("", "", [0] * length, {}, free_tokens=12, max_tokens=20)
        assert ours == pytest.approx(punishment(length), abs=1e-12)
