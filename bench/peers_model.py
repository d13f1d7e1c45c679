"""The model of the peers: the quickstart's untrained one, warmed up on careless demonstrations; made once.

It lies in a folder that says of what it was made, and is made again only when that changes. Takes about a minute.
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
import transformers

from bench import peers_task
from bench.measure import Say
from bench.peers_task import demonstrate, examples
from learner.sft import Row, collate, read_rows
from streamrl.quickstart.base_model import write_base_model

_SEED = 7
_NUM_DEMONSTRATIONS = 20_000
_BATCH_TOKENS = 600  # few, for it takes many steps to learn the rule at all
_LR = 3e-3
_POSITIONS = 256
_STAMP = "made.json"  # written last


def write_prompts(path: Path, *, seed: int, num_prompts: int) -> None:
    found = islice(examples(random.Random(seed)), num_prompts)
    _write(path, [{"prompt": one.prompt, "answer": one.answer} for one in found])


def make_model(folder: Path, say: Say) -> Path:
    """The folder of the warmed-up model, with its tokenizer."""
    made_of = {"demonstrations": _NUM_DEMONSTRATIONS, "batch_tokens": _BATCH_TOKENS, "lr": _LR, "seed": _SEED}
    made_of["task"] = inspect.getsource(peers_task)
    stamp, model = folder / _STAMP, folder / "model"
    if stamp.exists() and json.loads(stamp.read_text()) == made_of:
        return model
    say("making the model that both train")
    stamp.unlink(missing_ok=True)
    rng = random.Random(_SEED)
    shown = islice(examples(rng), _NUM_DEMONSTRATIONS)
    folder.mkdir(parents=True, exist_ok=True)
    _write(
        folder / "demonstrations.jsonl", [{"prompt": one.prompt, "completion": demonstrate(one, rng)} for one in shown]
    )
    write_base_model(folder / "base", seed=_SEED, num_positions=_POSITIONS)
    say(f"made: loss {_warm_up(folder, model, rng):.3f}")
    stamp.write_text(json.dumps(made_of))
    return model


def _warm_up(folder: Path, output: Path, rng: random.Random) -> float:
    """The mean loss of the last batches."""
    torch.manual_seed(_SEED)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).train()
    batches = list(_batches(read_rows(folder / "demonstrations.jsonl", tokenizer)))
    rng.shuffle(batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=_LR, total_steps=len(batches), pct_start=0.1)
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


def _batches(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Of rows about as long as each other: with these lengths padding would be most of the work."""
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row.token_ids)):
        if batch and len(row.token_ids) * (len(batch) + 1) > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    yield batch


def _write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
