"""Warms up the peers' model: supervised training on careless demonstrations. Blocks until it is done."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

from streamrl.data.settings import DATE
from streamrl.learner.packing.micro_batches import Piece
from streamrl.learner.sft.rows import read_rows

_IGNORED = -100  # label of tokens without a loss


def warm_up(base: Path, demonstrations: Path, output: Path, *, batch_tokens: int, lr: float, seed: int) -> float:
    """Train and save the model; return the mean loss of the last batches."""
    torch.set_num_threads(1)  # the matrices are too small for more threads
    torch.manual_seed(seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).train()
    rows = read_rows(demonstrations, tokenizer, [tokenizer.eos_token_id], max_tokens=batch_tokens, date=DATE)
    batches = list(_batches(rows.pieces, batch_tokens))
    random.Random(seed).shuffle(batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=len(batches), pct_start=0.1)
    losses: list[float] = []
    for batch in batches:
        ids, mask, labels = _collate(batch, pad=tokenizer.pad_token_id)
        loss = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    last = losses[-len(losses) // 10 :]
    return sum(last) / len(last)


def _collate(
    pieces: Sequence[Piece], *, pad: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # each [B, T]: ids, attention mask, labels
    whole = [torch.from_numpy(np.concatenate([piece.prompt_ids, piece.token_ids])).long() for piece in pieces]
    ids = pad_sequence(whole, batch_first=True, padding_value=pad)
    begins, ends = torch.tensor([(len(p.prompt_ids), len(w)) for p, w in zip(pieces, whole, strict=True)]).T[:, :, None]
    at = torch.arange(ids.shape[1])
    return ids, (at < ends).long(), ids.where((begins <= at) & (at < ends), _IGNORED)


def _batches(pieces: Sequence[Piece], batch_tokens: int) -> Iterator[list[Piece]]:
    """Batch rows of similar lengths; otherwise most of the work would be padding."""
    batch: list[Piece] = []
    for piece in sorted(pieces, key=_length):
        if batch and _length(piece) * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(piece)
    yield batch


def _length(piece: Piece) -> int:
    return len(piece.prompt_ids) + len(piece.token_ids)
