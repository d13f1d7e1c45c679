"""`streamrl doctor`: what can be known to go wrong, or slowly, before a run: each line ok, warning or error, with the
remedy. Nothing is started, nothing is written, no model is loaded; each check has a bound of some seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

from streamrl.config.load import Loaded
from streamrl.errors import UserError
from streamrl.ops.monitor.doctor import machine, services
from streamrl.ops.monitor.doctor.finding import Finding, error, ok
from streamrl.ops.monitor.doctor.musts import MUSTS, Part, check_packages

Check = Callable[[Loaded], Iterable[Finding]]


def _sound(name: str, must: Callable[[Loaded], object]) -> Check:
    def check(loaded: Loaded) -> Iterator[Finding]:
        must(loaded)
        yield ok(name, "sound")

    return check


CHECKS: Mapping[str, Check] = {
    **{name: _sound(name, must) for name, must in MUSTS.items()},
    "redis": services.check_redis,
    "model": machine.check_models,
    "rewards": services.check_rewards,
    "gpu": machine.check_gpus,
    "memory": machine.check_memory,
    "shared memory": machine.check_shared_memory,
    "disk": machine.check_disk,
    "limits": machine.check_limits,
}


# What another machine must have: the learner asks no rewards, and a worker reads no prompts.
_ELSEWHERE: Mapping[Part, Collection[str]] = {
    "all": (),
    "learner": ("rewards", "reward port", "shared memory"),
    "worker": ("files", "reward port", "disk"),
}


def examine(loaded: Loaded, part: Part = "all") -> Iterator[Finding]:
    """One by one, as they are found."""
    of_part: Mapping[str, Check] = {
        "packages": _sound("packages", lambda loaded: check_packages(loaded.config, part)),
        "gpu": partial(machine.check_gpus, part=part),
        "memory": partial(machine.check_memory, part=part),
        "shared memory": partial(machine.check_shared_memory, part=part),
    }
    for name, check in {**CHECKS, **of_part}.items():
        if name in _ELSEWHERE[part]:
            continue
        try:
            yield from check(loaded)
        except UserError as mistake:
            yield from (error(name, line, "mend it as it says") for line in str(mistake).splitlines())
        except OSError as refused:
            yield error(name, str(refused), "see to what the machine refuses")
