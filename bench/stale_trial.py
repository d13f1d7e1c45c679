"""One trial: a pretrained model learns sums from samples that are all exactly `lag` steps old.

    weights after step s - lag ─► file ─► vLLM ─► groups, scored by reasoning-gym ─► the learner's own gradients, step s

Logprobs and answer lengths are vLLM's, in bfloat16. Model, data, rewards and settings are the demo's, except for no KL,
so that only staleness differs, and for a constant rate, a third of the demo's, over three times the steps: the samples
of a lag of 32 then come from weights that are as far away as those of a lag of 11 in the demo. Until step `lag`, all
samples come from the initial weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from bench.measure import Say
from streamrl.config import schema
from streamrl.config.load import load_config
from streamrl.config.shipped import shipped_config
from streamrl.demos import sums
from streamrl.learner.loading.load import load_policy
from streamrl.learner.loading.tokenizer import read_tokenizer_info
from streamrl.learner.metrics.tally import Tally
from streamrl.learner.objective.gradients import Gradients
from streamrl.learner.objective.optimizer import learning_rate, make_optimizer, update
from streamrl.learner.parallel.dtensors import whole
from streamrl.learner.process.ranks import World
from streamrl.protocol.wire.group import Group, decode_body, decode_header, encode_group
from streamrl.protocol.wire.ticket import Purpose, Ticket
from streamrl.recipe.algorithms import make_algorithm
from streamrl.recipe.rewards import regex_format
from streamrl.versions import make_version
from streamrl.workers.engines.base import Engine, Load
from streamrl.workers.rewards.base import RewardDouble, ScoreItem
from streamrl.workers.rewards.mixing import Rewards, Weighted
from streamrl.workers.rollout.answer import Answerer

CORES = 2  # of a trial
_FORM = r".*\d\.?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    num_steps: int = 216
    num_held_out: int = 500
    lr: float = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Results of the final weights and of training."""

    right: Sequence[int]  # whether each held-out sum is correct
    rewards: Sequence[float]  # mean of each step's samples, under the weights that generated them
    clipped: float  # fraction of tokens whose ratio was clamped
    effective: float  # effective samples of a step, as a fraction of its tokens; mean over all steps
    length: float  # tokens per answer, mean over all steps


def config_of(model: Path, loss: str, task: Task) -> schema.Config:
    """Return the demo's configuration, for a single process in all roles."""
    # On a GPU, for many trials at once; what compiling saves here is less than what it takes.
    engine_args = "{gpu_memory_utilization: 0.05, enforce_eager: true, kv_cache_memory_bytes: 268435456}"
    changes = {
        "model.path": model,
        "algorithm.loss": loss,
        "algorithm.kl.placement": "none",
        "optimizer.schedule": "constant",
        "optimizer.lr": task.lr,
        "optimizer.min_lr": task.lr,
        "model.compile": False,
        "worker.threads": CORES,
        "worker.engine_args": engine_args,
    }
    return load_config(shipped_config("demo.yaml"), [f"{key}={value}" for key, value in changes.items()]).config


class Trainer:
    def __init__(self, config: schema.Config, task: Task, *, lag: int, seed: int, engine: Engine) -> None:
        self._config, self._task, self._lag, self._engine = config, task, lag, engine
        self._num_loads = 0
        self._world = World.alone()
        torch.manual_seed(seed)
        self._info = read_tokenizer_info(config.model.path)
        self._policy = load_policy(config, self._world, self._info.end_ids)
        self._optimizer = make_optimizer(self._policy, config.optimizer)
        self._gradients = Gradients(
            policy=self._policy,
            reference=None,
            algorithm=make_algorithm(config.algorithm),
            config=config,
            world=self._world,
            beat=lambda: None,
        )
        self._answerer = Answerer(rewards=_rewards(config), config=config, worker="bench", fingerprint="")
        # A seed always has the same sums, held-out and trained.
        entries = sums.entries(seed)
        held_out: dict[str, Mapping[str, Any]] = {}
        while len(held_out) < task.num_held_out:
            entry = next(entries)
            held_out.setdefault(entry["question"], entry)
        self._held_out = list(held_out.values())
        self._entries = (entry for entry in entries if entry["question"] not in held_out)
        self._num_asked = 0

    async def run(self, folder: Path, *, say: Say) -> Trial:
        rewards: list[float] = []
        clipped: list[float] = []
        effective: list[float] = []
        lengths: list[float] = []
        for step in range(self._task.num_steps):
            self._save(folder, step)
            await self._serve(folder, max(0, step - self._lag))
            groups = await self._generate(islice(self._entries, self._config.training.groups_per_step), "train")
            metrics = self._learn(groups, step)
            samples = [sample for group in groups for sample in group.samples]
            rewards.append(float(np.mean([sample.reward for sample in samples])))
            lengths.append(float(np.mean([len(sample.token_ids) for sample in samples])))
            clipped.append(metrics["policy/clipped_fraction"])
            effective.append(metrics["policy/ess"])
            say(f"step {step + 1} of {self._task.num_steps}, reward {rewards[-1]:.2f}")
        self._save(folder, self._task.num_steps)
        await self._serve(folder, self._task.num_steps)
        answers = await self._generate(self._held_out, "eval")
        right = [int(answer.samples[0].rewards["right"]) for answer in answers]
        return Trial(
            right=right,
            rewards=rewards,
            clipped=float(np.mean(clipped)),
            effective=float(np.mean(effective)),
            length=float(np.mean(lengths)),
        )

    def _save(self, folder: Path, step: int) -> None:
        """Save the weights as served, and remove those no longer needed."""
        named = self._policy.model.named_parameters()
        tensors = {name: whole(p).to(torch.bfloat16).contiguous().cpu() for name, p in named}
        save_file(tensors, _file(folder, step))
        _file(folder, step - self._lag - 1).unlink(missing_ok=True)

    async def _serve(self, folder: Path, step: int) -> None:
        version = make_version(1, self._num_loads)
        self._num_loads += 1
        await self._engine.load(Load(weights=_file(folder, step), version=version, step=step))

    async def _generate(self, entries: Any, purpose: Purpose) -> list[Group]:
        return list(await asyncio.gather(*(self._answered(entry, purpose) for entry in entries)))

    async def _answered(self, entry: Mapping[str, Any], purpose: Purpose) -> Group:
        messages = [{"role": "user", "content": entry["question"]}]
        prompt = str(self._info.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        ids = self._info.tokenizer.encode(prompt, add_special_tokens=False)
        self._num_asked += 1
        ticket = Ticket(
            number=self._num_asked,
            run_uid="bench",
            purpose=purpose,
            data_epoch=0,
            prompt_index=self._num_asked,
            prompt=prompt,
            token_ids=np.array(ids, dtype=np.int32),
            fields=entry,
            num_samples=self._config.sampling.num_samples if purpose == "train" else 1,
        )
        header, body = encode_group(await self._answerer.answer(ticket, self._engine))
        return decode_body(decode_header(header), body)  # as a learner receives it

    def _learn(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        settings = self._config.optimizer
        tally = Tally(sources=self._config.reward_sources, step=step, is_dead=lambda _version, _step: False)
        loss = self._gradients.accumulate(self._gradients.prepare(groups, tally), tally)
        lr = learning_rate(step, settings, total_steps=None)
        update(self._optimizer, loss=loss, lr=lr, clip_norm=settings.clip_norm, world=self._world)
        return dict(tally.metrics(self._world))


def _file(folder: Path, step: int) -> Path:
    return folder / f"{step}.safetensors"


def _rewards(config: schema.Config) -> Rewards:
    """Return the demo's rewards, without their own process."""

    def right(item: ScoreItem) -> float:
        return sums.right(item.prompt, item.completion, item.token_ids.tolist(), item.fields)

    def form(item: ScoreItem) -> float:
        return regex_format(item.prompt, item.completion, item.token_ids.tolist(), item.fields, pattern=_FORM)

    judges = {"right": right, "form": form}
    return Rewards(
        {name: Weighted(reward=RewardDouble(judges[name]), weight=w) for name, w in config.reward_weights.items()}
    )
