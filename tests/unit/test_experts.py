"""Experts as one rank asks them, against transformers' own; which divisions are refused; what is said among ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.memory_cases import Case
from bench.memory_run import _batch, tell_evenly
from streamrl.config import schema
from streamrl.errors import ConfigError
from streamrl.learner.loading.load import fill, load_policy, make_policy
from streamrl.learner.parallel.experts import experts_forward, experts_of
from streamrl.learner.parallel.fsdp import shard
from streamrl.learner.process.ranks import World
from tests.learner_cases import learner_config
from tests.mixtures import MIXTURES, NUM_EXPERTS, make_mixture
from tests.nowhere import Said, nowhere
from tests.tiny_models import make_model

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
RANKS, TOKENS, CHOSEN, LAYERS = 8, 64, 2, 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_answer_as_transformers_asks_them_one_after_another(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    folder = make_mixture(tmp_path / "model", family)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager", dtype=dtype)
    _, module = next(experts_of(model))
    hidden = torch.randn(40, model.config.hidden_size, dtype=dtype, requires_grad=True)
    chosen = torch.randn(40, NUM_EXPERTS - 2).topk(CHOSEN).indices  # some experts get nothing
    weights = torch.rand(40, CHOSEN, dtype=dtype, requires_grad=True)
    of = [hidden, weights, *module.parameters()]
    answers = experts_forward(module, hidden, chosen, weights), module(hidden, chosen, weights)
    found = [[answer, *torch.autograd.grad(answer.sin().sum(), of)] for answer in answers]
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == dtype
        off = (ours - theirs).double().norm() / theirs.double().norm()
        assert off < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize(("make", "said"), [(make_model, "has no experts"), (make_mixture, "8 experts.* a divisor")])
def test_a_division_that_cannot_be_is_refused(tmp_path: Path, make: Any, said: str) -> None:
    folder = make(tmp_path / "model", **({"family": "mixtral"} if make is make_mixture else {}))
    config = learner_config(folder, learner=schema.Learner(layout=schema.Layout(experts=3)))
    with pytest.raises(ConfigError, match=rf"learner\.layout\.experts = 3: .*{said}"):
        load_policy(config, ALONE, ())


@pytest.fixture
def ranks() -> Iterator[World]:
    with nowhere(RANKS) as world:
        yield world


@pytest.mark.parametrize("experts", [1, RANKS])
def test_divided_experts_send_tokens_and_not_weights(ranks: World, experts: int) -> None:
    """In bf16, without memory and on ranks that are not there."""
    width, inner = 256, 512
    model_config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=width,
        moe_intermediate_size=inner,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=16,
        num_experts_per_tok=CHOSEN,
    )
    config = learner_config(Path("none"), model=schema.Model(path="none"))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    world = ranks.under(schema.Layout(experts=experts))
    policy = shard(make_policy(model, config, (), world).train(), world, in_half=True)
    tell_evenly(model, rows=TOKENS * CHOSEN)
    with FakeTensorMode(allow_non_fake_inputs=True), Said() as said:
        for module in model.modules():
            module._buffers.update({name: torch.empty_like(b, device="cpu") for name, b in module._buffers.items()})
        fill(policy, {}, torch.device("cpu"))
        policy(_batch(Case(size="none", ranks=RANKS, tokens=TOKENS))).logp.sum().backward()
    of_experts = 16 * 3 * width * inner * 2  # bytes of a layer's, in bf16
    if experts == 1:
        assert said.bytes_of["all_to_all_single"] == 0
        assert said.bytes_of["_allgather_base_"] > 2 * LAYERS * of_experts
    else:  # rows there and back, forward and backward
        assert said.bytes_of["all_to_all_single"] == LAYERS * 4 * TOKENS * CHOSEN * width * 2
        assert said.bytes_of["_allgather_base_"] < LAYERS * of_experts
    assert all(p.grad is not None for p in policy.parameters())
