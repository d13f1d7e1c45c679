"""Attention of responses to a prompt that is computed once for all of them, without a mask.

    laid      p p p p | r r r | s s s s s | q q | t t t         r, s: responses to p
    near      each stretch attends to itself, causally          one call over all of them
    far       the responses to a prompt attend to all of it     one call, in which they are a few long sequences

    attended = near * e^(L_near - L) + far * e^(L_far - L)      L: log of the sum of a token's exponential scores, by
                                                                stretch, and of both

The backward pass of a flash kernel takes the output and L; given those of both together, its gradients are that part's
share of the whole one's, and they add up. PyTorch's own variable-length attention gives no gradient for L, so its
kernels are called directly.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

Indices = npt.NDArray[np.int64]

_AT_ONCE = 1024  # an H100 with sequences of 5,000 cells and prompts of 256 spent twice as long in the backward pass


class Prefixes(NamedTuple):
    """The cells of responses that attend to a prompt laid before them.

    A prompt with many responses is listed several times, with a share of them each: flash attention's backward pass
    runs keys, heads and sequences in parallel, but loops over a sequence's queries.
    """

    responses: torch.Tensor  # [r] cells
    prompts: torch.Tensor  # [p] cells
    of_responses: torch.Tensor  # [sequences + 1] int32: where each begins in `responses`; then their number
    of_prompts: torch.Tensor  # [sequences + 1] int32: and in `prompts`
    most_responses: int  # cells of a sequence
    longest_prompt: int

    def to(self, device: torch.device) -> Prefixes:
        return self._replace(
            responses=self.responses.to(device, non_blocking=True),
            prompts=self.prompts.to(device, non_blocking=True),
            of_responses=self.of_responses.to(device, non_blocking=True),
            of_prompts=self.of_prompts.to(device, non_blocking=True),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Which queries attend to which keys: sequence by sequence."""

    queries: torch.Tensor  # [sequences + 1] int32 starts, then their number
    keys: torch.Tensor
    most_queries: int
    most_keys: int
    is_causal: bool


class Kernel(Protocol):
    """Attention of concatenated sequences, [tokens, heads, head_dim]; its forward returns L, [heads, tokens] fp32, and
    its backward takes it.
    """

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: Spans, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        spans: Spans,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


class Flash:
    """PyTorch's flash attention. Query heads may share heads of keys and values."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: Spans, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
            query,
            key,
            value,
            spans.queries,
            spans.keys,
            spans.most_queries,
            spans.most_keys,
            0.0,  # dropout
            spans.is_causal,
            return_debug_mask=False,
            scale=scale,
        )
        return out, logsumexp

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        spans: Spans,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        without_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.aten._flash_attention_backward(
            grad,
            query,
            key,
            value,
            out,
            logsumexp,
            spans.queries,
            spans.keys,
            spans.most_queries,
            spans.most_keys,
            0.0,
            spans.is_causal,
            without_dropout,
            without_dropout,
            scale=scale,
        )
        return found


def attend_twice(
    query: torch.Tensor,  # [tokens, heads, head_dim]
    key: torch.Tensor,  # [tokens, kv heads, head_dim]
    value: torch.Tensor,
    starts: torch.Tensor,  # [stretches + 1] int32
    longest: int,
    prefixes: Prefixes,
    *,
    scale: float | None,
    kernel: Kernel,
) -> torch.Tensor:  # [tokens, heads, head_dim]
    # torch leaves `apply` untyped: its types are those of `forward`.
    attended: torch.Tensor = _Twice.apply(  # type: ignore[no-untyped-call]
        query, key, value, starts, longest, scale, kernel, *prefixes
    )
    return attended


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts: torch.Tensor,
        longest: int,
        scale: float | None,
        kernel: Kernel,
        *prefixes: Any,
    ) -> torch.Tensor:
        where = Prefixes(*prefixes)
        near, far = _near(starts, longest), _far(where)
        own, own_sum = kernel.forward(query, key, value, near, scale)
        rows = where.responses
        to_prompt = kernel.forward(query[rows], key[where.prompts], value[where.prompts], far, scale)
        out, logsumexp = _joined(own, own_sum, rows, *to_prompt)
        ctx.save_for_backward(query, key, value, out, logsumexp, starts, *where[:4])
        ctx.rest = longest, scale, kernel, *where[4:]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, logsumexp, starts, *cells = ctx.saved_tensors
        longest, scale, kernel, *most = ctx.rest
        where, grad = Prefixes(*cells, *most), grads[0].contiguous()
        rows, before = where.responses, where.prompts
        of_query, of_key, of_value = kernel.backward(
            grad, query, key, value, out, logsumexp, _near(starts, longest), scale
        )
        far = kernel.backward(
            grad[rows], query[rows], key[before], value[before], out[rows], logsumexp[:, rows], _far(where), scale
        )
        of_query = of_query.index_add(0, rows, far[0])
        # Prompts are there more than once: their gradients are summed before rounding.
        of_key, of_value = (
            near.to(logsumexp.dtype).index_add(0, before, part.to(logsumexp.dtype)).to(near.dtype)
            for near, part in ((of_key, far[1]), (of_value, far[2]))
        )
        return of_query, of_key, of_value, *[None] * (4 + len(where))


def _near(starts: torch.Tensor, longest: int) -> Spans:
    return Spans(queries=starts, keys=starts, most_queries=longest, most_keys=longest, is_causal=True)


def _far(where: Prefixes) -> Spans:
    return Spans(
        queries=where.of_responses,
        keys=where.of_prompts,
        most_queries=where.most_responses,
        most_keys=where.longest_prompt,
        is_causal=False,
    )


def _joined(
    own: torch.Tensor, own_sum: torch.Tensor, rows: torch.Tensor, far: torch.Tensor, far_sum: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(attended, L) of all tokens; `far` has those of `rows`."""
    near_sum = own_sum[:, rows]
    both = torch.logaddexp(near_sum, far_sum)
    near_share, far_share = ((one - both).exp().T[..., None] for one in (near_sum, far_sum))
    joined = (own[rows] * near_share + far * far_share).to(own.dtype)
    return own.index_copy(0, rows, joined), own_sum.index_copy(1, rows, both)


def each_with_its_prompt(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    prefixes: Prefixes,
    *,
    scale: float | None,
) -> torch.Tensor:  # [tokens, heads, head_dim]
    """The same in one PyTorch call for each stretch, with its prompt before it."""
    cells_of = prefixes.prompts.split(prefixes.of_prompts.diff().tolist())
    sequences = torch.arange(len(cells_of), device=query.device).repeat_interleave(prefixes.of_responses.diff())
    sequence_of = dict(zip(prefixes.responses.tolist(), sequences.tolist(), strict=True))
    attended = []
    for start, end in pairwise(starts.tolist()):
        before = cells_of[sequence_of[start]] if start in sequence_of else prefixes.prompts[:0]
        cells = torch.cat([before, torch.arange(start, end, device=query.device)])
        seen = torch.ones(end - start, len(cells), dtype=torch.bool, device=query.device).tril(len(before))
        q, k, v = (x.transpose(0, 1)[None] for x in (query[start:end], key[cells], value[cells]))
        [out] = F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
        attended.append(out.transpose(0, 1))
    return torch.cat(attended)


def prefixes_of(starts: Indices, positions: Indices, *, at_least: int = _AT_ONCE) -> Prefixes | None:
    """Build the prefixes of one row. A stretch that begins at position 0 is a prompt or a whole sequence; any other
    continues the last such stretch before it.

    `starts`: of the stretches, then the row's end. `at_least`: cells of a sequence of responses, unless it is all there
    is for its prompt, or the prompt is longer. None: each stretch is a whole sequence.
    """
    lengths, begins = np.diff(starts), starts[:-1]
    is_response = positions[begins] > 0
    if not is_response.any():
        return None
    stretches = np.arange(len(begins))
    prompt_of = np.maximum.accumulate(np.where(is_response, 0, stretches))[is_response]
    prompts, bundle = np.unique(prompt_of, return_inverse=True)
    divided = [
        _divided(int(size), at_least=max(at_least, int(prompt)))
        for size, prompt in zip(np.bincount(bundle, weights=lengths[is_response]), lengths[prompts], strict=True)
    ]
    of_responses = np.concatenate(divided)
    repeated = np.repeat(prompts, [len(parts) for parts in divided])
    return Prefixes(
        responses=_cells(begins[is_response], lengths[is_response]),
        prompts=_cells(begins[repeated], lengths[repeated]),
        of_responses=_ends(of_responses),
        of_prompts=_ends(lengths[repeated]),
        most_responses=int(of_responses.max()),
        longest_prompt=int(lengths[prompts].max()),
    )


def _divided(size: int, *, at_least: int) -> Indices:
    """Parts of nearly equal size, none much smaller than `at_least`."""
    return np.diff(np.linspace(0, size, max(1, size // at_least) + 1).astype(np.int64))


def _cells(begins: Indices, lengths: Indices) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.arange(at, at + n) for at, n in zip(begins, lengths, strict=True)]))


def _ends(lengths: Indices) -> torch.Tensor:
    return torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32))
