"""`streamrl record`: save the groups of a live run; `record export` and `record info` read the recording."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click

from streamrl.errors import ConfigError, RunGone
from streamrl.extras import need
from streamrl.ops.cli.arguments import MovingLine, OutputFile, open_run, print_result, takes_json, takes_run
from streamrl.ops.launch.processes import Interrupts
from streamrl.ops.monitor.runs import Target
from streamrl.ops.record.export import write_jsonl, write_parquet, write_whole
from streamrl.ops.record.tap import Tap
from streamrl.ops.record.tap import record as run_session
from streamrl.ops.record.view import choose_decoder
from streamrl.ops.record.write import RecordingWriter, Written
from streamrl.protocol.recording import Origin, Recording, is_intact
from streamrl.terminal import printable, size

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kMGT])(i?))?B?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_REMEDY = "there is nothing to record; `streamrl groups tail {folder}` shows the groups that its folder keeps"
_LIVE = "live"  # the hidden command behind `streamrl record RUN_FOLDER`


def _num_bytes(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size; write a number of bytes, or for example 500MB or 2GiB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** _POWERS[(match[2] or "").lower()])


class _Record(click.Group):
    """The group of `record export` and `record info`; any other first argument is a run to record."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "-h", "--help"):
            args = [_LIVE, *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in super().list_commands(ctx) if name != _LIVE]


@click.group(cls=_Record)
def record() -> None:
    """Record the groups of a live run: prompts, samples, log-probs, versions, rewards.

    \b
        streamrl record runs/big --output recording
        streamrl record --redis redis://host:6379 --run big --output recording
        streamrl record info recording
        streamrl record export recording --format parquet --output rollouts.parquet
        streamrl learn conf/mine.yaml name=again --replay recording

    It only reads from the run. Recording ends with the run or with Ctrl-C, and resumes if started again with the same
    folder.

    \b
    Options of `streamrl record [RUN_FOLDER]`:
      --output DIR         Folder for the recording; may hold an earlier part of it.
      --redis URL, --run   The run, if not given by its folder.
      --file-bytes SIZE    Size at which a new file is started.   [default: 256MB]
      --max-bytes SIZE     Limit for all files: then the oldest are deleted, and their groups counted.
                           [default: 20GB]
      --once               Save what is in Redis now, and exit.
      --json               At the end, print JSON: groups, bytes, dropped, missed (null: unknown).
    """


@record.command(_LIVE, hidden=True)
@takes_run
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), required=True, metavar="DIR")
@click.option("--file-bytes", type=_num_bytes, metavar="SIZE", default="256MB")
@click.option("--max-bytes", type=_num_bytes, metavar="SIZE", default="20GB")
@click.option("--once", is_flag=True)
@takes_json
def live(target: Target, output: Path, file_bytes: int, max_bytes: int, once: bool, as_json: bool) -> None:
    """Record a run."""
    if max_bytes < 2 * file_bytes:
        raise ConfigError(f"--max-bytes {max_bytes}: must be at least twice --file-bytes = {file_bytes}")
    with open_run(target, remedy=_REMEDY) as opened, Interrupts() as interrupts:
        info = opened.info
        model = opened.config.model.path
        origin = Origin(run=info.name, run_uid=info.uid, fingerprint=info.fingerprint, model=model)
        tap = Tap(opened.client, opened.keys, run_uid=info.uid)
        with RecordingWriter(output, origin, file_bytes=file_bytes, max_bytes=max_bytes) as writer:
            continued = f", continuing after {writer.last_id}" if writer.num_files else ""
            click.echo(printable(f"recording run {info.name} into {output}{continued}; Ctrl-C ends it"), err=True)
            show = _Progress(writer)
            gone: RunGone | None = None  # raised once the result is printed
            try:
                run_session(tap, writer, stopped=lambda: interrupts.count > 0, follow=not once, show=show)
            except RunGone as error:
                gone = error
            show.end()
    result = {"run": info.name, "output": str(output), "missed": tap.num_missed}
    result |= {name.removeprefix("num_"): value for name, value in asdict(writer.written).items()}
    result |= {"files": writer.num_files, "files_bytes": writer.num_bytes}
    print_result(result, [_line(writer.written, tap.num_missed, output)], as_json=as_json, indent=None)
    if gone is not None:
        raise gone


class _Progress:
    def __init__(self, writer: RecordingWriter) -> None:
        self._writer, self._line = writer, MovingLine()
        self._num_dropped = 0

    def __call__(self) -> None:
        written = self._writer.written
        if written.num_dropped > self._num_dropped:
            num_new = written.num_dropped - self._num_dropped
            self._num_dropped = written.num_dropped
            click.echo(f"\rdropped the oldest file with {num_new} groups: --max-bytes is reached", err=True)
        self._line.show(f"{written.num_groups} groups, {size(written.num_bytes)}")

    def end(self) -> None:
        self()
        self._line.end()


@record.command("export")
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--format", "kind", type=click.Choice(["jsonl", "parquet"]), default="jsonl")
@click.option("--output", type=OutputFile(), help="Output file; default for jsonl: stdout.")
@click.option("--tokenizer", metavar="MODEL", help="Model folder with the tokenizer for texts.")
@click.option("--no-text", is_flag=True, help="Write token ids only, even if the run's model is here.")
def export_to(folder: Path, kind: str, output: Path | None, tokenizer: str | None, no_text: bool) -> None:
    """Write a recording as JSON Lines, or Parquet.

    JSON Lines have one group per line, Parquet one sample per row, with prompts and responses as text if the model's
    tokenizer is found. The numbers of exported and of unreadable groups are printed to stderr.
    """
    if kind == "parquet":
        need("--format parquet", "pyarrow", extra="parquet")
        if output is None:
            raise ConfigError("--format parquet writes a file: name it with --output FILE")
    recording = Recording.open(folder)
    decoder = None if no_text else choose_decoder(tokenizer, recording.origin.model)
    form = write_parquet if kind == "parquet" else write_jsonl
    write = partial(form, recording, decoder=decoder)
    exported = write(sys.stdout.buffer) if output is None else write_whole(output, write)
    torn = sum(recording.tears.values())
    click.echo(f"{exported}; {torn} torn bytes left out" if torn else str(exported), err=True)


@record.command()
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--verify", is_flag=True, help="Read every group and check its digest.")
@takes_json
def info(folder: Path, verify: bool, as_json: bool) -> int:
    """Describe a recording, and check that it is complete.

    It also lists the tickets without an answer. Exits with 1 if --verify finds a damaged group.
    """
    recording = Recording.open(folder)
    numbers = recording.numbers()
    damaged = [place.entry_id for place in recording.places if not is_intact(place)] if verify else []
    facts = {
        "run": recording.origin.run,
        "run_uid": recording.origin.run_uid,
        "model": recording.origin.model,
        "groups": len(recording.places),
        "bytes": sum(place.num_bytes for place in recording.places),
        "first": recording.places[0].entry_id if recording.places else None,
        "last": recording.places[-1].entry_id if recording.places else None,
        "tickets": len(numbers),
        "highest_ticket": max(numbers, default=None),
        "tickets_without_answer": max(numbers, default=-1) + 1 - len(numbers),
        "torn_bytes": sum(recording.tears.values()),
        "damaged": damaged if verify else None,
    }
    lines = [f"{name.replace('_', ' '):<24}{_shown(value)}" for name, value in facts.items() if value is not None]
    print_result(facts, lines, as_json=as_json)
    return 1 if damaged else 0


def _line(written: Written, num_missed: int | None, output: Path) -> str:
    line = f"{written.num_groups} groups, {size(written.num_bytes)}, in {output}"
    if written.num_dropped:
        line += f"; {written.num_dropped} older ones dropped for --max-bytes"
    if written.num_too_large:
        line += f"; {written.num_too_large} entries left out as too large for a group"
    if num_missed is None:
        line += "; how many were missed is unknown"
    elif num_missed:
        line += f"; {num_missed} missed, trained before they could be read"
    return line


def _shown(value: object) -> str:
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)
