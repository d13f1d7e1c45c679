"""A run that is started again after it has finished: whether there is anything left to do, and how to continue.

Uses the run's folder alone, before anything is started: loading a model just to find that there is nothing to train
takes minutes.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence

from streamrl.config import schema
from streamrl.errors import ConfigError
from streamrl.ops.monitor.bounds import MAX_STEPS, bound_of, longer
from streamrl.ops.monitor.remains import Remains, read_remains
from streamrl.ops.monitor.text import summary_words
from streamrl.terminal import age


def nothing_left_of(config: schema.Config) -> Remains | None:
    """Return the folder's record of a finished run to which these settings add no step; else None."""
    try:
        remains = read_remains(config.folder)
    except ConfigError:  # none yet, or unreadable: the launch itself reports what is wrong
        return None
    if remains.state != "finished" or remains.name != config.name:
        return None
    return None if _extends(config.training, remains) else remains


def _extends(requested: schema.Training, remains: Remains) -> bool:
    """Return whether the bound that ended it is raised: its steps, or its passes over the data."""
    if bound_of(requested.max_steps, step=remains.step) == MAX_STEPS:
        return False
    before = remains.config.get("training", {})
    if bound_of(before.get("max_steps"), step=remains.step) == MAX_STEPS:
        return True
    return requested.max_epochs > int(before.get("max_epochs", requested.max_epochs))


def finished_lines(remains: Remains, requested: schema.Training, file: str, overrides: Sequence[str]) -> Iterator[str]:
    """Describe it for people; `file` and `overrides` are the configuration that was given, `requested` a part of it."""
    name, step, folder = remains.name, remains.step, shlex.quote(str(remains.folder))
    given, more, other = (file, *overrides), _more(requested, remains), f"name={name}-2"
    yield f"run {name} has finished: {step} steps, {age(time.time() - remains.at)} ago; nothing is left to do"
    if summary := summary_words(remains.summary):
        yield f"  result          {summary}"
    yield f"  look at it      streamrl status {folder}; streamrl dashboard {folder}"
    yield f"  more steps      {_up(given, *more)}"
    yield f"  another run     {_up(given, other)}"
    yield f"  a fork of it    {_up(given, other, *more)} --fork {folder}@{step}"


def finished_sentence(remains: Remains, requested: schema.Training, *, new_functions: Sequence[str]) -> str:
    """Describe it to a program; `new_functions`: names of given reward functions that differ from those of the run."""
    settings = (setting.partition("=") for setting in _more(requested, remains))
    more, other = {key: int(bound) for key, _, bound in settings}, {"name": f"{remains.name}-2"}
    new = f", nor were the new functions used: {', '.join(new_functions)}" if new_functions else ""
    return (
        f"run {remains.name} had finished ({remains.step} steps, {age(time.time() - remains.at)} ago): nothing was "
        f"trained{new}; {other} starts another run, {more} continues it"
    )


def _more(requested: schema.Training, remains: Remains) -> tuple[str, ...]:
    """Return the settings that give it more to do: the bound that ended it, and requested steps that it has made."""
    found = [remains.longer]
    if bound_of(requested.max_steps, step=remains.step) == MAX_STEPS:
        found.append(longer(requested.model_dump(), step=remains.step))
    return tuple(dict.fromkeys(found))


def _up(given: Sequence[str], *settings: str) -> str:
    """Return the command with what was given, and these settings instead of what was given for them."""
    keys = {setting.partition("=")[0] for setting in settings}
    kept = (word for word in given if word.partition("=")[0] not in keys)
    return shlex.join(["streamrl", "up", *kept, *settings])
