"""Plain supervised training of a small model on one machine: `python -m learner.model.sft`.

What comes before reinforcement learning: the model imitates demonstrations, one JSON object a line,
{"prompt": ..., "completion": ...}. The loss covers the completions and the end token, not the prompts. One pass
over the rows in a shuffled order, AdamW with a short warm-up and a cosine. Blocks on nothing but computing.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

from streamrl.data.texts import read_texts
from streamrl.errors import DataError, UserError

_IGNORED = -100  # the label of tokens without a loss
_BETAS = (0.9, 0.98)
_WARMUP_STEPS = 20
_CLIP_NORM = 1.0
_REPORTS = 20  # lines about the loss, over the whole training


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    model: Path  # what to start from
    data: Path
    output: Path
    batch_rows: int
    lr: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    token_ids: list[int]  # prompt, completion, end token
    num_prompt_tokens: int


def train(settings: Settings, say: Callable[[str], None]) -> float:
    """The loss of the last steps. The trained model and its tokenizer are in `output` afterwards."""
    torch.manual_seed(settings.seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32).train()
    rows = read_rows(settings.data, tokenizer)
    random.Random(settings.seed).shuffle(rows)
    batches = [rows[at : at + settings.batch_rows] for at in range(0, len(rows), settings.batch_rows)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=_BETAS, weight_decay=0.0)
    losses: list[float] = []
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = settings.lr * _share_of_lr(step, len(batches))
        ids, mask, labels = collate(batch, pad=tokenizer.pad_token_id)
        loss = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % max(1, len(batches) // _REPORTS) == 0:
            say(f"step {step + 1} of {len(batches)}: loss {losses[-1]:.3f}")
    model.save_pretrained(settings.output)
    tokenizer.save_pretrained(settings.output)
    last = losses[-max(1, len(losses) // _REPORTS) :]
    return sum(last) / len(last)


def read_rows(path: Path, tokenizer: transformers.PreTrainedTokenizerBase) -> list[Row]:
    rows = []
    for place, row in read_texts(path, "prompt", "completion", what="demonstrations"):
        prompt_ids = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        completion_ids = tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
        if not prompt_ids:
            raise DataError(f"{place}: the prompt has no tokens")
        ids = [*prompt_ids, *completion_ids, tokenizer.eos_token_id]
        rows.append(Row(token_ids=ids, num_prompt_tokens=len(prompt_ids)))
    if not rows:
        raise DataError(f"{path}: no demonstrations")
    return rows


def collate(
    rows: Sequence[Row], *, pad: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # each [B, T]: ids, attention mask, labels
    ids = pad_sequence([torch.tensor(row.token_ids) for row in rows], batch_first=True, padding_value=pad)
    begins, ends = torch.tensor([(row.num_prompt_tokens, len(row.token_ids)) for row in rows]).T[:, :, None]
    at = torch.arange(ids.shape[1])
    return ids, (at < ends).long(), ids.where((begins <= at) & (at < ends), _IGNORED)


def _share_of_lr(step: int, num_steps: int) -> float:
    """Up in a straight line, down to a tenth in half a cosine."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / num_steps))
    return min(1.0, (step + 1) / _WARMUP_STEPS) * (0.1 + 0.9 * cosine)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m streamrl.learner.model.sft", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of the model to start from")
    parser.add_argument("--data", type=Path, required=True, help='JSONL of {"prompt": ..., "completion": ...}')
    parser.add_argument("--output", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--batch-rows", type=int, default=64, help="rows of one optimizer step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's choice")
    arguments = vars(parser.parse_args(argv))
    if threads := arguments.pop("threads"):
        torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        loss = train(Settings(**arguments), lambda text: print(text, flush=True))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"trained: loss {loss:.3f}, in {arguments['output']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
