"""`streamrl doctor`: finds what would go wrong, or be slow, before a run: each line ok, warning or error, with a
remedy. Nothing of the run is started, nothing is written, no weights are loaded; each check is bounded. Checks that
take seconds come last, and run only if what they need is in order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from streamrl.config.load import Loaded
from streamrl.config.placement import StartedPart
from streamrl.errors import UserError
from streamrl.finding import Finding, error, ok, warning
from streamrl.ops.monitor.doctor import gpus, machine, services
from streamrl.ops.monitor.doctor.requirements import (
    REQUIREMENTS,
    check_hosts_reach_redis,
    check_packages,
    check_readable_store,
)
from streamrl.ops.monitor.doctor.trials import try_learner, try_rewards

Check = Callable[[Loaded], Iterable[Finding]]
_SEE_EVIDENCE = "fix it as described"


def _as_check(name: str, requirement: Callable[[Loaded], object]) -> Check:
    def check(loaded: Loaded) -> Iterator[Finding]:
        requirement(loaded)
        yield ok(name, "no problem found")

    return check


CHECKS: Mapping[str, Check] = {
    **{name: _as_check(name, requirement) for name, requirement in REQUIREMENTS.items()},
    "torch": machine.check_torch,
    "redis": services.check_redis,
    "model": machine.check_models,
    "reward services": services.check_rewards,
    "teacher's servers": services.check_teacher,
    "gpu": gpus.check_gpus,
    "precision": machine.check_precision,
    "memory": machine.check_memory,
    "shared memory": machine.check_shared_memory,
    "disk": machine.check_disk,
    "limits": machine.check_limits,
}
_NEEDED = {"settings", "packages", "files", "model"}  # by the trials


# Checks to skip on a machine with only this part: the learner asks no rewards and no served teacher, and may have more
# machines' ranks; a worker reads no prompts and has no run folder.
_SKIPPED: Mapping[StartedPart, Collection[str]] = {
    "all": (),
    "learner": ("layout", "reward services", "teacher's servers", "reward port", "shared memory"),
    "worker": ("layout", "files", "reward port", "run folder", "disk"),
}


def examine(loaded: Loaded, part: StartedPart = "all", *, ask_services: bool = False) -> Iterator[Finding]:
    """Yield findings as they come. `ask_services`: also request a score from reward services."""
    failed = set()
    for name, finding in look(loaded, part):
        failed |= {name} if finding.level == "error" else set()
        yield finding
    if failed & _NEEDED:
        yield warning(
            "trials", "rewards, prompts and model were not tried", "fix the errors first, then run doctor again"
        )
        return
    if part == "all":  # rewards are tried on rows of the data, which a worker's machine may not have
        yield from _run_check("rewards", partial(try_rewards, ask_services=ask_services), loaded)
    if part != "worker":
        yield from _run_check("learner", partial(try_learner, workers_are_here=part == "all"), loaded)


def look(loaded: Loaded, part: StartedPart = "all") -> Iterator[tuple[str, Finding]]:
    """Run the quick checks; yields each finding with the name of its check."""
    of_part: dict[str, Check] = {
        "packages": _as_check("packages", lambda loaded: check_packages(loaded.config, part)),
        "placement": partial(gpus.check_placement, part=part),
        "gpu": partial(gpus.check_gpus, part=part),
        "memory": partial(machine.check_memory, part=part),
        "shared memory": partial(machine.check_shared_memory, part=part),
    }
    if part == "worker":
        of_part["weights store"] = _as_check("weights store", lambda loaded: check_readable_store(loaded.config))
    if part == "all" and loaded.config.worker.hosts > 1:
        of_part["hosts"] = _as_check("hosts", lambda loaded: check_hosts_reach_redis(loaded.config))
    for name, check in {**CHECKS, **of_part}.items():
        if name not in _SKIPPED[part]:
            yield from ((name, finding) for finding in _run_check(name, check, loaded))


def _run_check(name: str, check: Check, loaded: Loaded) -> Iterator[Finding]:
    try:
        for finding in check(loaded):
            yield finding if finding.level == "ok" or finding.remedy else replace(finding, remedy=_SEE_EVIDENCE)
    except UserError as mistake:
        yield from (error(name, line, _SEE_EVIDENCE) for line in str(mistake).splitlines())
    except OSError as failure:
        yield error(name, str(failure), "fix the cause of this system error")
