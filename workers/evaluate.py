"""Evaluates a set of prompts once, outside of a run: starts an engine, and scores its samples.

    `try_rewards` ─► each source has answered once
    prompts ─► `max_groups_in_flight` at a time: samples, each scored (workers.rollout.answer) ─► Answers ─► Result

Blocks on the engine and the rewards, for `validation.timeout_s` at most in total; prompts without an answer by then are
counted as unanswered in the result. Raises RewardOutage when a source stays out for longer than its `outage_s`, or was
never reachable. Whatever ends it, the answers until then are in `Answers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from streamrl.config import schema
from streamrl.errors import RewardError, RewardOutage
from streamrl.permissions import Permissions
from streamrl.protocol.wire.ticket import Ticket
from streamrl.tasks import cancel_all, gather_or_cancel, run_beside
from streamrl.versions import make_version
from streamrl.workers.engines.base import Engine, EngineSettings, Load, make_engine
from streamrl.workers.engines.model import ModelFacts
from streamrl.workers.environments.playing import playing
from streamrl.workers.eval_result import Answers, EvalPrompt
from streamrl.workers.rewards.base import ScoreItem
from streamrl.workers.rewards.mixing import Rewards
from streamrl.workers.rollout.answer import Answerer

_UID = "eval"
_LOOK_EVERY_S = 0.2
_SHOW_EVERY_S = 1.0
_NOTICE_AFTER_S = 5.0


async def try_rewards(
    rewards: Rewards,
    item: ScoreItem,
    *,
    num_samples: int,
    patience_s: float,
    limit_s: float,
    show: Callable[[str], None] = lambda text: None,
    notice: Callable[[str], None] = lambda text: None,
) -> None:
    """Start all sources, wait until each has answered once (a refusal counts), and close them, so that an unusable
    source is found before a model is loaded. RewardOutage if one is unreachable for `patience_s`, or silent for
    `limit_s`."""
    await rewards.start()  # closes all of them if one fails
    began, outage = time.monotonic(), None
    scoring = asyncio.create_task(_first_score(rewards, item, num_samples), name="a first score")
    try:
        while not (await asyncio.wait([scoring], timeout=_LOOK_EVERY_S))[0]:
            waited_s, silent = time.monotonic() - began, rewards.silent()
            names = ", ".join(map(_with_state, silent, silent.values()))
            # None while a source that is out is being retried, which proves nothing yet.
            outage = rewards.outage() or (outage if set(silent.values()) - {"well"} else None)
            if outage and waited_s > patience_s:
                raise RewardOutage(f"{outage}; no score for {patience_s:g} s (--patience-s)")
            if waited_s > limit_s:
                raise RewardOutage(f"reward {names} has not answered a first request within {limit_s:g} s")
            show(f"waiting for a first score of {names}: {waited_s:.0f} s")
            if waited_s > _NOTICE_AFTER_S:
                notice(f"still waiting for a first score of {', '.join(map(repr, silent))}")
        scoring.result()
    except RewardOutage:
        raise
    except RewardError:
        pass  # reachable, which is enough: the sample is made up
    finally:
        await cancel_all([scoring])
        await rewards.close()


def _with_state(name: str, state: str) -> str:
    return repr(name) if state == "well" else f"{name!r} ({state})"


async def _first_score(rewards: Rewards, item: ScoreItem, num_samples: int) -> None:
    """Score two samples of one prompt, if a ticket has that many: a comparing source asks nothing for a single one."""
    scored = await rewards.score_sample(item, "eval")
    together = min(2, num_samples)
    await rewards.mix([item] * together, [scored] * together, purpose="eval")


async def evaluate(
    answers: Answers,
    *,
    config: schema.Config,
    model: ModelFacts,
    weights: Path,
    step: int,
    rewards: Rewards,
    permissions: Permissions,
    show: Callable[[int], None] = lambda num_done: None,
) -> None:
    """Answer the prompts with the engine that `worker.engine` names, started and stopped here. `show` is called each
    second with the number of prompts done."""
    config = _fitted(config, answers.prompts)
    engine = make_engine(EngineSettings(model=model, config=config, seed=config.seed))
    try:
        await rewards.start()  # closes all of them if one fails
        await engine.start()
        await engine.load(Load(weights=weights, version=make_version(1, 0), step=step))
        tickets = [_ticket(i, prompt, config) for i, prompt in enumerate(answers.prompts)]
        async with playing(config, permissions, model) as player:
            answerer = Answerer(
                rewards=rewards,
                config=config,
                worker=_UID,
                fingerprint=model.fingerprint,
                player=player,
                ends=model.ends(),
            )
            with answers.timed():
                await _answer_all(tickets, engine, answerer, answers, config, show)
    finally:
        await engine.stop()
        await rewards.close()


async def _answer_all(
    tickets: Sequence[Ticket],
    engine: Engine,
    answerer: Answerer,
    answers: Answers,
    config: schema.Config,
    show: Callable[[int], None],
) -> None:
    """Answer as many tickets as time allows. EngineError and RewardOutage end the evaluation."""
    room = asyncio.Semaphore(config.worker.max_groups_in_flight)

    async def answer(ticket: Ticket) -> None:
        async with room:
            answers.add(ticket.number, await answerer.answer(ticket, engine))

    async def keep_showing() -> None:
        while True:
            show(len(answers))
            await asyncio.sleep(_SHOW_EVERY_S)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(config.validation.timeout_s):
            answering = gather_or_cancel({f"prompt {ticket.number}": answer(ticket) for ticket in tickets})
            await run_beside(answering, {"progress": keep_showing()})


def _fitted(config: schema.Config, prompts: Sequence[EvalPrompt]) -> schema.Config:
    """Size the engine for the evaluation's prompts and sampling instead of training's."""
    sampling = schema.Sampling(**config.validation.sampling.model_dump())
    longest = max(len(prompt.token_ids) for prompt in prompts)
    data = config.data.model_copy(update={"max_prompt_tokens": longest})
    return config.model_copy(update={"sampling": sampling, "data": data})


def _ticket(number: int, prompt: EvalPrompt, config: schema.Config) -> Ticket:
    return Ticket(
        number=number,
        run_uid=_UID,
        purpose="eval",
        data_epoch=0,
        prompt_index=number,
        prompt=prompt.text,
        token_ids=prompt.token_ids,
        fields=prompt.fields,
        num_samples=config.validation.sampling.num_samples,
    )
