"""Context parallelism (Ulysses): the ranks of a context group share the length of rows, and in attention the heads.

    row         | p p p p r r r r | s s s s t t . . |       of two ranks; both have the whole micro-batch
                    the first          the second           embeddings, norms, MLP and head: each on its own part

    attention     [rows, all heads, a part of the length] ── all-to-all ──► [rows, a part of the heads, whole length]
                  it attends as ever: the mask, or where sequences begin, is of the whole length
                  [rows, whole length, a part of the heads] ── all-to-all ──► [rows, a part of the length, all heads]

    log-probs     [tokens predicted here] ── all-reduce ──► [T] of the micro-batch, on every rank of the group

What comes behind the log-probs sees whole samples on every rank, and makes the same loss on each; the gradient of a
log-prob goes back on the one rank that made it. So gradients of parameters are sums over ranks, as they are without.

Heads of keys and values are repeated as far as ranks can have equal ones. Where the query heads do not divide, empty
ones fill up the last ranks, and each query has a head of keys and values of its own. With more ranks than heads, or
where something beside attention looks along the length (convolutions, recurrences), the model is refused.

A ring, which sends keys and values around instead, takes any number of ranks; it wants attention of its own in place of
every kernel, mask and sink, and there is none of these here that it could use.

Each exchange blocks until the group's ranks have come. No GPU has run this, by NCCL.
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

Kernel = Callable[..., tuple[torch.Tensor, Any]]  # as transformers calls attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """This rank's place among those that share rows."""

    at: int
    of: int
    group: dist.ProcessGroup

    @staticmethod
    def among(world: World) -> Parts | None:
        """None: each rank has its rows for itself."""
        if world.context_group is None:
            return None
        size = world.layout.context
        return Parts(at=world.rank // world.layout.tensor % size, of=size, group=world.context_group)

    def ways(self, model: transformers.PreTrainedModel, known: Sequence[Way]) -> list[Way]:
        """Those that can be shared out, of those that are known; ConfigError: none can."""
        refuse_heads(model, self.of)
        found = [way for way in known if not way.own_logits and (way.layout == "shared" or way.attention == VARLEN)]
        if not found:
            raise self.refusal(model, ", ".join(unpackable(model.config)[:3]) or "it takes no masks of ours")
        return found

    def refusal(self, model: transformers.PreTrainedModel, reason: str) -> ConfigError:
        told = f"{type(model).__name__} cannot be computed in parts of its rows ({reason})"
        return ConfigError(f"{KEY} = {self.of}: {told}; set it to 1")

    # Cells and tokens

    def cut(self, batch: MicroBatch) -> MicroBatch:
        """Cells and tokens of this rank; what is said of attention (`until`, `starts`) stays that of whole rows."""
        mine, length = batch.mine, batch.input_ids.shape[1]
        assert mine is not None, "it was packed for a policy that has rows whole"
        size = length // self.of
        cells = self._cells(size)
        of_tokens = ("targets", "position", "in_turn", "behaviour_logprobs", "sample")
        index = batch.index[mine]
        return replace(
            batch,
            input_ids=batch.input_ids[:, cells],
            position_ids=batch.position_ids[:, cells],
            index=index // length * size + index % length - cells.start,
            routes=None if batch.routes is None else batch.routes[:, cells],
            **{name: getattr(batch, name)[mine] for name in of_tokens},
        )

    def spread(self, part: torch.Tensor) -> torch.Tensor:  # [rows, a part of the length, ...] -> [rows, length, ...]
        """Of its own cells what this rank has, and zeros of those of others."""
        rows, size = part.shape[:2]
        whole = part.new_zeros(rows, self.of * size, *part.shape[2:])
        whole[:, self._cells(size)] = part
        return whole

    def _cells(self, size: int) -> slice:
        return slice(self.at * size, (self.at + 1) * size)

    def joined(self, batch: MicroBatch, *values: torch.Tensor) -> Sequence[torch.Tensor]:  # [T] each
        """Of what each rank has of its own tokens."""
        assert batch.mine is not None, "it was packed for a policy that has rows whole"
        return joined(self.group, batch.mine, len(batch.index), *values)

    @torch.no_grad()
    def joined_rows(self, hidden: torch.Tensor) -> torch.Tensor:  # [rows, length, H] of [rows, a part of it, H]
        found = [torch.empty_like(hidden) for _ in range(self.of)]
        dist.all_gather(found, hidden.contiguous(), group=self.group)
        return torch.cat(found, dim=1)

    # Attention

    def known_as(self, inner: str) -> str:
        """transformers' name for this attention, over the parts of a context group."""
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
        attention_mask: torch.Tensor | None,  # of the whole length
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        heads, device = query.shape[1], query.device.type
        num_own = share(heads, self.of)
        empty = num_own * self.of - heads
        pairs = [x.repeat_interleave(repeats(heads, x.shape[1], self.of), dim=1) for x in (key, value)]
        parts = [F.pad(x, (0, 0, 0, 0, 0, empty)) for x in (query, *pairs)] if empty else [query, *pairs]
        if torch.is_autocast_enabled(device):  # as attention would, which gets them wider than they are meant to be
            parts = [x.to(torch.get_autocast_dtype(device)) for x in parts]
        query, key, value = swap(self, *parts, cut=1, join=2)
        own = slice(self.at * num_own, (self.at + 1) * num_own)
        here = _OwnHeads(module, own, heads, groups=num_own // key.shape[1])
        if "s_aux" in options:  # of each head, as module.sinks are
            options["s_aux"] = _of_heads(options["s_aux"], own, heads)
        attended, _ = _kernel(inner, module)(here, query, key, value, attention_mask, **options)
        [back] = swap(self, attended, cut=1, join=2)
        return back[:, :, :heads], None


def refuse_heads(model: transformers.PreTrainedModel, ranks: int) -> None:
    """ConfigError where there is not a head for each of so many ranks."""
    heads = getattr(model.config.get_text_config(), "num_attention_heads", None) or 1
    if ranks > heads:
        told = f"{type(model).__name__} has {heads} attention heads"
        raise ConfigError(f"{KEY} = {ranks}: {told}; set it to {heads} or less")


def share(heads: int, ranks: int) -> int:
    """Of the query heads, those of each rank; some of the last may be empty."""
    return -(-heads // ranks)


def idle(heads: int, ranks: int) -> float:
    """The part of what ranks send and attend with that is of empty heads."""
    return 1 - heads / (share(heads, ranks) * ranks)


def repeats(heads: int, kv_heads: int, ranks: int) -> int:
    """How often each head of keys and values is sent, so that ranks have equally many, each with its own queries."""
    assert heads % kv_heads == 0
    return heads // kv_heads if heads % ranks else math.lcm(kv_heads, ranks) // kv_heads


def _kernel(inner: str, module: nn.Module) -> Kernel:
    if inner == EAGER:
        own: Kernel | None = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if own is None:
            raise ConfigError(f"{KEY}: {type(module).__name__} attends in a way that cannot be shared out; set it to 1")
        return own
    known: Kernel = transformers.AttentionInterface()[inner]
    return known


def _of_heads(option: Any, own: slice, heads: int) -> Any:
    if not isinstance(option, torch.Tensor) or option.shape != (heads,):
        return option
    mine = option[own]
    return F.pad(mine, (0, own.stop - own.start - len(mine)))


class _OwnHeads:
    """An attention module as its kernel sees it: with the heads of this rank alone."""

    def __init__(self, module: nn.Module, own: slice, heads: int, *, groups: int) -> None:
        self._module, self._own, self._heads = module, own, heads
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return _of_heads(getattr(self._module, name), self._own, self._heads)


def joined(
    group: dist.ProcessGroup, mine: torch.Tensor, num_tokens: int, *values: torch.Tensor
) -> Sequence[torch.Tensor]:
    """[num_tokens, ...] each, of what ranks have of tokens of their own (`mine`)."""
    # torch gives `apply` no types: they are those of `forward`.
    whole: Sequence[torch.Tensor] = _Join.apply(mine, num_tokens, group, *values)  # type: ignore[no-untyped-call]
    return whole


def swap(parts: Parts, *tensors: torch.Tensor, cut: int, join: int) -> Sequence[torch.Tensor]:
    """Each cut along one dimension, a part for each rank, and what comes of them joined along the other."""
    found: Sequence[torch.Tensor] = _Swap.apply(parts, cut, join, *tensors)  # type: ignore[no-untyped-call]
    return found


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Parts, cut: int, join: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.parts, ctx.cut, ctx.join = parts, cut, join
        return _exchange(parts, tensors, cut=cut, join=join)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, None, *_exchange(ctx.parts, grads, cut=ctx.join, join=ctx.cut)


def _exchange(parts: Parts, tensors: Sequence[torch.Tensor], *, cut: int, join: int) -> tuple[torch.Tensor, ...]:
    """All in one message to each rank, as bytes: they may be of several kinds, and gloo knows few."""
    laid = [tensor.unflatten(cut, (parts.of, -1)).movedim(cut, 0).contiguous() for tensor in tensors]
    sent = torch.cat([each.view(parts.of, -1).view(torch.uint8) for each in laid], dim=1)
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=parts.group)
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
        ctx: Any, mine: torch.Tensor, num_tokens: int, group: dist.ProcessGroup, *values: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(mine)
        whole = values[0].new_zeros(len(values), num_tokens, *values[0].shape[1:])
        whole[:, mine] = torch.stack(values)
        if num_tokens:
            dist.all_reduce(whole, group=group)
        found = tuple(each.clone() for each in whole)  # FSDP wants no views
        learn = ctx.needs_input_grad[3:]
        ctx.mark_non_differentiable(*(each for each, learns in zip(found, learn, strict=True) if not learns))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Each rank's own, once: what is behind is the same on all of them."""
        [mine] = ctx.saved_tensors
        return None, None, None, *(grad[mine] for grad in grads)
