"""How much computing a step is: useful FLOPs, for an estimate of how much of the machine they keep busy.

    a token through the layers    (4 N + 2 N_trained)                  forward, back to inputs, back to trained weights
    a trained token at the head   (4 V H + 2 V H if the head trains)
    a token that attends to c     12 * layers * heads * head_dim * c

N counts the elements of the layers' matrices: all but embeddings and head. A prompt counts once for its group, and what
is computed twice to save memory counts once: so this is less than what the machine really does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import transformers
from torch import nn

from streamrl.learner.model.packing import Piece
from streamrl.learner.model.ways import decoder_of

# Dense bf16 of whole cards, as their makers state it.
_PEAK_TFLOPS: Mapping[str, float] = {
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "A10": 125,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """What a model spends on tokens, in FLOPs of forward and backward pass together."""

    layers: float  # on a token
    head: float  # on a trained token
    attended: float  # on each earlier token that a token attends to

    @classmethod
    def of(cls, model: transformers.PreTrainedModel) -> Flops:
        config = model.config.get_text_config()
        projection = model.get_output_embeddings()
        head = next(model.parameters()).new_empty(0) if projection is None else projection.weight
        lookups = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} | {id(head)}
        matrices = [p for p in decoder_of(model).parameters() if p.ndim >= 2 and id(p) not in lookups]
        size, trained = (
            sum(p.numel() for p in found) for found in (matrices, [p for p in matrices if p.requires_grad])
        )
        heads = getattr(config, "num_attention_heads", None) or 0  # none: nothing attends
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
            prompt, response = len(piece.prompt_ids), len(piece.token_ids) - 1
            if piece.group not in seen:
                seen.add(piece.group)
                flops += self.layers * prompt + self.attended * prompt * (prompt + 1) / 2
            flops += self.layers * response + self.head * int(piece.mask.sum())
            flops += self.attended * (prompt * response + response * (response + 1) / 2)
        return flops


def peak_flops(device: torch.device) -> float | None:
    """A second, of one device; None when it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * peak for mark, peak in _PEAK_TFLOPS.items() if mark in name), None)
