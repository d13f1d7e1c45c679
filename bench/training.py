"""A 136M-parameter model in real training, for its weights: bf16 copies of its last steps.

The shapes are those of a small Llama with tied embeddings, initial weights are drawn from N(0, 0.02), gradients come
from cross-entropy on random tokens, the optimizer is AdamW on fp32 masters. Needs torch and transformers, and half a
second to a second per step.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import transformers

from bench.publishing import State
from streamrl.protocol.weights.format import TensorMeta

_LENGTH = 32  # tokens per step, enough for every weight to get a gradient


def make_model(*, quick: bool) -> transformers.LlamaForCausalLM:
    """Return the 136M model; with `quick`, a third of its layers."""
    config = transformers.LlamaConfig(
        vocab_size=51_840,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=10 if quick else 30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        initializer_range=0.02,
    )
    torch.set_num_threads(1)  # as in all measurements; threads that wait for each other are slow on a busy machine
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def tensors_of(model: torch.nn.Module) -> list[TensorMeta]:
    return [TensorMeta(name=name, dtype="bfloat16", shape=tuple(p.shape)) for name, p in model.named_parameters()]


def train(model: transformers.LlamaForCausalLM, *, lr: float, num_steps: int) -> Iterator[State]:
    """Yield the state after each step as it would be published, in new arrays."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.1)
    for _ in range(num_steps):
        train_once(model, optimizer, num_tokens=_LENGTH)
        yield bits_of(model)


def train_once(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, num_tokens: int, num_rows: int = 1) -> None:
    """Run one step on random tokens."""
    ids = torch.randint(model.config.vocab_size, (num_rows, num_tokens))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def bits_of(model: torch.nn.Module) -> State:
    return {
        name: p.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).ravel()
        for name, p in model.named_parameters()
    }
