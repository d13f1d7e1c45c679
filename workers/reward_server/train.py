"""Trains a reward model on pairs or ratings, in a single run on one device.

Starts from any transformers model with a new reward head, and writes a folder that `streamrl reward serve` and plain
transformers can load. A share of the examples is held out; the summary reports how many of them the model ranks
correctly, and the mean and standard deviation of its rewards on them, which standardise it when served.

Reward models learn from pairs of texts, one better than the other, or from texts with ratings:

    {"prompt": ..., "chosen": ..., "rejected": ...}      loss = -log sigmoid(r(chosen) - r(rejected))   (Bradley-Terry)
    {"prompt": ..., "completion": ..., "score": ...}     loss = mean (output - score)^2, of a number or a list of them

Prompt and completion are joined as in the reward client. A malformed example is a DataError that names file and line.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from streamrl.config import schema
from streamrl.errors import DataError, ResourceError, TrainingError
from streamrl.files import write_durably
from streamrl.workers.reward_server.model import RewardModel, Row

SUMMARY_FILE = "reward_summary.json"
_REPORTS = 10  # of the loss, over the whole training
# Tokens of one forward pass, padding included: one pair of the default --max-tokens, the least that splits no pair.
# A pass keeps all that it computed until its gradient is there, so this bounds the memory, whatever the batch size.
_PIECE_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    model: str  # base model: a folder or hub name
    output: Path
    epochs: int = 1
    batch_size: int = 32  # examples per optimizer step
    lr: float = 1e-5
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    held_out: float = 0.1  # share of the examples
    max_tokens: int = 2048  # examples with a longer text are skipped, and counted
    seed: int = 1234
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    num_trained: int
    num_held_out: int
    num_overlong: int
    steps: int
    accuracy: float  # share of held-out pairs (for ratings: of neighbours that differ) ranked correctly
    reward_mean: float  # over the held-out texts; for several outputs, of their mean
    reward_std: float
    num_outputs: int  # of the model


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encoded:
    rows: tuple[Row, ...]
    scores: tuple[float, ...]


def train(examples: Sequence[Example], settings: TrainSettings, report: Callable[[str], None]) -> Summary:
    torch.manual_seed(settings.seed)  # the new head, and dropout
    outputs = max(1, len(examples[0].scores))
    start = schema.RewardServer(model=settings.model)
    scorer = RewardModel.load(start, new_head=outputs, trust_remote_code=settings.trust_remote_code)
    if scorer.tokenizer.pad_token_id is not None:
        scorer.model.config.get_text_config().pad_token_id = scorer.tokenizer.pad_token_id
    encoded = _encode(scorer, examples, settings.max_tokens)
    random.Random(settings.seed).shuffle(encoded)
    num_held_out = max(1, round(len(encoded) * settings.held_out))
    held_out, training = encoded[:num_held_out], encoded[num_held_out:]
    if not training:
        raise DataError(
            f"{len(encoded)} of {len(examples)} examples have texts short enough, and {len(held_out)} of these "
            "are held out: none is left to train on; raise --max-tokens, or lower --held-out"
        )

    batches = list(_batches(training, settings))
    optimizer = torch.optim.AdamW(scorer.model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    with _full_memory_explained(settings.max_tokens):
        scorer.model.train()
        for step, batch in enumerate(batches, start=1):
            loss = _step(scorer, optimizer, batch, settings.clip_norm)
            if step % math.ceil(len(batches) / _REPORTS) == 0 or step == len(batches):
                report(f"step {step}/{len(batches)}: loss {loss:.4f}")
        scorer.model.eval()
        rewards = _rewards(scorer, held_out)

    summary = Summary(
        num_trained=len(training),
        num_held_out=len(held_out),
        num_overlong=len(examples) - len(encoded),
        steps=len(batches),
        accuracy=_accuracy(held_out, rewards),
        reward_mean=statistics.fmean(rewards),
        reward_std=statistics.pstdev(rewards) or 1.0,
        num_outputs=outputs,
    )
    scorer.model.config.use_cache = True
    scorer.model.save_pretrained(settings.output)
    scorer.tokenizer.save_pretrained(settings.output)
    write_durably(settings.output / SUMMARY_FILE, json.dumps(asdict(summary), indent=2).encode() + b"\n")
    return summary


def _encode(scorer: RewardModel, examples: Sequence[Example], max_tokens: int) -> list[_Encoded]:
    limit = min(max_tokens, scorer.max_tokens or max_tokens)
    rows = iter(scorer.encode([text for example in examples for text in example.texts]))
    encoded = [_Encoded(rows=tuple(next(rows) for _ in example.texts), scores=example.scores) for example in examples]
    return [example for example in encoded if _longest(example) <= limit]


def _batches(examples: Sequence[_Encoded], settings: TrainSettings) -> Iterator[Sequence[_Encoded]]:
    order = random.Random(settings.seed + 1)
    for _ in range(settings.epochs):
        shuffled = order.sample(examples, len(examples))
        for start in range(0, len(shuffled), settings.batch_size):
            yield shuffled[start : start + settings.batch_size]


@contextmanager
def _full_memory_explained(max_tokens: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise ResourceError(
            f"the device's memory is too small to train this model on texts of up to {max_tokens} tokens: lower "
            "--max-tokens, or use a smaller model or a GPU with more memory; another --batch-size changes nothing"
        ) from None


def _step(scorer: RewardModel, optimizer: torch.optim.Optimizer, batch: Sequence[_Encoded], clip_norm: float) -> float:
    loss = _add_gradients(scorer, batch)
    torch.nn.utils.clip_grad_norm_(scorer.model.parameters(), clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _add_gradients(scorer: RewardModel, batch: Sequence[_Encoded]) -> float:
    """Add the gradients of the mean loss over the batch, piece by piece, and return this loss."""
    total = 0.0
    for piece in _pieces(sorted(batch, key=_longest)):  # examples of similar lengths need less padding
        loss = _mean_loss(scorer, piece) * (len(piece) / len(batch))
        if not torch.isfinite(loss):
            raise TrainingError(f"the loss became {loss.item()}: try a smaller learning rate")
        loss.backward()
        total += loss.item()
    return total


def _mean_loss(scorer: RewardModel, examples: Sequence[_Encoded]) -> torch.Tensor:
    outputs = scorer.forward([row for example in examples for row in example.rows])
    if examples[0].scores:
        return torch.nn.functional.mse_loss(outputs, outputs.new_tensor([example.scores for example in examples]))
    chosen, rejected = outputs.view(-1, 2).T
    return -torch.nn.functional.logsigmoid(chosen - rejected).mean()


def _pieces(examples: Sequence[_Encoded]) -> Iterator[Sequence[_Encoded]]:
    """Cut, in order, into pieces of at most `_PIECE_TOKENS`; an example that has more is a piece of its own."""
    piece: list[_Encoded] = []
    num_rows = width = 0
    for example in examples:
        num_rows, width = num_rows + len(example.rows), max(width, _longest(example))
        if piece and num_rows * width > _PIECE_TOKENS:
            yield piece
            piece, num_rows, width = [], len(example.rows), _longest(example)
        piece.append(example)
    if piece:
        yield piece


def _longest(example: _Encoded) -> int:
    return max(map(len, example.rows))


@torch.inference_mode()
def _rewards(scorer: RewardModel, held_out: Sequence[_Encoded]) -> list[float]:
    """Return the reward of every held-out text, in order; for several outputs, their mean."""
    parts = [scorer.forward([row for example in piece for row in example.rows]) for piece in _pieces(held_out)]
    rewards: list[float] = torch.cat(parts).mean(dim=1).tolist()
    return rewards


def _accuracy(held_out: Sequence[_Encoded], rewards: Sequence[float]) -> float:
    if not held_out[0].scores:
        pairs = zip(rewards[::2], rewards[1::2], strict=True)
        return statistics.fmean(chosen > rejected for chosen, rejected in pairs)
    rated = [(statistics.fmean(example.scores), reward) for example, reward in zip(held_out, rewards, strict=True)]
    differing = [(a, b) for a, b in itertools.pairwise(rated) if a[0] != b[0]]
    if not differing:
        return 1.0
    return statistics.fmean((a[0] < b[0]) == (a[1] < b[1]) for a, b in differing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    texts: tuple[str, ...]  # of a pair, the better one first
    scores: tuple[float, ...] = ()  # of a rated text; empty for a pair


def read_pairs(path: Path) -> list[Example]:
    return _read(path, _pair, what="preference pairs")


def read_ratings(path: Path) -> list[Example]:
    examples = _read(path, _rating, what="ratings")
    if len({len(example.scores) for example in examples}) > 1:
        raise DataError(f"{path}: all ratings must have the same number of scores")
    return examples


def _read(path: Path, read: Callable[[Any], Example], *, what: str) -> list[Example]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise DataError(f"cannot read the {what} {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"the {what} {str(path)!r} are not UTF-8 text: {error}") from None
    examples = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            example = read(json.loads(line))
        except ValueError as error:
            raise DataError(f"{path}:{number}: {error}; got {line:.80}") from None
        if not all(example.texts):
            raise DataError(f"{path}:{number}: an empty text cannot be scored")
        examples.append(example)
    if len(examples) < 2:
        raise DataError(f"{path} holds {len(examples)} {what}; at least 2 are needed")
    return examples


def _pair(row: Any) -> Example:
    prompt, chosen, rejected = _texts(row, "prompt", "chosen", "rejected")
    return Example(texts=(prompt + chosen, prompt + rejected))


def _rating(row: Any) -> Example:
    prompt, completion = _texts(row, "prompt", "completion")
    score = row.get("score")
    scores = score if isinstance(score, list) else [score]
    if not scores or not all(type(number) in (int, float) and math.isfinite(number) for number in scores):
        raise ValueError("expected `score` to be a finite number or a list of them")
    return Example(texts=(prompt + completion,), scores=tuple(map(float, scores)))


def _texts(row: Any, *keys: str) -> list[str]:
    texts = [row[key] for key in keys if isinstance(row, dict) and isinstance(row.get(key), str)]
    if len(texts) < len(keys):
        raise ValueError("expected {" + ", ".join(f'"{key}": text' for key in keys) + "}")
    return texts
