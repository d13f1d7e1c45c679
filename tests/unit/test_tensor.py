"""Which models ranks can share the layers of, and with how many; which ranks have the same samples then; what they say
to each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.memory_cases import Case
from bench.memory_run import _batch
from streamrl.config import schema
from streamrl.config.layout import refuse_layout
from streamrl.errors import ConfigError
from streamrl.learner.loading.build import build_model
from streamrl.learner.loading.load import fill, make_policy
from streamrl.learner.packing.attention import MASKED
from streamrl.learner.parallel.fsdp import shard
from streamrl.learner.parallel.tensor import refuse_tensor
from streamrl.learner.process.ranks import World
from tests.learner_cases import learner_config
from tests.nowhere import Said, nowhere
from tests.tiny_families import make_family

RANKS, TOKENS, LAYERS = 8, 64, 3
NINE = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8}


def outline(folder: Path, family: str, **settings: int) -> transformers.PreTrainedModel:
    return build_model(str(make_family(folder / "model", family, **settings)), MASKED)


def test_numbers_that_do_not_divide_are_refused_with_those_that_do(tmp_path: Path) -> None:
    model = outline(tmp_path, "llama", **NINE)
    refuse_tensor(model, schema.Layout(tensor=3))
    told = (
        r"tensor = 9: LlamaForCausalLM has 9 attention heads, 3 of keys and values, an MLP 96 wide.*; set one of 1, 3$"
    )
    with pytest.raises(ConfigError, match=rf"learner\.layout\.{told}"):
        refuse_tensor(model, schema.Layout(tensor=9))


def test_a_ranks_own_heads_are_what_a_context_group_shares(tmp_path: Path) -> None:
    model = outline(tmp_path, "llama", **NINE)
    refuse_tensor(model, schema.Layout(tensor=3, context=3))
    with pytest.raises(
        ConfigError, match=r"layout\.context = 9: with .*tensor = 3 a rank has 3 of .*; set it to 3 or less$"
    ):
        refuse_tensor(model, schema.Layout(tensor=3, context=9))


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("gpt2", "transformers has no plan for it"),
        ("phi3", "o_proj is rowwise_split_input"),
        ("olmo2", "q_proj is colwise_gather_output"),
        ("gpt_oss", "transformers has no plan for it"),
    ],
)
def test_what_transformers_has_no_such_plan_for_is_refused(tmp_path: Path, family: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"layout\.tensor = 2: ranks cannot share .*{said}.*; set it to 1"):
        refuse_tensor(outline(tmp_path, family), schema.Layout(tensor=2))


def test_ranks_in_a_row_share_layers_and_those_of_a_context_group_are_so_far_apart() -> None:
    layout = schema.Layout(replicas=2, context=2, tensor=2)
    refuse_layout(layout, 16)
    with pytest.raises(
        ConfigError, match=r"context = 2 in each of .*replicas = 2 and .*tensor = 2 .* 12: .* of 8 ranks"
    ):
        refuse_layout(layout, 12)
    world = [World(rank=rank, size=16, device=torch.device("cpu"), layout=layout) for rank in range(16)]
    assert [one.data_rank for one in world] == [rank // 4 for rank in range(16)]
    assert {one.data_size for one in world} == {4}
    assert [one.rank for one in world if one.reports_samples] == [0, 4, 8, 12]


@pytest.fixture
def ranks() -> Iterator[World]:
    with nowhere(RANKS) as world:
        yield world


@pytest.mark.parametrize("tensor", [1, 4])
def test_ranks_that_share_layers_gather_as_much_less_of_their_weights(ranks: World, tensor: int) -> None:
    """In bf16, without memory and on ranks that are not there."""
    width, inner = 256, 1024
    model_config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=width // 4,
    )
    config = learner_config(Path("none"), model=schema.Model(path="none"))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    world = ranks.under(schema.Layout(tensor=tensor))
    policy = shard(make_policy(model, config, (), world).train(), world, in_half=True)
    with FakeTensorMode(allow_non_fake_inputs=True), Said() as said:
        for module in model.modules():
            module._buffers.update({name: torch.empty_like(b, device="cpu") for name, b in module._buffers.items()})
        fill(policy, {}, torch.device("cpu"))
        policy(_batch(Case(size="none", ranks=RANKS, tokens=TOKENS))).logp.sum().backward()
    of_layer = (4 * width * width + 3 * width * inner) * 2  # bytes, in bf16
    others = 2 * (2 * 64 * width + width + LAYERS * (2 * width + 2 * width // 4) * 2) + 2 * LAYERS * 1024
    gathered = said.bytes_of["_allgather_base_"] - 2 * LAYERS * of_layer // tensor
    assert 0 < gathered < 2 * others  # norms, embeddings and the head, with what makes shards even
    if tensor == 1:
        assert said.bytes_of["allreduce_"] == said.bytes_of["alltoall_base_"] == 0
    else:
        # Hidden states, twice a layer in each direction, and once for the head; log-probs and entropies.
        assert said.bytes_of["allreduce_"] == (LAYERS * 4 + 1) * TOKENS * width * 2 + 2 * TOKENS * 4
        # Columns for rows of o and down, and gradients back.
        assert said.bytes_of["alltoall_base_"] == LAYERS * 2 * (width * width + width * inner) * 2 // tensor
    assert all(p.grad is not None for p in policy.parameters())
