"""Writes a first configuration for the user's case: short, every line explained. Other settings keep their defaults.

It does not extend an installed file, so that it can be copied to any machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from streamrl.config.source import parse
from streamrl.recipe.rewards import REWARDS

_COLUMN = 33  # where comments begin
_REDIS = "redis://127.0.0.1:6379/0"
_WIDEST = 120
_LONGEST_NAME = 64  # RUN_NAME
_STOP = r'["\n"]'


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    file: Path
    model: str
    data: str
    validation: str | None
    reward: str  # a built-in, or FILE:FUNCTION
    gpus: int
    chat: bool  # the model has a chat template, and prompts are messages

    @property
    def name(self) -> str:
        return re.sub(r"[^A-Za-z0-9._-]", "-", self.file.stem).strip("._-")[:_LONGEST_NAME] or "run"

    @property
    def ranks(self) -> int:
        return max(1, self.gpus // 2)


def is_chat_model(model: str) -> bool:
    """Whether the folder has a chat template; assumed for a hub's model, since most have one."""
    folder = Path(model)
    if not folder.is_dir():
        return True
    file = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").is_file() or (file.is_file() and '"chat_template"' in file.read_text())


def starter(case: Case, *, reference: Path) -> str:
    """Return the file's text; `reference` is conf/reinforce.yaml."""
    return "".join(f"{line}\n" for line in (*_head(case, reference), *_experiment(case), *_running(case)))


def _head(case: Case, reference: Path) -> Iterator[str]:
    yield f"# Train {case.model} with the reward {case.reward}."
    yield "#"
    yield f"#   streamrl config check {case.file}    # settings and files"
    yield f"#   streamrl doctor {case.file}          # this machine, Redis, memory"
    if case.gpus < 2:
        yield f"#   streamrl up {case.file}              # again: resumes from its last checkpoint"
    else:
        ranks = ",".join(map(str, range(case.ranks)))
        yield f"#   CUDA_VISIBLE_DEVICES={ranks} streamrl up {case.file}"
        own = f" --allow-reward-code {case.reward}" if ":" in case.reward else ""
        yield f"#   CUDA_VISIBLE_DEVICES={case.ranks} streamrl worker --redis {_REDIS} --run {case.name} \\"
        yield f"#       --model {case.model}{own}    # one for each GPU from {case.ranks} to {case.gpus - 1}"
    yield "#"
    yield "# Everything else has its default. All settings, explained:"
    yield f"# {reference}"


def _experiment(case: Case) -> Iterator[str]:
    prompt = '"messages": [{"role": "user", "content": ...}]' if case.chat else '"text": ...'
    yield from _section(f"name: {_text(case.name)}", f"the run's folder is runs/{case.name}")
    yield from _section("model:", "")
    yield _line(f"  path: {_text(case.model)}", "folder or hub name; the starting point, and the reference for KL")
    yield _line("  dtype: auto", "bfloat16 if the machine that starts the run computes in it, else float32")
    yield from _section("data:", "")
    yield _line(f"  train: {_text(case.data)}", f'one per line: {{{prompt}, "answer": ...}}')
    if case.validation is not None:
        yield _line(f"  validation: {_text(case.validation)}", "held-out prompts")
    yield _line("  max_prompt_tokens: 512", "longer prompts are an error; see `overlong`")
    yield from _section("sampling:", "")
    yield _line("  num_samples: 8", "per prompt: groups with equal rewards teach nothing")
    yield _line("  max_tokens: 256", "per answer: what a good one needs, and little more")
    yield _line("  temperature: 0.7", "higher explores more; small models then give few right answers")
    if not case.chat:
        yield _line(f"  stop: {_STOP}", "ends answers besides the end token, which base models seldom write")
    yield from _section("rewards:", "under names of yours: a sample's reward is their weighted sum")
    yield _line("  right:", _meaning(case.reward))
    yield _line("    type: function", "Python, in a process of its own; http: a service")
    yield _line(f"    target: {_text(case.reward)}", "a built-in, path/to/file.py:function or package.module:function")
    yield from _section("algorithm:", "REINFORCE with a leave-one-out baseline")
    yield _line("  mask_unfinished: false", "answers cut off by max_tokens are trained like any other")
    yield _line("  kl: {coefficient: 0.001}", "how strongly the policy is kept near its start")


def _running(case: Case) -> Iterator[str]:
    large = case.gpus > 0
    yield from _section("optimizer:", "")
    yield _line(f"  lr: {'1e-6' if large else '3e-5'}", "3e-5 was tried with 135M parameters; billions need about 1e-6")
    yield _line(f"  min_lr: {'1e-7' if large else '1e-5'}", "at the end of the cosine")
    yield _line("  warmup_steps: 2", "warm-up from 0 to lr")
    yield _line("  constant_steps: 0", "at min_lr, at the end")
    yield from _section("training:", "")
    yield _line(f"  groups_per_step: {32 if large else 6}", "prompts per step: more reduce noise, and take longer")
    yield _line("  max_steps: 100", "optimizer steps; -1: until max_epochs")
    yield _line("  max_epochs: 10", "epochs over the prompts, at most")
    yield _line(f"  micro_batch_tokens: {16384 if large else 4096}", "tokens per pass: lower it if memory is short")
    yield from _section("weights: {dtype: auto}", "of the served weights; auto: by the learner's machine")
    yield from _section("lag: {max_steps: 2}", "how many steps behind the learner the sampling weights may be")
    yield from _section("checkpoint: {every_steps: 10}", "the run resumes from the last checkpoint")
    if case.validation is not None:
        yield _line("validation:", "also at start and end")
        yield _line("  every_steps: 10", "runs beside training")
        stop = "" if case.chat else f", stop: {_STOP}"
        yield _line(f"  sampling: {{max_tokens: 256{stop}}}", "greedy, one answer per prompt")
    else:
        yield _line("validation: {every_steps: 0}", "none without data.validation")
    yield from _parts(case)


def _parts(case: Case) -> Iterator[str]:
    if case.gpus == 0:
        yield from _section("worker: {count: 1, threads: 1}", "vLLM on the CPU")
        yield _line("learner: {threads: 1}", "raise if you have more cores")
    elif case.gpus == 1:
        yield from _section("worker:", "vLLM, sharing the GPU with the learner")
        yield _line("  engine_args: {gpu_memory_utilization: 0.4}", "the rest is the learner's")
    else:
        yield from _section("redis:", "")
        yield _line(f"  url: {_REDIS}", "your server, with appendonly on; workers on other machines need its host name")
        yield from _section("worker:", "")
        yield _line("  count: 0", "`up` starts none: start each by hand on its own GPU, as above")
        yield _line("  engine_args: {gpu_memory_utilization: 0.85}", "share of its GPU's memory")
        yield from _section("learner:", "")
        yield _line(f"  processes: {case.ranks}", "ranks, one GPU each; the model is sharded over them")


def _section(text: str, comment: str) -> Iterator[str]:
    yield ""
    yield _line(text, comment)


def _line(text: str, comment: str) -> str:
    """Put the comment beside the line, or above it if there is no room."""
    if not comment:
        return text
    beside = f"{text:<{_COLUMN - 2}}  # {comment}"
    indent = " " * (len(text) - len(text.lstrip()))
    return beside if len(beside) <= _WIDEST else f"{indent}# {comment}\n{text}"


def _text(value: str) -> str:
    """Return the value bare if YAML reads it back unchanged; else as JSON, which is YAML too."""
    is_plain = re.fullmatch(r"[\w./:-]+", value) and parse(value, name="", numbered=False).value == value
    return value if is_plain else json.dumps(value, ensure_ascii=False)


def _meaning(reward: str) -> str:
    known = REWARDS.get(reward)
    if known is None:
        return "function(prompt, completion, token_ids, fields) -> float; fields: the line's other fields"
    return (known.__doc__ or "").strip().splitlines()[0].rstrip(".")
