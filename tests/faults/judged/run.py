"""One run of a kind, from its start through volleys of faults to its drain, and the judge's verdict.

    start ─► first checkpoint ─► volley: up to three faults start ─► a moment ─► they end ─► the next checkpoint ─► ...
          ─► drain ─► verdict ─► compared with the audit's

Some volleys do not wait for that checkpoint: they hit a run that has not recovered from the previous one. The seed
decides what happens and in which order; when it hits the run depends on the machine. Every wait is bounded.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import redis

from bench.measure import Say
from streamrl.errors import TransportError
from tests.faults.judge.books import Rules, Verdict, Violation, judge
from tests.faults.judge.compare import disagreements
from tests.faults.judge.history import read_history
from tests.faults.judge.recorder import Recorder, look
from tests.faults.judge.weights import Store, WeightsWatch, file_store, redis_store
from tests.faults.judged.faults import FAULTS, NEED_WATCHDOG, NothingThereError, Scene
from tests.faults.judged.kinds import DTYPE, RUN, Kind
from tests.faults.judged.light import LightTeam
from tests.faults.judged.team import Team
from tests.helpers import wait_until

_BEGUN_WITHIN_S = 180.0
_RECOVERED_WITHIN_S = 150.0
_LASTS_S = (0.2, 2.0)
_QUIET_S = (0.0, 1.0)  # between two volleys
_MOST_AT_ONCE = 3
_INTO_RECOVERY = 1 / 3  # of the volleys
_AWAY = (redis.RedisError, TransportError)  # from a plain client, and from an operator's command


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The outcome of one run."""

    kind: str
    seed: int
    seconds: float
    injections: Mapping[str, int]
    recoveries_s: Sequence[float]  # from the end of a volley to the next checkpoint
    num_eras: int  # of Redis
    num_entries: int  # seen in the streams
    num_forged: int
    num_retries: int
    weights_compared: int
    endings: Mapping[str, int]
    verdict: Verdict
    violations: Sequence[Violation]  # of the verdict and of the weights
    disagreements: Sequence[str]
    stuck: str  # what did not happen in time; empty: nothing
    evidence: str = ""

    @property
    def ok(self) -> bool:
        return not (self.violations or self.disagreements or self.stuck)


def run_judged(
    kind: Kind, folder: Path, *, seconds: float, seed: int, without: Collection[str] = (), keep: Path, say: Say
) -> Judged:
    """`keep`: where the folder is copied if something is wrong."""
    with ExitStack() as parts:
        team = (LightTeam if kind.light else Team)(kind, folder, parts, seed=seed)
        recorder = Recorder(team.server.client, RUN, to=folder / "seen.msgpack")
        recorder.start()
        client = parts.enter_context(team.server.client())
        watch = WeightsWatch(team.run_folder, recorder.record, lambda: _store(team, client), dtype=DTYPE)
        if team.publishes_masters:
            watch.start()
            parts.callback(watch.stop)
        scene = Scene(team, recorder, random.Random(f"{seed} {kind.name}"))
        ordeal = _Ordeal(scene, seed=seed, without=without, say=say)
        stuck = ordeal.suffer(seconds)
        found = _conclude(ordeal, watch, seed=seed, stuck=stuck)
    if found.ok:
        return found
    evidence = keep / f"{time.strftime('%Y%m%d-%H%M%S')}-{kind.name}-{seed}"
    shutil.copytree(folder, evidence, ignore=_no_evidence)
    return replace(found, evidence=str(evidence))


def _conclude(ordeal: _Ordeal, watch: WeightsWatch, *, seed: int, stuck: str) -> Judged:
    scene, team = ordeal.scene, ordeal.scene.team
    if stuck:
        team.end_all()
        team.server.revive()
    with team.server.client() as client:
        history = read_history(team.run_folder)
        record = scene.recorder.stop()
        looks = watch.stop() if team.publishes_masters else watch.looks
        record.final = look(client, RUN, history.run_uid)
    audit = _audit(team)
    verdict = judge(history, record, Rules(prompts=team.prompts(), max_lag=team.max_lag, forged=scene.forged))
    return Judged(
        kind=team.kind.name,
        seed=seed,
        seconds=round(time.monotonic() - ordeal.began, 1),
        injections=dict(ordeal.injections),
        recoveries_s=tuple(round(seconds, 1) for seconds in ordeal.recoveries_s),
        num_eras=len(record.eras),
        num_entries=len(record.seen),
        num_forged=len(scene.forged),
        num_retries=len(history.retries),
        weights_compared=len(looks.compared),
        endings=dict(team.endings),
        verdict=verdict,
        violations=(*verdict.violations, *looks.violations),
        disagreements=() if stuck else disagreements(verdict, audit),  # the audit knows more about open tickets
        stuck=stuck,
    )


def _audit(team: Team) -> dict[str, Any]:
    done = subprocess.run(team.audit_words(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode in (0, 1), f"the audit ended with {done.returncode}: {done.stderr}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _store(team: Team, client: redis.Redis) -> Store:
    run_uid = json.loads((team.run_folder / "run.json").read_text())["run_uid"]
    if team.kind.files:
        return file_store(team.folder / "blobs", run_uid)
    return redis_store(client, RUN, run_uid)


def _no_evidence(folder: str, names: list[str]) -> list[str]:
    """Skip copies of Redis, and what cannot be copied."""
    return [name for name in names if name == "copies" or (Path(folder) / name).is_socket()]


class _Ordeal:
    def __init__(self, scene: Scene, *, seed: int, without: Collection[str], say: Say) -> None:
        self.scene, self._say = scene, say
        self.injections: Counter[str] = Counter()
        self.recoveries_s: list[float] = []
        self.began = time.monotonic()
        # Separate from the faults' generator, whose draws depend on what they find.
        self._order = random.Random(f"{seed} {scene.team.kind.name}")
        kind = scene.team.kind
        left_out = {*without, *(NEED_WATCHDOG if kind.light else ())}
        self._names = sorted(FAULTS.keys() - left_out)

    def suffer(self, seconds: float) -> str:
        """Return what the run got stuck at; empty if it never did."""
        try:
            self._wait_for_progress("the run has begun", _BEGUN_WITHIN_S)
            self._say(f"{self.scene.team.kind.name}: at work after {time.monotonic() - self.began:.0f} s")
            ends = time.monotonic() + seconds
            while time.monotonic() < ends:
                self._volley()
            self.scene.team.drain()
        except (AssertionError, *_AWAY) as error:
            return f"{error}\n{self.scene.team.last_words()}"
        return ""

    def _volley(self) -> None:
        self.scene.keep_copy()
        self.scene.wait(self._order.uniform(*_QUIET_S))
        names, lasts_s = self._draw(), self._order.uniform(*_LASTS_S)
        self._say(f"{self.scene.team.kind.name}: {' and '.join(names)}")
        with ExitStack() as under_way:
            for name in names:
                try:
                    under_way.enter_context(FAULTS[name](self.scene))
                    self.injections[name] += 1
                except (NothingThereError, *_AWAY):  # or an earlier fault has stopped the server that this one needs
                    continue
            self.scene.wait(lasts_s)
        if self._order.random() < _INTO_RECOVERY:
            self.scene.team.tend()
        else:
            self.recoveries_s.append(self._wait_for_progress(f"a checkpoint after {names}", _RECOVERED_WITHIN_S))

    def _draw(self) -> list[str]:
        """Draw faults, at most one of Redis: no fault may stop a server that another is about to start."""
        names = self._order.sample(self._names, k=self._order.randint(1, _MOST_AT_ONCE))
        of_redis = [name for name in names if name.startswith("Redis")]
        return [name for name in names if name not in of_redis[1:]]

    def _wait_for_progress(self, description: str, timeout_s: float) -> float:
        """Return the seconds until a new checkpoint was made."""
        team = self.scene.team
        before, began = team.progress(), time.monotonic()

        def has_gone_on() -> bool:
            team.tend()
            return team.progress() > before

        wait_until(has_gone_on, description=description, timeout_s=timeout_s, poll_s=0.2)
        return time.monotonic() - began
