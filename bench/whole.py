"""A whole run against the minimum that its tokens need.

    run    Redis, a learner under torchrun, a worker with vLLM: core-seconds of every process, from the first sample to
           the last step, and tokens generated and trained in that time
    bare   the same vLLM alone, with answers as long as the run's: core-seconds per generated token
           the plain model, forward and backward, packed like the learner: core-seconds per trained token
    TRL    a few steps of its RLOO trainer on the same model and prompts: core-seconds of all its processes

    (generated tokens x bare vLLM + trained tokens x bare passes) / core-seconds of the run, and the same for TRL

One thread per process, on two cores. Tokens that are generated but not trained (dropped groups, samples in flight at
the end) count as generated: the run pays for them, and so does bare vLLM. What a core does in a second changes on a
shared machine within minutes, so the minimum is measured between two runs whose tokens and core-seconds are added: a
steady change cancels, and what a token costs in the second run over the first is told. Takes about 35 minutes, six of
them for TRL's two steps at 25M; --quick omits TRL.
"""

from __future__ import annotations

import os
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from bench.descendants import Spent
from bench.measure import Say, environment_as_it_was
from bench.peer_trl import environment
from bench.peers_terms import Terms
from bench.report import Bar, Fact, Line
from bench.whole_bare import Bare, bare
from bench.whole_trl import TrlRan, run_trl
from streamrl.config import schema
from streamrl.errors import ResourceError
from streamrl.held_folders import scratch_folder
from streamrl.ops.launch.processes import Command, Process, end_all
from streamrl.ops.monitor.history import read_lines
from streamrl.process import bind
from streamrl.protocol.transport.embedded import EmbeddedRedis

_NAME = "whole"
_REWARD = Path(__file__).with_name("whole_reward.py")
_REWARD_FUNCTION = f"{_REWARD}:reward"
_LOOK_EVERY_S = 0.5
_LIMIT_S = 1200.0
_LEAVE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    steps: int
    groups_per_step: int
    longest: int  # tokens per answer
    trl_steps: int
    dtype: str  # of passes and of published weights
    goal: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    start_s: float  # before the first sample
    seconds: float  # from there to the last step
    spent: Counter[str]  # core-seconds in that time, by role
    made: int  # tokens
    used: float  # those of answers in trained groups
    trained: float  # tokens processed by the learner, prompts included
    answer: float  # mean tokens


_CASES = (
    Case(name="0.7M", steps=100, groups_per_step=20, longest=12, trl_steps=100, dtype="float32", goal=0.65),
    Case(name="25M", steps=10, groups_per_step=16, longest=256, trl_steps=2, dtype="float32", goal=0.8),
    Case(name="136M", steps=4, groups_per_step=8, longest=48, trl_steps=2, dtype="bfloat16", goal=0.8),
)


def bench(*, quick: bool, say: Say) -> list[Line]:
    lines: list[Line] = []
    python = None if quick else environment(say)
    for case in _CASES[:1] if quick else _CASES:
        with scratch_folder() as folder, environment_as_it_was():
            os.environ["OMP_NUM_THREADS"] = "1"
            lines += _measure(replace(case, steps=case.steps // 6) if quick else case, folder, python, say=say)
    return lines


def _measure(case: Case, folder: Path, python: Path | None, *, say: Say) -> list[Line]:
    """`python`: TRL's interpreter, if TRL is to be measured."""
    from bench.whole_model import write_model  # imports torch

    write_model(case.name, folder / "model", folder / "prompts.jsonl")
    settings = _settings(case, folder)
    say(f"{case.name}: a run of {case.steps} steps")
    first = _run(settings, folder / "first", say)
    say(f"{case.name}: {first.made:,} tokens made and {first.trained:,.0f} trained in {first.seconds:.0f} s; now bare")
    least = bare(schema.Config.model_validate(settings), case.name, answer=first.answer)
    say(f"{case.name}: a second run of {case.steps} steps")
    lines = list(lines_of(case, first, _run(settings, folder / "second", say), least))
    if python is not None:
        say(f"{case.name}: {case.trl_steps} steps of TRL")
        lines += trl_lines(case, _run_trl(case, folder, python), least)
    for line in lines:  # printed now: the next case takes minutes and may be interrupted
        say(f"{line.name}: {line.value:.3g} {line.unit}")
    return lines


def lines_of(case: Case, first: Ran, second: Ran, least: Bare) -> Iterator[Line]:
    """`least` was measured between the two runs."""
    ran = together(first, second)
    name, total = case.name, sum(ran.spent.values())
    made_s, trained_s = ran.made * least.made.cpu_s, ran.trained * least.trained.cpu_s
    yield Bar(name=f"{name}: bare / run", value=(made_s + trained_s) / total, unit="x", goal=case.goal, better="higher")
    overlapped_s = max(ran.made * least.made.wall_s, ran.trained * least.trained.wall_s)
    yield Fact(
        name=f"{name}: wall time, bare and perfectly overlapped / run", value=overlapped_s / ran.seconds, unit="x"
    )
    yield Fact(name=f"{name}: tokens made that were not trained", value=1 - ran.used / ran.made, unit="x")
    yield Fact(
        name=f"{name}: core-seconds of a token, second run / first", value=_price(second) / _price(first), unit="x"
    )
    yield Fact(name=f"{name}: before the first sample", value=ran.start_s, unit="s")
    yield Fact(name=f"{name}: bare vLLM", value=made_s, unit="core-s")
    yield Fact(name=f"{name}: bare passes", value=trained_s, unit="core-s")
    for part, seconds in ran.spent.most_common():
        yield Fact(name=f"{name}: {part}", value=seconds, unit="core-s")


def together(first: Ran, second: Ran) -> Ran:
    """Both runs as if they were one; `start_s` and `answer` are means."""
    return Ran(
        start_s=(first.start_s + second.start_s) / 2,
        seconds=first.seconds + second.seconds,
        spent=first.spent + second.spent,
        made=first.made + second.made,
        used=first.used + second.used,
        trained=first.trained + second.trained,
        answer=(first.answer + second.answer) / 2,
    )


def _price(ran: Ran) -> float:
    return sum(ran.spent.values()) / (ran.made + ran.trained)


def trl_lines(case: Case, trl: TrlRan, least: Bare) -> Iterator[Line]:
    needed_s = trl.made * least.made.cpu_s + trl.trained * least.trained.cpu_s
    overlapped_s = max(trl.made * least.made.wall_s, trl.trained * least.trained.wall_s)
    yield Fact(name=f"{case.name}: bare / TRL", value=needed_s / trl.core_s, unit="x")
    yield Fact(
        name=f"{case.name}: wall time, bare and perfectly overlapped / TRL", value=overlapped_s / trl.seconds, unit="x"
    )


def _run_trl(case: Case, folder: Path, python: Path) -> TrlRan:
    from bench.whole_model import PROMPT_TOKENS

    terms = Terms(
        model=folder / "model",
        groups_per_step=case.groups_per_step,
        max_steps=case.trl_steps,
        longest=case.longest,
        reward=_REWARD,
    )
    return run_trl(
        python,
        terms,
        bf16=case.dtype == "bfloat16",
        prompt_tokens=PROMPT_TOKENS,
        prompts=folder / "prompts.jsonl",
        folder=folder / "trl",
    )


def _settings(case: Case, folder: Path) -> dict[str, Any]:
    return {
        "name": _NAME,
        "model": {"path": str(folder / "model"), "dtype": case.dtype},
        "data": {"train": str(folder / "prompts.jsonl"), "max_prompt_tokens": 16},
        "sampling": {"num_samples": 8, "max_tokens": case.longest},
        "rewards": {"even": {"type": "function", "target": _REWARD_FUNCTION}},
        "algorithm": {"kl": {"placement": "none"}, "mask_unfinished": False},
        "training": {
            "groups_per_step": case.groups_per_step,
            "max_steps": case.steps,
            "micro_batch_tokens": 4096,
        },
        "lag": {"max_steps": 2},
        "weights": {"dtype": case.dtype},
        "checkpoint": {"every_steps": 1000},
        "validation": {"every_steps": 0, "at_start": False, "at_end": False},
        "worker": {"threads": 1, "grace_s": 1.0},
        "learner": {"threads": 1},
    }


def _run(settings: dict[str, Any], folder: Path, say: Say) -> Ran:
    folder.mkdir()
    file = folder / "whole.yaml"
    file.write_text(yaml.safe_dump(settings | {"dir": str(folder)}))
    port = bind("127.0.0.1", 0, what="the worker's figures")
    http = f"127.0.0.1:{port.getsockname()[1]}"
    port.close()
    began = time.time()
    with EmbeddedRedis.start(folder / "redis") as server:
        learner = ("learn", str(file), "--redis", server.url)
        worker = ("worker", "--redis", server.url, "--run", _NAME, "--model", settings["model"]["path"], "--http", http)
        parts = [
            Process(_command("learner", learner, folder)),
            Process(_command("worker", (*worker, "--allow-reward-code", _REWARD_FUNCTION, "--import-vllm"), folder)),
        ]
        try:
            return _watched(parts, folder / _NAME / "metrics.jsonl", http, settings["training"]["max_steps"], began)
        finally:
            end_all(parts, within_s=_LEAVE_S)


def _watched(parts: list[Process], metrics: Path, http: str, num_steps: int, began: float) -> Ran:
    spent = Spent(os.getpid())
    first: tuple[float, Counter[str]] | None = None
    while time.time() < began + _LIMIT_S:
        by_part, made, now = spent.look(), _made(http), time.time()
        if first is None and made > 0:
            first = now, Counter(by_part)
        steps = [line for line in read_lines(metrics) if "train_optim/loss" in line] if metrics.exists() else []
        if first is not None and len(steps) >= num_steps:
            return _ran(steps, made, by_part - first[1], seconds=now - first[0], start_s=first[0] - began)
        for part in parts:
            if (code := part.poll()) is not None:
                last_lines = "\n".join(part.last_words())
                raise ResourceError(f"the {part.command.name} ended ({code}) after {len(steps)} steps:\n{last_lines}")
        time.sleep(_LOOK_EVERY_S)
    raise ResourceError(f"the run made fewer than {num_steps} steps within {_LIMIT_S:.0f} s; {parts[0].command.log}")


def _ran(steps: list[dict[str, Any]], made: int, spent: Counter[str], *, seconds: float, start_s: float) -> Ran:
    answers = sum(step["train_rollouts/response_lengths"] * step["train_rollouts/rollout_size"] for step in steps)
    return Ran(
        seconds=seconds,
        start_s=start_s,
        spent=spent,
        made=made,
        trained=sum(step["throughput/tokens"] for step in steps),
        used=answers,
        answer=answers / sum(step["train_rollouts/rollout_size"] for step in steps),
    )


def _made(http: str) -> int:
    """Return the tokens generated by the worker's engine so far."""
    try:
        with urllib.request.urlopen(f"http://{http}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return 0
    words = (line.replace("{", " ").split() for line in lines if not line.startswith("#"))
    return next((int(float(last)) for name, *_, last in words if name.endswith("engine_tokens")), 0)


def _command(name: str, arguments: Sequence[str], folder: Path) -> Command:
    program = (sys.executable, "-m", "streamrl.ops.cli.main", *arguments)
    return Command(name=name, arguments=program, log=folder / f"{name}.log", environment={"HF_HUB_OFFLINE": "1"})
