"""Context parallelism (Ulysses): the ranks of a context group split rows by length, and in attention by heads.

    row         | p p p p r r r r | s s s s t t . . |       two ranks; both have the whole micro-batch
                    the first          the second           embeddings, norms, MLP and head: each on its own part

    attention     [rows, all heads, a part of the length] ── all-to-all ──► [rows, a part of the heads, whole length]
                  normal attention: the mask, or the sequence boundaries, cover the whole length
                  [rows, whole length, a part of the heads] ── all-to-all ──► [rows, a part of the length, all heads]

    log-probs     [tokens predicted here] ── all-reduce ──► [T] of the micro-batch, on every rank of the group

After the log-probs every rank has whole samples and computes the same loss; the gradient of a log-prob flows back only
on the rank that computed it. So gradients of parameters are sums over ranks, as without context parallelism.

Heads of keys and values are repeated until ranks can have equally many. If the query heads do not divide, empty ones
pad the last ranks, and each query has its own head of keys and values. With more ranks than heads, or if something
besides attention looks along the length (convolutions, recurrences), the model is refused.

A ring, which passes keys and values around instead, takes any number of ranks, but needs its own attention in place of
every kernel, mask and sink, and none is available here.

Each exchange blocks until the group's ranks have joined. No GPU has run this, by NCCL.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn

from streamrl.errors import ConfigError
from streamrl.learner.packing.attention import EAGER, VARLEN
from streamrl.learner.packing.micro_batches import MicroBatch
from streamrl.learner.packing.ways import Way, unpackable
from streamrl.learner.process.ranks import World

KEY = "learner.layout.context"

Kernel = Callable[..., tuple[torch.Tensor, Any]]  # transformers' signature of attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharers:
    """This rank's place among ranks that share rows (here) or layers (`tensor`)."""

    at: int
    of: int
    group: dist.ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSplit(Sharers):
    """How the ranks of this rank's context group split rows."""

    @staticmethod
    def among(world: World) -> ContextSplit | None:
        """None if each rank has its own rows."""
        if world.context_group is None:
            return None
        size = world.layout.context
        return ContextSplit(at=world.rank // world.layout.tensor % size, of=size, group=world.context_group)

    def ways(self, model: transformers.PreTrainedModel, known: Sequence[Way]) -> list[Way]:
        """The known ways that can be split over ranks; ConfigError if there are none."""
        refuse_heads(model, self.of)
        found = [way for way in known if not way.own_logits and (way.layout == "shared" or way.attention == VARLEN)]
        if not found:
            raise self.refusal(model, ", ".join(unpackable(model.config)[:3]) or "it does not accept our masks")
        return found

    def refusal(self, model: transformers.PreTrainedModel, reason: str) -> ConfigError:
        problem = f"{type(model).__name__} cannot split its rows over ranks ({reason})"
        return ConfigError(f"{KEY} = {self.of}: {problem}; set it to 1")

    # Cells and tokens

    def cut(self, batch: MicroBatch) -> MicroBatch:
        """This rank's cells and tokens; attention metadata (`until`, `starts`) stays that of whole rows."""
        own_tokens, length = batch.own_tokens, batch.input_ids.shape[1]
        assert own_tokens is not None, "the micro-batch was packed for whole rows"
        size = length // self.of
        cells = self._cells(size)
        of_tokens = ("targets", "position", "in_turn", "behaviour_logprobs", "sample")
        index = batch.index[own_tokens]
        return replace(
            batch,
            input_ids=batch.input_ids[:, cells],
            position_ids=batch.position_ids[:, cells],
            is_token=batch.is_token[:, cells],
            index=index // length * size + index % length - cells.start,
            routes=None if batch.routes is None else batch.routes[:, cells],
            **{name: getattr(batch, name)[own_tokens] for name in of_tokens},
        )

    def spread(self, part: torch.Tensor) -> torch.Tensor:  # [rows, a part of the length, ...] -> [rows, length, ...]
        """This rank's cells at their place in whole rows, with zeros elsewhere."""
        rows, size = part.shape[:2]
        whole = part.new_zeros(rows, self.of * size, *part.shape[2:])
        whole[:, self._cells(size)] = part
        return whole

    def _cells(self, size: int) -> slice:
        return slice(self.at * size, (self.at + 1) * size)

    def joined(self, batch: MicroBatch, *values: torch.Tensor) -> Sequence[torch.Tensor]:  # [T] each
        """Values of all tokens, from each rank's values of its own tokens."""
        assert batch.own_tokens is not None, "the micro-batch was packed for whole rows"
        return joined(self.group, batch.own_tokens, len(batch.index), *values)

    @torch.no_grad()
    def joined_rows(self, hidden: torch.Tensor) -> torch.Tensor:  # [rows, length, H] of [rows, a part of it, H]
        found = [torch.empty_like(hidden) for _ in range(self.of)]
        dist.all_gather(found, hidden.contiguous(), group=self.group)
        return torch.cat(found, dim=1)

    # Attention

    def known_as(self, inner: str) -> str:
        """Register this attention over the context group in transformers; return its name."""
        name = f"streamrl_context_{inner}"
        transformers.AttentionInterface.register(name, partial(self.attend, inner))
        return name

    def attend(
        self,
        inner: str,
        module: nn.Module,
        query: torch.Tensor,  # [rows, heads, a part of the length, head_dim]
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,  # over the whole length
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        heads, device = query.shape[1], query.device.type
        num_own = share(heads, self.of)
        empty = num_own * self.of - heads
        pairs = [x.repeat_interleave(repeats(heads, x.shape[1], self.of), dim=1) for x in (key, value)]
        parts = [F.pad(x, (0, 0, 0, 0, 0, empty)) for x in (query, *pairs)] if empty else [query, *pairs]
        if torch.is_autocast_enabled(device):  # as attention would: they come in a wider dtype than autocast's
            parts = [x.to(torch.get_autocast_dtype(device)) for x in parts]
        query, key, value = swap(self, *parts, cut=1, join=2)
        own = slice(self.at * num_own, (self.at + 1) * num_own)
        own_heads = _OwnHeads(module, own, heads, groups=num_own // key.shape[1])
        if "s_aux" in options:  # per head, like module.sinks
            options["s_aux"] = _of_heads(options["s_aux"], own, heads)
        attended, _ = _kernel(inner, module)(own_heads, query, key, value, attention_mask, **options)
        [back] = swap(self, attended, cut=1, join=2)
        return back[:, :, :heads], None


def refuse_heads(model: transformers.PreTrainedModel, ranks: int) -> None:
    """Raise ConfigError if the model has fewer heads than `ranks`."""
    heads = getattr(model.config.get_text_config(), "num_attention_heads", None) or 1
    if ranks > heads:
        problem = f"{type(model).__name__} has {heads} attention heads"
        raise ConfigError(f"{KEY} = {ranks}: {problem}; set it to {heads} or less")


def share(heads: int, ranks: int) -> int:
    """Query heads per rank; some of the last rank's may be empty."""
    return -(-heads // ranks)


def idle(heads: int, ranks: int) -> float:
    """The fraction of communicated and attended heads that are empty."""
    return 1 - heads / (share(heads, ranks) * ranks)


def repeats(heads: int, kv_heads: int, ranks: int) -> int:
    """How often each key/value head is repeated, so that ranks have equally many, each with its own queries."""
    assert heads % kv_heads == 0
    return heads // kv_heads if heads % ranks else math.lcm(kv_heads, ranks) // kv_heads


def _kernel(inner: str, module: nn.Module) -> Kernel:
    if inner == EAGER:
        own: Kernel | None = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if own is None:
            raise ConfigError(
                f"{KEY}: {type(module).__name__} has an attention that cannot be split over ranks; set it to 1"
            )
        return own
    known: Kernel = transformers.AttentionInterface()[inner]
    return known


def _of_heads(option: Any, own: slice, heads: int) -> Any:
    if not isinstance(option, torch.Tensor) or option.shape != (heads,):
        return option
    own_heads = option[own]
    return F.pad(own_heads, (0, own.stop - own.start - len(own_heads)))


class _OwnHeads:
    """An attention module as its kernel sees it: with only this rank's heads."""

    def __init__(self, module: nn.Module, own: slice, heads: int, *, groups: int) -> None:
        self._module, self._own, self._heads = module, own, heads
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return _of_heads(getattr(self._module, name), self._own, self._heads)


def joined(
    group: dist.ProcessGroup, own_tokens: torch.Tensor, num_tokens: int, *values: torch.Tensor
) -> Sequence[torch.Tensor]:
    """[num_tokens, ...] each, from the ranks' values of their own tokens (`own_tokens`)."""
    # torch leaves `apply` untyped: its types are those of `forward`.
    whole: Sequence[torch.Tensor] = _Join.apply(own_tokens, num_tokens, group, *values)  # type: ignore[no-untyped-call]
    return whole


def swap(sharers: Sharers, *tensors: torch.Tensor, cut: int, join: int) -> Sequence[torch.Tensor]:
    """Cut each tensor along `cut`, one part per rank, exchange the parts, and join them along `join`."""
    found: Sequence[torch.Tensor] = _Swap.apply(sharers, cut, join, *tensors)  # type: ignore[no-untyped-call]
    return found


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sharers: Sharers, cut: int, join: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.sharers, ctx.cut, ctx.join = sharers, cut, join
        return _exchange(sharers, tensors, cut=cut, join=join)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, None, *_exchange(ctx.sharers, grads, cut=ctx.join, join=ctx.cut)


def _exchange(sharers: Sharers, tensors: Sequence[torch.Tensor], *, cut: int, join: int) -> tuple[torch.Tensor, ...]:
    """Exchange all tensors in one message per rank, as bytes: dtypes may differ, and gloo supports few."""
    laid = [tensor.unflatten(cut, (sharers.of, -1)).movedim(cut, 0).contiguous() for tensor in tensors]
    sent = torch.cat([each.view(sharers.of, -1).view(torch.uint8) for each in laid], dim=1)
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=sharers.group)
    found, begin = [], 0
    for each in laid:
        end = begin + each[0].numel() * each.element_size()
        own = got[:, begin:end].contiguous().view(each.dtype).view(each.shape)
        found.append(own.movedim(0, join).flatten(join, join + 1))
        begin = end
    return tuple(found)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own_tokens: torch.Tensor, num_tokens: int, group: dist.ProcessGroup, *values: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(own_tokens)
        whole = values[0].new_zeros(len(values), num_tokens, *values[0].shape[1:])
        whole[:, own_tokens] = torch.stack(values)
        if num_tokens:
            dist.all_reduce(whole, group=group)
        found = tuple(each.clone() for each in whole)  # FSDP does not accept views
        learn = ctx.needs_input_grad[3:]
        ctx.mark_non_differentiable(*(each for each, learns in zip(found, learn, strict=True) if not learns))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Each rank takes the gradient of its own tokens; later computation is identical on all ranks."""
        [own_tokens] = ctx.saved_tensors
        return None, None, None, *(grad[own_tokens] for grad in grads)
