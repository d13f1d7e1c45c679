"""Training a reward model on preference pairs: Bradley-Terry, in one sitting, on one device.

    loss = -log sigmoid(r(prompt + chosen) - r(prompt + rejected))

Reads JSONL of {"prompt", "chosen", "rejected"}, starts from any model of transformers with a new reward head, and
leaves a folder that `streamrl reward serve` and plain transformers load. Texts are joined as the reward client joins
them. A share of the pairs is held out; the summary says how many of them the model orders rightly, and the mean and
deviation of its rewards on them, which standardise it when served.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from streamrl.durable import write_durably
from streamrl.errors import DataError, TrainingError
from workers.rewards.model import RewardModel, Row

SUMMARY_FILE = "reward_summary.json"
_REPORTS = 10  # of the loss, over the whole training
_SCORE_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    pairs: Path
    model: str  # what to start from: a folder or hub name
    output: Path
    epochs: int = 1
    batch_pairs: int = 32  # pairs of one optimizer step
    lr: float = 1e-5
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    held_out: float = 0.1  # share of the pairs
    max_tokens: int = 2048  # a pair with a longer text is left out, and counted
    seed: int = 1234
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    num_pairs: int  # trained on
    num_held_out: int
    num_overlong: int
    steps: int
    accuracy: float  # share of held-out pairs that are ordered rightly
    reward_mean: float  # over both texts of the held-out pairs
    reward_std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    chosen: Row
    rejected: Row


def train(settings: TrainSettings, say: Callable[[str], None]) -> Summary:
    torch.manual_seed(settings.seed)  # the new head, and dropout
    texts = read_pairs(settings.pairs)
    scorer = RewardModel.load(settings.model, new_head=True, trust_remote_code=settings.trust_remote_code)
    if scorer.tokenizer.pad_token_id is not None:
        scorer.model.config.get_text_config().pad_token_id = scorer.tokenizer.pad_token_id
    pairs = _encode(scorer, texts, settings.max_tokens)
    random.Random(settings.seed).shuffle(pairs)
    num_held_out = max(1, round(len(pairs) * settings.held_out))
    held_out, pairs = pairs[:num_held_out], pairs[num_held_out:]
    if not pairs:
        raise DataError(
            f"{settings.pairs}: {len(texts)} pairs, {num_held_out} fit and are held out: none left to train on"
        )

    batches = list(_batches(pairs, settings))
    optimizer = torch.optim.AdamW(scorer.model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    scorer.model.train()
    for step, batch in enumerate(batches, start=1):
        loss = _step(scorer, optimizer, batch, settings.clip_norm)
        if step % math.ceil(len(batches) / _REPORTS) == 0 or step == len(batches):
            say(f"step {step}/{len(batches)}: loss {loss:.4f}")
    scorer.model.eval()

    summary = _summarise(scorer, held_out, len(pairs), len(texts) - len(pairs) - len(held_out), len(batches))
    scorer.model.config.use_cache = True
    scorer.model.save_pretrained(settings.output)
    scorer.tokenizer.save_pretrained(settings.output)
    write_durably(settings.output / SUMMARY_FILE, json.dumps(asdict(summary), indent=2).encode() + b"\n")
    return summary


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """(prompt + chosen, prompt + rejected) of each line; what is no pair is a DataError with file and line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the preference pairs {str(path)!r}: {error}") from None
    pairs = [_read_pair(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if len(pairs) < 2:
        raise DataError(f"{path} holds {len(pairs)} preference pairs; at least 2 are needed")
    return pairs


def _read_pair(line: str, place: str) -> tuple[str, str]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: not JSON: {error}") from None
    values = [row.get(key) if isinstance(row, dict) else None for key in ("prompt", "chosen", "rejected")]
    if not all(isinstance(value, str) for value in values):
        raise DataError(f'{place}: expected {{"prompt": text, "chosen": text, "rejected": text}}, got {line:.80}')
    prompt, chosen, rejected = map(str, values)
    if not (prompt + chosen and prompt + rejected):
        raise DataError(f"{place}: an empty text cannot be scored")
    return prompt + chosen, prompt + rejected


def _encode(scorer: RewardModel, texts: Sequence[tuple[str, str]], max_tokens: int) -> list[Pair]:
    limit = min(max_tokens, scorer.max_tokens or max_tokens)
    chosen = scorer.encode([text for text, _ in texts])
    rejected = scorer.encode([text for _, text in texts])
    pairs = [Pair(chosen=c, rejected=r) for c, r in zip(chosen, rejected, strict=True)]
    return [pair for pair in pairs if max(len(pair.chosen), len(pair.rejected)) <= limit]


def _batches(pairs: Sequence[Pair], settings: TrainSettings) -> Iterator[Sequence[Pair]]:
    order = random.Random(settings.seed + 1)
    for _ in range(settings.epochs):
        shuffled = order.sample(pairs, len(pairs))
        for start in range(0, len(shuffled), settings.batch_pairs):
            yield shuffled[start : start + settings.batch_pairs]


def _step(scorer: RewardModel, optimizer: torch.optim.Optimizer, batch: Sequence[Pair], clip_norm: float) -> float:
    rewards = scorer.forward([pair.chosen for pair in batch] + [pair.rejected for pair in batch])
    chosen, rejected = rewards.chunk(2)
    loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
    if not torch.isfinite(loss):
        raise TrainingError(f"the loss became {loss.item()}: try a smaller learning rate")
    loss.backward()
    torch.nn.utils.clip_grad_norm_(scorer.model.parameters(), clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _summarise(scorer: RewardModel, held_out: Sequence[Pair], num_pairs: int, num_overlong: int, steps: int) -> Summary:
    rows = [pair.chosen for pair in held_out] + [pair.rejected for pair in held_out]
    rewards = [
        score for start in range(0, len(rows), _SCORE_ROWS) for score in scorer.score(rows[start : start + _SCORE_ROWS])
    ]
    chosen, rejected = rewards[: len(held_out)], rewards[len(held_out) :]
    return Summary(
        num_pairs=num_pairs,
        num_held_out=len(held_out),
        num_overlong=num_overlong,
        steps=steps,
        accuracy=statistics.fmean(c > r for c, r in zip(chosen, rejected, strict=True)),
        reward_mean=statistics.fmean(rewards),
        reward_std=statistics.pstdev(rewards),
    )
