"""The policy: a transformers causal model that returns log-probs of packed sequences only.

With several ranks, parameters are gathered and freed around the policy's forward pass, so the head's log-probs are
computed inside it. `plain` returns the bare model's output for one sequence, unpacked and with its own head;
`learner.model.settle` checks packing against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from torch.distributed.fsdp import FSDPModule

from streamrl.learner.model.logits import Head
from streamrl.learner.model.logprobs import LogProbs, given_logprobs, project, token_logprobs
from streamrl.learner.moe.routing_replay import RoutingReplay
from streamrl.learner.packing.attention import EAGER, VARLEN
from streamrl.learner.packing.micro_batches import MicroBatch, Piece, Shape, additive
from streamrl.learner.packing.ways import Way, decoder_of, layer_types, ways_of
from streamrl.learner.parallel.context import ContextSplit
from streamrl.learner.parallel.experts import active_shares, use_our_experts
from streamrl.learner.parallel.sums import TokenShare
from streamrl.learner.parallel.tensor import sharers_of
from streamrl.protocol.wire.routes import RouteShape

_MOST_LOGITS = 1 << 26  # per micro-batch, if logits are the model's own: 256 MiB in fp32, several times
_HEAD_TOLERANCE = 1e-4
_SIZES_OF_LOGITS = (3.0, 3000.0)  # large enough to reveal a cap that the current logits do not reach


class Seen(NamedTuple):
    """The bare model's output for one sequence."""

    logp: torch.Tensor  # [T]
    hidden: torch.Tensor  # [T, H] that `logp` is computed from; empty if the model does not expose it


class Policy(nn.Module):
    """Log-probs of a micro-batch's trained tokens."""

    def __init__(self, model: transformers.PreTrainedModel, *, head: Head, min_tokens: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.head, self._min_tokens, self._dtype = head, min_tokens, dtype
        self.flops = Flops.of(model)  # before anything is sharded
        self.replay: RoutingReplay | None = None  # set if expert routes are replayed
        if dtype == torch.float64:
            use_our_experts(model)
        self.ways = ways_of(model)  # before one of them is taken
        self.split: ContextSplit | None = None
        self.take(self.ways[0], head)

    def share_out(self, split: ContextSplit) -> None:
        """Split each row over the context group's ranks from now on; ConfigError if the model cannot be split."""
        self.split, self.ways = split, split.ways(self.model, self.ways)
        self.take(self.way if self.way in self.ways else self.ways[0], self.head)

    @property
    def routes_wanted(self) -> RouteShape | None:
        """The shape of the routes that groups must carry, or None."""
        return None if self.replay is None else self.replay.wanted

    def take(self, way: Way, head: Head) -> None:
        """Call the model in this way from now on."""
        self.way, self.head = way, head
        config = self.model.config.get_text_config()
        attention = way.attention
        if self.split is not None and way.layout != "rows":  # whole rows are used only by `plain`
            attention = self.split.known_as(attention)
        if self.model.config._attn_implementation != attention:
            self.model.set_attn_implementation(attention)
        self._varlen = way.attention == VARLEN
        self.shape = Shape(
            hidden_size=config.hidden_size,
            share_prompts=way.layout == "shared",
            padded=not self._varlen,
            alone=way.layout == "rows",
            max_cells=max(1, _MOST_LOGITS // config.vocab_size) if way.own_logits else None,
            parts=1 if self.split is None else self.split.of,
            part=0 if self.split is None else self.split.at,
        )

    def forward(self, batch: MicroBatch, *, raw: bool = False, entropy_learns: bool = False) -> LogProbs:
        """Log-probs of the micro-batch.

        `raw`: as of the bare model, in fp32 throughout, at temperature 1 and with nothing banned. `entropy_learns`: the
        entropy carries a gradient too.
        """
        dtype, head, min_tokens = (
            (torch.float32, self.head.plain(), 0) if raw else (self._dtype, self.head, self._min_tokens)
        )
        own_part = batch if self.split is None else self.split.cut(batch)
        early = own_part.in_turn < min_tokens
        projection = self.model.get_output_embeddings()
        # Parameters that FSDP gathered in bf16 need no casts; a cast cache would hold them all until the end of the
        # pass.
        casts = dtype == torch.bfloat16 and next(self.model.parameters()).dtype != dtype
        replaying = nullcontext() if self.replay is None else self.replay.passing(own_part)
        with replaying, torch.autocast(batch.input_ids.device.type, torch.bfloat16, enabled=casts, cache_enabled=False):
            if self.way.own_logits:
                logits = self.model(input_ids=batch.input_ids, use_cache=False).logits
                return given_logprobs(logits.flatten(0, 1)[batch.index], batch.targets, early, head, entropy_learns)
            hidden = self._hidden(own_part, batch)
        bias = getattr(projection, "bias", None)
        if (sharers := sharers_of(self.model)) is None:
            found = token_logprobs(hidden, projection.weight, own_part.targets, early, head, bias, entropy_learns)
        else:
            share = TokenShare(sharers, len(hidden), hidden.device)
            of_own = (own_part.targets[share.own_tokens], early[share.own_tokens])
            own_logprobs = token_logprobs(share.taken(hidden), projection.weight, *of_own, head, bias, entropy_learns)
            found = LogProbs(*share.gathered(*own_logprobs))
        return found if self.split is None else LogProbs(*self.split.joined(batch, *found))

    def _hidden(self, own_part: MicroBatch, batch: MicroBatch) -> torch.Tensor:  # [T, H]
        """`own_part`: the part of the micro-batch that this rank computes."""
        where: dict[str, Any] = {}
        if not self.shape.alone:
            where["position_ids"] = own_part.position_ids
        if self.shape.share_prompts and self.shape.padded:
            where["attention_mask"] = self._masks(batch)
        if self._varlen and not self.shape.alone:
            where |= {"cu_seq_lens_q": batch.starts, "max_length_q": batch.longest}
            if batch.prefixes is not None:
                where["prefixes"] = batch.prefixes
        out = decoder_of(self.model)(input_ids=own_part.input_ids, use_cache=False, **where)
        hidden: torch.Tensor = out.last_hidden_state.flatten(0, 1)[own_part.index]
        return hidden

    def _masks(self, batch: MicroBatch) -> torch.Tensor | dict[str, torch.Tensor]:
        """Masks as the model takes them: one for all layers, or one for each kind of layer."""
        config = self.model.config.get_text_config()
        prepared = additive if self.way.attention == EAGER else torch.Tensor.contiguous
        window, kinds = getattr(config, "sliding_window", None), layer_types(config)
        if window is None or (kinds and "sliding_attention" not in kinds):
            return prepared(batch.attention_mask())
        near = prepared(batch.attention_mask(window))
        return {"full_attention": prepared(batch.attention_mask()), "sliding_attention": near} if kinds else near

    def plain(self, token_ids: torch.Tensor) -> Seen:  # [T]
        """The bare model's output for one sequence, without packing and with its own head."""
        with self.watching() as hidden:
            logits = self.model(input_ids=token_ids[None], use_cache=False).logits[0, :-1].float()
        return Seen(logp=logits.log_softmax(-1).gather(1, token_ids[1:, None])[:, 0], hidden=hidden[0][0, :-1])

    @contextmanager
    def watching(self) -> Iterator[list[torch.Tensor]]:  # [rows, length, H] of each pass
        """Collect the final hidden states of forward passes made inside."""
        seen: list[torch.Tensor] = []
        with decoder_of(self.model).register_forward_hook(lambda _module, _args, out: seen.append(_last(out))):
            yield seen

    def head_fits(self, token_ids: torch.Tensor, head: Head) -> bool:  # [T]
        """Whether the model computes its logits as this head does, at every magnitude."""
        return all(self._head_fits(token_ids, head, size) for size in _SIZES_OF_LOGITS)

    def _head_fits(self, token_ids: torch.Tensor, head: Head, size: float) -> bool:
        projection = self.model.get_output_embeddings()
        weight, bias = projection.weight, getattr(projection, "bias", None)
        seen: list[torch.Tensor] = []

        def resize(_module: nn.Module, _args: Any, out: Any) -> Any:
            hidden = out.last_hidden_state
            out.last_hidden_state = hidden * (size / (hidden @ weight.T).abs().max())
            seen.append(out.last_hidden_state)
            return out

        with decoder_of(self.model).register_forward_hook(resize):
            theirs = self.model(input_ids=token_ids[None], use_cache=False).logits
        ours = project(seen[0], weight, bias, replace(head.plain(), compute_dtype=weight.dtype))
        largest = theirs.abs().max()
        return ours.shape == theirs.shape and bool((ours - theirs).abs().max() <= _HEAD_TOLERANCE * largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """A model's useful FLOPs, forward and backward pass together, to estimate how much of the machine's peak they use.

        a token through the layers    (4 N + 2 N_trained)                  forward, back to inputs, to trained weights
        a trained token at the head   (4 V H + 2 V H if the head trains)
        a token that attends to c     12 * layers * heads * head_dim * c

    N counts the elements of the layers' matrices: all but embeddings and head, and of a layer's experts those that a
    token is routed to. A prompt counts once for its group, and recomputation to save memory does not count, so this is
    less than what the machine really does.
    """

    layers: float  # per token
    head: float  # per trained token
    attended: float  # per pair of a token and an earlier one that it attends to

    @classmethod
    def of(cls, model: transformers.PreTrainedModel) -> Flops:
        config = model.config.get_text_config()
        projection = model.get_output_embeddings()
        head = next(model.parameters()).new_empty(0) if projection is None else projection.weight
        lookups = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} | {id(head)}
        matrices = [p for p in decoder_of(model).parameters() if p.ndim >= 2 and id(p) not in lookups]
        shares = active_shares(model)
        size = sum(shares.get(p, 1.0) * p.numel() for p in matrices)
        trained = sum(shares.get(p, 1.0) * p.numel() for p in matrices if p.requires_grad)
        heads = getattr(config, "num_attention_heads", None) or 0  # none: no attention
        head_dim = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
        return cls(
            layers=4 * size + 2 * trained,
            head=(4 + 2 * head.requires_grad) * head.numel(),
            attended=12 * config.num_hidden_layers * heads * head_dim,
        )

    def of_pass(self, pieces: Iterable[Piece]) -> float:
        flops = 0.0
        seen: set[int] = set()
        for piece in pieces:
            prompt = len(piece.prompt_ids)
            if piece.group not in seen:
                seen.add(piece.group)
                flops += self.layers * prompt + self.attended * prompt * (prompt + 1) / 2
            flops += self.head * int(piece.mask.sum())
            starts = [0, *(branch.start for branch in piece.branches), len(piece.token_ids)]
            for before, (start, end) in zip((prompt, *(b.keep for b in piece.branches)), pairwise(starts), strict=True):
                own = max(0, end - start - 1)
                flops += self.layers * own + self.attended * (before * own + own * (own + 1) / 2)
        return flops


def _last(out: Any) -> torch.Tensor:
    """A decoder's last hidden state; empty if the decoder is the whole model."""
    hidden = getattr(out, "last_hidden_state", None)
    return torch.zeros(1, 1, 0) if hidden is None else hidden


@contextmanager
def evaluating(policy: Policy) -> Iterator[None]:
    """Inside, forward passes run without gradient or dropout; afterwards the policy trains again.

    FSDP keeps the outermost parameters gathered after a forward pass, for a backward pass that never comes here.
    """
    policy.eval()
    with torch.no_grad():
        yield
    if isinstance(policy, FSDPModule):
        policy.reshard()
    policy.train()
