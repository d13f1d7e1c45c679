"""Turns one ticket into a group: generates and scores its samples concurrently.

Sources that score whole groups run when all samples are there. A sample fails permanently when the engine refuses it or
it cannot be scored. With at least `min_survivors` samples left (or all of them, if the ticket asks for fewer)
the group is delivered without the failed ones; otherwise the group is a failure, and the learner counts an attempt. A
dead engine or a reward outage is not the ticket's fault: EngineError and RewardOutage propagate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import structlog

from streamrl.config import schema
from streamrl.errors import RewardError, RewardOutage, SampleError
from streamrl.protocol.wire.group import Group, GroupHeader
from streamrl.protocol.wire.routes import Routes, ending
from streamrl.protocol.wire.sample import Sample, TeacherLogprobs
from streamrl.protocol.wire.ticket import Purpose, Ticket
from streamrl.recipe.names import ENVIRONMENT
from streamrl.tasks import gather_or_cancel
from streamrl.workers.engines.base import Engine, SampleRequest
from streamrl.workers.environments.playing import Account, Plays
from streamrl.workers.rewards.base import Score, ScoreItem
from streamrl.workers.rewards.mixing import Rewards, Scores
from streamrl.workers.rewards.teaching import Teaches, split_by_row
from streamrl.workers.sessions.trace import Played

_NO_SCORES = Scores(rewards={}, total=0.0)
_Failure: TypeAlias = SampleError | RewardError  # why a sample failed: returned, as `Rewards.mix` does

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Generated:
    """A generated sample, with the scores of the sources that score samples one by one."""

    rollout: Played
    item: ScoreItem
    own_scores: Mapping[str, Score]
    teacher_logprobs: TeacherLogprobs
    generated_at: float  # monotonic


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    sample: Sample
    rollout: Played
    generated_at: float


class Answerer:
    def __init__(
        self,
        *,
        rewards: Rewards,
        config: schema.Config,
        worker: str,
        fingerprint: str,
        player: Plays | None = None,
        teacher: Teaches | None = None,
        ends: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.rewards = rewards
        self._player = player  # plays rollouts of several turns
        self._account = Account()  # statistics of those rollouts
        self._teacher = teacher  # asked for logprobs of each sample
        self._ends = ends  # by end token: how a chat's text ends (`ModelFacts.ends`)
        self._config = config
        self._worker = worker
        self._fingerprint = fingerprint
        self._num_requests = 0
        self.num_scored = 0  # samples with a score, which shows that an outage is over

    def outage(self) -> str | None:
        """Why no sample can be made or scored now, so that leasing tickets is pointless; None if all is well."""
        if (outage := self.rewards.outage()) is not None:
            return outage
        if self._teacher is not None and (outage := self._teacher.outage()) is not None:
            return outage
        if self._player is None:
            return None
        outage = self._player.outage()
        return None if outage is None else f"environment: {outage}"

    def facts(self) -> dict[str, int | float | str]:
        """What the monitor shows for each source."""
        facts = self.rewards.facts()
        if self._player is not None:
            facts[f"rewards/{ENVIRONMENT}/state"] = self._player.outage() or "well"
            facts |= {f"rewards/{ENVIRONMENT}/{name}": fact for name, fact in self._account.facts().items()}
        if self._teacher is not None:
            facts["rewards/teacher/state"] = self._teacher.state
        return facts

    async def answer(self, ticket: Ticket, engine: Engine, *, sample_done: Callable[[], None] = lambda: None) -> Group:
        """Generate and score the ticket's samples. `sample_done` is called once per sample, when its own scores are
        there or it has failed."""
        began = time.monotonic()

        async def sample() -> _Generated | _Failure:
            outcome = await self._sample(ticket, engine)
            sample_done()
            return outcome

        outcomes = await gather_or_cancel(
            {f"ticket {ticket.number} sample {i}": sample() for i in range(ticket.num_samples)}
        )
        return self._group(ticket, await self._with_group_scores(outcomes, ticket.purpose), began)

    async def _sample(self, ticket: Ticket, engine: Engine) -> _Generated | _Failure:
        self._num_requests += 1
        request = SampleRequest(
            request_id=f"{ticket.purpose}-{ticket.number}-{self._num_requests}",
            prompt_ids=ticket.token_ids,
            sampling=self._config.sampling if ticket.purpose == "train" else self._config.validation.sampling,
            urgent=ticket.purpose == "eval",
        )
        try:
            rollout = await self._generate(ticket, engine, request)
            generated_at = time.monotonic()
            item = ScoreItem(
                prompt=ticket.prompt,
                completion=rollout.text,
                token_ids=rollout.sample.token_ids,
                fields=ticket.fields,
                finish_reason=rollout.sample.finish_reason,
                end="" if rollout.last_id is None else self._ends.get(rollout.last_id, ""),
            )
            own_scores = await self.rewards.score_sample(item, ticket.purpose)
            teacher_logprobs = await self._ask_teacher(ticket, rollout.sample)
        except RewardOutage:
            raise
        except (SampleError, RewardError) as error:
            log.warning("sample_failed", ticket=ticket.number, error=str(error))
            return error
        if own_scores:
            self.num_scored += 1
        return _Generated(
            rollout=rollout,
            item=item,
            own_scores=own_scores,
            teacher_logprobs=teacher_logprobs,
            generated_at=generated_at,
        )

    async def _with_group_scores(
        self, outcomes: Sequence[_Generated | _Failure], purpose: Purpose
    ) -> list[_Scored | _Failure]:
        """Add the scores of group sources, and the weighted sum."""
        ready = [outcome for outcome in outcomes if isinstance(outcome, _Generated)]
        mixed = iter(await self._mix(ready, purpose))
        return [
            self._scored(outcome, next(mixed)) if isinstance(outcome, _Generated) else outcome for outcome in outcomes
        ]

    async def _mix(self, ready: Sequence[_Generated], purpose: Purpose) -> Sequence[Scores | RewardError]:
        if not self._config.rewards:  # only the environment gives rewards
            return [_NO_SCORES] * len(ready)
        has_teacher = self._config.teacher is not None and purpose == "train"
        return await self.rewards.mix(
            [one.item for one in ready],
            [one.own_scores for one in ready],
            must_apply=self._config.environment is None and not has_teacher,
            purpose=purpose,
        )

    def _scored(self, ready: _Generated, scores: Scores | RewardError) -> _Scored | _Failure:
        rollout = ready.rollout
        all_scores = self._with_environment(rollout, scores)
        if not isinstance(all_scores, Scores):
            log.warning("sample_failed", error=str(all_scores))
            return all_scores
        if not ready.own_scores:  # not counted before
            self.num_scored += 1
        token_rewards = all_scores.token_rewards
        sample = rollout.sample._replace(
            rewards=all_scores.rewards,
            reward=all_scores.total,
            turn_rewards=self._weighted(rollout.turn_rewards),
            token_rewards=None if token_rewards is None else token_rewards.astype(np.float32),
            teacher_logprobs=ready.teacher_logprobs,
        )
        return _Scored(sample=sample, rollout=rollout, generated_at=ready.generated_at)

    def _with_environment(self, rollout: Played, scores: Scores | RewardError) -> Scores | _Failure:
        settings = self._config.environment
        if settings is None or isinstance(scores, RewardError):
            return scores
        total = scores.total + settings.weight * rollout.reward
        if not all(map(math.isfinite, (total, *self._weighted(rollout.turn_rewards)))):
            return SampleError(
                f"the environment's rewards are not finite: they add up to {rollout.reward:g}, weighted {total:g}"
            )
        return Scores(
            rewards={**scores.rewards, ENVIRONMENT: rollout.reward, **rollout.rewards},
            total=total,
            token_rewards=scores.token_rewards,
        )

    async def _generate(self, ticket: Ticket, engine: Engine, request: SampleRequest) -> Played:
        if self._player is not None:
            with self._account.rollout():
                played = await self._player.play(ticket, engine, request)
            self._account.played(played)
            return played
        began = time.monotonic()
        generated = await engine.generate(request)
        num_tokens = len(generated.token_ids)
        sample = Sample(
            token_ids=generated.token_ids,
            logprobs=generated.logprobs,
            mask_runs=(num_tokens,) if num_tokens else (),
            spans=generated.spans,
            finish_reason=generated.finish_reason,
            rewards={},
            reward=0.0,
        )
        rollout = Played(
            sample=sample,
            text=generated.text,
            model_s=time.monotonic() - began,
            last_id=int(generated.token_ids[-1]) if num_tokens else None,
        )
        return rollout if generated.routes is None else _routed(rollout, generated.routes, num_tokens)

    async def _ask_teacher(self, ticket: Ticket, sample: Sample) -> TeacherLogprobs:
        """Return the teacher's logprob of each sampled token; 0 for tokens that were given."""
        if self._teacher is None or ticket.purpose != "train":
            return None
        rows = split_by_row(ticket.token_ids, sample)
        per_row = [await self._teacher.logprobs(context, tokens) for context, tokens in rows]
        found = np.zeros(len(sample.token_ids), dtype=np.float32)
        logprobs = np.concatenate(per_row)
        for span in sample.spans:
            found[span.start : span.end] = logprobs[span.start : span.end]
        return found

    def _weighted(self, rewards: Sequence[float]) -> tuple[float, ...]:
        settings = self._config.environment
        return () if settings is None else tuple(settings.weight * reward for reward in rewards)

    def _group(self, ticket: Ticket, outcomes: Sequence[_Scored | _Failure], began: float) -> Group:
        scored = [outcome for outcome in outcomes if isinstance(outcome, _Scored)]
        failed = [outcome for outcome in outcomes if not isinstance(outcome, _Scored)]
        enough = len(scored) >= min(self._config.worker.min_survivors, ticket.num_samples)
        generated_at = max((entry.generated_at for entry in scored), default=began)
        header = GroupHeader(
            ticket=ticket.number,
            identity=ticket.identity,
            run_uid=ticket.run_uid,
            purpose=ticket.purpose,
            attempt=ticket.attempt,
            worker=self._worker,
            fingerprint=self._fingerprint,
            num_failed_samples=len(failed),
            error="" if enough else f"{len(failed)} of {len(outcomes)} samples failed: {failed[0]}",
            generate_s=generated_at - began,
            reward_s=time.monotonic() - generated_at if scored else 0.0,
            model_s=fmean(entry.rollout.model_s for entry in scored) if scored else 0.0,
            environment_s=fmean(entry.rollout.environment_s for entry in scored) if scored else 0.0,
            num_tool_calls=sum(entry.rollout.num_tool_calls for entry in scored),
        )
        samples = tuple(entry.sample for entry in scored) if enough else ()
        group = Group(header=header, prompt_ids=ticket.token_ids, samples=samples)
        return _with_routes(group, scored) if ticket.purpose == "train" else _without_routes(group)


def _routed(rollout: Played, routes: Routes, num_tokens: int) -> Played:
    """Split the routes into those of the completion and those of its prompt."""
    num_prompt = 1 + len(routes) - num_tokens
    sample = rollout.sample._replace(routes=ending(routes[num_prompt:]))
    return rollout._replace(sample=sample, prompt_routes=routes[:num_prompt])


def _with_routes(group: Group, scored: Sequence[_Scored]) -> Group:
    """Attach the prompt's routes, from the first sample that has them."""
    prompt_routes = (one.rollout.prompt_routes for one in scored)
    return replace(group, prompt_routes=next((routes for routes in prompt_routes if routes is not None), None))


def _without_routes(group: Group) -> Group:
    """Drop the routes of an evaluation: nothing trains on them."""
    return replace(group, samples=tuple(sample._replace(routes=None) for sample in group.samples))
