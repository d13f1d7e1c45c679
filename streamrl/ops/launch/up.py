"""A whole run on this machine, from the first check to the final summary.

    checks ─► one launcher per folder ─► Redis ─► RunSupervisor: reward server, learner, workers
      └─► imports for these, meanwhile                  │ the learner has ended
    summary ◄─ Redis ends ◄─ reward server ends ◄─ audit ◄─ workers have left

Until all checks are done nothing is started but imports; everything started has ended when `up` returns or raises.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from streamrl.config import schema
from streamrl.config.load import Loaded
from streamrl.config.placement import place
from streamrl.config.places import EMBEDDED_REDIS
from streamrl.files import only_one, write_durably
from streamrl.gpus import gpus_here
from streamrl.ops.audit import audit_folder
from streamrl.ops.launch.display import Audience
from streamrl.ops.launch.forking import PartsAhead
from streamrl.ops.launch.parts import RunFolder, check_redis, folder_holder
from streamrl.ops.launch.processes import Interrupts
from streamrl.ops.launch.redis_part import RedisPart
from streamrl.ops.launch.summary import RunSummary, summarise
from streamrl.ops.launch.supervisor import RunSupervisor
from streamrl.ops.monitor.doctor.requirements import REQUIREMENTS
from streamrl.ops.monitor.doctor.trials import LEARNER_TRIALS, LIGHT_TRIALS, Trial, run_trials
from streamrl.protocol.transport.connection import check_server, connect
from streamrl.protocol.transport.embedded import find_server
from streamrl.telemetry.logs import configure_logging


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    summary: RunSummary | None  # None: ended before the learner had created the run
    exit_code: int  # 0, or that of the signal that ended it


def up(
    loaded: Loaded,
    *,
    display: Audience,
    takeover: bool = False,
    is_tried: bool = False,
    ahead: PartsAhead | None = None,
) -> RunOutcome:
    """Run it. `takeover` replaces a learner elsewhere that holds the run; `is_tried`: the trials have been run before;
    `ahead` has begun to import for its parts. Raises UserError if something must be fixed, PartError if a part of the
    run cannot go on, and KeyboardInterrupt at the second request to end."""
    _check(loaded)
    with ExitStack() as stack:
        if not is_tried:
            _try(loaded, display, LIGHT_TRIALS)
        if ahead is None:
            ahead = PartsAhead(stack)
            ahead.begin(loaded.config)
        if not is_tried:
            _try(loaded, display, LEARNER_TRIALS)
        return _run(loaded, display=display, takeover=takeover, ahead=ahead)


def _run(loaded: Loaded, *, display: Audience, takeover: bool, ahead: PartsAhead) -> RunOutcome:
    config, folder = loaded.config, RunFolder(loaded.config.folder)
    placement = place(config, gpus_here())
    began = time.monotonic()
    with only_one(folder.path, config.name), Interrupts() as interrupts, display, ExitStack() as stack:
        configure_logging("launcher", folder.logs / "launcher.log", quiet=True)
        folder.write_request(config, folder_holder(folder.path))
        embedded = None
        if config.redis.url == EMBEDDED_REDIS:
            embedded = RedisPart(folder.redis, notify=display.notify)
            stack.callback(embedded.close)
        url = embedded.url if embedded else config.redis.url
        client = stack.enter_context(connect(url, config.redis))
        check_server(client)
        supervisor = RunSupervisor(
            config=config,
            redis_url=url,
            embedded=embedded,
            client=client,
            display=display,
            interrupts=interrupts,
            takeover=takeover,
            placement=placement,
            start=ahead.start,
        )
        stack.callback(supervisor.close)
        supervisor.run()
        summary = _summarise(config, folder, supervisor, redis_url=url, seconds=time.monotonic() - began)
        return RunOutcome(summary=summary, exit_code=interrupts.exit_code)


def _check(loaded: Loaded) -> None:
    """Raise one UserError for the first unmet requirement, so that a mistake costs seconds and leaves nothing behind.
    Imports neither torch nor vLLM: trials that do run last, in processes of their own."""
    for check in REQUIREMENTS.values():
        check(loaded)
    if loaded.config.redis.url == EMBEDDED_REDIS:
        find_server()
    else:
        check_redis(loaded.config.redis.url, loaded.config)


def _try(loaded: Loaded, display: Audience, trials: Mapping[str, Trial]) -> None:
    with display.checking() as show:
        run_trials(loaded, report=show, warn=lambda text: display.notify(f"warning: {text}"), trials=trials)


def _summarise(
    config: schema.Config, folder: RunFolder, supervisor: RunSupervisor, *, redis_url: str, seconds: float
) -> RunSummary | None:
    view = supervisor.watcher.view
    if view is None or view.run.state == "absent":
        return None
    summary = summarise(
        folder=folder.path,
        state=view.run.state,
        seconds=seconds,
        audit=audit_folder(folder.path, redis_url=redis_url, run=config.name),
        versions_published=view.weights.published or 0,
        loads=supervisor.loads,
        restarts=supervisor.restarts,
    )
    write_durably(folder.summary, json.dumps(summary.to_json(), indent=2).encode())
    return summary
