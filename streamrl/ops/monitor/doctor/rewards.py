"""The reward sources: servers answer, functions can be found."""

from __future__ import annotations

import importlib.util
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

from streamrl.config.load import Loaded
from streamrl.config.places import LOCAL_REWARD_SERVER
from streamrl.config.schema import FunctionReward
from streamrl.ops.monitor.doctor.finding import Finding, error, ok, warning

_TIMEOUT_S = 5.0


def check_rewards(loaded: Loaded) -> Iterator[Finding]:
    for name, source in loaded.config.rewards.items():
        label = f"reward {name}"
        if isinstance(source, FunctionReward):
            yield _function(label, source)
        else:
            yield from (_server(label, url) for url in source.urls)


def _function(label: str, source: FunctionReward) -> Finding:
    """A module is looked for and not imported: whether its code may run is for the workers to say."""
    module, colon, _ = source.target.rpartition(":")
    if not colon:
        return ok(label, f"built in: {source.target}")
    if module.endswith(".py"):
        return ok(label, f"function in {module}")  # `files` has seen to it
    try:
        there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        there = False
    if not there:
        return error(label, f"no module {module!r} here", "install it where workers run, or give a path to a .py file")
    return ok(label, f"function in module {module}")


def _server(label: str, address: str) -> Finding:
    if address == LOCAL_REWARD_SERVER:
        return ok(label, "the reward server that `streamrl up` starts here")
    url = f"{address.rstrip('/')}/health"
    began = time.perf_counter()
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S):
            pass
    except urllib.error.HTTPError as answer:  # something serves there; it need not know /health
        return warning(label, f"{url} answers {answer.code}", "look whether a reward server is there")
    except (OSError, ValueError) as failed:
        return error(label, f"{url} does not answer: {failed}", "start it, or mend the source's url")
    return ok(label, f"{address} answers in {1000 * (time.perf_counter() - began):.0f} ms")
