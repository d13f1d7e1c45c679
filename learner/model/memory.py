"""What a rank takes of its GPU at the peak of a step: a closed form, in bytes, before any weights are loaded.

    always     masters 4, gradients 4 and moments 8 a trained weight; a frozen base 2, a reference 2: all of it sharded
    gathered   in bf16: the outermost weights throughout, the layer at work and, over ranks, the next one
    kept       by all layers for the backward pass: their inputs alone, with checkpointing

    and the most of    a layer     what it keeps, computed again; gradients at work in it, and those of its weights
                       the head    logits of a chunk, its gradient in fp32
                       the end     gradients of the outermost weights, in fp32 to be added up over ranks

T tokens of a micro-batch, H the width, I that of the MLP, Q and K those of queries and of keys, V the vocabulary. A
layer keeps 16 H + 4 Q + 4 K + 8 I a token: of both norms an fp32 copy and two of bf16 (16 H), queries, keys, values and
what attention makes of them, four of the MLP's; and 2 H, its input. In the backward pass the MLP holds three gradients
(6 I), the rest of the layer some of 10 H. AdamW is fused, and takes nothing of its own.

A teacher's pass comes before, when nothing is kept yet: its shard always, and for a while two of its layers, what one
of them holds, and the logits of a chunk.

It is the arithmetic of layers as Llama and Qwen have them, in bf16 with flash attention; of others it is a guess. Held
against the learner's own code on tensors without memory (`python -m bench memory`); never against a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import transformers
from torch import nn

from streamrl.config import schema
from streamrl.errors import ResourceError
from streamrl.learner.model.logprobs import CHUNK_ELEMENTS
from streamrl.learner.model.ways import decoder_of
from streamrl.terminal import size

REMEDY = (
    "lower training.micro_batch_tokens, leave model.gradient_checkpointing on, set model.reference, model.masters "
    "or teacher.place to cpu, train adapters (model.lora), keep fewer copies (learner.layout.replicas), share "
    "samples among more ranks (learner.layout.context), or take more GPUs (learner.processes)"
)
# Headroom; guesses, none of which a GPU has seen.
_CONTEXT = 700_000_000  # the driver's, with the kernels that are loaded
_WORKSPACES = 300_000_000  # of cuBLAS and of flash attention
_NCCL = 500_000_000  # its buffers: of a single rank as well, which has a group of its own
_FRAGMENTS = 0.05  # of the allocator's blocks, in pieces that nothing fits into
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
    gathered: int
    kept: int
    at_work: int  # the most of a layer, the head and the end
    teaching: int = 0  # of a teacher's pass, in the place of the last three

    @property
    def peak(self) -> int:
        """Of tensors alone."""
        return self.always + max(self.gathered + self.kept + self.at_work, self.teaching)

    @property
    def needed(self) -> int:
        """Of the GPU, with headroom."""
        return int(self.peak * (1 + _FRAGMENTS)) + _CONTEXT + _WORKSPACES + _NCCL


def refuse_too_large(
    sizes: Sizes, config: schema.Config, *, ranks: int, room: int, teacher: Sizes | None = None
) -> None:
    """ResourceError where tensors alone are more than this room on a GPU."""
    needed = plan(sizes, config, ranks=ranks, teacher=teacher).peak
    if needed > room:
        told = f"a rank takes {size(needed)} of its GPU at its peak, by calculation, and {size(room)} are to have"
        raise ResourceError(f"{told}: {REMEDY}")


def plan(sizes: Sizes, config: schema.Config, *, ranks: int | None = None, teacher: Sizes | None = None) -> Plan:
    """On GPUs, where layers are computed again unless the configuration says otherwise. `ranks`: of all hosts; by
    default those of one. `teacher`: of the one that lies beside the policy."""
    ranks = max(1, (ranks or config.learner.processes) // config.learner.layout.replicas)  # that share the model
    # Of a micro-batch each rank of a context group computes a part, and attends to all of it with a part of the heads.
    tokens = -(-config.training.micro_batch_tokens // config.learner.layout.context)
    is_lora = config.model.lora is not None
    on_host = config.model.masters == "cpu"
    copies = 0 if is_lora or config.algorithm.kl.placement == "none" or config.model.reference == "cpu" else 2
    own = 0 if on_host else 16 * sizes.trained + 2 * sizes.frozen
    layers_at_once = 1 if ranks == 1 else 2
    again = bool(config.model.gradient_checkpointing)  # or `auto`
    kept = tokens * 2 * sizes.width if again else _of_layer(sizes, tokens) + tokens * 2 * sizes.width
    last = _of_layer(sizes, tokens) if again else 0
    # What the end holds comes when nothing is kept any longer.
    at_end = _at_the_end(sizes, ranks, is_lora=is_lora) - sizes.layers * kept
    weights = own + copies * (sizes.trained + sizes.frozen)
    if teacher is not None and config.teacher is not None and config.teacher.place == "device":
        weights += 2 * (teacher.trained + teacher.frozen)
    return Plan(
        always=weights // ranks,
        teaching=0 if teacher is None else _of_a_teacher(teacher, tokens, layers_at_once),
        gathered=2 * (sizes.outermost + layers_at_once * sizes.layer),
        kept=sizes.layers * kept,
        at_work=max(
            last + _in_a_layer(sizes, tokens, ranks, is_lora=is_lora),
            _in_the_head(sizes, tokens, is_lora=is_lora),
            at_end,
        ),
    )


def _of_a_teacher(sizes: Sizes, tokens: int, layers_at_once: int) -> int:
    """One pass forward, of which nothing stays."""
    gathered = 2 * (sizes.outermost + layers_at_once * sizes.layer)
    return gathered + max(_of_layer(sizes, tokens), _CHUNK_BYTES * CHUNK_ELEMENTS["cuda"]) + 4 * tokens * sizes.width


def _of_layer(sizes: Sizes, tokens: int) -> int:
    """What it keeps beyond its input."""
    return tokens * (16 * sizes.width + 4 * sizes.queries + 4 * sizes.keys + 8 * sizes.mlp)


def _in_a_layer(sizes: Sizes, tokens: int, ranks: int, *, is_lora: bool) -> int:
    """At work on its backward pass, when the head's gradient waits for the embeddings'."""
    of_weights = 0 if is_lora else 2 * sizes.head + (2 + 4 + 4 // ranks) * sizes.layer
    return tokens * (6 * sizes.mlp + 10 * sizes.width) + of_weights


def _in_the_head(sizes: Sizes, tokens: int, *, is_lora: bool) -> int:
    of_weights = 0 if is_lora else (4 + 2) * sizes.head
    return of_weights + 6 * tokens * sizes.width + _CHUNK_BYTES * CHUNK_ELEMENTS["cuda"]


def _at_the_end(sizes: Sizes, ranks: int, *, is_lora: bool) -> int:
    return 0 if is_lora else (2 + 4) * sizes.outermost + 4 * sizes.outermost // ranks


def _layers(model: transformers.PreTrainedModel) -> list[nn.Module]:
    found = getattr(decoder_of(model), "layers", None)
    return list(found) if found is not None else []
