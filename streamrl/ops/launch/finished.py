"""A run that is asked for again after it has finished: whether anything is left to do, and how it may go on.

From its folder alone, before anything is started: to load a model in order to find out that there is nothing to train
takes minutes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from streamrl.config import schema
from streamrl.errors import ConfigError
from streamrl.ops.monitor.remains import Remains, read_remains
from streamrl.ops.monitor.text import summary_words
from streamrl.terminal import age


def nothing_left_of(config: schema.Config) -> Remains | None:
    """What the folder tells of a run that has finished and that these settings give no further step; else None."""
    try:
        remains = read_remains(config.folder)
    except ConfigError:  # there is none yet, or nothing that may be read: the launch itself says what is wrong
        return None
    if remains.state != "finished" or remains.name != config.name:
        return None
    return None if _goes_further(config.training, remains) else remains


def _goes_further(asked: schema.Training, remains: Remains) -> bool:
    """Beyond the bound that ended it: its steps, or its passes over the data."""
    if 0 <= asked.max_steps <= remains.step:
        return False
    before = remains.config.get("training", {})
    if 0 <= before.get("max_steps", -1) <= remains.step:
        return True
    return asked.max_epochs > int(before.get("max_epochs", asked.max_epochs))


def finished_lines(remains: Remains, file: str) -> Iterator[str]:
    """For people; `file` is the configuration that was asked for."""
    name, step, folder = remains.name, remains.step, remains.folder
    yield f"run {name} has finished: {step} steps, {age(time.time() - remains.at)} ago; nothing is left to do"
    if summary := summary_words(remains.summary):
        yield f"  it came to      {summary}"
    yield f"  to look at it   streamrl status {folder}; streamrl dashboard {folder}"
    yield f"  more steps      streamrl up {file} training.max_steps={2 * step}"
    yield f"  another run     streamrl up {file} name={name}-2"
    yield f"  a fork of it    streamrl learn {file} name={name}-2 --fork {folder}@{step}"
