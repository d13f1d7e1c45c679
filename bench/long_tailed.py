"""Samples with the long-tailed lengths of a reasoning model, and random models to train on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import transformers

from streamrl.config import schema
from streamrl.learner.packing.attention import MASKED
from streamrl.protocol.wire.group import Group, GroupHeader, decode_body, decode_header, encode_group
from streamrl.protocol.wire.sample import Sample, Span
from streamrl.versions import make_version

END = 1  # the token that ends a response


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Response lengths are log-normal, truncated at `longest`; prompt lengths uniform."""

    prompt: tuple[int, int]
    median: int
    spread: float  # sigma of the log-normal
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of a Qwen2-shaped model with tied embeddings."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int

    def config(self, *, max_length: int) -> transformers.Qwen2Config:
        return transformers.Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=max_length,
            tie_word_embeddings=True,
            eos_token_id=END,
            bos_token_id=None,
            pad_token_id=0,
        )

    def model(self, *, max_length: int, device: torch.device, attention: str = MASKED) -> transformers.PreTrainedModel:
        """Return a model with random fp32 weights."""
        torch.manual_seed(0)
        with device:
            return transformers.AutoModelForCausalLM.from_config(
                self.config(max_length=max_length), dtype=torch.float32, attn_implementation=attention
            )


def make_groups(num_groups: int, *, num_samples: int, lengths: Lengths, vocabulary: int, seed: int = 0) -> list[Group]:
    rng = np.random.default_rng(seed)
    return [_group(rng, ticket, num_samples, lengths, vocabulary) for ticket in range(num_groups)]


def _group(rng: np.random.Generator, ticket: int, num_samples: int, lengths: Lengths, vocabulary: int) -> Group:
    samples = tuple(_sample(rng, lengths, vocabulary) for _ in range(num_samples))
    header = GroupHeader(
        ticket=ticket,
        identity="",
        run_uid="bench",
        purpose="train",
        attempt=0,
        worker="bench",
        fingerprint="bench",
        num_prompt_tokens=0,
        sample_lengths=(),
        sample_rewards=(),
        sample_finished=(),
        min_version=0,
        max_version=0,
    )
    prompt = rng.integers(2, vocabulary, rng.integers(*lengths.prompt)).astype(np.int32)
    # Encode and decode once: encoding completes the header's sample fields.
    encoded, body = encode_group(Group(header=header, prompt_ids=prompt, samples=samples))
    return decode_body(decode_header(encoded), body)


def _sample(rng: np.random.Generator, lengths: Lengths, vocabulary: int) -> Sample:
    drawn = int(lengths.median * np.exp(lengths.spread * rng.standard_normal()))
    num_tokens = min(lengths.longest, max(2, drawn))
    tokens = rng.integers(2, vocabulary, num_tokens).astype(np.int32)
    tokens[-1] = END
    reward = float(rng.random())
    return Sample(
        token_ids=tokens,
        logprobs=np.full(num_tokens, -np.log(vocabulary), dtype=np.float32),
        mask_runs=(num_tokens,),
        spans=(Span(version=make_version(1, 0), step=0, start=0, end=num_tokens),),
        finish_reason="stop",
        rewards={"bench": reward},
        reward=reward,
    )


def num_tokens(groups: Sequence[Group]) -> int:
    """Count the tokens of all samples, each with its prompt."""
    return sum(
        header.num_prompt_tokens * len(header.sample_lengths) + sum(header.sample_lengths)
        for header in (group.header for group in groups)
    )


def make_config(*, micro_batch_tokens: int, dtype: str, attention: str = "auto") -> schema.Config:
    """Return the defaults without KL, so that, like the peers, the learner has no reference model."""
    return schema.Config.model_validate(
        {
            "model": {"path": "bench", "dtype": dtype, "attention": attention},
            "data": {"train": "none"},
            "rewards": {"bench": {"type": "function", "target": "none"}},
            "algorithm": {"kl": {"placement": "none"}},
            "training": {"micro_batch_tokens": micro_batch_tokens},
        }
    )
