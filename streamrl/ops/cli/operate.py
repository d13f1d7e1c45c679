"""Operators' commands: `streamrl pause|resume|drain|stop`, which report who follows, and `streamrl dead ls|show|retry|
purge` for tickets that failed too often.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import click

from streamrl.errors import ConfigError, DataError, ResourceError
from streamrl.ops.cli.arguments import (
    OpenRun,
    gone,
    open_run,
    open_run_or_remains,
    takes_json,
    takes_run,
    takes_timeout,
    tell,
)
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
_TAKE_UP = "nothing is running that could follow; resume the run with `streamrl up CONFIG`"
_LETTERS = "the dead letters are there again once you resume the run with `streamrl up CONFIG`"
_LOOK_EVERY_S = 0.2
_SHOWN_CHARS = 110  # of an error: the cause in a user's function comes after some 50 other characters


def _order_of(command: Callable[..., Any]) -> click.Command:
    """Make a command about a run, with a confirmation timeout and --json."""
    return click.command(takes_run(takes_timeout("wait for confirmation")(takes_json(command))))


@_order_of
def pause(target: Target, timeout_s: float, as_json: bool) -> int:
    """Stop making steps and taking tickets, until `resume`.

    Samples in flight are finished and kept; nothing is lost, and idle timeouts are suspended. Repeating it has no
    further effect. Exits with 0 if the learner and all workers confirm, with 1 if some don't in time; the pause stays
    in force, also for parts that join later.
    """
    return _order(target, "pause", timeout_s=timeout_s, as_json=as_json)


@_order_of
def resume(target: Target, timeout_s: float, as_json: bool) -> int:
    """Continue after a pause; cancel a `drain` that is not done yet."""
    return _order(target, "run", timeout_s=timeout_s, as_json=as_json)


@_order_of
def drain(target: Target, timeout_s: float, as_json: bool) -> int:
    """Issue no more tickets, train what was requested, write a checkpoint, and stop.

    Exits with 0 if the learner confirms or the run has ended, with 1 if it doesn't in time; the command stays in force.
    It addresses every learner started before it, including restarts by torchrun, waiting ones and standbys. A learner
    started later resumes the run.
    """
    return _order(target, "drain", timeout_s=timeout_s, as_json=as_json)


@_order_of
def stop(target: Target, timeout_s: float, as_json: bool) -> int:
    """Finish the step, write a checkpoint, and stop; samples in flight wait in Redis for the next start.

    Exits with 0 if the learner confirms or the run has ended, with 1 if it doesn't in time; the command stays in force.
    It addresses every learner started before it, including restarts by torchrun, waiting ones and standbys. A learner
    started later resumes the run.
    """
    return _order(target, "stop", timeout_s=timeout_s, as_json=as_json)


def _order(target: Target, mode: Control, *, timeout_s: float, as_json: bool) -> int:
    with open_run_or_remains(target) as opened:
        if isinstance(opened, Remains):
            if mode not in _ENDS_A_RUN or not opened.has_ended:
                raise gone(opened, instead=_TAKE_UP)
            told = {"run": target.run, "mode": mode, "changed": False, "state": opened.state}
            told |= {"acknowledged": True, "obeying": (), "waiting_for": {}}
            tell(told, [f"run {target.run}: {opened.state}"], as_json=as_json)
            return 0
        state = opened.info.state
        running = state == "running"
        if not running and mode not in _ENDS_A_RUN:
            raise ResourceError(f"run {opened.info.name!r} has ended ({state}); `streamrl up` resumes it")
        changed = orders.set_control(opened.client, opened.keys, mode, by=operator())
        found = orders.await_obedience(opened.client, opened.keys, mode, timeout_s=timeout_s)
    told = {"run": target.run, "mode": mode, "changed": changed, "state": found.state}
    told |= {"acknowledged": found.complete, "obeying": found.obeying, "waiting_for": dict(found.waiting_for)}
    tell(told, [_followers(target.run, mode, changed, found)], as_json=as_json)
    return 0 if found.complete else 1


def _followers(run: str, mode: Control, changed: bool, found: Obedience) -> str:
    if found.state != "running":
        return f"run {run}: {found.state or 'removed'}"
    said = f"run {run}: {mode}{'' if changed else ' (as before)'}"
    parts = [f"{', '.join(found.obeying)} follow{'s' if len(found.obeying) == 1 else ''}"] if found.obeying else []
    parts += [f"not yet {part}, which {activity}" for part, activity in found.waiting_for.items()]
    return "; ".join([said, *parts])


@click.group()
def dead() -> None:
    """List, retry or purge the tickets that failed too often."""


@dead.command()
@takes_run
@takes_json
def ls(target: Target, as_json: bool) -> None:
    """List the dead letters, oldest first."""
    with open_run(target, instead=_LETTERS) as opened:
        letters = _letters(opened)
        tell([_to_json(letter) for letter in letters] if as_json else None, letter_lines(letters), as_json=as_json)


@dead.command()
@takes_run
@click.option("--ticket", "number", type=int, required=True, help="The ticket's number.")
def show(target: Target, number: int) -> None:
    """Print everything known about one dead ticket, as JSON."""
    with open_run(target, instead=_LETTERS) as opened:
        [letter] = _chosen(_letters(opened), [number])
    click.echo(json.dumps(_to_json(letter), indent=2, ensure_ascii=False))


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
    _refuse_nothing(numbers, everything)
    with open_run(target, instead=_LETTERS) as opened:
        letters, issued_before = _letters(opened), orders.read_retried(opened.client, opened.keys)
        chosen = letters if everything else _chosen(letters, [n for n in numbers if n not in issued_before])
        wanted: set[int] = set()
        requested = orders.request_retries(opened.client, opened.keys, _noting(chosen, wanted), by=operator())
        # A run that has ended handles no requests until it is resumed.
        deadline = time.monotonic() + (timeout_s if opened.info.state == "running" else 0.0)
        while wanted & orders.read_requests(opened.client, opened.keys) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
        issued = orders.read_retried(opened.client, opened.keys)
    told = {n: max(issued[n]) if n in issued else None for n in sorted({*wanted, *numbers})}
    lines = (f"{number} -> {'not yet: the request stands' if new is None else new}" for number, new in told.items())
    tell({"requested": requested, "issued": told}, lines, as_json=as_json)
    return 1 if None in told.values() else 0


@dead.command()
@_takes_tickets
def purge(target: Target, numbers: tuple[int, ...], everything: bool, as_json: bool) -> None:
    """Delete dead letters. Their tickets have ended and are not asked again."""
    _refuse_nothing(numbers, everything)
    with open_run(target, instead=_LETTERS) as opened:
        chosen = (letter for letter in _letters(opened) if everything or letter.number in numbers)
        purged = orders.purge(opened.client, opened.keys, chosen, by=operator())
    tell({"purged": purged}, [f"{purged} dead letters purged"], as_json=as_json)


def _refuse_nothing(numbers: Sequence[int], everything: bool) -> None:
    if bool(numbers) == everything:
        raise ConfigError("say which dead tickets are meant: --ticket N, as often as needed, or --all")


def _letters(opened: OpenRun) -> Iterator[DeadLetter]:
    """Yield this run's letters, as the audit counts them; entries without a number belong to no ticket."""
    letters = orders.read_letters(opened.client, opened.keys)
    return (one for one in letters if one.number >= 0 and one.run_uid == opened.info.uid)


def _noting(letters: Iterable[DeadLetter], numbers: set[int]) -> Iterator[DeadLetter]:
    """Yield the letters, keeping only their numbers in memory."""
    for letter in letters:
        numbers.add(letter.number)
        yield letter


def _chosen(letters: Iterable[DeadLetter], numbers: Sequence[int]) -> list[DeadLetter]:
    there = {letter.number: letter for letter in letters if letter.number in numbers}
    missing = [number for number in numbers if number not in there]
    if missing:
        named = ", ".join(map(str, missing))
        raise DataError(f"there is no dead letter of ticket {named}; `streamrl dead ls` shows all")
    return [there[number] for number in dict.fromkeys(numbers)]


def _to_json(letter: DeadLetter) -> dict[str, Any]:
    ticket = letter.ticket
    told: dict[str, Any] = {
        "ticket": letter.number,
        "purpose": letter.purpose,
        "error": letter.error,
        "at": letter.at,
        "retry_requested": letter.retry_requested,
    }
    if ticket is not None:
        told |= {
            "attempts": ticket.attempt,
            "retry_of": ticket.retry_of,
            "prompt": ticket.prompt,
            "prompt_tokens": len(ticket.token_ids),
            "prompt_index": ticket.prompt_index,
            "data_epoch": ticket.data_epoch,
            "fields": dict(ticket.fields),
        }
    return told


def letter_lines(letters: Iterable[DeadLetter]) -> Iterator[str]:
    count = 0
    for letter in letters:
        count += 1
        yield from _of_letter(letter)
    yield plural(count, "dead letter")


def _of_letter(letter: DeadLetter) -> Iterator[str]:
    """Yield the error, and below it the prompt: the end of a long one, since a run's chats begin alike."""
    asked = "(retry asked for) " if letter.retry_requested else ""
    error = " ".join(f"{asked}{letter.error}".split())
    prompt = " ".join(letter.ticket.prompt.split()) if letter.ticket else "(cannot be read)"
    yield f"{letter.number:>8}  {error if len(error) <= _SHOWN_CHARS else error[: _SHOWN_CHARS - 1] + '…'}"
    yield f"{'':8}  {prompt if len(prompt) <= _SHOWN_CHARS else '…' + prompt[1 - _SHOWN_CHARS :]}"
