"""Random language models of given sizes, published as by a learner, whose answers end at long-tailed lengths.

All 64 tokens, end token included, are about equally likely: lengths are geometric, about 64 tokens on average.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.publishing import State
from streamrl.protocol.weights.format import TensorMeta

VOCABULARY = 64
_PAD, _END = "<pad>", "<end>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    name: str
    hidden: int
    layers: int


SMALL = Size(name="0.7M", hidden=128, layers=4)
MIDDLE = Size(name="25M", hidden=512, layers=8)


def write_model(folder: Path, size: Size) -> int:
    """Write a folder that engines can load; return the number of parameters."""
    tokenizer = make_tokenizer()
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=4 * size.hidden if size is SMALL else 1408,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64,
        num_key_value_heads=size.hidden // 64,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def read_state(folder: Path) -> tuple[list[TensorMeta], State]:
    weights = load_file(folder / "model.safetensors")
    tensors = [TensorMeta(name=name, dtype="float32", shape=tuple(w.shape)) for name, w in sorted(weights.items())]
    return tensors, {name: weight.flatten().numpy().view(np.uint32) for name, weight in weights.items()}


def after_a_step(state: State, number: int) -> State:
    """Move a few percent of the elements to a neighbouring value, different ones at each step."""
    rng = np.random.default_rng(number)
    return {name: bits ^ (rng.random(len(bits)) < 0.05).astype(bits.dtype) for name, bits in state.items()}


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer without merges, since AutoTokenizer preserves it."""
    tokens = [_PAD, _END, *(chr(33 + number) for number in range(VOCABULARY - 2))]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=_PAD, eos_token=_END)
