"""Tiny random causal language models with a character-level tokenizer, made on the fly: no test downloads anything.

`make_model(folder, ...)` writes the files of a hub folder (config, tokenizer, safetensors), so that vLLM, transformers
and the learner load it like a real one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 ,.:;=+->?"
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
Architecture = Literal["qwen2", "llama"]


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token per character, `<eos>` ends a sequence, nothing is added automatically.

    A byte-level BPE without merges: AutoTokenizer replaces a folder's pre-tokenizer by that of its model type if it
    knows it, and only this form means the same under all of them.
    """
    alphabet = [_byte_level(character) for character in CHARACTERS]
    vocab = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )


def begin_all_with(tokenizer: transformers.PreTrainedTokenizerFast, token: str) -> None:
    """Make the tokenizer put this token, which it has, in front of every text, as those of Llama and Gemma do."""
    tokenizer.add_special_tokens({"bos_token": token})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, tokenizer.convert_tokens_to_ids(token))]
    )


def end_all_with(tokenizer: transformers.PreTrainedTokenizerFast, token: str) -> None:
    """Make the tokenizer put this token, which it has, behind every text, as one saved with `add_eos_token` does."""
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {token}", special_tokens=[(token, tokenizer.convert_tokens_to_ids(token))]
    )


def sentencepiece_like() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer that puts a space in front of every text, as those of Llama 2 and Mistral do."""
    tokens = [PAD, EOS, UNKNOWN, "▁", "\n", *"0123456789+=[]"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=[], unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, unk_token=UNKNOWN)


def _byte_level(character: str) -> str:
    return "\u0120" if character == " " else character


def make_model(
    folder: Path,
    *,
    architecture: Architecture = "qwen2",
    tied: bool = True,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int = 1,
    dtype: torch.dtype = torch.float32,
    scale: float = 0.2,
    seed: int = 0,
    positions: int = 512,
) -> Path:
    """A random model; `scale` is the spread of its weights, large enough that its distributions are far from uniform.

    vLLM on CPUs refuses heads narrower than 32.
    """
    tokenizer = make_tokenizer()
    config = _config(architecture)(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        initializer_range=scale,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _config(architecture: Architecture) -> Any:
    return {"qwen2": transformers.Qwen2Config, "llama": transformers.LlamaConfig}[architecture]


def response_logprobs(
    folder: Path, prompt_ids: list[int], response_ids: list[int], *, min_tokens: int = 0, temperature: float = 1.0
) -> torch.Tensor:  # [T]
    """The ground truth for engines: a plain forward pass in fp32, with the end token masked before `min_tokens`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt_ids + response_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt_ids) - 1 : -1]
    logits[:min_tokens, model.config.eos_token_id] = -torch.inf
    return torch.log_softmax(logits / temperature, dim=-1).gather(1, ids[0, len(prompt_ids) :, None])[:, 0]
