"""Operators' commands: `streamrl pause|resume|drain|stop`, which report who follows, and `streamrl dead ls|show|retry|
purge` for tickets that failed too often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import click

from streamrl.errors import ConfigError, DataError, ResourceError
from streamrl.ops.cli.arguments import (
    OpenRun,
    open_run,
    open_run_or_remains,
    print_result,
    redis_gone_error,
    takes_json,
    takes_run,
    takes_timeout,
)
from streamrl.ops.monitor.bounds import longer
from streamrl.ops.monitor.remains import Remains
from streamrl.ops.monitor.runs import Target
from streamrl.protocol.transport import operator as orders
from streamrl.protocol.transport.operator import (
    DeadLetter,
    Obedience,
    operator,
)
from streamrl.protocol.transport.types import Control
from streamrl.terminal import plural

_ENDS_A_RUN = ("drain", "stop")
_RESUME = "no process is running that could obey; resume the run with `{up}`"
_RESTORE_LETTERS = "resume the run with `{up}` to restore its dead letters"
_LOOK_EVERY_S = 0.2
_SHOWN_CHARS = 110  # of an error: the cause in a user's function comes after some 50 other characters


def _control_command(command: Callable[..., Any]) -> click.Command:
    """Make a command about a run, with a confirmation timeout and --json."""
    return click.command(takes_run(takes_timeout("wait for confirmation")(takes_json(command))))


@_control_command
def pause(target: Target, timeout_s: float, as_json: bool) -> int:
    """Stop making steps and taking tickets, until `resume`.

    Samples in flight are finished and kept; nothing is lost, and idle timeouts are suspended. Repeating it has no
    further effect. Exits with 0 if the learner and all workers confirm, with 1 if some don't in time; the pause stays
    in force, also for parts that join later.
    """
    return _send_control(target, "pause", timeout_s=timeout_s, as_json=as_json)


@_control_command
def resume(target: Target, timeout_s: float, as_json: bool) -> int:
    """Continue after a pause; cancel a `drain` that is not done yet."""
    return _send_control(target, "run", timeout_s=timeout_s, as_json=as_json)


@_control_command
def drain(target: Target, timeout_s: float, as_json: bool) -> int:
    """Issue no more tickets, train what was requested, write a checkpoint, and stop.

    Exits with 0 if the learner confirms or the run has ended, with 1 if it doesn't in time; the command stays in force.
    It addresses every learner started before it, including restarts by torchrun, waiting ones and standbys. A learner
    started later resumes the run.
    """
    return _send_control(target, "drain", timeout_s=timeout_s, as_json=as_json)


@_control_command
def stop(target: Target, timeout_s: float, as_json: bool) -> int:
    """Finish the step, write a checkpoint, and stop; samples in flight wait in Redis for the next start.

    Exits with 0 if the learner confirms or the run has ended, with 1 if it doesn't in time; the command stays in force.
    It addresses every learner started before it, including restarts by torchrun, waiting ones and standbys. A learner
    started later resumes the run.
    """
    return _send_control(target, "stop", timeout_s=timeout_s, as_json=as_json)


def _send_control(target: Target, mode: Control, *, timeout_s: float, as_json: bool) -> int:
    with open_run_or_remains(target) as opened:
        if isinstance(opened, Remains):
            if mode not in _ENDS_A_RUN or not opened.has_ended:
                raise redis_gone_error(opened, remedy=_RESUME)
            result = {"run": target.run, "mode": mode, "changed": False, "state": opened.state}
            result |= {"acknowledged": True, "obeying": (), "waiting_for": {}}
            print_result(result, [f"run {target.run}: {opened.state}"], as_json=as_json)
            return 0
        state = opened.info.state
        running = state == "running"
        if not running and mode not in _ENDS_A_RUN:
            raise ResourceError(f"run {opened.info.name!r} has ended ({state}); `{_up(opened)}` resumes it")
        changed = orders.set_control(opened.client, opened.keys, mode, by=operator())
        obedience = orders.await_obedience(opened.client, opened.keys, mode, timeout_s=timeout_s)
    result = {"run": target.run, "mode": mode, "changed": changed, "state": obedience.state}
    result |= {
        "acknowledged": obedience.complete,
        "obeying": obedience.obeying,
        "waiting_for": dict(obedience.waiting_for),
    }
    print_result(result, [_obedience_line(target.run, mode, changed, obedience)], as_json=as_json)
    return 0 if obedience.complete else 1


def _up(opened: OpenRun) -> str:
    """Return the command that starts a learner of a run that has ended."""
    if opened.info.state != "finished":
        return "streamrl up CONFIG"
    try:
        training = opened.config.training.model_dump()
    except ConfigError:  # of another version of streamrl
        return "streamrl up CONFIG"
    return f"streamrl up CONFIG {longer(training, step=opened.step)}"


def _obedience_line(run: str, mode: Control, changed: bool, obedience: Obedience) -> str:
    if obedience.state != "running":
        return f"run {run}: {obedience.state or 'removed'}"
    command = f"run {run}: {mode}{'' if changed else ' (as before)'}"
    parts = (
        [f"{', '.join(obedience.obeying)} follow{'s' if len(obedience.obeying) == 1 else ''}"]
        if obedience.obeying
        else []
    )
    parts += [f"not yet {part}, which {activity}" for part, activity in obedience.waiting_for.items()]
    return "; ".join([command, *parts])


@click.group()
def dead() -> None:
    """List, retry or purge the tickets that failed too often."""


@dead.command()
@takes_run
@takes_json
def ls(target: Target, as_json: bool) -> None:
    """List the dead letters, oldest first."""
    with open_run(target, remedy=_RESTORE_LETTERS) as opened:
        letters = _letters(opened)
        print_result(
            [_to_json(letter) for letter in letters] if as_json else None, letter_lines(letters), as_json=as_json
        )


@dead.command()
@takes_run
@click.option("--ticket", "number", type=int, required=True, help="The ticket's number.")
def show(target: Target, number: int) -> None:
    """Print everything known about one dead ticket, as JSON."""
    with open_run(target, remedy=_RESTORE_LETTERS) as opened:
        [letter] = _select(_letters(opened), [number])
    print_result(_to_json(letter), (), as_json=True)


def _takes_tickets(command: Callable[..., Any]) -> Callable[..., Any]:
    tickets = click.option(
        "--ticket", "numbers", type=int, multiple=True, metavar="N", help="The ticket's number; repeatable."
    )
    everything = click.option("--all", "everything", is_flag=True, help="All dead letters.")
    return takes_run(tickets(everything(takes_json(command))))


@dead.command()
@_takes_tickets
@takes_timeout("wait for the learner to issue them")
def retry(target: Target, numbers: tuple[int, ...], everything: bool, as_json: bool, timeout_s: float) -> int:
    """Ask the learner to issue dead tickets again.

    Each gets a new number with the same prompt, and its dead letter is removed in the same step. The learner handles
    requests when it has room for tickets; asking twice has no further effect. Exits with 0 when all are issued, with 1
    if some were not issued in time; their requests remain.
    """
    _check_selection(numbers, everything)
    with open_run(target, remedy=_RESTORE_LETTERS) as opened:
        letters, issued_before = _letters(opened), orders.read_retried(opened.client, opened.keys)
        chosen = letters if everything else _select(letters, [n for n in numbers if n not in issued_before])
        wanted: set[int] = set()
        requested = orders.request_retries(opened.client, opened.keys, _collect_numbers(chosen, wanted), by=operator())
        # A run that has ended handles no requests until it is resumed.
        deadline = time.monotonic() + (timeout_s if opened.info.state == "running" else 0.0)
        while wanted & orders.read_requests(opened.client, opened.keys) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
        issued = orders.read_retried(opened.client, opened.keys)
    new_numbers = {n: max(issued[n]) if n in issued else None for n in sorted({*wanted, *numbers})}
    lines = [f"{old} -> {'not yet: the request remains' if new is None else new}" for old, new in new_numbers.items()]
    if None in new_numbers.values() and opened.info.state != "running":
        lines.append(f"the run has ended ({opened.info.state}); `{_up(opened)}` resumes it")
    print_result({"requested": requested, "issued": new_numbers}, lines, as_json=as_json)
    return 1 if None in new_numbers.values() else 0


@dead.command()
@_takes_tickets
def purge(target: Target, numbers: tuple[int, ...], everything: bool, as_json: bool) -> None:
    """Delete dead letters. Their tickets have ended and are not asked again."""
    _check_selection(numbers, everything)
    with open_run(target, remedy=_RESTORE_LETTERS) as opened:
        chosen = (letter for letter in _letters(opened) if everything or letter.number in numbers)
        purged = orders.purge(opened.client, opened.keys, chosen, by=operator())
    print_result({"purged": purged}, [f"{purged} dead letters purged"], as_json=as_json)


def _check_selection(numbers: Sequence[int], everything: bool) -> None:
    if bool(numbers) == everything:
        raise ConfigError("choose the dead tickets: --ticket N (repeatable), or --all")


def _letters(opened: OpenRun) -> Iterator[DeadLetter]:
    """Yield this run's letters, as the audit counts them; entries without a number belong to no ticket."""
    letters = orders.read_letters(opened.client, opened.keys)
    return (letter for letter in letters if letter.number >= 0 and letter.run_uid == opened.info.uid)


def _collect_numbers(letters: Iterable[DeadLetter], numbers: set[int]) -> Iterator[DeadLetter]:
    """Yield the letters, keeping only their numbers in memory."""
    for letter in letters:
        numbers.add(letter.number)
        yield letter


def _select(letters: Iterable[DeadLetter], numbers: Sequence[int]) -> list[DeadLetter]:
    found = {letter.number: letter for letter in letters if letter.number in numbers}
    missing = [number for number in numbers if number not in found]
    if missing:
        tickets = ", ".join(map(str, missing))
        raise DataError(f"no dead letter for ticket {tickets}; `streamrl dead ls` lists all")
    return [found[number] for number in dict.fromkeys(numbers)]


def _to_json(letter: DeadLetter) -> dict[str, Any]:
    ticket = letter.ticket
    fields: dict[str, Any] = {
        "ticket": letter.number,
        "purpose": letter.purpose,
        "error": letter.error,
        "at": letter.at,
        "retry_requested": letter.retry_requested,
    }
    if ticket is not None:
        fields |= {
            "attempts": ticket.attempt,
            "retry_of": ticket.retry_of,
            "prompt": ticket.prompt,
            "prompt_tokens": len(ticket.token_ids),
            "prompt_index": ticket.prompt_index,
            "data_epoch": ticket.data_epoch,
            "fields": dict(ticket.fields),
        }
    return fields


def letter_lines(letters: Iterable[DeadLetter]) -> Iterator[str]:
    count = 0
    for letter in letters:
        count += 1
        yield from _lines_of_letter(letter)
    yield plural(count, "dead letter")


def _lines_of_letter(letter: DeadLetter) -> Iterator[str]:
    """Yield the error, and below it the prompt: the end of a long one, since a run's chats begin alike."""
    mark = "(retry requested) " if letter.retry_requested else ""
    error = " ".join(f"{mark}{letter.error}".split())
    prompt = " ".join(letter.ticket.prompt.split()) if letter.ticket else "(unreadable)"
    yield f"{letter.number:>8}  {error if len(error) <= _SHOWN_CHARS else error[: _SHOWN_CHARS - 1] + '…'}"
    yield f"{'':8}  {prompt if len(prompt) <= _SHOWN_CHARS else '…' + prompt[1 - _SHOWN_CHARS :]}"
