"""How a launcher's run ends when its learner or its workers end by themselves: programs of a line stand for the parts,
beside a run that a real Redis holds."""

from __future__ import annotations

import json
import os
import pty
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import redis
import redis.asyncio
from rich.console import Console

from streamrl.config import schema
from streamrl.config.load import dump_config
from streamrl.config.placement import LEARNER, REWARD, Placement
from streamrl.errors import PartError, UserError
from streamrl.ops.launch.display import Display
from streamrl.ops.launch.parts import DRAIN_S
from streamrl.ops.launch.processes import Command, Interrupts, Process
from streamrl.ops.launch.supervisor import RunSupervisor
from streamrl.ops.monitor.remains import read_remains
from streamrl.protocol.transport.keys import Keys
from tests.helpers import wait_until
from tests.redis.monitor_world import Watched
from tests.redis.run_world import RunWorld

WORKER = "worker/0"
MISTAKE = "echo 'error: there is no such model' >&2; exit 2"


def until_told(last: str) -> str:
    """The words of a part that goes on until it is told to end; these are its last."""
    return f"trap '{last}' TERM; echo ready; while :; do sleep 0.05; done"


STAYS = until_told("exit 0")
IS_KILLED_AS_IT_SAVES = until_told("kill -KILL $$")

Launch = Callable[..., tuple[RunSupervisor, Interrupts]]


@pytest.fixture
def world(
    tmp_path: Path, client: redis.Redis, async_client: redis.asyncio.Redis, keys: Keys, redis_url: str
) -> RunWorld:
    return RunWorld(tmp_path, client=client, async_client=async_client, keys=keys, url=redis_url)


@pytest.fixture
def logs(world: RunWorld) -> Path:
    return world.config.folder / "logs"


@pytest.fixture
def launch(world: RunWorld) -> Launch:
    """A launcher, by the shell's words for each of its parts; and who is asked to end it."""

    def make(
        scripts: Mapping[str, str], display: Display | None = None, *, drain_s: float = DRAIN_S, **sections: object
    ) -> tuple[RunSupervisor, Interrupts]:
        def start(command: Command) -> Process:
            return Process(replace(command, arguments=("/bin/sh", "-c", scripts[command.name])))

        interrupts = Interrupts()
        supervisor = RunSupervisor(
            config=world.config.model_copy(update=sections),
            redis_url=world.url,
            embedded=None,
            client=world.client,
            display=display or Display(Console(quiet=True)),
            interrupts=interrupts,
            takeover=False,
            placement=Placement(shares={}),
            start=start,
            drain_s=drain_s,
        )
        return supervisor, interrupts

    return make


@contextmanager
def asked_to_end_once_ready(
    logs: Path, interrupts: Interrupts, *, first: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Inside, once all parts are there and `first` was done."""

    def is_ready(part: str) -> bool:
        log = logs / f"{part}.out"
        return log.exists() and "ready" in log.read_text()

    def ask() -> None:
        wait_until(lambda: is_ready("learner") and is_ready("worker-0"), description="all parts are there")
        first()
        interrupts.count = 1

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_a_learner_that_is_killed_as_it_saves_has_not_stopped_the_run(launch: Launch, logs: Path) -> None:
    supervisor, interrupts = launch({LEARNER: IS_KILLED_AS_IT_SAVES, WORKER: STAYS})

    with (
        asked_to_end_once_ready(logs, interrupts),
        pytest.raises(PartError, match="learner was ended by signal 9 and cannot continue"),
    ):
        supervisor.run()


def test_a_learner_that_is_killed_after_it_has_left_the_run_has_stopped_it(
    launch: Launch, world: RunWorld, logs: Path
) -> None:
    supervisor, interrupts = launch({LEARNER: IS_KILLED_AS_IT_SAVES, WORKER: STAYS})
    world.learner.stream.release("stopped")

    with asked_to_end_once_ready(logs, interrupts):
        supervisor.run()


@pytest.mark.parametrize("make", [pty.openpty, os.pipe], ids=["terminal", "pipe"])
def test_a_learner_has_its_time_to_save_when_the_launchers_terminal_is_closed(
    make: Callable[[], tuple[int, int]], launch: Launch, logs: Path, world: RunWorld
) -> None:
    saves = until_told(f"sleep 1; touch {logs}/saved; kill -KILL $$")
    reader, writer = make()
    with os.fdopen(writer, "w") as out, Display(Console(file=out)) as display:
        supervisor, interrupts = launch({LEARNER: saves, WORKER: STAYS}, display)
        world.learner.stream.release("stopped")
        with asked_to_end_once_ready(logs, interrupts, first=lambda: os.close(reader)):
            supervisor.run()

    assert (logs / "saved").exists()


def test_a_learner_that_does_not_end_in_time_is_killed_and_so_are_the_workers(launch: Launch, logs: Path) -> None:
    pids = f"echo $$ >> {logs}/pids"
    deaf = f"{pids}; trap '' TERM; echo ready; while :; do sleep 0.05; done"
    supervisor, interrupts = launch({LEARNER: deaf, WORKER: deaf}, drain_s=0.5)

    with (
        asked_to_end_once_ready(logs, interrupts),
        pytest.raises(PartError, match=rf"the learner did not end within 0\.5 s \(see {logs}\)"),
    ):
        supervisor.run()

    started = (logs / "pids").read_text().split()
    assert len(started) == 2
    assert [pid for pid in started if Path(f"/proc/{pid}").exists()] == []


def test_workers_that_cannot_go_on_end_a_run(launch: Launch) -> None:
    with pytest.raises(UserError, match="there is no such model"):
        launch({LEARNER: STAYS, WORKER: MISTAKE})[0].run()


@pytest.mark.parametrize("lost", [REWARD, WORKER])
def test_if_a_part_cannot_go_on_the_learner_saves_first_as_if_asked_to_end(
    lost: str, launch: Launch, world: RunWorld, logs: Path
) -> None:
    """And the run's folder says why, once the run is over."""
    folder = world.config.folder
    (folder / "config.yaml").write_text(dump_config(world.config))
    saves = until_told(f"while [ ! -e {logs}/told ]; do sleep 0.05; done; ls {logs} > {logs}/at-last; exit 0")
    bound = f"echo http://127.0.0.1:1 > {folder}/reward.bound"
    learns = f"while [ ! -e {logs}/learns ]; do sleep 0.05; done"
    scripts = {LEARNER: saves, WORKER: until_told(f"touch {logs}/worker-left; exit 0"), REWARD: f"{bound}; {STAYS}"}
    scripts[lost] = f"{bound}; {learns}; {MISTAKE}"
    supervisor, _ = launch(scripts, reward_server=schema.OwnRewardServer(model="m"))
    run = Watched(world)
    run.learner()

    def learn_and_stop() -> None:
        wait_until(lambda: supervisor.watcher.view is not None, description="the launcher looks")
        wait_until(supervisor._learner_is_at_work, description="it sees that the learner is at work")
        (logs / "learns").touch()
        wait_until(lambda: supervisor._failure is not None, description="it has noticed that a part is lost")
        world.learner.stream.release("stopped")
        (folder / "state.json").write_text(json.dumps({"state": "stopped", "term": world.learner.term}))
        (logs / "told").touch()

    thread = threading.Thread(target=learn_and_stop)
    with run.alive():
        thread.start()
        with pytest.raises(UserError, match="there is no such model"):
            supervisor.run()
        thread.join()

    assert "worker-left" not in (logs / "at-last").read_text(), "the learner ends before the workers"
    remains = read_remains(folder)
    assert (remains.state, remains.error) == ("stopped", f"{lost}: there is no such model")
    supervisor.close()


def test_workers_that_cannot_go_on_do_not_end_a_learner_that_writes_its_last_checkpoint(
    launch: Launch, logs: Path
) -> None:
    saving = logs / "saving"
    saves = until_told(f"touch {saving}; sleep 1; exit 0")
    dies_then = f"echo ready; while [ ! -e {saving} ]; do sleep 0.05; done; {MISTAKE}"
    supervisor, interrupts = launch({LEARNER: saves, WORKER: dies_then})

    with asked_to_end_once_ready(logs, interrupts):
        supervisor.run()

    assert "no such model" in (logs / "worker-0.out").read_text()


def test_what_a_full_disk_has_left_of_the_learners_error_hides_nothing(launch: Launch, world: RunWorld) -> None:
    supervisor, _ = launch({LEARNER: f": > {world.config.folder / 'learner.error'}; {MISTAKE}", WORKER: STAYS})

    with pytest.raises(UserError, match="learner: there is no such model"):
        supervisor.run()
