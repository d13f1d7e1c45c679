"""Checks before a run that its rewards can score the data's rows and that its environment answers. Run as `python -m
streamrl.workers.preflight`, with the configuration on stdin.

Each source scores made-up completions of the first row of each prompt file, the way a worker would: functions in a
child process with its limits, sources concurrently. A source that fails on every completion would fail in the run too.
The source's own `timeout_s` bounds each answer. Reward services may cost money, so they are asked only with
`--ask-services`; the run's own reward server does not exist yet.
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
from streamrl.workers.environments.base import Environment
from streamrl.workers.environments.own import OwnEnvironment, build_children
from streamrl.workers.environments.remote import build_remote
from streamrl.workers.rewards.base import ScoreItem
from streamrl.workers.rewards.mixing import Rewards, Scores, build_rewards

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

    async def find(name: str, source: schema.Reward) -> None:
        async for finding in _try(name, source, files, allowed):
            write(finding)

    async def play(settings: schema.Environment) -> None:
        write(await _try_environment(settings, files, allowed))

    tested = {name: source for name, source in config.rewards.items() if _is_tested(source, ask_services=ask_services)}
    environment = config.environment
    if environment is not None and environment.target is None and not ask_services:
        environment = None
    playing = [] if environment is None else [play(environment)]
    await asyncio.gather(*(find(name, source) for name, source in tested.items()), *playing)


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


async def _try(name: str, source: schema.Reward, files: Files, allowed: Permissions) -> AsyncIterator[Finding]:
    label = f"reward {name}"
    try:
        rewards = build_rewards({name: _once(source)}, allowed, None)
        await rewards.start()
    except UserError as mistake:
        yield error(label, str(mistake), "")
        return
    try:
        for place, (row, *_) in files.items():
            scored = await _score(rewards, row, timeout_s=source.timeout_s)
            if isinstance(scored, str):
                failed = f"rewards.{name}.{_setting(source)} fails for {place}:{row.line}: {scored}"
                if "KeyError: " in scored:  # usually of a missing field
                    failed += f"; the row's fields: {', '.join(row.fields) or 'none'}"
                yield error(label, failed, _remedy(source))
                return
            evidence = f"{scored.rewards[name]:g} for a made-up completion of {place}:{row.line}"
    finally:
        await rewards.close()
    yield ok(label, evidence)
    if isinstance(source, schema.FunctionReward) and source.target in REWARDS:
        for found in _missing_fields(name, source, files):
            yield found


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
                answer = await rollout.step(_COMPLETIONS[0])
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
    except UserError as mistake:
        return error("environment", str(mistake), "")
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


async def _score(rewards: Rewards, row: PromptRow, *, timeout_s: float) -> Scores | str:
    """Return the scores of the first completion that gets some, or the reason why the last got none."""
    reason = ""
    for completion in _COMPLETIONS:
        token_ids = np.arange(len(completion.split()), dtype=np.int32)
        item = ScoreItem(prompt=_text(row), completion=completion, token_ids=token_ids, fields=row.fields)
        began = time.monotonic()
        try:
            return await rewards.score(item)
        except RewardError as failed:
            reason = str(failed).partition(": ")[2]  # without the source's name
        if time.monotonic() - began >= timeout_s:
            break
    return reason


def _text(row: PromptRow) -> str:
    return row.text or "\n".join(str(message["content"]) for message in row.messages or ())


if __name__ == "__main__":
    sys.exit(main())
