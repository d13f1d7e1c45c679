"""On-policy distillation: its gradient is that of the reverse KL, exactly, and a teacher's tokens are the policy's."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import normalizers

from streamrl.config.load import load_config
from streamrl.config.schema import Config
from streamrl.errors import DataError
from streamrl.learner.loading.load import load_policy
from streamrl.learner.loading.tokenizer import read_tokenizer_info
from streamrl.learner.metrics.tally import Tally
from streamrl.learner.objective.frozen import check_teacher, differences, load_teacher
from streamrl.learner.objective.gradients import Gradients
from streamrl.learner.process.ranks import World
from streamrl.recipe.algorithms import make_algorithm
from streamrl.recipe.losses import TokenBatch, truncated
from streamrl.recipe.teaching import with_teacher_term
from tests.learner_cases import group_of
from tests.tiny_models import make_model, make_tokenizer

ALONE = World(rank=0, size=1, device=torch.device("cpu"))


def every_token(logits: torch.Tensor, sampler: torch.Tensor, teacher: torch.Tensor) -> TokenBatch:
    """One of each token of the vocabulary: with the sampler's probabilities as weights, sums are expectations."""
    num = len(logits)
    return TokenBatch(
        logprobs=logits.log_softmax(0),
        behaviour_logprobs=sampler.log_softmax(0),
        proximal_logprobs=logits.detach().log_softmax(0),
        teacher_logprobs=teacher.log_softmax(0),
        advantages=torch.zeros(num, dtype=torch.float64),
        staleness=torch.zeros(num, dtype=torch.int64),
        sample=torch.zeros(num, dtype=torch.int64),
        num_samples=1,
    )


@pytest.mark.parametrize("stale", [0.0, 0.3], ids=["on-policy", "stale"])
def test_in_expectation_the_gradient_is_that_of_the_reverse_kl(stale: float) -> None:
    generator = torch.Generator().manual_seed(5)
    logits, teacher, drift = torch.randn(3, 12, dtype=torch.float64, generator=generator)
    logits.requires_grad_()
    sampler = (logits + stale * drift).detach()
    batch = every_token(logits, sampler, teacher)

    values, metrics = with_teacher_term(*truncated(batch, clamp=1e9), batch, weight=0.7)
    (sampler.softmax(0) * values).sum().backward()

    apart = logits.detach().requires_grad_()
    policy = apart.log_softmax(0)
    (0.7 * (policy.exp() * (policy - teacher.log_softmax(0))).sum()).backward()
    assert logits.grad is not None
    assert apart.grad is not None
    assert float((logits.grad - apart.grad).abs().max()) < 1e-9
    told = metrics["teacher_kl"]
    assert isinstance(told, torch.Tensor)
    if not stale:
        kl = torch.nn.functional.kl_div(teacher.log_softmax(0), policy.detach(), reduction="sum", log_target=True)
        assert float((sampler.softmax(0) * told).sum()) == pytest.approx(float(kl), abs=1e-12)


def test_what_the_teacher_finds_impossible_does_not_rule_the_batch() -> None:
    logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    batch = every_token(logits, logits.detach(), torch.tensor([0.0, -9999.0], dtype=torch.float64))

    values, _ = with_teacher_term(*truncated(batch), batch, weight=1.0)
    [slope] = torch.autograd.grad(values[1], batch.logprobs, retain_graph=True)

    assert slope.tolist() == [0.0, 20.0]


def config_of(folder: Path, teacher: Path, *overrides: str) -> Config:
    (folder / "mine.yaml").write_text(
        f"model: {{path: '{folder / 'policy'}', dtype: float32}}\ndata: {{train: prompts.jsonl}}\n"
        "validation: {every_steps: 0}\nsampling: {max_tokens: 8}\n"
    )
    named = f"teacher.path={teacher}"
    return load_config(folder / "mine.yaml", ["extends=recipes/distillation.yaml", named, *overrides]).config


def gradient_norm(config: Config) -> tuple[float, float]:
    """(of the step that a group makes, what the teacher is away from the policy in it)"""
    policy = load_policy(config, ALONE, (1,))
    gradients = Gradients(
        policy=policy,
        reference=None,
        algorithm=make_algorithm(config.algorithm),
        config=config,
        world=ALONE,
        beat=lambda: None,
        teacher=load_teacher(config, ALONE, (1,)),
    )
    tally = Tally(sources=(), step=0, is_dead=lambda _version, _step: False)
    batch = gradients.prepare([group_of(rewards=[0.0, 0.0])], tally)
    gradients.accumulate(batch, tally)
    each = [p.grad.norm() for p in policy.parameters() if p.grad is not None]
    return float(torch.stack(each).norm()), tally.metrics(ALONE)["loss/teacher_kl"]


def test_a_policy_that_is_its_own_teacher_learns_nothing_of_it(tmp_path: Path) -> None:
    make_model(tmp_path / "policy")

    norm, away = gradient_norm(config_of(tmp_path, tmp_path / "policy"))

    assert (norm, away) == pytest.approx((0.0, 0.0), abs=1e-6)


def test_a_teacher_of_another_family_and_size_teaches(tmp_path: Path) -> None:
    make_model(tmp_path / "policy")
    make_model(tmp_path / "teacher", architecture="llama", hidden=128, layers=3, tied=False, seed=1)

    norm, _ = gradient_norm(config_of(tmp_path, tmp_path / "teacher"))

    assert norm > 1e-4


def test_a_teacher_with_another_vocabulary_is_refused_by_both_names(tmp_path: Path) -> None:
    make_model(tmp_path / "policy")
    shutil.copytree(tmp_path / "policy", tmp_path / "teacher")
    path = tmp_path / "teacher" / "tokenizer.json"
    found = json.loads(path.read_text())
    words = sorted(found["model"]["vocab"].items(), key=lambda item: item[1])
    (a, first), (b, second) = words[-2:]
    found["model"]["vocab"] |= {a: second, b: first}
    path.write_text(json.dumps(found))

    with pytest.raises(DataError) as refusal:
        check_teacher(config_of(tmp_path, tmp_path / "teacher"), read_tokenizer_info(str(tmp_path / "policy")))

    told = str(refusal.value)
    assert f"teacher.path = '{tmp_path / 'teacher'}'" in told
    assert f"model.path = '{tmp_path / 'policy'}'" in told
    assert f"2 of {len(words)} tokens differ; {a!r}, for one, is {first} here and {second} in the teacher" in told


def test_tokenizers_of_one_vocabulary_that_cut_texts_otherwise_differ() -> None:
    ours, theirs = make_tokenizer(), make_tokenizer()
    assert differences(ours, theirs) == ""
    theirs.backend_tokenizer.normalizer = normalizers.Lowercase()

    assert re.fullmatch(
        r"'The quick brown fox.*' is \[2, .* here and \[22, .* in the teacher", differences(ours, theirs)
    )


def test_what_is_wrong_with_a_teacher_names_its_own_setting(tmp_path: Path) -> None:
    make_model(tmp_path / "policy")

    with pytest.raises(DataError, match=r"^teacher\.path '.*nowhere' cannot be read"):
        check_teacher(config_of(tmp_path, tmp_path / "nowhere"), read_tokenizer_info(str(tmp_path / "policy")))
