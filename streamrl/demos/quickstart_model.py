"""The untrained model of the quickstart: a Qwen2 of 0.7M parameters that reads and writes single characters.

Written as the folder that a hub would hold (configuration, tokenizer, weights), with numpy alone: everything that loads
a real model loads this one in the same way, and making it needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from streamrl.demos.quickstart_task import DIGITS, FALLING, RISING

PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"
VOCABULARY = (PAD, END, UNKNOWN, *DIGITS, RISING, FALLING)
_HIDDEN, _LAYERS, _HEADS, _INNER = 128, 3, 4, 384  # heads of 32: vLLM on CPUs refuses narrower ones
_SPREAD = 0.05  # of the random weights


def write_base_model(folder: Path, *, seed: int, num_positions: int = 64) -> None:
    """`num_positions`: the longest prompt and answer together."""
    from safetensors.numpy import save_file  # only machines that train have it

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    save_file(dict(_tensors(rng)), folder / "model.safetensors", metadata={"format": "pt"})
    ends = {"pad_token_id": VOCABULARY.index(PAD), "eos_token_id": VOCABULARY.index(END)}
    _write_json(folder / "config.json", {**_architecture(num_positions), **ends})
    _write_json(folder / "generation_config.json", ends)
    _write_json(folder / "tokenizer.json", _tokenizer())
    words = {"pad_token": PAD, "eos_token": END, "unk_token": UNKNOWN}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    _write_json(folder / "tokenizer_config.json", {**settings, **words})


def _architecture(num_positions: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dtype": "float32",
        "vocab_size": len(VOCABULARY),
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "max_position_embeddings": num_positions,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
    }


def _tensors(rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * _SPREAD).astype(np.float32)

    ones, zeros = np.ones(_HIDDEN, dtype=np.float32), np.zeros(_HIDDEN, dtype=np.float32)
    yield "model.embed_tokens.weight", matrix(len(VOCABULARY), _HIDDEN)
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", ones
        yield f"{prefix}.post_attention_layernorm.weight", ones
        for name in ("q", "k", "v"):
            yield f"{prefix}.self_attn.{name}_proj.weight", matrix(_HIDDEN, _HIDDEN)
            yield f"{prefix}.self_attn.{name}_proj.bias", zeros
        yield f"{prefix}.self_attn.o_proj.weight", matrix(_HIDDEN, _HIDDEN)
        yield f"{prefix}.mlp.gate_proj.weight", matrix(_INNER, _HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", matrix(_INNER, _HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", matrix(_HIDDEN, _INNER)
    yield "model.norm.weight", ones
    yield "lm_head.weight", matrix(len(VOCABULARY), _HIDDEN)


def _tokenizer() -> dict[str, object]:
    """A byte-level BPE without merges: one token a character.

    The one form whose meaning AutoTokenizer leaves alone; for a model of this type it replaces a pre-tokenizer of
    another kind by the type's own.
    """
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [{"id": VOCABULARY.index(t), "content": t, **special} for t in (PAD, END, UNKNOWN)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "unk_token": UNKNOWN,
            "vocab": {token: i for i, token in enumerate(VOCABULARY)},
            "merges": [],
        },
    }


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
