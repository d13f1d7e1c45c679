"""Adapters: the base is the reference, the merged model is what the world sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from streamrl.config import schema
from streamrl.errors import ConfigError, DataError
from streamrl.learner.checkpoints.export import export
from streamrl.learner.checkpoints.shard import load_state, load_weights
from streamrl.learner.loading.build import load_model
from streamrl.learner.loading.load import load_policy
from streamrl.learner.loading.tokenizer import read_tokenizer_info
from streamrl.learner.model.lora import merged_parameters, without_adapters
from streamrl.learner.model.policy import Policy, evaluating
from streamrl.learner.objective.optimizer import make_optimizer
from streamrl.learner.packing.micro_batches import MicroBatch
from streamrl.learner.packing.pack import pack
from streamrl.learner.process.ranks import World
from tests.learner_cases import learner_config
from tests.probing import probe
from tests.shards import write_shard
from tests.tiny_models import make_model

ALONE = World(rank=0, size=1, device=torch.device("cpu"))


@pytest.fixture
def config(tmp_path: Path) -> schema.Config:
    folder = make_model(tmp_path / "model")
    lora = schema.Lora(rank=4, dropout=0.5)
    return learner_config(folder, dir=tmp_path, model=schema.Model(path=str(folder), dtype="float32", lora=lora))


@pytest.fixture
def policy(config: schema.Config) -> Policy:
    """With adapters that do something."""
    torch.manual_seed(0)
    policy = load_policy(config, ALONE, (1,))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.3)
    return policy


def batch_for(policy: Policy) -> MicroBatch:
    [batch] = pack([probe(torch.arange(3, 12).numpy())], max_tokens=64, shape=policy.shape)
    return batch


def logprobs(policy: Policy) -> torch.Tensor:
    with evaluating(policy):
        logp: torch.Tensor = policy(batch_for(policy), raw=True).logp
    return logp


def plain_logprobs(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        logp = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return logp.gather(1, ids[0, 1:, None])[:, 0]


def test_only_adapters_train(policy: Policy) -> None:
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    policy(batch_for(policy)).logp.sum().backward()
    assert all((p.grad is not None) == (name in trained) for name, p in policy.named_parameters())


def test_without_adapters_the_policy_is_the_model_it_began_as(policy: Policy, config: schema.Config) -> None:
    base = plain_logprobs(load_model(config.model.path))
    with without_adapters(policy):
        torch.testing.assert_close(logprobs(policy), base, atol=1e-5, rtol=0)
    assert not torch.allclose(logprobs(policy), base, atol=1e-2)


def test_adapters_in_half_learn_after_the_reference_was_asked_first(config: schema.Config) -> None:
    """FSDP looks in its first pass which parameters learn, and peft switches adapters off by saying that none does."""
    half = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    policy = load_policy(half, ALONE, (1,))
    with evaluating(policy), without_adapters(policy):
        policy(batch_for(policy))
    policy(batch_for(policy)).logp.sum().backward()
    assert {p.grad.dtype for p in policy.parameters() if p.grad is not None} == {torch.float32}


def test_merged_parameters_have_the_bases_names_and_the_policys_log_probs(
    policy: Policy, config: schema.Config
) -> None:
    merged = dict(merged_parameters(policy.model, torch.float32))
    base = load_model(config.model.path)
    assert merged.keys() == {name for name, _ in base.named_parameters()}
    base.load_state_dict(merged, strict=False)
    torch.testing.assert_close(plain_logprobs(base), logprobs(policy), atol=1e-5, rtol=0)


def test_the_export_is_the_merged_model(policy: Policy, config: schema.Config) -> None:
    folder = export(policy, read_tokenizer_info(config.model.path).tokenizer, config, ALONE)
    torch.testing.assert_close(plain_logprobs(load_model(str(folder))), logprobs(policy), atol=1e-5, rtol=0)


def test_a_checkpoint_holds_the_adapters_alone(policy: Policy, config: schema.Config, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    write_shard(tmp_path / "checkpoint", policy, make_optimizer(policy, config.optimizer), ALONE)
    restored = load_policy(config, ALONE, (1,))
    load_state(tmp_path / "checkpoint", restored, make_optimizer(restored, config.optimizer), ALONE)
    torch.testing.assert_close(logprobs(restored), logprobs(policy))
    [file] = (tmp_path / "checkpoint").iterdir()
    assert file.stat().st_size < 0.5 * (Path(config.model.path) / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    "lora", [{"rank": 2}, {"rank": 8}, {"targets": ("q_proj",)}, {"targets": ("q_proj", "k_proj", "v_proj", "o_proj")}]
)
def test_a_checkpoint_of_other_adapters_is_refused(
    policy: Policy, config: schema.Config, tmp_path: Path, lora: dict[str, Any]
) -> None:
    """Runs of the flat factors would fit: of a smaller rank, for one, they are other rows."""
    (tmp_path / "checkpoint").mkdir()
    write_shard(tmp_path / "checkpoint", policy, make_optimizer(policy, config.optimizer), ALONE)
    other = config.model.model_copy(update={"lora": schema.Lora(**{"rank": 4, **lora})})
    restored = load_policy(config.model_copy(update={"model": other}), ALONE, (1,))
    with pytest.raises(DataError, match=r"the checkpoint holds \d+ weights of .*lora_.*, but \d+ are trained: `model`"):
        load_weights(tmp_path / "checkpoint", restored)
    with pytest.raises(DataError, match="`model` must be the one that it was made with"):
        load_state(tmp_path / "checkpoint", restored, make_optimizer(restored, config.optimizer), ALONE)


def test_targets_that_the_model_does_not_have_are_named(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    model = schema.Model(path=str(folder), dtype="float32", lora=schema.Lora(targets=("c_attn",)))
    with pytest.raises(ConfigError, match=r"model\.lora\.targets: .*c_attn"):
        load_policy(learner_config(folder, model=model), ALONE, (1,))


@pytest.mark.parametrize(("target", "tied"), [("lm_head", False), ("embed_tokens", True)])
def test_an_adapter_on_the_head_is_refused(tmp_path: Path, target: str, tied: bool) -> None:
    folder = make_model(tmp_path / "model", tied=tied)
    model = schema.Model(path=str(folder), dtype="float32", lora=schema.Lora(targets=("q_proj", target)))
    with pytest.raises(ConfigError, match=rf"model\.lora\.targets: .*{target} is the output projection or tied"):
        load_policy(learner_config(folder, model=model), ALONE, (1,))
