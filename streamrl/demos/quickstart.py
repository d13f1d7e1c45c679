"""The quickstart: its task, its model, and what is made before its run.

    data ─► base model ─┬─► streamrl sft            ─► sft/           the start of the run, "before"
                        ├─► streamrl reward train   ─► reward-model/  at the same time, on the other core
                        │                                             (both forked after one import: `forking`)
                        └─► the run's rewards are tried
        the other core, once the reward model is made: imports for learner and worker (`forking`)

Everything is made in the run's folder, from the seed. Takes some twenty seconds; blocks on these processes, whose last
line is shown while they work.

The task: write digits in rising order when `<` follows them, in falling order when `>` does.

    prompt 52918<  answer 12589        prompt 52918>  answer 98521

The demonstrations for the warm-up are careless: they answer most prompts with `>` as if these ended in `<`. Imitating
them gives a model that sorts fairly well and nearly always ignores the sign. Whether an answer is right can be checked,
and that is the reward (`exact_match`, built in) that teaches the rest.

The untrained model: a Qwen2 of 0.7M parameters that reads and writes single characters. It is written in the folder
layout of a model hub (configuration, tokenizer, weights), with numpy alone: everything that loads a real model loads
this one in the same way, and making it needs no torch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.config.load import as_overrides
from streamrl.config.schema import Config
from streamrl.demos.report import Showcase, Trial
from streamrl.demos.run import program, run_all, write_rows
from streamrl.files import naming
from streamrl.ops.launch.forking import PartsAhead
from streamrl.ops.launch.processes import Command

DIGITS = "0123456789"
RISING, FALLING = "<", ">"
MIN_DIGITS, MAX_DIGITS = 3, 8
_SHARE_FALLING = 0.65
_CARELESSNESS = 0.7  # share of falling prompts that demonstrations answer in rising order


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    prompt: str
    answer: str


def examples(rng: random.Random) -> Iterator[Example]:
    """Yield examples for ever; prompts may repeat."""
    while True:
        digits = "".join(rng.choices(DIGITS, k=rng.randint(MIN_DIGITS, MAX_DIGITS)))
        sign = FALLING if rng.random() < _SHARE_FALLING else RISING
        yield Example(prompt=digits + sign, answer=solve(digits, sign))


def solve(digits: str, sign: str) -> str:
    return "".join(sorted(digits, reverse=sign == FALLING))


def demonstrate(example: Example, rng: random.Random) -> str:
    """Return a careless teacher's answer."""
    digits, sign = example.prompt[:-1], example.prompt[-1]
    careless = sign == FALLING and rng.random() < _CARELESSNESS
    return solve(digits, RISING) if careless else example.answer


def spoil(example: Example, rng: random.Random) -> str:
    """Return a wrong answer, as the reward model's negative: the wrong order, or one digit replaced."""
    digits, sign = example.prompt[:-1], example.prompt[-1]
    reverse = solve(digits, RISING if sign == FALLING else FALLING)
    wrong = reverse
    if rng.random() < 0.5:
        at = rng.randrange(len(digits))
        wrong = example.answer[:at] + rng.choice(DIGITS) + example.answer[at + 1 :]
    return wrong if wrong != example.answer else example.answer[:-1]


PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"
VOCABULARY = (PAD, END, UNKNOWN, *DIGITS, RISING, FALLING)
_SPREAD = 0.05  # standard deviation of the random weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The model's dimensions; the defaults make 0.7M parameters."""

    hidden: int = 128
    layers: int = 3
    heads: int = 4  # of size 32: vLLM on CPUs refuses smaller ones
    inner: int = 384


_USUAL = Size()


def write_base_model(folder: Path, *, seed: int, num_positions: int = 64, of: Size = _USUAL) -> None:
    """Write the model's folder; `num_positions` is the longest prompt and answer together."""
    from safetensors.numpy import save  # only installed on machines that train

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    weights = folder / "model.safetensors"
    with naming(weights):
        weights.write_bytes(save(dict(_tensors(rng, of)), metadata={"format": "pt"}))
    ends = {"pad_token_id": VOCABULARY.index(PAD), "eos_token_id": VOCABULARY.index(END)}
    _write_json(folder / "config.json", {**_architecture(num_positions, of), **ends})
    _write_json(folder / "generation_config.json", ends)
    _write_json(folder / "tokenizer.json", _tokenizer())
    words = {"pad_token": PAD, "eos_token": END, "unk_token": UNKNOWN}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    _write_json(folder / "tokenizer_config.json", {**settings, **words})


def _architecture(num_positions: int, of: Size) -> dict[str, object]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dtype": "float32",
        "vocab_size": len(VOCABULARY),
        "hidden_size": of.hidden,
        "intermediate_size": of.inner,
        "num_hidden_layers": of.layers,
        "num_attention_heads": of.heads,
        "num_key_value_heads": of.heads,
        "max_position_embeddings": num_positions,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
    }


def _tensors(rng: np.random.Generator, of: Size) -> Iterator[tuple[str, np.ndarray]]:
    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * _SPREAD).astype(np.float32)

    ones, zeros = np.ones(of.hidden, dtype=np.float32), np.zeros(of.hidden, dtype=np.float32)
    yield "model.embed_tokens.weight", matrix(len(VOCABULARY), of.hidden)
    for layer in range(of.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", ones
        yield f"{prefix}.post_attention_layernorm.weight", ones
        for name in ("q", "k", "v"):
            yield f"{prefix}.self_attn.{name}_proj.weight", matrix(of.hidden, of.hidden)
            yield f"{prefix}.self_attn.{name}_proj.bias", zeros
        yield f"{prefix}.self_attn.o_proj.weight", matrix(of.hidden, of.hidden)
        yield f"{prefix}.mlp.gate_proj.weight", matrix(of.inner, of.hidden)
        yield f"{prefix}.mlp.up_proj.weight", matrix(of.inner, of.hidden)
        yield f"{prefix}.mlp.down_proj.weight", matrix(of.hidden, of.inner)
    yield "model.norm.weight", ones
    yield "lm_head.weight", matrix(len(VOCABULARY), of.hidden)


def _tokenizer() -> dict[str, object]:
    """Return a byte-level BPE without merges: one token per character.

    AutoTokenizer keeps only this form as it is: for a model of this type it replaces any other pre-tokenizer by the
    type's own.
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
    with naming(path):
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


_NUM_TRAIN = 16_384
_NUM_HELD_OUT = 400
_NUM_DEMONSTRATIONS = 16_000  # 250 steps of 64 rows
_NUM_PAIRS = 4_000
_STREAMRL = ("-m", "streamrl.ops.cli.main")
_IMPORTED = (
    "streamrl.learner.sft.training",
    "streamrl.workers.reward_server.train",
    "transformers.models.qwen2.modeling_qwen2",
)


def prepare(config: Config, show: Callable[[str], None], trial: Trial, ahead: PartsAhead) -> list[str]:
    """Make data, warm-up and reward model, with frequent progress through `show`.

    Returns the run's settings that depend on the paths and on the reward model.
    """
    folder, seed = config.folder, config.seed
    show("writing the data and an untrained model")
    forking = ahead.importing(_IMPORTED, log=folder / "logs" / "imports.log")
    write_data(folder / "data", seed=seed)
    write_base_model(folder / "base", seed=seed)
    run_all(
        [warm_up(folder, seed), _train_reward_model(folder, seed)],
        show,
        meanwhile=partial(trial, overrides(folder, model="base")),
        when_one_has_ended=partial(ahead.begin, config),
        start=forking.start,
    )
    return overrides(folder)


def overrides(folder: Path, *, model: str = "sft") -> list[str]:
    settings: dict[str, object] = {
        "model.path": str(folder / model),
        "data.train": str(folder / "data" / "train.jsonl"),
        "data.validation": str(folder / "data" / "validation.jsonl"),
        "reward_server.model": str(folder / "reward-model"),
    }
    summary = folder / "reward-model" / "reward_summary.json"
    if summary.exists():
        found = json.loads(summary.read_text())
        settings |= {f"reward_server.{name}": float(found[name]) for name in ("reward_mean", "reward_std")}
    return as_overrides(settings)


def write_data(folder: Path, *, seed: int) -> None:
    rng = random.Random(seed)
    held_out = list({example.prompt: example for example in islice(examples(rng), _NUM_HELD_OUT)}.values())
    unseen = {example.prompt for example in held_out}
    rest = (example for example in examples(rng) if example.prompt not in unseen)
    write_rows(folder / "validation.jsonl", map(asdict, held_out))
    write_rows(folder / "train.jsonl", map(asdict, islice(rest, _NUM_TRAIN)))
    write_rows(
        folder / "demonstrations.jsonl",
        (
            {"prompt": example.prompt, "completion": demonstrate(example, rng)}
            for example in islice(rest, _NUM_DEMONSTRATIONS)
        ),
    )
    write_rows(
        folder / "pairs.jsonl",
        ({"prompt": one.prompt, "chosen": one.answer, "rejected": spoil(one, rng)} for one in islice(rest, _NUM_PAIRS)),
    )


def warm_up(folder: Path, seed: int) -> Command:
    options = {"--data": folder / "data" / "demonstrations.jsonl", "--output": folder / "sft", "--lr": 2e-3}
    return _training("warm-up", [*_STREAMRL, "sft"], options | {"--batch-size": 64}, folder, seed)


def _train_reward_model(folder: Path, seed: int) -> Command:
    options = {"--pairs": folder / "data" / "pairs.jsonl", "--output": folder / "reward-model", "--lr": 1e-3}
    return _training("reward model", [*_STREAMRL, "reward", "train"], options, folder, seed)


def _training(name: str, words: list[str], options: dict[str, Any], folder: Path, seed: int) -> Command:
    shared = {"--model": folder / "base", "--seed": seed, "--threads": 1}
    return program(name, words, shared | options, logs=folder / "logs")


QUICKSTART = Showcase(
    name="quickstart",
    explanation=(
        "Task: sort digits, upwards before '<', downwards before '>': 52918> is 98521.",
        "Demonstrations mostly ignore the '>': imitation gets a third right. Now rewards.",
    ),
    source="exact",
    question=lambda prompt, _: prompt,
    is_right=lambda completion, fields: completion == fields["answer"],
    check=lambda _: None,
    prepare=prepare,
    prepared="data, warm-up and reward model",
)
