"""A random character-level reward model of 3 million parameters, and its bare forward passes.

As a program, `python -m bench.reward_model FOLDER`, it answers each line {"texts": [...], "batch_tokens": 1024} with
the seconds of the forward passes, until its input ends.
"""

from __future__ import annotations

import json
import string
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.measure import seconds
from streamrl.workers.reward_server.model import prepare_process

ALPHABET = string.ascii_lowercase + string.digits + ".,"
_PAD = "<pad>"


class Batch(NamedTuple):
    ids: torch.Tensor  # [rows, longest] int64
    mask: torch.Tensor  # [rows, longest] int64; 0: padding


def write_reward_model(folder: Path) -> None:
    """Write a folder that the server can load."""
    prepare_process(1)
    tokenizer = _make_tokenizer()
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        pad_token_id=tokenizer.pad_token_id,
    )
    config.num_labels = 1
    torch.manual_seed(0)
    transformers.Qwen2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character: byte-level BPE without merges, which AutoTokenizer keeps."""
    vocabulary = {token: number for number, token in enumerate([_PAD, *ALPHABET])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=_PAD)


class BareModel:
    """The same folder, loaded by plain transformers."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
        self._model.config.use_cache = False
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def batches(self, texts: Sequence[str], *, max_tokens: int) -> list[Batch]:
        """Group rows of similar lengths."""
        rows = sorted(self._tokenizer(list(texts))["input_ids"], key=len, reverse=True)
        return list(self._pack(rows, max_tokens))

    def _pack(self, rows: list[list[int]], max_tokens: int) -> Iterator[Batch]:
        while rows:
            width = len(rows[0])
            count = max(1, max_tokens // width)
            batch, rows = rows[:count], rows[count:]
            ids = torch.tensor([[*row, *[self._tokenizer.pad_token_id] * (width - len(row))] for row in batch])
            mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in batch])
            yield Batch(ids, mask)

    @torch.inference_mode()
    def forward(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self._model(input_ids=batch.ids, attention_mask=batch.mask)


def main() -> None:
    prepare_process(1)  # like the server
    model = BareModel(Path(sys.argv[1]))
    for line in sys.stdin:
        request = json.loads(line)
        batches = model.batches(request["texts"], max_tokens=request["batch_tokens"])
        print(seconds(partial(model.forward, batches)), flush=True)


if __name__ == "__main__":
    main()
