"""`streamrl pause|resume|drain|stop`: say how a run shall go on, and hear who follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from streamrl.errors import ResourceError
from streamrl.ops.cli.arguments import open_run, operator, takes_json, takes_run, takes_timeout, tell
from streamrl.ops.monitor.runs import Target
from streamrl.protocol.transport.operator import Obedience, await_obedience, set_control
from streamrl.protocol.transport.types import Control

_ENDS_A_RUN = ("drain", "stop")


def _order_of(command: Callable[..., Any]) -> click.Command:
    """A command about a run, with how long to listen for those concerned, and --json."""
    return click.command(takes_run(takes_timeout("listen for those concerned")(takes_json(command))))


@_order_of
def pause(target: Target, timeout_s: float, as_json: bool) -> int:
    """Make no more steps and take no more tickets, until `resume`.

    What workers are generating is finished and kept; nothing is lost, and no idle timeout runs. Saying it twice is
    saying it once. Exits with 0 when the learner and all workers follow, with 1 when some do not in time: the word
    stands all the same, and who comes later follows it.
    """
    return _order(target, "pause", timeout_s=timeout_s, as_json=as_json)


@_order_of
def resume(target: Target, timeout_s: float, as_json: bool) -> int:
    """Go on after a pause; take back a `drain` that is not done yet."""
    return _order(target, "run", timeout_s=timeout_s, as_json=as_json)


@_order_of
def drain(target: Target, timeout_s: float, as_json: bool) -> int:
    """Send out no more tickets, train what is under way, write a checkpoint, and stop.

    Exits with 0 when the learner follows or the run has ended, with 1 when it does not in time: the word stands, for
    this learner and its restarts by torchrun. One that is started after it goes on.
    """
    return _order(target, "drain", timeout_s=timeout_s, as_json=as_json)


@_order_of
def stop(target: Target, timeout_s: float, as_json: bool) -> int:
    """Finish the step, write a checkpoint, and stop; what is under way waits in Redis for the next start.

    Exits with 0 when the learner follows or the run has ended, with 1 when it does not in time: the word stands, for
    this learner and its restarts by torchrun. One that is started after it goes on.
    """
    return _order(target, "stop", timeout_s=timeout_s, as_json=as_json)


def _order(target: Target, mode: Control, *, timeout_s: float, as_json: bool) -> int:
    with open_run(target) as opened:
        state = opened.info.state
        running = state == "running"
        if not running and mode not in _ENDS_A_RUN:
            raise ResourceError(f"run {opened.info.name!r} has ended ({state}); `streamrl up` takes it up again")
        # A word to a run that has ended would meet the learner that takes it up again.
        changed = running and set_control(opened.client, opened.keys, mode, by=operator())
        found = await_obedience(opened.client, opened.keys, mode, timeout_s=timeout_s)
    told = {"run": target.run, "mode": mode, "changed": changed, "state": found.state}
    told |= {"acknowledged": found.complete, "obeying": found.obeying, "waiting_for": dict(found.waiting_for)}
    tell(told, [_line(target.run, mode, changed, found)], as_json=as_json)
    return 0 if found.complete else 1


def _line(run: str, mode: Control, changed: bool, found: Obedience) -> str:
    if found.state != "running":
        return f"run {run}: {found.state or 'removed'}"
    said = f"run {run}: {mode}{'' if changed else ' (as before)'}"
    parts = [f"{', '.join(found.obeying)} follow{'s' if len(found.obeying) == 1 else ''}"] if found.obeying else []
    parts += [f"not yet {part}, which {activity}" for part, activity in found.waiting_for.items()]
    return "; ".join([said, *parts])
