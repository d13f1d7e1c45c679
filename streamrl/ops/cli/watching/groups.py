"""`streamrl groups tail|show`: readable rollouts of a live run or of a recording. Reads only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from streamrl.errors import ConfigError, DataError, WireError
from streamrl.ops.cli.arguments import open_run_or_remains, refuse, takes_server
from streamrl.ops.cli.console import Console
from streamrl.ops.monitor.remains import Remains, read_remains
from streamrl.ops.monitor.runs import find_target
from streamrl.ops.record.export import to_json
from streamrl.ops.record.kept import KeptGroups, lines_of_record
from streamrl.ops.record.recorded import RecordedGroups, is_entry_id
from streamrl.ops.record.tap import LiveGroups
from streamrl.ops.record.view import TokenDecoder, choose_decoder, lines_of
from streamrl.protocol.recording import open_group
from streamrl.protocol.transport.types import Entry
from streamrl.protocol.wire.ticket import Purpose
from streamrl.terminal import printable

_NARROWEST = 20

Source = LiveGroups | RecordedGroups | KeptGroups


_LOOK_OPTIONS = (
    takes_server,
    click.option("--eval", "evaluation", is_flag=True, help="Show validation answers, which are not kept for long."),
    click.option("--tokenizer", metavar="MODEL", help="Model folder with the tokenizer for texts."),
    click.option("--color/--no-color", "colour", default=None, help="Default: if the terminal supports it."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object per group, one per line."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What to show besides the folder, and how: the options `_LOOK_OPTIONS`."""

    url: str | None
    run: str | None
    evaluation: bool
    tokenizer: str | None
    colour: bool | None  # None: if the terminal supports it
    as_json: bool


def _takes_look(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `Look`."""
    for option in reversed(_LOOK_OPTIONS):
        command = option(command)
    return command


@click.group()
def groups() -> None:
    """Read rollouts: prompt, samples, rewards by source, and which weights made which tokens.

    From a live run, which holds groups that were delivered and not committed yet, or from a recording (`streamrl
    record`). Texts need the model's tokenizer.json on this machine (model.path or --tokenizer); otherwise token ids are
    shown. For a run that has ended, or whose stream is empty, you see the rollouts that its folder keeps: at most 128
    of the whole run.
    """


@groups.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path), metavar="[RUN_FOLDER|RECORDING]")
@click.option("-n", "--number", "count", type=click.IntRange(min=0), default=3, help="Number of groups.")
@click.option("-f", "--follow", is_flag=True, help="Follow new groups until Ctrl-C or the end of the run.")
@click.option("--lines", type=click.IntRange(min=1), default=12, help="Lines to show of each text.")
@_takes_look
def tail(folder: Path | None, count: int, follow: bool, lines: int, **options: Any) -> None:
    """Show the newest groups.

    \b
        streamrl groups tail runs/big
        streamrl groups tail -f --redis redis://host:6379 --run big
        streamrl groups tail recording -n 20 --json
    """
    look = Look(**options)
    with _opened(folder, look) as (source, decoder):
        if isinstance(source, KeptGroups):
            remains = read_remains(source.folder)
            if_none = f"no groups are kept: run {remains.name!r} {remains.description}"
            _print_kept(source.latest(count), look, max_lines=lines, if_none=if_none)
            return
        entries: Sequence[Entry] | None = source.latest(count)
        ended = not entries and isinstance(source, LiveGroups) and source.has_ended()
        if not entries and (ended or not follow):
            kept = KeptGroups(folder).latest(count) if folder is not None and not look.evaluation else []
            if_none = "no groups at the moment" + (": the run has ended" if ended else "; -f waits for new ones")
            _print_kept(kept, look, max_lines=lines, if_none=if_none)
        while entries is not None:
            for entry in entries:
                _print(entry, decoder, look, max_lines=lines)
            entries = source.more() if follow else None


@groups.command()
@click.argument("words", nargs=-1, required=True, metavar="[RUN_FOLDER|RECORDING] TICKET|ID")
@_takes_look
def show(words: tuple[str, ...], **options: Any) -> None:
    """Show one group, by the number of its ticket or by its id.

    \b
        streamrl groups show runs/big 57
        streamrl groups show recording 1763628312345-0 --json
    """
    if len(words) > 2:
        raise ConfigError(f"{len(words)} arguments: give the folder of a run or a recording, and one ticket or id")
    look = Look(**options)
    is_entry_id(words[-1])  # shows a mistake before anything is opened
    with _opened(Path(words[0]) if len(words) == 2 else None, look) as (source, decoder):
        if isinstance(source, KeptGroups):
            _print_kept([source.find(words[-1])], look, max_lines=None, if_none="")
        else:
            _print(source.find(words[-1]), decoder, look, max_lines=None)


@contextmanager
def _opened(folder: Path | None, look: Look) -> Iterator[tuple[Source, TokenDecoder | None]]:
    if folder is not None and _is_recording(folder):
        refuse("url", "run", "evaluation", because=f"only for a run, and {folder} is a recording")
        recorded = RecordedGroups(folder)
        yield recorded, choose_decoder(look.tokenizer, recorded.model)
        return
    purpose: Purpose = "eval" if look.evaluation else "train"
    with open_run_or_remains(find_target(folder, look.url, look.run)) as opened:
        if isinstance(opened, Remains):
            if look.evaluation:
                raise DataError(
                    f"run {opened.name!r} {opened.description}: {opened.folder}/validation.jsonl has its answers"
                )
            yield KeptGroups(opened.folder), None
            return
        live = LiveGroups(opened.client, opened.keys, run_uid=opened.info.uid, purpose=purpose)
        yield live, choose_decoder(look.tokenizer, opened.config.model.path)


def _is_recording(folder: Path) -> bool:
    return any(folder.glob("*.groups")) and not (folder / "config.yaml").exists()


def _print(entry: Entry, decoder: TokenDecoder | None, look: Look, *, max_lines: int | None) -> None:
    try:
        group = open_group(entry)
    except WireError as error:
        click.echo(printable(f"group {entry.id} of ticket {entry.number} cannot be read: {error}"), err=True)
        return
    if look.as_json:
        click.echo(json.dumps(to_json(entry, group, decoder)))
        return
    console = _console(look.colour)
    width = max(_NARROWEST, console.width)
    colour = console.color_system is not None
    for line in lines_of(entry, group, decoder, width=width, colour=colour, max_lines=max_lines):
        console.print(line, soft_wrap=True, highlight=False)
    console.print()


def _print_kept(records: Sequence[Mapping[str, Any]], look: Look, *, max_lines: int | None, if_none: str) -> None:
    if not records:
        click.echo(printable(if_none), err=True)
    console = _console(look.colour)
    for record in records:
        if look.as_json:
            click.echo(json.dumps(record))
            continue
        for line in lines_of_record(record, width=max(_NARROWEST, console.width), max_lines=max_lines):
            console.print(line, soft_wrap=True, highlight=False)
        console.print()


def _console(colour: bool | None) -> Console:
    """A console as wide as the terminal, or 80 columns without one."""
    plain = Console(no_color=True, color_system=None)
    if colour is False or (colour is None and not plain.is_terminal):
        return plain
    return Console(force_terminal=True)
