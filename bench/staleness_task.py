"""A policy and a task small enough for runs of seconds, which stale samples harm as they harm large ones.

    prompt, position, previous token ─► small network ─► logits ─► a response, token by token
                                         ▲ streamrl.recipe: advantages within the group, the loss by its name

At each position one token is worth most; a lure, which the untrained policy prefers, is worth less; the rest nothing.
Training on old samples without correction pushes the lure up until the best token is never sampled again. All samples
of step s come from the weights after step s - lag.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from streamrl.config import schema
from streamrl.recipe.advantages import ScoredGroup, leave_one_out
from streamrl.recipe.algorithms import Algorithm, make_algorithm
from streamrl.recipe.losses import TokenBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    num_prompts: int = 16
    num_tokens: int = 6  # per response
    vocabulary: int = 16
    lure: float = 0.6  # its reward; the best token's is 1
    liking: float = 2.0  # logits by which the untrained policy prefers the lure
    groups_per_step: int = 16
    num_samples: int = 8
    lr: float = 0.01
    hidden: int = 64
    num_steps: int = 300
    look_every: int = 10  # evaluation interval in steps
    num_looked_at: int = 2048  # responses per evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The result of one run."""

    rewards: Sequence[float]  # of the current policy, every `look_every` steps
    entropy: float  # of the final policy, nats per token

    @property
    def final(self) -> float:
        """Return the mean over the last fifth."""
        return float(np.mean(self._late(5)))

    @property
    def unrest(self) -> float:
        """Return the standard deviation over the last third."""
        return float(np.std(self._late(3)))

    def _late(self, part: int) -> Sequence[float]:
        return self.rewards[-max(1, len(self.rewards) // part) :]


class Policy(torch.nn.Module):
    """A policy with given initial preferences; the network adds to their logits."""

    def __init__(self, task: Task, liked: torch.Tensor) -> None:  # [prompts, places, vocabulary] logits
        super().__init__()
        self._task, self._liked = task, liked
        width = task.num_prompts + task.num_tokens + task.vocabulary + 1  # one for: no previous token
        self._net = torch.nn.Sequential(
            torch.nn.Linear(width, task.hidden), torch.nn.Tanh(), torch.nn.Linear(task.hidden, task.vocabulary)
        )

    def logprobs(self, prompts: torch.Tensor, place: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return the next-token logprobs of each prompt at its position, [n, vocabulary]."""
        task, hot = self._task, torch.nn.functional.one_hot
        seen = [hot(prompts, task.num_prompts), hot(place, task.num_tokens), hot(before, task.vocabulary + 1)]
        logits = self._liked[prompts, place] + self._net(torch.cat(seen, dim=1).float())
        return logits.log_softmax(dim=1)

    @torch.no_grad()
    def respond(self, prompts: torch.Tensor, chance: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ([n, places] tokens, [n, places] logprobs)."""
        before = torch.full_like(prompts, self._task.vocabulary)
        tokens, logps = [], []
        for place in range(self._task.num_tokens):
            logp = self.logprobs(prompts, torch.full_like(prompts, place), before)
            before = torch.multinomial(logp.exp(), 1, generator=chance)[:, 0]
            tokens.append(before)
            logps.append(logp.gather(1, before[:, None])[:, 0])
        return torch.stack(tokens, dim=1), torch.stack(logps, dim=1)

    def logprobs_of(self, prompts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # [n, places, vocabulary]
        count, places = tokens.shape
        nothing = torch.full((count, 1), self._task.vocabulary)
        before = torch.cat([nothing, tokens[:, :-1]], dim=1)
        place = torch.arange(places).repeat(count)
        found = self.logprobs(prompts.repeat_interleave(places), place, before.flatten())
        return found.view(count, places, -1)


def run_trial(task: Task, *, loss: str, lag: int, seed: int) -> Trial:
    """Run one trial. The seed determines the task, the initial weights and every draw; loss and lag do not."""
    chance = torch.Generator().manual_seed(seed)
    worth = _worth(task, chance)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        policy, old = (Policy(task, task.liking * (worth == task.lure).float()) for _ in range(2))
    algorithm = make_algorithm(schema.Algorithm.model_validate({"loss": loss}))
    optimizer = torch.optim.Adam(policy.parameters(), lr=task.lr)
    versions: deque[dict[str, torch.Tensor]] = deque(maxlen=lag + 1)
    rewards = []
    for step in range(task.num_steps):
        versions.append({name: value.clone() for name, value in policy.state_dict().items()})
        old.load_state_dict(versions[0])
        prompts = torch.randint(task.num_prompts, (task.groups_per_step,), generator=chance)
        prompts = prompts.repeat_interleave(task.num_samples)
        tokens, behaviour_logprobs = old.respond(prompts, chance)
        rewarded = _rewards(worth, prompts, tokens)
        optimizer.zero_grad()
        _loss(algorithm, policy, prompts, tokens, behaviour_logprobs, rewarded, task).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % task.look_every == 0:
            rewards.append(_look(task, policy, worth, chance)[0])
    return Trial(rewards=rewards, entropy=_look(task, policy, worth, chance)[1])


def _worth(task: Task, chance: torch.Generator) -> torch.Tensor:  # [prompts, places, vocabulary]
    shape = (task.num_prompts, task.num_tokens, task.vocabulary)
    order = torch.rand(shape, generator=chance).argsort(dim=2)
    return (order == 0) + task.lure * (order == 1)


def _rewards(worth: torch.Tensor, prompts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # [n]
    return worth[prompts].gather(2, tokens[:, :, None]).mean(dim=(1, 2))


def _loss(
    algorithm: Algorithm,
    policy: Policy,
    prompts: torch.Tensor,
    tokens: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    rewards: torch.Tensor,
    task: Task,
) -> torch.Tensor:
    advantages = np.concatenate([_advantages(group, task) for group in rewards.view(-1, task.num_samples)])
    logprobs = policy.logprobs_of(prompts, tokens).gather(2, tokens[:, :, None])[:, :, 0].flatten()
    batch = TokenBatch(
        logprobs=logprobs,
        behaviour_logprobs=behaviour_logprobs.flatten(),
        proximal_logprobs=logprobs.detach(),
        advantages=torch.from_numpy(advantages).float().repeat_interleave(task.num_tokens),
        staleness=torch.zeros(len(logprobs), dtype=torch.int64),
        sample=torch.arange(len(prompts)).repeat_interleave(task.num_tokens),
        num_samples=len(prompts),
    )
    return algorithm.loss(batch)[0].mean()


def _advantages(rewards: torch.Tensor, task: Task) -> npt.NDArray[np.float64]:  # [num_samples] each
    everything = np.ones((task.num_samples, task.num_tokens), dtype=np.bool_)
    group = ScoredGroup(
        rewards=rewards.double().numpy(),
        may_teach=everything[:, 0],
        lengths=everything.sum(axis=1),
        finish_reasons=("length",) * task.num_samples,
        masks=tuple(everything),
        rewards_by_source={},
    )
    return leave_one_out(group)


@torch.no_grad()
def _look(task: Task, policy: Policy, worth: torch.Tensor, chance: torch.Generator) -> tuple[float, float]:
    """Return (mean reward, entropy per token)."""
    prompts = torch.arange(task.num_looked_at) % task.num_prompts
    tokens, _ = policy.respond(prompts, chance)
    logp = policy.logprobs_of(prompts, tokens)
    return float(_rewards(worth, prompts, tokens).mean()), float(-(logp.exp() * logp).sum(dim=2).mean())
