"""Keys and values of sequences of different lengths, decoded together: rows come, go and grow by a token a step.

Rows are padded on the left, so that all end in the same column, and the batch is no wider than its longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache


class KvBatch:
    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._layers: list[tuple[Tensor, Tensor]] = []  # keys and values of each layer, [B, heads, L, D]
        self._mask = torch.empty(0, 0, dtype=torch.long, device=device)  # [B, L]; 0: padding

    def __len__(self) -> int:
        return len(self._mask)

    def add(self, prompts: Sequence[Sequence[int]]) -> Tensor:  # [b, V]
        """Append rows; the logits of what follows each prompt."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=self._device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        cache = DynamicCache()
        logits = self._forward(ids, mask, (mask.cumsum(dim=-1) - 1).clamp(min=0), cache)
        new = _contents(cache)
        if len(self):
            width = max(width, self._mask.shape[1])
            new = [
                (torch.cat([_widen(k, width), _widen(k2, width)]), torch.cat([_widen(v, width), _widen(v2, width)]))
                for (k, v), (k2, v2) in zip(self._layers, new, strict=True)
            ]
            mask = torch.cat([_widen_mask(self._mask, width), _widen_mask(mask, width)])
        self._layers, self._mask = new, mask
        return logits

    def step(self, token_ids: Tensor) -> Tensor:  # [B] -> [B, V]
        """Append a token to every row; the logits of what follows."""
        cache = DynamicCache()
        for i, (keys, values) in enumerate(self._layers):
            cache.update(keys, values, i)
        positions = self._mask.sum(dim=-1, keepdim=True)
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=1)
        logits = self._forward(token_ids[:, None], self._mask, positions, cache)
        self._layers = _contents(cache)
        return logits

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        index = torch.tensor(rows, dtype=torch.long, device=self._device)
        mask = self._mask[index]
        width = int(mask.sum(dim=-1).max()) if rows else 0
        start = self._mask.shape[1] - width
        self._mask = mask[:, start:]
        self._layers = [(k[index, :, start:], v[index, :, start:]) for k, v in self._layers] if rows else []

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


def _contents(cache: DynamicCache) -> list[tuple[Tensor, Tensor]]:
    layers: list[Any] = cache.layers  # of those that have no keys, none is in a model that is decoded here
    return [(layer.keys, layer.values) for layer in layers]


def _widen(cached: Tensor, width: int) -> Tensor:  # [B, heads, L, D]
    return nn.functional.pad(cached, (0, 0, width - cached.shape[2], 0))


def _widen_mask(mask: Tensor, width: int) -> Tensor:  # [B, L]
    return nn.functional.pad(mask, (width - mask.shape[1], 0))
