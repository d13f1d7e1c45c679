"""The terms and metrics of routers against transformers' own numbers, sequence by sequence; routers that stay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from streamrl.config import schema
from streamrl.config.check import check_config
from streamrl.config.load import load_config
from streamrl.errors import ConfigError
from streamrl.learner.loading.load import load_policy
from streamrl.learner.metrics.routers import of_routers
from streamrl.learner.metrics.tally import Tally
from streamrl.learner.model.lora import published_parameters
from streamrl.learner.model.policy import Policy
from streamrl.learner.objective.gradients import Gradients
from streamrl.learner.objective.optimizer import make_optimizer, update
from streamrl.learner.process.ranks import World
from streamrl.protocol.wire.group import Group
from streamrl.recipe.algorithms import make_algorithm
from tests.integration.learner_ranks import never_round
from tests.learner_cases import learner_config, random_groups
from tests.mixtures import MIXTURES, NUM_EXPERTS, make_mixture, never_round_routers
from tests.tiny_families import make_family
from tests.tiny_models import make_model

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
GROUPS = random_groups(3, seed=5)
BALANCE, Z = 0.3, 0.05


def config_of(folder: Path, *, micro_batch_tokens: int = 40, **model: object) -> schema.Config:
    settings = schema.Model.model_validate({"path": str(folder), "dtype": "float64", **model})
    return learner_config(
        folder,
        model=settings,
        algorithm=schema.Algorithm(kl=schema.Kl(placement="none")),
        training=schema.Training(micro_batch_tokens=micro_batch_tokens),
    )


def exact(config: schema.Config) -> Policy:
    policy = load_policy(config, ALONE, ())
    never_round(policy)
    never_round_routers(policy)
    return policy


def learnt(
    policy: Policy, config: schema.Config, groups: Sequence[Group] = GROUPS
) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    gradients = Gradients(
        policy=policy,
        reference=None,
        algorithm=make_algorithm(config.algorithm),
        config=config,
        world=ALONE,
        beat=lambda: None,
    )
    tally = Tally(sources=tuple(config.rewards), step=0, is_dead=lambda _version, _step: False)
    policy.zero_grad()
    loss = gradients.accumulate(gradients.prepare(groups, tally), tally)
    found = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    return loss, found, tally.metrics(ALONE)


def logits_of(policy: Policy, groups: Sequence[Group] = GROUPS) -> torch.Tensor:  # [layers, tokens, E]
    """Of the cells that predict trained tokens, each sample by itself, as the model records them."""
    found, select = [], make_algorithm(schema.Algorithm()).select
    for group in groups:
        for sample, trained in zip(group.samples, select(group).trained, strict=True):
            if not trained:
                continue
            ids = torch.from_numpy(np.concatenate([group.prompt_ids, sample.token_ids])).long()
            said = policy.model(input_ids=ids[None], use_cache=False, output_router_logits=True).router_logits
            found.append(torch.stack(said)[:, len(group.prompt_ids) - 1 : -1])
    return torch.cat(found, dim=1)


def brute_force(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(balance, z), expert by expert."""
    balance, z = [], []
    for layer in logits:
        chosen = layer.topk(top_k, dim=-1).indices.tolist()
        for expert in range(layer.shape[1]):
            share = sum(expert in one for one in chosen) / len(layer)
            balance.append(share * layer.softmax(-1)[:, expert].mean() * layer.shape[1] / top_k)
        z += [row.logsumexp(-1) ** 2 for row in layer]
    return torch.stack(balance).sum() / len(logits), torch.stack(z).mean()


@pytest.mark.parametrize("family", MIXTURES)
def test_terms_and_their_gradients_are_those_of_each_sequence_by_itself(tmp_path: Path, family: str) -> None:
    folder = make_mixture(tmp_path / "model", family)
    without, with_terms = (config_of(folder, router_balance=b, router_z=z) for b, z in ((0, 0), (BALANCE, Z)))
    policy = exact(with_terms)
    plain_loss, plain_gradients, _ = learnt(policy, without)
    loss, gradients, _ = learnt(policy, with_terms)
    policy.zero_grad()
    balance, z = brute_force(logits_of(policy), policy.model.config.num_experts_per_tok)
    expected = BALANCE * balance + Z * z
    expected.backward()
    assert loss - plain_loss == pytest.approx(expected.item(), abs=1e-9)
    for name, parameter in policy.model.named_parameters():
        of_terms = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(gradients[name] - plain_gradients[name], of_terms, atol=1e-9, rtol=0)


def test_an_even_load_makes_the_balance_one() -> None:
    balance, _ = brute_force(torch.eye(4).repeat(1, 2, 1) * 30, 1)
    assert float(balance) == pytest.approx(1.0)


@pytest.mark.parametrize("tokens", [25, 4000])
def test_micro_batches_do_not_change_what_routers_add_and_tell(tmp_path: Path, tokens: int) -> None:
    folder = make_mixture(tmp_path / "model", "qwen3_moe")
    terms = {"router_balance": BALANCE, "router_z": Z}
    config = config_of(folder, **terms)
    policy = exact(config)
    loss, gradients, told = learnt(policy, config)
    other, others, told_too = learnt(policy, config_of(folder, micro_batch_tokens=tokens, **terms))
    assert other == pytest.approx(loss, abs=1e-9)
    torch.testing.assert_close(others, gradients, atol=1e-9, rtol=0)
    assert told_too == pytest.approx(told, abs=1e-9)


def test_layers_that_are_computed_again_are_heard_once(tmp_path: Path) -> None:
    folder = make_mixture(tmp_path / "model", "qwen3_moe")
    found = []
    for again in (False, True):
        config = config_of(folder, router_balance=BALANCE, router_z=Z, gradient_checkpointing=again)
        found.append(learnt(exact(config), config))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-12, rtol=0)
    assert found[0][2] == found[1][2]


def test_metrics_are_those_of_each_sequence_by_itself(tmp_path: Path) -> None:
    config = config_of(make_mixture(tmp_path / "model", "qwen3_moe"))
    policy = exact(config)
    _, _, told = learnt(policy, config)
    logits = logits_of(policy).detach()
    probabilities = logits.softmax(-1)
    chosen = logits.topk(policy.model.config.num_experts_per_tok, dim=-1).indices
    loads = torch.stack([torch.bincount(layer.flatten(), minlength=NUM_EXPERTS) for layer in chosen]).double()
    expected = {
        "router/entropy": -(probabilities * probabilities.log()).sum(-1).mean(),
        "router/z": (logits.logsumexp(-1) ** 2).mean(),
        "router/load_max_over_mean": (loads.amax(1) / loads.mean(1)).mean(),
        "router/unused_experts": (loads == 0).double().mean(),
    }
    for name, value in expected.items():
        assert told[name] == pytest.approx(float(value), abs=1e-9), name


def test_metrics_of_a_step_without_trained_tokens_are_none() -> None:
    assert of_routers(np.zeros(2 * 6 + 1), 2) == {}


def test_a_frozen_router_stays_while_all_else_moves_and_is_published_as_it_is(tmp_path: Path) -> None:
    config = config_of(make_mixture(tmp_path / "model", "gpt_oss"), router="frozen", dtype="float32")
    policy = load_policy(config, ALONE, ())
    optimizer = make_optimizer(policy, config.optimizer)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    loss, _, _ = learnt(policy, config)
    assert update(optimizer, loss=loss, lr=1e-3, clip_norm=1.0, world=ALONE).applied
    stayed = {name for name, p in policy.model.named_parameters() if torch.equal(p, before[name])}
    assert stayed == {name for name in before if ".router." in name}
    assert {name for name, _ in published_parameters(policy.model)} == set(before)


def test_biases_of_stacked_experts_do_not_decay(tmp_path: Path) -> None:
    config = config_of(make_mixture(tmp_path / "model", "gpt_oss"), dtype="float32")
    policy = load_policy(config, ALONE, ())
    decays = {
        parameter: group["weight_decay"] > 0
        for group in make_optimizer(policy, config.optimizer).param_groups
        for parameter in group["params"]
    }
    for name, parameter in policy.named_parameters():
        assert decays[parameter] == (parameter.ndim >= 2 and not name.endswith("_bias")), name


def test_a_token_costs_the_experts_that_it_goes_through(tmp_path: Path) -> None:
    of = {k: load_policy(config_of(_with_top(tmp_path, k)), ALONE, ()) for k in (1, 2, NUM_EXPERTS)}
    layers = {k: policy.flops.layers for k, policy in of.items()}
    experts = sum(p.numel() for name, p in of[1].model.named_parameters() if ".experts." in name)
    assert layers[2] - layers[1] == pytest.approx(6 * experts / NUM_EXPERTS)
    assert layers[NUM_EXPERTS] - layers[1] == pytest.approx(6 * experts * (NUM_EXPERTS - 1) / NUM_EXPERTS)


def _with_top(folder: Path, k: int) -> Path:
    return make_mixture(folder / str(k), "qwen3_moe", num_experts_per_tok=k)


@pytest.mark.parametrize(("setting", "value"), [("router", "frozen"), ("router_balance", 0.01), ("router_z", 0.01)])
def test_what_is_asked_of_the_routers_of_a_dense_model_is_refused(tmp_path: Path, setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"model\.{setting} = {value}: Qwen2ForCausalLM has no routers"):
        load_policy(config_of(make_model(tmp_path / "model"), **{setting: value}), ALONE, ())


@pytest.mark.parametrize("family", ["deepseek_v3", "afmoe", "ernie4_5_moe", "lfm2_moe", "minimax_m2"])
def test_a_router_with_a_bias_of_its_own_is_refused_the_balance(tmp_path: Path, family: str) -> None:
    """Wherever the family has it: in the router, inside or around it, by either name."""
    folder = make_family(tmp_path / "model", family)
    with pytest.raises(ConfigError, match=r"model\.router_balance = 0\.01: .* balanced by their own bias"):
        load_policy(config_of(folder, router_balance=0.01), ALONE, ())


def test_terms_for_routers_that_do_not_train_contradict_them(tmp_path: Path) -> None:
    conf = Path("conf/reinforce.yaml")
    for said, why in (("router=frozen", "router = frozen"), ("lora={rank: 4, targets: [q_proj]}", "lora")):
        with pytest.raises(ConfigError, match=rf"model\.router_z = 0\.1: must be 0 with model\.{why}"):
            check_config(load_config(conf, [f"model.{said}", "model.router_z=0.1"]).config)
