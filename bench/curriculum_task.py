"""The quickstart's task and model in a minimal training loop.

    prompts ─► the learner's order, with a curriculum or without ─► groups, sampled with the current weights
                         ▲ finished groups                                       │ in a queue, (lag + 1) steps long
                         └─ equal rewards: dropped; others: trained ◄────────────┘ recipe: advantages, loss

An epoch holds prompts that the model can answer from the start, prompts it has to learn, and impossible prompts, whose
expected answers are wrong; or only those to learn.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import transformers

from streamrl.config import schema
from streamrl.demos.quickstart import (
    DIGITS,
    FALLING,
    RISING,
    VOCABULARY,
    demonstrate,
    examples,
    solve,
    write_base_model,
)
from streamrl.demos.run import write_rows
from streamrl.learner.groups.curriculum import Curriculum, DataOrder
from streamrl.learner.groups.prompts import Prompt, PromptSet
from streamrl.learner.sft.training import Settings, train
from streamrl.protocol.wire.group import GroupHeader
from streamrl.recipe.advantages import ScoredGroup, leave_one_out
from streamrl.recipe.algorithms import Algorithm, make_algorithm
from streamrl.recipe.losses import TokenBatch

PAD, END = VOCABULARY.index("<pad>"), VOCABULARY.index("<eos>")
MIXED, UNNAMED, FITTING = "mixed", "mixed in one file", "all fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    num_prompts: int = 1000  # per kind
    num_held_out: int = 500
    num_digits: tuple[int, int] = (3, 5)
    num_demonstrations: int = 16_000
    groups_per_step: int = 16
    num_samples: int = 8
    lag: int = 1  # steps
    max_steps: int = 120
    steps_beyond: int = 10  # after reaching the goal
    max_groups: int = 10_000  # limit, if hardly any group gives a gradient
    lr: float = 5e-5  # keeps the goal on the slope: at 2e-4, or with fewer prompts, it is on a noisy plateau
    look_every: int = 5  # evaluation interval in steps
    goal: float = 0.9  # accuracy on held-out prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    tokens_to_goal: float  # generated until the goal; all tokens, if it was not reached
    reached: bool
    alike_to_goal: float  # fraction of groups with equal rewards until the goal
    final: float  # accuracy at the end, `steps_beyond` after the goal, mean of three evaluations
    tokens: int  # generated in total


def make_model(task: Task, folder: Path) -> Path:
    """Create the model, warmed up like the quickstart's, unless it exists."""
    made = folder / f"model-{task.num_demonstrations}"
    if not (made / "config.json").exists():
        rng = random.Random(1)
        write_base_model(folder / "base", seed=1)
        write_rows(
            folder / "demonstrations.jsonl",
            (
                {"prompt": one.prompt, "completion": demonstrate(one, rng)}
                for one in islice(examples(rng), task.num_demonstrations)
            ),
        )
        base, data = str(folder / "base"), folder / "demonstrations.jsonl"
        settings = Settings(model=base, data=data, output=made, batch_size=64, lr=2e-3, seed=1)
        train(settings, lambda text: None)
    return made


def make_prompts(task: Task, kind: str, seed: int) -> tuple[PromptSet, list[Prompt]]:
    """Return (training prompts, held-out prompts)."""
    rng = random.Random(seed)

    def digits() -> str:
        return "".join(rng.choices(DIGITS, k=rng.randint(*task.num_digits)))

    def row(question: str, answer: str, dataset: str) -> Prompt:
        ids = np.array(_encode(question), dtype=np.int32)
        name = dataset if kind == MIXED else ""
        return Prompt(line=1, text=question, token_ids=ids, fields={"answer": answer}, dataset=name)

    def fitting() -> Prompt:
        some = digits()
        return row(some + FALLING, solve(some, FALLING), "fitting")

    rows = [fitting() for _ in range(task.num_prompts)]
    held_out = [fitting() for _ in range(task.num_held_out)]
    if kind == FITTING:
        return PromptSet(rows, seed=seed, shuffle=True), held_out
    easy = [digits()[: task.num_digits[0]] for _ in range(task.num_prompts)]
    hopeless = [digits() for _ in range(task.num_prompts)]
    rows += [row(some + RISING, solve(some, RISING), "easy") for some in easy]
    rows += [row(some + FALLING, some[0] * 11, "hopeless") for some in hopeless]
    return PromptSet(rows, seed=seed, shuffle=True), held_out


def _encode(text: str) -> list[int]:
    return [VOCABULARY.index(letter) for letter in text]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Answers to some prompts, one per row."""

    prompts: torch.Tensor  # [n, P] left-padded
    tokens: torch.Tensor  # [n, T] right-padded
    logprobs: torch.Tensor  # [n, T]

    @property
    def lengths(self) -> torch.Tensor:  # [n]
        return (self.tokens != PAD).sum(dim=1)


class Trainer:
    def __init__(self, task: Task, model: Path, *, kind: str, curriculum: bool, seed: int) -> None:
        self._task, self._chance = task, torch.Generator().manual_seed(seed)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._prompts, self._held_out = make_prompts(task, kind, seed)
        num_places = 1 << 30
        self._order = (
            Curriculum(self._prompts, num_samples=task.num_samples, num_places=num_places, block=task.groups_per_step)
            if curriculum
            else DataOrder(self._prompts, num_places=num_places)
        )
        self._algorithm: Algorithm = make_algorithm(schema.Algorithm())
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=task.lr, betas=(0.9, 0.98), weight_decay=0.0)
        self._queue: deque[tuple[int, Answers, tuple[float, ...]]] = deque()  # (place, samples, rewards)
        self._num_issued = 0
        self.num_tokens = self.num_ended = self.num_alike = 0

    def run(self) -> Run:
        task = self._task
        looks, reached = [self.look()], None
        before = (0.0, looks[0])
        step, last = 0, task.max_steps
        while step < last and self.num_ended < task.max_groups:
            step += 1
            self._make_step()
            if step % task.look_every == 0:
                looks.append(self.look())
                if reached is None and looks[-1] >= task.goal:
                    part = (task.goal - before[1]) / max(1e-9, looks[-1] - before[1])
                    reached = (before[0] + part * (self.num_tokens - before[0]), self.num_alike / self.num_ended)
                    last = min(last, step + task.steps_beyond)
                before = (float(self.num_tokens), looks[-1])
        tokens, alike = reached or (float(self.num_tokens), self.num_alike / self.num_ended)
        return Run(
            tokens_to_goal=tokens,
            reached=reached is not None,
            alike_to_goal=alike,
            final=float(np.mean(looks[-3:])),
            tokens=self.num_tokens,
        )

    def look(self) -> float:
        """Return the accuracy on held-out prompts."""
        answers = self._respond(self._held_out, greedy=True)
        return float(np.mean(_rewards(self._held_out, answers)))

    def _make_step(self) -> None:
        task, batch = self._task, []
        while len(batch) < task.groups_per_step and self.num_ended < task.max_groups:
            self._request((task.lag + 1) * task.groups_per_step - len(batch) - len(self._queue))
            place, answers, rewards = self._queue.popleft()
            informative = len(set(rewards)) > 1
            self._order.ended(place, _header(rewards), informative=informative)
            self.num_ended, self.num_alike = self.num_ended + 1, self.num_alike + (not informative)
            if informative:
                batch.append((answers, rewards))
        if batch:
            self._train(batch)

    def _request(self, room: int) -> None:
        """Answer prompts with the current weights. Answers many at once, for speed."""
        task = self._task
        if room < task.groups_per_step and self._queue:
            return
        places = range(self._num_issued, self._num_issued + room)
        self._num_issued += room
        self._order.draw(self._num_issued)
        rows = [self._prompts.rows[self._order.locate(place)[1]] for place in places for _ in range(task.num_samples)]
        answers = self._respond(rows, greedy=False)
        self.num_tokens += int(answers.lengths.sum())
        rewards = _rewards(rows, answers)
        for n, place in enumerate(places):
            mine = slice(n * task.num_samples, (n + 1) * task.num_samples)
            own = Answers(prompts=answers.prompts[mine], tokens=answers.tokens[mine], logprobs=answers.logprobs[mine])
            self._queue.append((place, own, tuple(rewards[mine])))

    @torch.no_grad()
    def _respond(self, rows: Sequence[Prompt], *, greedy: bool) -> Answers:
        prompts = _left_padded(rows)
        mask, given, past = (prompts != PAD).long(), prompts, None
        tokens, logprobs = [], []
        alive = torch.ones(len(rows), dtype=torch.bool)
        for _ in range(self._task.num_digits[1] + 2):
            position = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -given.shape[1] :]
            out = self._model(
                input_ids=given, attention_mask=mask, position_ids=position, past_key_values=past, use_cache=True
            )
            past, logp = out.past_key_values, out.logits[:, -1].log_softmax(dim=1)
            drawn = logp.argmax(dim=1) if greedy else torch.multinomial(logp.exp(), 1, generator=self._chance)[:, 0]
            tokens.append(drawn.where(alive, torch.tensor(PAD)))
            logprobs.append(logp.gather(1, drawn[:, None])[:, 0])
            alive = alive & (drawn != END)
            given, mask = tokens[-1][:, None], torch.cat([mask, alive[:, None].long()], dim=1)
            if not alive.any():
                break
        return Answers(prompts=prompts, tokens=torch.stack(tokens, dim=1), logprobs=torch.stack(logprobs, dim=1))

    def _train(self, batch: Sequence[tuple[Answers, tuple[float, ...]]]) -> None:
        width, length = (max(getattr(a, name).shape[1] for a, _ in batch) for name in ("prompts", "tokens"))
        pad = torch.nn.functional.pad
        prompts = torch.cat([pad(a.prompts, (width - a.prompts.shape[1], 0), value=PAD) for a, _ in batch])
        tokens = torch.cat([pad(a.tokens, (0, length - a.tokens.shape[1]), value=PAD) for a, _ in batch])
        behaviour = torch.cat([pad(a.logprobs, (0, length - a.logprobs.shape[1])) for a, _ in batch])
        advantages = torch.from_numpy(np.concatenate([_advantages(rewards) for _, rewards in batch])).float()
        ids = torch.cat([prompts, tokens], dim=1)
        mask = (ids != PAD).long()
        position = (mask.cumsum(dim=1) - 1).clamp(min=0)
        logits = self._model(input_ids=ids, attention_mask=mask, position_ids=position, use_cache=False).logits
        logp = logits[:, width - 1 : -1].log_softmax(dim=2).gather(2, tokens[:, :, None])[:, :, 0]
        trained = tokens != PAD
        sample = torch.arange(len(ids))[:, None].expand_as(trained)[trained]
        values, _ = self._algorithm.loss(
            TokenBatch(
                logprobs=logp[trained],
                behaviour_logprobs=behaviour[trained],
                proximal_logprobs=logp[trained].detach(),
                advantages=advantages[sample],
                staleness=torch.zeros(len(sample), dtype=torch.int64),
                sample=sample,
                num_samples=len(ids),
            )
        )
        self._optimizer.zero_grad()
        (values / trained.sum(dim=1)[sample] / len(ids)).sum().backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()


def _left_padded(rows: Sequence[Prompt]) -> torch.Tensor:
    width = max(len(row.token_ids) for row in rows)
    return torch.tensor([[PAD] * (width - len(row.token_ids)) + row.token_ids.tolist() for row in rows])


def _rewards(rows: Sequence[Prompt], answers: Answers) -> list[float]:
    """Return 1 for each correct, finished answer, else 0."""
    wanted = [[*_encode(row.fields["answer"]), END] for row in rows]
    given = zip(answers.tokens.tolist(), answers.lengths.tolist(), wanted, strict=True)
    return [float(tokens[:length] == right) for tokens, length, right in given]


def _advantages(rewards: tuple[float, ...]) -> np.ndarray:
    everything = np.ones((len(rewards), 1), dtype=np.bool_)
    return leave_one_out(
        ScoredGroup(
            rewards=np.array(rewards),
            may_teach=everything[:, 0],
            lengths=everything.sum(axis=1),
            finish_reasons=("stop",) * len(rewards),
            masks=tuple(everything),
            rewards_by_source={},
        )
    )


def _header(rewards: tuple[float, ...]) -> GroupHeader:
    return GroupHeader(
        ticket=0,
        identity="",
        run_uid="",
        purpose="train",
        attempt=0,
        worker="",
        fingerprint="",
        sample_rewards=rewards,
    )
