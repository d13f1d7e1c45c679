"""What people get wrong when they first start a run, and what the one line about it must say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

CONFIG = """\
name: checked
dir: runs
model: {path: model}
data: {train: train.jsonl, max_prompt_tokens: 64}
sampling: {max_tokens: 64}
validation: {every_steps: 0}
training: {groups_per_step: 2}
worker: {engine: transformers}
rewards:
  exact: {type: function, target: exact_match}
"""
TRAIN = '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n'
REWARDS = """\
def takes_less(prompt, completion):
    return 1.0

def loops(prompt, completion, token_ids, fields):
    while True:
        pass

def in_words(prompt, completion, token_ids, fields):
    return "good"

def of_a_field(prompt, completion, token_ids, fields):
    return float(completion == fields["solution"])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    says: tuple[str, ...]  # the setting, and what to do; {folder} and {redis} in here and below are the test's
    overrides: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)  # as the user has written them
    gone: tuple[str, ...] = ()  # files that are not there
    environment: Mapping[str, str] = field(default_factory=dict)


def mine(target: str, **options: object) -> tuple[str, ...]:
    return (f"rewards.mine={json.dumps({'type': 'function', 'target': target, **options})}",)


def edited(text: str, **settings: object) -> str:
    return json.dumps({**json.loads(text), **settings})


OF_SETTINGS = {
    "a misspelt key": Mistake(
        overrides=("sampling.temprature=1",), says=("sampling.temprature", "did you mean 'sampling.temperature'")
    ),
    "an unknown section": Mistake(
        files={"run.yaml": CONFIG + "trainer: {max_steps: 3}\n"},
        says=("run.yaml:11", "unknown key 'trainer'", "a configuration has name, seed, dir,"),
    ),
    "a wrong type": Mistake(
        overrides=("training.max_steps=ten",), says=("training.max_steps", "'ten'", "must be a valid integer")
    ),
    "no steps": Mistake(overrides=("training.groups_per_step=0",), says=("training.groups_per_step", "0")),
    "a dtype of elsewhere": Mistake(overrides=("model.dtype=bf16",), says=("model.dtype", "'bf16'", "bfloat16")),
    "an unknown type of reward": Mistake(
        overrides=("rewards.mine={type: llm, url: 'http://x'}",), says=("rewards.mine", "llm", "function")
    ),
    "one sample a prompt": Mistake(
        overrides=("sampling.num_samples=1",), says=("sampling.num_samples = 1", "at least 2")
    ),
    "a duration of its own": Mistake(overrides=("training.max_time=3h",), says=("training.max_time", "DD:HH:MM:SS")),
    "a misspelt reward": Mistake(
        overrides=("rewards.exact.target=exact_mach",), says=("rewards.exact.target", "did you mean 'exact_match'")
    ),
    "an empty configuration": Mistake(files={"run.yaml": ""}, says=("run.yaml", "it is empty", "a map of settings")),
    "a configuration that is no YAML": Mistake(files={"run.yaml": "model: [path"}, says=("run.yaml:1", "YAML")),
    "no configuration": Mistake(gone=("run.yaml",), says=("run.yaml", "no configuration file")),
    "extends what is not there": Mistake(
        files={"run.yaml": "extends: base.yaml\n" + CONFIG}, says=("base.yaml", "extends")
    ),
}
OF_PLACES = {
    "no prompts": Mistake(overrides=("data.train=nowhere.jsonl",), says=("data.train", "nowhere.jsonl", "JSONL")),
    "an empty file of prompts": Mistake(files={"train.jsonl": ""}, says=("data.train", "train.jsonl holds no prompts")),
    "prompts as one JSON list": Mistake(
        files={"train.jsonl": '[\n  {"prompt": "1+1="}\n]\n'},
        says=("train.jsonl:1", "a JSON array; write one object per line: `jq"),
    ),
    "a row without text": Mistake(
        files={"train.jsonl": TRAIN + '{"question": "1+3="}\n'},
        says=("train.jsonl:3", "exactly one of 'text', 'prompt' and 'messages'"),
    ),
    "no prompts for validation": Mistake(
        overrides=("data.validation=held-out.jsonl",), says=("data.validation", "held-out.jsonl")
    ),
    "no model": Mistake(overrides=("model.path=./sft",), says=("model.path = './sft'", "no such folder")),
    "a folder without a model": Mistake(gone=("model/config.json",), says=("model.path", "config.json")),
    "a folder without a tokenizer": Mistake(
        gone=("model/tokenizer.json",), says=("model.path", "no tokenizer (tokenizer.json")
    ),
    "a folder without weights": Mistake(
        gone=("model/model.safetensors",), says=("model.path", "no weights (model.safetensors")
    ),
    "weights that git did not fetch": Mistake(
        files={"model/model.safetensors": "version https://git-lfs.github.com/spec/v1\n"},
        says=("model.path", "git lfs pull"),
    ),
    "a reward's file that is not there": Mistake(
        overrides=mine("nowhere.py:score"), says=("rewards.mine.target", "nowhere.py", "no such file")
    ),
    "a run's folder that cannot be made": Mistake(
        overrides=("dir=train.jsonl",), says=("dir = 'train.jsonl'", "choose another place")
    ),
    "a store that cannot be written": Mistake(
        overrides=("weights.store=file:{folder}/train.jsonl/store",), says=("weights.store", "choose another place")
    ),
    "a tracker that is not installed": Mistake(
        overrides=("metrics.wandb={}",), says=("metrics.wandb", "pip install", "[trackers]'")
    ),
    "a server that is not there": Mistake(
        overrides=("redis.url=redis://127.0.0.1:1/0", "redis.connect_timeout_s=0.2"),
        says=("Redis at 127.0.0.1:1/0", "redis.url"),
    ),
    "a wrong password": Mistake(
        overrides=("redis.url={redis}",),
        environment={"STREAMRL_REDIS_PASSWORD": "wrong"},
        says=("Redis at", "STREAMRL_REDIS_PASSWORD"),
    ),
}
OF_REWARDS = {
    "a function that is not in its file": Mistake(
        overrides=mine("rewards.py:loop"), says=("rewards.mine.target", "did you mean 'loops'")
    ),
    "a module that cannot be imported": Mistake(
        overrides=mine("no_such_module:score"), says=("rewards.mine.target", "No module named 'no_such_module'")
    ),
    "another signature": Mistake(
        overrides=mine("rewards.py:takes_less"),
        says=("rewards.mine.target", "takes_less(prompt, completion, token_ids, fields", "too many positional"),
    ),
    "options of another function": Mistake(
        overrides=("rewards.exact.options={tolerance: 0.1}",), says=("rewards.exact.target", "'tolerance'")
    ),
    "no answer in the rows": Mistake(
        files={"train.jsonl": '{"prompt": "1+1=", "solution": "2"}\n{"prompt": "1+2=", "solution": "3"}\n'},
        says=("rewards.exact.target", "train.jsonl:1", "no field 'answer'; it has: solution", "options"),
    ),
    "a field of another name": Mistake(
        overrides=mine("rewards.py:of_a_field"),
        says=("rewards.mine.target", "KeyError: 'solution'", "the row's fields: answer"),
    ),
    "a function that loops": Mistake(
        overrides=mine("rewards.py:loops", timeout_s=1), says=("rewards.mine.target", "no answer within 1 s")
    ),
    "a function that says it in words": Mistake(
        overrides=mine("rewards.py:in_words"), says=("rewards.mine.target", "returned 'good', not a number")
    ),
}
_LEARNED_POSITIONS = {
    "model_type": "gpt2",
    "n_positions": 64,
    "max_position_embeddings": 64,
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 2,
}
OF_THE_MODEL = {
    "a prompt that is too long": Mistake(
        overrides=("data.max_prompt_tokens=3",),
        says=("train.jsonl:1", "4 tokens, data.max_prompt_tokens is 3", "raise it, or set data.overlong"),
    ),
    "messages without a chat template": Mistake(
        files={"train.jsonl": '{"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}\n' * 2},
        says=("train.jsonl:1", "need a chat template", "use 'text'"),
    ),
    "samples longer than the model's positions": Mistake(
        overrides=("sampling.max_tokens=500",),
        says=("data.max_prompt_tokens and sampling.max_tokens", "sequences of 564 tokens", "only 512 positions"),
    ),
    "a target of adapters that no layer has": Mistake(
        overrides=("model.lora.targets=[query]",),
        says=("model.lora.targets", "no layer of the model is named any of query", "q_proj"),
    ),
    "a loss that cannot be imported": Mistake(
        overrides=("algorithm.loss=no_such_module:loss",), says=("algorithm.loss", "no_such_module")
    ),
}
OF_OTHER_MODELS = {
    "a tokenizer of another model": ({"vocab_size": 15}, ("model.path", "the model only 15 outputs", "resize")),
    "too few positions": (_LEARNED_POSITIONS, ("model.path", "64 tokens", "data.max_prompt_tokens + sampling.max_tok")),
    "a model that does not generate": ({"model_type": "t5"}, ("model.path", "causal language model")),
    "a model that nobody knows": ({"model_type": "gpt9"}, ("model.path", "gpt9")),
}
