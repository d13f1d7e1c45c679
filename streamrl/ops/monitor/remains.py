"""A run as its folder records it, for when its Redis is gone: finished, stopped, failed, crashed.

    state.json      the learner's last state; without it, the launcher's in summary.json
    metrics.jsonl   the curves            summary.json   the outcome of the last launch
    rollouts.jsonl  some rollouts         learner.error  why no learner took the run
                                          launcher.error why its launcher ended it

"running" there means that the learner did not get to record its end. Whether it lives is known only on its own machine;
if its process is gone, it has crashed. Only reads, and imports little: no schema, no numpy.
"""

from __future__ import annotations

import json
import shlex
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from streamrl.errors import ConfigError, TransportError
from streamrl.ops.monitor.bounds import longer
from streamrl.ops.monitor.build import build_view, with_verdict
from streamrl.ops.monitor.history import History
from streamrl.ops.monitor.view import View
from streamrl.process import started_at
from streamrl.protocol.transport.snapshot import Snapshot, StreamCounts
from streamrl.protocol.transport.types import RUN_STATES, Record, RunInfo
from streamrl.protocol.wire.ticket import PURPOSES

State = Literal["absent", "running", "finished", "stopped", "failed", "crashed"]  # absent: no learner has taken the run
_NO_COUNTS = StreamCounts(num_tickets=0, num_leased=0, leased_by={}, num_groups=0)


@dataclass(frozen=True, kw_only=True)
class Remains:
    folder: Path
    name: str
    url: str  # of Redis, from the configuration
    config: Mapping[str, Any]
    state: State
    recorded: Mapping[str, Any]  # state.json
    error: str

    @cached_property
    def history(self) -> History:
        return History.read(self.folder)

    @cached_property
    def _last(self) -> tuple[Record, ...]:
        """Of steps and of validations, the last record, if there is one; read without the rest of the curves."""
        end = History.read_end(self.folder)
        return tuple(curve.records[-1] for curve in (end.steps, end.validations) if curve.records)

    @property
    def step(self) -> int:
        return max((record.step for record in self._last), default=0)

    @property
    def uid(self) -> str | None:
        return _read_json(self.folder / "run.json").get("run_uid")

    @property
    def term(self) -> int:
        return int(self.recorded.get("term", 0))

    @property
    def at(self) -> float:
        """When it ended; for a crash, the last sign of life."""
        last_metric_at = max((record.at for record in self._last), default=0.0)
        recorded_at: float = self.recorded.get("at", 0.0)
        if self.state in ("crashed", "running"):
            return max(last_metric_at, recorded_at)
        return recorded_at or last_metric_at or _modified(self.folder)

    @property
    def began_at(self) -> float:
        return _modified(self.folder / "run.json")

    @property
    def summary(self) -> Mapping[str, Any] | None:
        return _read_json(self.folder / "summary.json") or None

    @property
    def has_ended(self) -> bool:
        return self.state in ("finished", "stopped", "failed", "crashed")

    @property
    def description(self) -> str:
        """What became of the run; follows its name in a sentence."""
        return {
            "absent": "has not started",
            "running": f"ran on {self.recorded.get('host')} when its folder was last written",
            "finished": f"has finished, after {self.step} steps",
            "stopped": f"was stopped at step {self.step}",
            "failed": f"failed at step {self.step}: {self.error}",
            "crashed": f"crashed at step {self.step}",
        }[self.state]

    @property
    def longer(self) -> str:
        """The setting that gives the finished run more to do."""
        return longer(self.config.get("training", {}), step=self.step)

    @property
    def up(self) -> str:
        """The command that starts a learner of the run, which has ended."""
        more = (self.longer,) if self.state == "finished" else ()
        return shlex.join(["streamrl", "up", f"{self.folder}/config.yaml", *more])

    @property
    def where(self) -> str:
        return str(self.folder)


def read_remains(folder: Path) -> Remains:
    """Read a run's folder. ConfigError if it is none."""
    config = read_config(folder)
    recorded = _read_json(folder / "state.json") or _recorded_by_launcher(folder)
    refusal = _read_json(folder / "learner.error")
    state = _state(folder, recorded, refusal)
    error = str(recorded.get("error") or refusal.get("error") or _why_ended(folder, recorded))
    name, url = str(config["name"]), str(config["redis"]["url"])
    return Remains(folder=folder, name=name, url=url, config=config, state=state, recorded=recorded, error=error)


def read_config(folder: Path) -> Mapping[str, Any]:
    """Read the complete configuration that the run wrote; `name` and `redis.url` are checked."""
    import yaml

    path = folder / "config.yaml"
    try:
        if not path.is_file():
            raise no_run(folder)
        config: Any = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        str(config["name"]), str(config["redis"]["url"])
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError):
        raise ConfigError(f"{path} is not the configuration of a run: it is not valid YAML") from None
    except (KeyError, TypeError):
        raise ConfigError(f"{path} is not the configuration of a run: `name` or `redis.url` is missing") from None
    found: Mapping[str, Any] = config
    return found


def no_run(folder: Path) -> ConfigError:
    """Return an error with the nearest name beside the folder or in `runs`."""
    if folder.is_dir():
        return ConfigError(f"{folder} is not the folder of a run: there is no config.yaml in it")
    runs = {path.parent.name: path for place in (Path("runs"), folder.parent) for path in place.glob("*/config.yaml")}
    near = [runs[name].parent for name in get_close_matches(folder.name, runs, n=1)]
    hint = f"; did you mean {near[0]}?" if near else "; `streamrl runs ls` lists those in `runs`"
    return ConfigError(f"{folder} is not the folder of a run: it does not exist{hint}")


def _recorded_by_launcher(folder: Path) -> Mapping[str, Any]:
    path = folder / "summary.json"
    summary = _read_json(path)
    return {"state": summary["state"], "at": _modified(path)} if "state" in summary else {}


def _state(folder: Path, recorded: Mapping[str, Any], refusal: Mapping[str, Any]) -> State:
    last = recorded.get("state")
    if last in RUN_STATES and last != "running":
        ended: State = last
        return ended
    if last == "running":
        return "running" if _may_live(recorded) else "crashed"
    if not (folder / "terms").is_dir():
        return "absent"
    return "failed" if refusal else "crashed"


def _why_ended(folder: Path, recorded: Mapping[str, Any]) -> str:
    """Return why the launcher ended the run's last term, if it did."""
    noted = _read_json(folder / "launcher.error")
    return str(noted.get("error", "")) if noted.get("term") == recorded.get("term") else ""


def _may_live(recorded: Mapping[str, Any]) -> bool:
    """Return whether the process may be alive; on another machine this is unknown, so it may."""
    if recorded.get("host") != socket.gethostname():
        return True
    began = recorded.get("process_began")
    return bool(began) and began == started_at(int(recorded.get("pid", 0)))


def view_of(remains: Remains, *, now: float) -> View:
    """Build a view; what only Redis knows is missing."""
    seen = build_view(_snapshot(remains, now=now), run_name=remains.name, server="", history=remains.history)
    run = replace(
        seen.run,
        state=remains.state,
        term=remains.term,
        error=remains.error or None,
        folder=str(remains.folder),
        ended_at=remains.at if remains.has_ended else None,
        eta_s=None,
    )
    return with_verdict(replace(seen, run=run, summary=remains.summary))


def _snapshot(remains: Remains, *, now: float) -> Snapshot:
    steps = remains.history.steps.records
    version = steps[-1].values.get("weights/version") if steps else None
    info = RunInfo(
        uid=remains.uid or "",
        name=remains.name,
        term=remains.term,
        config_json=json.dumps(remains.config, default=str),
        fingerprint="",
        state="stopped",  # a placeholder; the view gets the right state
    )
    return Snapshot(
        at=now,
        run=info,
        created_at=remains.began_at or None,
        step=remains.step,
        holder=None,
        control="run",
        streams=dict.fromkeys(PURPOSES, _NO_COUNTS),
        num_dead=int(steps[-1].values.get("stream/dead_letters", 0)) if steps else 0,
        latest_version=int(version) if version else None,
        latest_version_step=steps[-1].step if version else 0,
        reports=(),
        records=(),
        events=(),
        used_memory_bytes=0,
        max_memory_bytes=0,
    )


class FolderWatcher:
    """Like `poller.Watcher`, for a folder, which is read again when it has changed."""

    def __init__(self, remains: Remains, *, clock: Callable[[], float] = time.time) -> None:
        self._remains, self._clock = remains, clock
        self._as_of = _stamp(remains.folder)

    @property
    def history(self) -> History:
        return self._remains.history

    def look(self) -> View:
        if (stamp := _stamp(self._remains.folder)) != self._as_of:
            try:
                self._remains, self._as_of = read_remains(self._remains.folder), stamp
            except ConfigError as error:  # moved or deleted since: it may come back
                raise TransportError(str(error)) from error
        if self._remains.state == "running":
            raise TransportError(
                "the run has been started again, and this view is out of date: run this command again to watch it"
            )
        return view_of(self._remains, now=self._clock())


def _stamp(folder: Path) -> tuple[float, ...]:
    return tuple(_modified(folder / name) for name in ("state.json", "metrics.jsonl", "summary.json"))


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read_json(path: Path) -> Mapping[str, Any]:
    """Read a JSON object; empty if the file is missing or incomplete."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
