"""The warm-up of the peers' model: supervised training on careless demonstrations. Blocks for as long as that takes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers

from streamrl.learner.model.sft import Row, collate, read_rows


def warm_up(base: Path, demonstrations: Path, output: Path, *, batch_tokens: int, lr: float, seed: int) -> float:
    """The mean loss of the last batches."""
    torch.set_num_threads(1)  # the matrices are too small for more
    torch.manual_seed(seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).train()
    batches = list(_batches(read_rows(demonstrations, tokenizer), batch_tokens))
    random.Random(seed).shuffle(batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=len(batches), pct_start=0.1)
    losses: list[float] = []
    for batch in batches:
        ids, mask, labels = collate(batch, pad=tokenizer.pad_token_id)
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


def _batches(rows: Sequence[Row], batch_tokens: int) -> Iterator[list[Row]]:
    """Of rows about as long as each other: with these lengths padding would be most of the work."""
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row.token_ids)):
        if batch and len(row.token_ids) * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    yield batch
