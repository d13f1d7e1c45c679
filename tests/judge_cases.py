"""Made-up runs for the judge: complete and sound, in the product's formats; a test spoils one part.

Step s trains tickets 2s - 2 and 2s - 1. Nothing of streamrl is used: the judge's input is written here according to
docs/wire.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import numpy as np

from tests.faults.judge.books import Prompts, Rules
from tests.faults.judge.history import Ended, History
from tests.faults.judge.layout import name_of
from tests.faults.judge.recorder import GROUPS, TICKETS, Final, Record, Seen

RUN = "the run"
NUM_STEPS = 4
GROUPS_PER_STEP = 2
NUM_TICKETS = NUM_STEPS * GROUPS_PER_STEP
PROMPTS = Prompts(texts=[f"prompt {number}" for number in range(5)])
MAX_LAG = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The contents of a group, field by field."""

    ticket: int
    prompt: int  # row of the prompt file
    step: int = 0  # of the weights that generated it
    version: int = 1 << 32
    rewards: tuple[float, ...] = (0.0, 1.0)
    run_uid: str = RUN
    generate_s: float = 0.5

    def fields(self) -> dict[bytes, bytes]:
        lengths = [3 + sample for sample in range(len(self.rewards))]
        ids = np.array([*tokens_of(self.prompt), *range(sum(lengths))], "<i4").tobytes()
        count = len(self.rewards)
        rows = [
            [[length], [[self.version, self.step, 0, length]], "stop", {"exact": reward}, reward, [], []]
            for length, reward in zip(lengths, self.rewards, strict=True)
        ]
        message = {"schema": 1, "rows": rows, "token_rewards": None, "teacher_logprobs": None}
        body = ids + np.full(sum(lengths), -0.5, "<f4").tobytes() + msgpack.packb(message)
        header = {"schema": 1, "ticket": self.ticket, "run_uid": self.run_uid, "purpose": "train", "attempt": 0,
                  "worker": "w", "fingerprint": "f", "num_prompt_tokens": len(tokens_of(self.prompt)),
                  "sample_lengths": lengths, "sample_rewards": list(self.rewards), "sample_finished": [True] * count,
                  "min_version": self.version, "max_version": self.version, "num_failed_samples": 0, "error": "",
                  "generate_s": self.generate_s, "reward_s": 0.1, "model_s": 0.1,
                  "environment_s": 0.0, "num_tool_calls": 0, "num_kept_tokens": 0, "digest": 7,
                  "routes": None}  # fmt: skip
        number, uid = str(self.ticket).encode(), self.run_uid.encode()
        return {b"n": number, b"u": uid, b"h": msgpack.packb(header), b"b": body}


def tokens_of(prompt: int) -> list[int]:
    return [10 + prompt, 20 + prompt, *range(prompt)]


def asked(ticket: int, prompt: int) -> dict[bytes, bytes]:
    tokens = np.array(tokens_of(prompt), "<i4")
    piece = {"schema": 1, "number": ticket, "run_uid": RUN, "purpose": "train", "data_epoch": 0,
             "prompt_index": prompt, "prompt": PROMPTS.texts[prompt], "token_ids": tokens.tobytes(), "fields": "{}",
             "num_samples": 2, "retry_of": -1}  # fmt: skip
    message = {"schema": 1, "asked": msgpack.packb(piece), "attempt": 0, "issued_step": 0, "min_version": 0}
    return {b"n": str(ticket).encode(), b"u": RUN.encode(), b"b": msgpack.packb(message)}


def step_of(ticket: int) -> int:
    return ticket // GROUPS_PER_STEP + 1


def version_of(step: int) -> int:
    """The version announced after so many steps."""
    return (1 << 32) + step


@dataclass(slots=True, kw_only=True)
class MadeUpRun:
    """A run to be changed and judged."""

    answers: list[Answer]
    ended: list[Ended]
    figures: dict[tuple[int, int], dict[str, float]]
    retries: dict[int, int] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)  # row of the prompt file, by ticket
    forged: list[Answer] = field(default_factory=list)  # seen in addition to the answers
    present: frozenset[int] = frozenset()
    issued: int = NUM_TICKETS

    def record(self) -> Record:
        entries = [(TICKETS, asked(ticket, prompt)) for ticket, prompt in self.asked.items()]
        entries += [(GROUPS, answer.fields()) for answer in (*self.answers, *self.forged)]
        seen = {
            (kind, f"{at}-0", name_of(fields)): Seen(
                kind=kind, id=f"{at}-0", fields=fields, name=name_of(fields), at=0.0, eras=[0]
            )
            for at, (kind, fields) in enumerate(entries)
        }
        steps = {version_of(step): step for step in range(NUM_STEPS + 1)}
        return Record(seen=seen, steps=steps, eras=["begin"], final=Final(tickets=self.present))

    def history(self) -> History:
        return History(
            run_uid=RUN,
            step=NUM_STEPS,
            issued=self.issued,
            resolved=((0, NUM_TICKETS),),
            retries=self.retries,
            ended=tuple(self.ended),
            figures=self.figures,
        )

    def rules(self) -> Rules:
        return Rules(prompts=PROMPTS, max_lag=MAX_LAG, forged={name_of(one.fields()) for one in self.forged})

    def change(self, ticket: int, **changes: Any) -> None:
        """Change what was seen of it, but not its step's record."""
        self.answers[ticket] = replace(self.answers[ticket], **changes)


def sound_run() -> MadeUpRun:
    answers = [_answer(ticket) for ticket in range(NUM_TICKETS)]
    return MadeUpRun(
        answers=answers,
        ended=[Ended(ticket, "trained", 1, step_of(ticket)) for ticket in range(NUM_TICKETS)],
        figures={(1, step): figures_of(answers[at : at + GROUPS_PER_STEP]) for step, at in _steps()},
        asked={ticket: ticket % len(PROMPTS.texts) for ticket in range(NUM_TICKETS)},
    )


def figures_of(answers: list[Answer]) -> dict[str, float]:
    """Return the metrics as a step's record has them."""
    samples = [(answer, sample) for answer in answers for sample in range(len(answer.rewards))]
    means: Mapping[str, Iterator[float]] = {
        "train_rollouts/rewards": (answer.rewards[at] for answer, at in samples),
        "train_rollouts/response_lengths": (3.0 + at for _, at in samples),
        "train_rollouts/prompt_lengths": (float(len(tokens_of(answer.prompt))) for answer, _ in samples),
    }
    found = {name: math.fsum(values) / len(samples) for name, values in means.items()}
    generate = math.fsum(answer.generate_s for answer in answers) / len(answers)
    return {"train_rollouts/rollout_size": float(len(samples)), **found, "timers/generate": generate}


def _answer(ticket: int) -> Answer:
    """Return an answer whose metrics differ from all others'."""
    step = step_of(ticket) - 1
    rewards, prompt = (0.125 * ticket, 1.0), ticket % len(PROMPTS.texts)
    return Answer(ticket=ticket, prompt=prompt, step=step, version=version_of(step), rewards=rewards,
                  generate_s=0.5 + ticket / 64)  # fmt: skip


def _steps() -> Iterator[tuple[int, int]]:
    """Yield (step, its first ticket)."""
    return ((step, (step - 1) * GROUPS_PER_STEP) for step in range(1, NUM_STEPS + 1))
