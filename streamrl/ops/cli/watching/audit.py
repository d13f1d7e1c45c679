"""`streamrl audit`: account for every ticket of a run, from its streams, checkpoints and journal. Reads only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click

from streamrl.errors import ResourceError
from streamrl.ops.audit import Audit, audit_folder
from streamrl.ops.audit.judge import WRONG
from streamrl.ops.audit.streams import open_server, read_meta
from streamrl.ops.cli.arguments import print_result, takes_json, takes_place
from streamrl.ops.monitor.remains import no_run
from streamrl.ops.monitor.runs import Target, find_target
from streamrl.protocol.transport.keys import Keys


@click.command()
@takes_place
@click.option("--folder-only", is_flag=True, help="Do not look for Redis.")
@takes_json
def audit(folder: Path | None, url: str | None, run: str | None, folder_only: bool, as_json: bool) -> int:
    """Account for every ticket of a run: issued = trained + dropped + dead + outstanding.

    \b
        streamrl audit runs/quickstart              with its Redis, if that still runs and holds it
        streamrl audit runs/big --redis redis://host:6379
        streamrl audit --redis redis://host:6379 --run big

    Reads the run's checkpoints and journal and the raw entries of its streams; it changes and starts nothing. lost:
    tickets that have not ended and are nowhere to be found. twice: tickets trained more than once. Both are determined
    ticket by ticket, in the lineage of the newest checkpoint. misanswered: tickets ended by an answer to something else
    than they asked. On a live run, tickets that ended after that checkpoint count as outstanding, and those that Redis
    lost count as lost until the learner has issued them again.

    Exits with 0 when every ticket is accounted for, 1 when one is lost, trained twice or in doubt, 2 when there is
    nothing to audit.

    \b
    --json prints one object:
      run, run_uid, folder, redis (null: not looked at), learner_is_live
      term, checkpoint (null: none yet), step            the newest commit
      issued, trained, dropped {reason: n}, dead, outstanding (= waiting + delivered when Redis was looked at)
      lost, twice, contradictory, misanswered, unproven   all 0 unless something is wrong; examples {kind: [ticket]}
      wasted_steps, wasted_tickets                        committed by learners that had been replaced
      leftover_tickets, leftover_groups                   harmless entries about tickets that have ended
      malformed {what: n}, dead_letters, eval_tickets, eval_groups
      problems [text], unchecked [text], balanced, clean
    """
    if folder is None:
        target = find_target(None, url, run)
        url, folder = target.server(), _folder_of(target.server(), target.run)
    elif not folder.is_dir():
        raise no_run(folder)
    try:
        if url is None and not folder_only and (folder / "config.yaml").is_file():
            url = _server_of(find_target(folder, None, run), folder)
        found = audit_folder(folder, redis_url=None if folder_only else url, run=run)
    except ResourceError as error:
        raise ResourceError(f"{error}; --folder-only audits without it") from None
    print_result(found.to_json(), _lines(found), as_json=as_json)
    return 0 if found.clean else 1


def _server_of(target: Target, folder: Path) -> str | None:
    """Return the run's server; None if its embedded one has ended, a replay had none, or the run has ended and the
    server does not hold it any more."""
    if target.url is None or (folder / "replay.json").is_file():
        return None
    remains = target.remains()
    if remains is None or not remains.has_ended:
        return target.url
    with open_server(target.url) as client:
        return target.url if client.exists(Keys(target.run).meta) else None


def _folder_of(url: str, run: str) -> Path:
    """Return the run's folder according to its configuration in Redis."""
    with open_server(url) as client:
        config = read_meta(client, Keys(run)).get(b"config", b"")
    try:
        folder = Path(json.loads(config)["dir"]) / run
    except (ValueError, KeyError, TypeError):
        raise ResourceError(
            f"the configuration of run {run!r} in Redis names no folder; give it as RUN_FOLDER"
        ) from None
    if not (folder / "run.json").is_file():
        raise ResourceError(f"the folder of run {run!r} is not at {folder} on this machine; give it as RUN_FOLDER")
    return folder


def _lines(found: Audit) -> Iterator[str]:
    commit = found.checkpoint or "no checkpoint yet"
    where = "the folder alone" if found.redis is None else f"with Redis at {found.redis}"
    yield f"run {found.run}: {commit}, term {found.term}, {where}{', live' if found.learner_is_live else ''}"
    yield ""
    yield _row("issued", found.issued)
    yield _row("trained", found.trained)
    yield _row("dropped", sum(found.dropped.values()), ", ".join(f"{why} {n}" for why, n in found.dropped.items()))
    yield _row("dead", found.dead)
    seen = f"waiting {found.waiting}, delivered {found.delivered}" if found.redis and found.outstanding else ""
    yield _row("outstanding", found.outstanding, seen)
    for kind in WRONG:
        if getattr(found, kind) or kind in ("lost", "twice"):
            yield _row(kind, getattr(found, kind), _examples(found, kind))
    yield ""
    yield from _further_lines(found)
    yield "clean: every ticket is accounted for" if found.clean else "NOT CLEAN"


def _row(name: str, count: int, detail: str = "") -> str:
    return f"  {name:<14}{count:>10}{f'   ({detail})' if detail else ''}"


def _examples(found: Audit, kind: str) -> str:
    tickets = found.examples.get(kind, ())
    more = ", ..." if len(tickets) < getattr(found, kind) else ""
    return f"tickets {', '.join(map(str, tickets))}{more}" if tickets else ""


def _further_lines(found: Audit) -> Iterator[str]:
    """Yield the lines that appear only if there is something to report."""
    if found.wasted_steps:
        yield f"wasted: {found.wasted_steps} steps ({found.wasted_tickets} tickets) of replaced learners"
    if found.malformed:
        yield "malformed: " + ", ".join(f"{what} {n}" for what, n in found.malformed.items())
    if found.leftover_tickets or found.leftover_groups:
        yield f"left over, harmless: {found.leftover_tickets} tickets and {found.leftover_groups} groups"
    if found.eval_tickets or found.eval_groups:
        yield f"evaluation: {found.eval_tickets} tickets and {found.eval_groups} groups under way"
    yield from (f"problem: {text}" for text in found.problems)
    yield from (f"not checked {text}" for text in found.unchecked)
