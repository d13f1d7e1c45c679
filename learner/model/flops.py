"""A policy's useful FLOPs, to estimate how much of the machine's peak they use (MFU).

    a token through the layers    (4 N + 2 N_trained)                  forward, back to inputs, back to trained weights
    a trained token at the head   (4 V H + 2 V H if the head trains)
    a token that attends to c     12 * layers * heads * head_dim * c

N counts the elements of the layers' matrices: all but embeddings and head, and of a layer's experts those that a token
is routed to. A prompt counts once for its group, and recomputation to save memory does not count, so this is less than
what the machine really does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
import transformers
from torch import nn

from streamrl.learner.packing.micro_batches import Piece
from streamrl.learner.packing.ways import decoder_of
from streamrl.learner.parallel.experts import active_shares

# Dense bf16 per card, as the makers state it.
_PEAK_TFLOPS: Mapping[str, float] = {
    "GB200": 2500,
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "A10": 125,
    "RTX 4090": 165,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """A model's FLOPs per token, forward and backward pass together."""

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

    def on(self, pieces: Iterable[Piece]) -> float:
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


def peak_flops(device: torch.device) -> float | None:
    """Peak FLOP/s of one device; None when it is not known."""
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """Peak FLOP/s of a device with this name."""
    return next((1e12 * peak for mark, peak in _PEAK_TFLOPS.items() if mark in name), None)
