"""T34: a run that lived through faults, recorded meanwhile, is replayed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from streamrl.config import schema
from streamrl.config.load import dump_config
from streamrl.ops.audit import audit_folder
from streamrl.process import dying_with_us
from streamrl.protocol.transport.snapshot import snapshot
from tests.faults.judge.history import read_history
from tests.faults.judge.recorder import Recorder
from tests.faults.judged.faults import FAULTS, Scene
from tests.faults.judged.kinds import RUN, Kind
from tests.faults.judged.team import KEYS, Team
from tests.faults.report import report
from tests.helpers import wait_until
from tests.integration.learner_world import ROOT, lines
from tests.replay_world import last_tensors, run_replay, same_bits

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
SEED = 35
PATIENCE_S = 180.0
# Its learner lives on through these.
AROUND_THE_LEARNER = (
    "worker killed",
    "Redis killed",
    "replies to worker lost",
    "worker asleep",
    "connections broken",
    "Redis asleep",
    "road of worker blocked",
)
ALL_AROUND = (
    "rank killed",
    "Redis emptied",
    "worker killed",
    "dead letters repeated",
    "agent killed",
    "Redis put back",
)
FIGURES = ("train_rollouts/rewards", "train_rollouts/response_lengths", "train_optim/loss", "train_optim/grad_norm")


def test_the_replay_gives_the_weights_of_a_run_whose_learner_lived_through_it(tmp_path: Path) -> None:
    live, recording = live_through(AROUND_THE_LEARNER, tmp_path)
    again = replay_of(live, recording, "again")

    assert figures(again) == figures(live)
    assert same_bits(last_tensors(again), last_tensors(live))


def test_the_replay_of_whatever_has_happened_is_one_and_its_books_are_whole(tmp_path: Path) -> None:
    live, recording = live_through(ALL_AROUND, tmp_path)
    one, other = (replay_of(live, recording, name) for name in ("one", "other"))

    assert figures(one) == figures(other)
    assert same_bits(last_tensors(one), last_tensors(other))
    for run in (one, other):
        found = audit_folder(run.folder, redis_url=None, run=None)
        assert (found.lost, found.twice, found.unproven) == (0, 0, 0), found.to_json()
        assert found.trained > 0


def live_through(faults: Sequence[str], folder: Path) -> tuple[schema.Config, Path]:
    """The run, drained after all of them, and its recording."""
    (place := folder / "live").mkdir()
    with ExitStack() as parts:
        team = Team(Kind(name="replayed"), place, parts, seed=SEED)
        scene = Scene(team, Recorder(team.server.client, RUN, to=place / "seen.msgpack"), random.Random(SEED))
        with team.server.client() as client:
            wait_until(lambda: snapshot(client, KEYS).run, description="the run is there", timeout_s=PATIENCE_S)
        with recording_of(team, folder / "recording") as recorder:  # before the first group
            goes_on(team)
            for name in faults:
                scene.keep_copy()
                goes_on(team)
                with FAULTS[name](scene):
                    scene.wait(0.5)
                goes_on(team)
            team.drain()
            assert recorder.wait(PATIENCE_S) == 0, (folder / "recorder.out").read_text()
        audit = audit_folder(team.run_folder, redis_url=team.server.url)
    report(f"T34 {len(faults)}", audit, injections=len(faults))
    return team.config, folder / "recording"


def goes_on(team: Team) -> None:
    before = team.progress()

    def has_gone_on() -> bool:
        team.tend()
        return team.progress() > before

    wait_until(has_gone_on, description="the next checkpoint", timeout_s=PATIENCE_S, poll_s=0.2)


@contextmanager
def recording_of(team: Team, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """As an operator records: a process beside the run, which outlives whatever befalls Redis."""
    words = [sys.executable, "-m", "streamrl.ops.cli.main", "record", "--redis", team.server.url, "--run", RUN]
    with (folder.parent / "recorder.out").open("ab") as out:
        program = dying_with_us([*words, "--output", str(folder)], by=signal.SIGKILL)
        process = subprocess.Popen(program, cwd=ROOT, stdout=out, stderr=out)
    try:
        wait_until(lambda: folder.exists() or process.poll() is not None, description="it records")
        yield process
    finally:
        process.kill()
        process.wait()


def replay_of(live: schema.Config, recording: Path, name: str) -> schema.Config:
    """As many steps as the run has made."""
    training = live.training.model_copy(update={"max_steps": read_history(live.folder).step})
    config = live.model_copy(update={"name": name, "training": training})
    config.folder.mkdir(parents=True)
    (config.folder / "config.yaml").write_text(dump_config(config))
    assert run_replay(config, recording) == "finished"
    return config


def figures(config: schema.Config) -> dict[int, list[float]]:
    """Of each step, as it was made last."""
    made = {line["step"]: line for line in lines(config.folder / "metrics.jsonl") if FIGURES[0] in line}
    return {step: [line.get(name, 0.0) for name in FIGURES] for step, line in sorted(made.items())}
