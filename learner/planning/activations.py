"""GPU memory of a rank's tokens while a layer works on them, in bytes: what it keeps, and its temporaries.

A token of width H in a layer whose queries are Q wide, keys K, the MLP I, in bf16:

    kept     H    2     its input; alone, until the backward pass recomputes the rest
             H   16     of both norms an fp32 copy and two of bf16
             Q    4     queries, and attention's output;                6 more if heads have norms
             K    4     keys and values;                                6 more likewise
             I    8     four of the MLP's;                              compiled 4, and 4 H: measured once, on an H100
    at work  I    4     two gradients of the MLP's
             H    2     that of its input

For each expert of width I that a token is routed to, a mixture keeps 8 I, or 14 I if experts modify their gates, and 4
H: hidden states by expert, before and after; and 8 for each expert that its router scores. At work are 6 H for each,
and 11 H if experts are divided and rows are exchanged; 3 I more if they modify their gates. Rows are counted as if
evenly distributed over ranks.

Ranks that share layers each have a part of Q, K and I, and send some of the tokens to their experts.

Ranks that share samples (context) each have their part of the tokens, and keys and values as often as they are
repeated; heads that do not divide are padded with empty ones. Attention of the model's own (sinks, soft caps) keeps 6
bytes for each head and token that a token may see, and has as many at work.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamrl.config import schema
from streamrl.learner.packing.attention import EAGER
from streamrl.learner.parallel.context import idle, repeats, share
from streamrl.learner.planning.sizes import Sizes

_SCORES = 6  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's share of a micro-batch, and the sizes of the groups it shares it with."""

    tokens: int  # of this rank
    longest: int  # of the longest sample
    context: int
    experts: int

    @classmethod
    def of(cls, layout: schema.Layout, *, tokens: int, longest: int) -> Part:
        own = -(-tokens // layout.context)
        return cls(tokens=own, longest=longest, context=layout.context, experts=layout.experts)


def of_layer(sizes: Sizes, part: Part, *, is_compiled: bool = False) -> int:
    """What a layer keeps beyond its input."""
    of_mlp = 4 * (sizes.mlp + sizes.width) if is_compiled else 8 * sizes.mlp
    return int(part.tokens * (16 * sizes.width + _attention(sizes, part) + of_mlp + _experts(sizes)))


def at_work(sizes: Sizes, part: Part) -> int:
    """Temporaries of a layer's backward pass, beyond what it keeps.

    Those of its MLP, or of its attention once what the MLP kept is freed, whichever is larger.
    """
    of_mlp: float = 4 * sizes.mlp + 2 * sizes.width
    if (experts := sizes.experts) is not None:
        widths = (6 if part.experts == 1 else 11) * sizes.width + (3 * experts.width if experts.has_bias else 0)
        of_mlp += experts.chosen * widths
    of_attention = _scores(sizes, part) - 8 * sizes.mlp - _experts(sizes)
    return int(part.tokens * max(of_mlp, of_attention))


def of_experts(sizes: Sizes, part: Part) -> int:
    """The layer's bytes for tokens that other ranks may have sent."""
    if sizes.experts is None or part.experts == 1:
        return 0
    return int(part.tokens * (_experts(sizes) + 11 * sizes.experts.chosen * sizes.width))


def masks(sizes: Sizes, part: Part) -> int:
    """Attention masks in fp32, over whole samples, if the attention uses any."""
    return 0 if sizes.attention != EAGER else 4 * part.tokens * part.context * part.longest


def _attention(sizes: Sizes, part: Part) -> int:
    keys, more = sizes.keys, 0
    if part.context > 1:
        keys *= repeats(sizes.heads, sizes.kv_heads, part.context)
    if sizes.norms_heads:
        more += 6 * (sizes.queries + sizes.keys)
    filled = 1 - idle(sizes.heads, part.context)
    return int((4 * sizes.queries + 4 * keys) / filled) + more + _scores(sizes, part)


def _scores(sizes: Sizes, part: Part) -> int:
    """Attention scores: in a context group each rank has a part of the heads, for all tokens."""
    heads = share(sizes.heads, part.context) * part.context
    return _SCORES * heads * part.longest if sizes.attention == EAGER else 0


def _experts(sizes: Sizes) -> float:
    if (experts := sizes.experts) is None:
        return 0
    return experts.chosen * ((14 if experts.has_bias else 8) * experts.width + 4 * sizes.width) + 8 * experts.num
