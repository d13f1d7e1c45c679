"""The batch of the transformers engine: rows join, grow by one token per step, and leave. One thread owns it.

    arrived ─► waiting ─► step: one token for every row, the first token for newly admitted rows ─► finished rows
                            ▲ between two steps: load, read_back, logprobs

Rows are left-padded, so that all end in the same column; the batch is no wider than its longest row.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from streamrl.config.routers import wants_routes
from streamrl.protocol.wire.routes import Routes
from streamrl.protocol.wire.sample import FinishReason, Span
from streamrl.recipe.held_out import HALF_CHARACTER
from streamrl.workers.engines.base import EngineSettings, Generated, ReadBack, SampleRequest
from streamrl.workers.engines.hf_model import (
    RowState,
    choose,
    load_weights,
    processed_logprobs,
    published,
    token_logprobs,
)
from streamrl.workers.engines.mapped_file import decoys, mapped_for
from streamrl.workers.engines.routes import Watch

_MAX_ROWS = 256


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """A sample in progress."""

    request: SampleRequest
    max_tokens: int
    done: asyncio.Future[Generated]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    num_cut: int = 0  # characters of the text from the stop string on that ended it, if one did
    routes: list[Routes] = field(default_factory=list)  # first of the prompt, then of each token but the last
    abandoned: bool = False  # set by the event loop, read between steps

    def state(self) -> RowState:
        sampling = self.request.sampling
        penalised = sampling.repetition_penalty != 1.0
        seen = [*self.request.prompt_ids.tolist(), *self.token_ids] if penalised else ()
        return RowState(sampling=sampling, num_tokens=len(self.token_ids), seen=seen)

    def append(self, token_id: int, logprob: float, version: int, step: int) -> None:
        at = len(self.token_ids)
        start = at
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(Span(version=version, step=step, start=start, end=at + 1))
        self.token_ids.append(token_id)
        self.logprobs.append(min(logprob, 0.0))


class Decoder:
    def __init__(self, model: nn.Module, settings: EngineSettings) -> None:
        self.arrived: deque[Row] = deque()  # appended to by the event loop
        self.waiting: list[Row] = []
        self.rows: list[Row] = []  # in the batch
        self.num_made = 0  # tokens
        self._model = model
        self._facts = settings.model
        device = next(model.parameters()).device
        self._generator = torch.Generator(device=device).manual_seed(settings.seed)
        self._batch = KvBatch(model, device)
        self._file = mapped_for(device)
        self._watch = Watch(model, settings.config) if wants_routes(settings.config) else None
        self._version, self._step = 0, 0

    @property
    def idle(self) -> bool:
        return not (self.rows or self.waiting or self.arrived)

    def load(self, weights: Path, *, version: int, step: int, recompute: bool) -> None:
        """Load a version. With `recompute`, also recompute the KV cache of all rows under it."""
        load_weights(self._model, dict(self._file.tensors(str(weights))))
        self._version, self._step = version, step
        if recompute and self.rows:
            self._batch.keep([])
            # Without the last token of each row: the next step feeds it in.
            self._batch.add([[*row.request.prompt_ids.tolist(), *row.token_ids[:-1]] for row in self.rows])

    def load_decoy(self, weights: Path) -> None:
        load_weights(self._model, dict(decoys(self._file.tensors(str(weights)))))

    def read_back(self, weights: Path, *, number: int, num_parts: int) -> ReadBack:
        served = list(published(self._model).items())[number % num_parts :: num_parts]
        expected = dict(self._file.tensors(str(weights)))
        wrong = tuple(name for name, tensor in served if not _is_equal(tensor, expected[name]))
        return ReadBack(num_read=len(served), wrong=wrong)

    def logprobs(self, token_ids: list[int]) -> list[float]:  # [T-1]
        return token_logprobs(self._model, token_ids)

    def step(self) -> list[tuple[Row, Generated]]:
        """Generate one token for every row; return the rows that finished."""
        self._admit()
        logits = []
        if self.rows:
            last = torch.tensor([row.token_ids[-1] for row in self.rows], device=self._generator.device)
            with self._routing(self.rows):
                logits.append(self._batch.step(last))
        if new := self.waiting[: _MAX_ROWS - len(self.rows)]:
            del self.waiting[: len(new)]
            with self._routing(new):
                logits.append(self._batch.add([row.request.prompt_ids.tolist() for row in new]))
            self.rows += new
        return self._extend(torch.cat(logits)) if logits else []

    @contextmanager
    def _routing(self, rows: Sequence[Row]) -> Iterator[None]:
        """Record the expert routes of one forward pass over these rows; each row keeps those of its own tokens."""
        if self._watch is None:
            yield
            return
        with self._watch.watching(len(rows)) as routes:
            yield
        for row, row_routes in zip(rows, routes, strict=True):
            row.routes.append(
                row_routes[-1:] if row.routes else row_routes[len(row_routes) - len(row.request.prompt_ids) :]
            )

    def _admit(self) -> None:
        """Queue the rows that arrived, urgent ones first, and drop the abandoned ones."""
        while self.arrived:
            self.waiting.append(self.arrived.popleft())
        self.waiting = [row for row in self.waiting if not row.abandoned]
        self.waiting.sort(key=lambda row: not row.request.urgent)
        self._keep([i for i, row in enumerate(self.rows) if not row.abandoned])

    def _extend(self, logits: torch.Tensor) -> list[tuple[Row, Generated]]:  # [B, V]
        states = [row.state() for row in self.rows]
        logprobs = processed_logprobs(logits, states, self._facts.stop_ids)
        tokens = choose(logprobs, states, self._generator)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        continuing, finished = [], []
        for i, (row, token_id, logprob) in enumerate(zip(self.rows, tokens.tolist(), chosen.tolist(), strict=True)):
            row.append(token_id, logprob, self._version, self._step)
            if (reason := self._finish_reason(row)) is None:
                continuing.append(i)
            else:
                finished.append((row, self._generated(row, reason)))
        self.num_made += len(self.rows)
        self._keep(continuing)
        return finished

    def _keep(self, indices: list[int]) -> None:
        if len(indices) < len(self.rows):
            self.rows = [self.rows[i] for i in indices]
            self._batch.keep(indices)

    def _finish_reason(self, row: Row) -> FinishReason | None:
        if row.token_ids[-1] in self._facts.stop_ids:
            return "stop"
        if row.request.sampling.stop and len(row.token_ids) > row.request.sampling.min_tokens:
            row.num_cut = self._from_stop_string(row)
            if row.num_cut:
                return "stop"
        return "length" if len(row.token_ids) >= row.max_tokens else None

    def _from_stop_string(self, row: Row) -> int:
        """Return how many characters there are from the stop string on that the last token completed; 0: none did."""
        stop = row.request.sampling.stop
        # A token may hold less than one character, so a stop string may span more tokens than it has characters.
        tail = row.token_ids[-4 * max(map(len, stop)) - 8 :]
        before, after = self._facts.decode(tail[:-1]).rstrip(HALF_CHARACTER), self._facts.decode(tail)
        begins = (after.find(one, max(0, len(before) - len(one) + 1)) for one in stop)
        return next((len(after) - begin for begin in begins if begin >= 0), 0)

    def _generated(self, row: Row, reason: FinishReason) -> Generated:
        text = self._facts.decode(row.token_ids)
        return Generated(
            token_ids=np.asarray(row.token_ids, dtype=np.int32),
            logprobs=np.asarray(row.logprobs, dtype=np.float32),
            text=text[: len(text) - row.num_cut],
            finish_reason=reason,
            spans=tuple(row.spans),
            routes=np.concatenate(row.routes) if row.routes else None,
        )


def _is_equal(served: torch.Tensor, given: torch.Tensor) -> bool:
    return served.dtype == given.dtype and torch.equal(served.detach().cpu(), given)


class KvBatch:
    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._cache = DynamicCache()  # KV cache of each layer, [B, heads, L, D]
        self._mask = torch.empty(0, 0, dtype=torch.long, device=device)  # [B, L]; 0 is padding

    def __len__(self) -> int:
        return len(self._mask)

    def add(self, prompts: Sequence[Sequence[int]]) -> Tensor:  # [b, V]
        """Append rows; return the logits that follow each prompt."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=self._device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        cache = DynamicCache()
        logits = self._forward(ids, mask, (mask.cumsum(dim=-1) - 1).clamp(min=0), cache)
        if len(self):
            width = max(width, self._mask.shape[1])
            for layer, before in zip(_layers(cache), _layers(self._cache), strict=True):
                layer.keys = torch.cat([_widen(before.keys, width), _widen(layer.keys, width)])
                layer.values = torch.cat([_widen(before.values, width), _widen(layer.values, width)])
            mask = torch.cat([_widen_mask(self._mask, width), _widen_mask(mask, width)])
        self._cache, self._mask = cache, mask
        return logits

    def step(self, token_ids: Tensor) -> Tensor:  # [B] -> [B, V]
        """Append one token to every row; return the next logits."""
        positions = self._mask.sum(dim=-1, keepdim=True)
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=1)
        return self._forward(token_ids[:, None], self._mask, positions, self._cache)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        index = torch.tensor(rows, dtype=torch.long, device=self._device)
        mask = self._mask[index]
        width = int(mask.sum(dim=-1).max()) if rows else 0
        start = self._mask.shape[1] - width
        self._mask = mask[:, start:]
        for layer in _layers(self._cache):
            layer.keys, layer.values = layer.keys[index, :, start:], layer.values[index, :, start:]

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits


def _layers(cache: DynamicCache) -> list[Any]:
    return cache.layers  # no model decoded here has layers without keys


def _widen(cached: Tensor, width: int) -> Tensor:  # [B, heads, L, D]
    return nn.functional.pad(cached, (0, 0, width - cached.shape[2], 0))


def _widen_mask(mask: Tensor, width: int) -> Tensor:  # [B, L]
    return nn.functional.pad(mask, (width - mask.shape[1], 0))
