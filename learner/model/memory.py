"""What a rank takes of its GPU at the peak of a step: a closed form, in bytes, before any weights are loaded.

    always     masters 4, gradients 4 and moments 8 a trained weight; a frozen base 4, a reference 2: all of it sharded
    backward   what layers keep for it, and one layer at work: what it keeps, its weights in bf16, its gradients
               over ranks: that layer and the next one gathered, the outermost weights throughout, gradients under way
    step       a copy of 4 a trained weight, by AdamW over many tensors at once

T tokens of a micro-batch, H the width, I that of the MLP, Q and K those of queries and of keys, V the vocabulary, W the
weights of a layer. A layer keeps 22 H + 4 Q + 4 K + 8 I a token: norms in fp32 (both, and the residual between them: 12
H), the inputs of five projections in bf16 (10 H), queries, keys, values and what attention makes of them, four of the
MLP's; and 4 H, its input. With checkpointing that input is all, but of the layer at work. In the backward pass the MLP
holds three gradients (6 I), the rest of the layer some of 10 H.

It is the arithmetic of layers as Llama and Qwen have them, in bf16 under autocast with flash attention; of others it is
a guess. Held against the learner's own code on tensors without memory (`python -m bench memory`); never against a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import transformers
from torch import nn

from streamrl.config import schema
from streamrl.learner.model.logprobs import Head
from streamrl.learner.model.ways import decoder_of

_CONTEXT = 1_500_000_000  # of the driver, of libraries and of NCCL; a guess
_FRAGMENTS = 0.05  # of the allocator's blocks, in pieces that nothing fits into; a guess
_CHUNK_BYTES = 14  # an element of the head's logits, with its exponential and its bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a model."""

    trained: int  # weights
    frozen: int
    layer: int  # weights of the largest
    head: int  # V x H
    outermost: int  # weights that are in no layer
    is_tied: bool
    layers: int
    width: int
    mlp: int
    queries: int
    keys: int

    @classmethod
    def of(cls, model: transformers.PreTrainedModel) -> Sizes:
        """It may be on `meta`."""
        config = model.config.get_text_config()
        layers = _layers(model)
        each = [sum(p.numel() for p in layer.parameters()) for layer in layers]
        total = sum(p.numel() for p in model.parameters())
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        heads = getattr(config, "num_attention_heads", None) or 1
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        mlp = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        return cls(
            trained=trained,
            frozen=total - trained,
            layer=max(each, default=0),
            head=config.vocab_size * config.hidden_size,
            outermost=total - sum(each),
            is_tied=bool(config.tie_word_embeddings),
            layers=len(each),
            width=config.hidden_size,
            mlp=mlp,
            queries=heads * head_dim,
            keys=(getattr(config, "num_key_value_heads", None) or heads) * head_dim,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Bytes of one rank."""

    always: int
    passes: int  # beyond it, at the peak of forward and backward passes
    step: int  # beyond it, of the optimizer

    @property
    def peak(self) -> int:
        """Of tensors alone."""
        return self.always + max(self.passes, self.step)

    @property
    def needed(self) -> int:
        """Of the GPU, with headroom."""
        return int(self.peak * (1 + _FRAGMENTS)) + _CONTEXT


def plan(sizes: Sizes, config: schema.Config) -> Plan:
    ranks, is_lora = config.learner.processes, config.model.lora is not None
    copies = 0 if is_lora or config.algorithm.kl.placement == "none" or config.model.reference == "cpu" else 2
    total = sizes.trained + sizes.frozen
    always = (16 * sizes.trained + 4 * sizes.frozen + copies * total) // ranks
    over_ranks = 0 if ranks == 1 else 4 * (sizes.outermost + 4 * sizes.layer)
    return Plan(
        always=always,
        passes=over_ranks + max(_in_a_layer(sizes, config), _in_the_head(sizes, config)),
        step=4 * sizes.trained // ranks,
    )


def _kept(sizes: Sizes, config: schema.Config) -> int:
    """By all layers, until the backward pass."""
    tokens = config.training.micro_batch_tokens
    if config.model.gradient_checkpointing:
        return sizes.layers * tokens * 4 * sizes.width
    return sizes.layers * (_layer(sizes, tokens) + tokens * 4 * sizes.width)


def _layer(sizes: Sizes, tokens: int) -> int:
    """Beyond its input."""
    each = 22 * sizes.width + 4 * sizes.queries + 4 * sizes.keys + 8 * sizes.mlp
    return tokens * each + 2 * sizes.layer


def _in_a_layer(sizes: Sizes, config: schema.Config) -> int:
    """At work on the last one, when the others still keep theirs, and the head's gradient waits for the embeddings'."""
    tokens = config.training.micro_batch_tokens
    again = _layer(sizes, tokens) if config.model.gradient_checkpointing else 0
    gradients = tokens * (6 * sizes.mlp + 10 * sizes.width) + (
        6 * sizes.mlp * sizes.width if not config.model.lora else 0
    )
    waiting = 4 * sizes.head if not config.model.lora and (sizes.is_tied or config.learner.processes > 1) else 0
    return _kept(sizes, config) + again + gradients + waiting


def _in_the_head(sizes: Sizes, config: schema.Config) -> int:
    tokens = config.training.micro_batch_tokens
    of_weights = 2 * sizes.head if config.model.lora else 8 * sizes.head
    return _kept(sizes, config) + of_weights + 16 * tokens * sizes.width + _CHUNK_BYTES * Head().chunk_elements


def _layers(model: transformers.PreTrainedModel) -> list[nn.Module]:
    found = getattr(decoder_of(model), "layers", None)
    return list(found) if found is not None else []
