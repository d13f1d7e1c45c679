"""Checks before a run that its rewards can score the data's rows and that its environment answers. Run as `python -m
streamrl.workers.preflight`, with the configuration on stdin.

Each source scores made-up completions of the first row of each prompt file, the way a worker would: functions in a
child process with its limits, sources concurrently. A source that fails on every completion would fail in the run too;
one that does not apply to the row is as good as one that scores it. The source's own `timeout_s` bounds each answer.

    sources of single samples ──► their scores ──► sources of groups, which read them, on two samples of a prompt

Reward services may cost money, so they are asked only with `--ask-services`; the run's own reward server does not exist
yet. Sources of groups read `STAND_IN` as the reward of a service that was not asked, and of a source that failed.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

import numpy as np

from streamrl.config import schema
from streamrl.config.load import config_from_json
from streamrl.config.places import LOCAL_REWARD_SERVER, granted
from streamrl.data.prompts import PromptRow, read_prompts
from streamrl.errors import RewardError, RewardOutage, SampleError, UserError
from streamrl.finding import Finding, error, ok, take_stdout, warning
from streamrl.permissions import Permissions
from streamrl.recipe.rewards import REWARDS
from streamrl.terminal import plural
from streamrl.workers.confined import confine
from streamrl.workers.environments.base import Environment, check_given, check_opening
from streamrl.workers.environments.own import OwnEnvironment, build_children
from streamrl.workers.environments.remote import build_remote
from streamrl.workers.rewards.base import Score, ScoreItem
from streamrl.workers.rewards.build import STAND_IN, build_rewards
from streamrl.workers.rewards.mixing import Rewards, applying, worth_of

_CONFINED = "reward processes"
_COMPLETIONS = ("The answer is 42.", "")  # a function may refuse what it cannot read


def main() -> int:
    write = take_stdout()
    config = config_from_json(sys.stdin.read())
    asyncio.run(_try_all(config, write, ask_services="--ask-services" in sys.argv[1:]))
    return 0


Files = Mapping[str, Sequence[PromptRow]]  # by place


async def _try_all(config: schema.Config, write: Callable[[Finding], None], *, ask_services: bool) -> None:
    data = config.data
    files = {
        prompts.dataset.place: read_prompts(prompts.dataset, malformed=data.malformed, key=prompts.key).rows
        for prompts in data.datasets()
    }
    allowed = granted(config)

    if config.environment or any(isinstance(source, schema.FunctionReward) for source in config.rewards.values()):
        write(confinement(_missing_guards()))

    async def play(settings: schema.Environment) -> None:
        write(await _try_environment(settings, files, allowed))

    environment = config.environment
    if environment is not None and environment.target is None and not ask_services:
        environment = None
    playing = [] if environment is None else [play(environment)]
    await asyncio.gather(_Trials(config, files).run(write, ask_services=ask_services), *playing)


def _missing_guards() -> dict[str, str]:
    """Ask a subprocess which guards over reward functions do not work here; confinement is permanent, hence not us."""
    done = subprocess.run([sys.executable, "-m", confine.__name__], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return dict.fromkeys(confine.GUARDS, (done.stderr.strip().splitlines() or ["it ended at once"])[-1])
    found: dict[str, str] = json.loads(done.stdout)
    return found


def confinement(lacking: Mapping[str, str]) -> Finding:
    """Report what reward functions are kept from on this machine."""
    if not lacking:
        return ok(_CONFINED, f"no access to {' and '.join(confine.GUARDS)}")
    reasons = "; ".join(f"{name} ({reason})" for name, reason in lacking.items())
    remedy = "use Linux 5.13 or newer (6.12 for all of it), and a container whose seccomp profile allows it"
    return warning(_CONFINED, f"not blocked: {reasons}", remedy)


def _is_tested(source: schema.Reward, *, ask_services: bool) -> bool:
    return not isinstance(source, schema.SERVICES) or (ask_services and LOCAL_REWARD_SERVER not in source.urls)


class _Trials:
    """Trials of the run's sources on each file's first row."""

    def __init__(self, config: schema.Config, files: Files) -> None:
        self._sources, self._files, self._allowed = config.rewards, files, granted(config)
        # Files to whose rows some source must apply. A teacher teaches without a reward, but scores no validation.
        held_out = {prompts.dataset.place for prompts in config.data.validation_sets()}
        unrewarded = set(files) if config.teacher is None else held_out
        self._must_apply = unrewarded if config.environment is None else set()
        self._num_together = min(2, config.sampling.num_samples)  # a judge that compares asks nothing about one
        # What each source gives, by place.
        self._scored: dict[str, dict[str, Score]] = {place: dict.fromkeys(self._sources, STAND_IN) for place in files}

    async def run(self, write: Callable[[Finding], None], *, ask_services: bool) -> None:
        async def find(name: str, source: schema.Reward) -> None:
            async for finding in self._try(name, source):
                write(finding)

        tested = {name: one for name, one in self._sources.items() if _is_tested(one, ask_services=ask_services)}
        for of_group in (False, True):
            await asyncio.gather(*(find(name, one) for name, one in tested.items() if one.of_group is of_group))
        for place, scored in self._scored.items():
            if place in self._must_apply and scored and not applying(scored):
                evidence = f"no reward applies to a made-up completion of {place}:{self._files[place][0].line}"
                remedy = "samples to which no source applies fail: add a source that scores such rows"
                write(warning("rewards", evidence, remedy))

    async def _try(self, name: str, source: schema.Reward) -> AsyncIterator[Finding]:
        label = f"reward {name}"
        try:
            rewards = build_rewards({name: _once(source)}, self._allowed, None)
            await rewards.start()
        except (UserError, RewardError) as failure:  # RewardError: no process could be started just now
            yield error(label, str(failure), "")
            return
        evidence = ""
        try:
            for place, (row, *_) in self._files.items():
                read = self._read_by(source, place)
                score = await self._score(rewards, row, read, timeout_s=source.timeout_s)
                if isinstance(score, str):
                    failed = f"rewards.{name}.{_setting(source)} fails for {place}:{row.line}: {score}"
                    yield error(label, failed + (_at_hand(row, read) if "KeyError: " in score else ""), _remedy(source))
                    return
                self._scored[place][name] = score
                given = "does not apply to" if score is None else f"{worth_of(score):g} for"
                evidence = f"{given} a made-up completion of {place}:{row.line}"
        finally:
            await rewards.close()
        yield ok(label, evidence)
        if isinstance(source, schema.FunctionReward) and source.target in REWARDS:
            for found in _missing_fields(name, source, self._files):
                yield found

    def _read_by(self, source: schema.Reward, place: str) -> dict[str, float]:
        """Return the rewards of the sources of single samples, if this one is of groups."""
        given = applying(self._scored[place]) if source.of_group else {}
        return {name: reward for name, reward in given.items() if not self._sources[name].of_group}

    async def _score(
        self, rewards: Rewards, row: PromptRow, read: Mapping[str, float], *, timeout_s: float
    ) -> Score | str:
        """Return the score of the first completion that gets one, or the reason why the last got none."""
        reason = ""
        for completion in _COMPLETIONS:
            token_ids = np.arange(len(completion.split()), dtype=np.int32)
            item = ScoreItem(
                prompt=row.plain, completion=completion, token_ids=token_ids, fields=row.fields, rewards=read
            )
            began = time.monotonic()
            try:
                [score] = (await self._scores(rewards, item)).values()
            except RewardError as failed:
                score = failed
            if not isinstance(score, RewardError):
                return score
            reason = str(score).partition(": ")[2]  # without the source's name
            if time.monotonic() - began >= timeout_s:
                break
        return reason

    async def _scores(self, rewards: Rewards, item: ScoreItem) -> Mapping[str, Score | RewardError]:
        """Let the one source score the sample: alone, or with another of its prompt."""
        return await rewards.score_sample(item) or (await rewards.score_together([item] * self._num_together))[0]


def _at_hand(row: PromptRow, read: Mapping[str, float]) -> str:
    """Say what there is, for a KeyError: usually of a missing field."""
    others = f"; the sample's rewards: {', '.join(read)}" if read else ""
    return f"; the row's fields: {', '.join(row.fields) or 'none'}{others}"


async def _try_environment(settings: schema.Environment, files: Files, allowed: Permissions) -> Finding:
    """Play one turn of a rollout for the first row of each file."""
    environment: Environment
    if settings.target is None:
        environment = build_remote(settings.model_copy(update={"outage_s": settings.timeout_s}), allowed)
        setting = f"environment.urls = {list(settings.urls)}"
    else:
        children = build_children(settings.model_copy(update={"processes": 1}), allowed)
        environment, setting = OwnEnvironment(children), f"environment.target = {settings.target!r}"
    evidence = ""
    try:
        if settings.target is not None:
            await children.start()
            if children.has_agent:
                return ok(
                    "environment", f"{settings.target!r} is an agent that can be started; trying it takes a model"
                )
        await environment.start()
        for path, (row, *_) in files.items():
            try:
                rollout = await environment.begin(row.fields)
                check_opening(rollout.opening, is_chat=row.messages is not None)
                answer = await rollout.step(_COMPLETIONS[0])
                if row.messages is None and not answer.done and settings.max_turns > 1:
                    check_given(answer.observation)
                await rollout.close()
            except (SampleError, RewardOutage) as failed:
                what = f"{setting} fails for {path}:{row.line}: {failed}"
                return error(
                    "environment", what, "fix it; for a turn that it cannot judge, end the rollout instead of raising"
                )
            evidence = (
                f"answers a made-up turn about {path}:{row.line} with {answer.observation!r:.40}, "
                f"reward {answer.reward:g}"
            )
    except (UserError, RewardError) as failure:
        return error("environment", str(failure), "")
    finally:
        await environment.close()
    return ok("environment", evidence)


def _once(source: schema.Reward) -> schema.Reward:
    """Limit the source to one child process, or to one request."""
    if not isinstance(source, schema.SERVICES):
        return source.model_copy(update={"processes": 1})
    return source.model_copy(update={"attempts": 1, "outage_s": source.timeout_s})


def _setting(source: schema.Reward) -> str:
    if isinstance(source, schema.CodeReward):
        return f"tests.field = {source.tests.field!r}"
    if isinstance(source, schema.JudgeReward):
        return f"judges = {', '.join(f'{name} at {judge.url}' for name, judge in source.judges.items())}"
    return f"url = {source.url!r}" if isinstance(source, schema.HttpReward) else f"target = {source.target!r}"


def _remedy(source: schema.Reward) -> str:
    if isinstance(source, schema.SERVICES):
        return "fix the service, or its address"
    if isinstance(source, schema.CodeReward):
        return "fix the rows: each needs tests"
    if source.target in REWARDS:
        return "fix its options, or the rows"
    return "fix it; give a completion that it cannot judge a low score instead of raising"


def _missing_fields(name: str, source: schema.FunctionReward, files: Files) -> Iterator[Finding]:
    """For a built-in that reads a field: report the rows that lack it, beyond the first."""
    taken = inspect.signature(REWARDS[source.target]).parameters
    if "field" not in taken:
        return
    field = source.options.get("field", taken["field"].default)
    places = [f"{path}:{row.line}" for path, rows in files.items() for row in rows if field not in row.fields]
    if places:
        wanted = f"rewards.{name}.target = {source.target!r} reads the field {field!r}"
        evidence = f"{wanted}, which is not in {plural(len(places), 'row')} ({places[0]}): their samples get no score"
        yield warning(f"reward {name} field", evidence, "add it")


if __name__ == "__main__":
    sys.exit(main())
