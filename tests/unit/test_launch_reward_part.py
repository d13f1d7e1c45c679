"""The run's own reward server: ready when it says so, each time anew, and always at the same address."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from streamrl.config import schema
from streamrl.errors import PartError
from streamrl.ops.launch.parts import RunFolder
from streamrl.ops.launch.processes import Command, Process
from streamrl.ops.launch.reward_part import RewardPart
from tests.helpers import wait_until


class MadeUpProcess:
    code: int | None = None

    def poll(self) -> int | None:
        return self.code


@pytest.mark.parametrize("code", [1, 0])  # 0: somebody asked it to end
def test_a_server_that_ended_is_ready_again_only_when_it_says_so(tmp_path: Path, code: int) -> None:
    started: list[tuple[Command, MadeUpProcess]] = []

    def start(command: Command) -> Process:
        started.append((command, MadeUpProcess()))
        return cast(Process, started[-1][1])

    folder = RunFolder(tmp_path)
    part = RewardPart(schema.OwnRewardServer(model="m"), folder, notify=lambda text: None, start=start)
    folder.reward_bound.write_text("http://127.0.0.1:4711")
    part.look()
    assert (part.url, part.is_ready) == ("http://127.0.0.1:4711", False)  # which workers may be started with
    folder.reward_url.write_text("http://127.0.0.1:4711")
    part.look()
    assert (part.is_ready, part.progress.report().doing) == (True, "serve")

    started[0][1].code = code

    def is_started_again() -> bool:
        part.look()
        return len(started) == 2

    wait_until(is_started_again, description="the server is started again")
    part.look()
    assert part.progress.report().doing == "restart"
    assert "--port=4711" in started[1][0].arguments  # where the workers know it

    folder.reward_url.write_text("http://127.0.0.1:4711")
    part.look()
    assert part.progress.report().doing == "serve"


class Loading:
    """A server that loads its model, by a clock that the test sets."""

    def __init__(self, folder: Path) -> None:
        self.now, self.told, self.process = 0.0, list[str](), MadeUpProcess()
        self.folder = RunFolder(folder)
        self.part = RewardPart(
            schema.OwnRewardServer(model="m"),
            self.folder,
            notify=self.told.append,
            clock=lambda: self.now,
            start=self._start,
        )

    def _start(self, command: Command) -> Process:
        self.process = MadeUpProcess()
        return cast(Process, self.process)

    def look_at(self, now: float) -> None:
        self.now = now
        self.part.look()


def test_a_server_that_never_gets_ready_ends_the_run_by_a_setting_which_is_named(tmp_path: Path) -> None:
    loading = Loading(tmp_path)
    loading.look_at(599)
    with pytest.raises(PartError, match=r"reward_server\.start_timeout_s=600 .*raise that setting"):
        loading.look_at(601)


def test_a_server_that_takes_long_to_be_ready_again_is_told_of_and_the_run_goes_on(tmp_path: Path) -> None:
    loading = Loading(tmp_path)
    loading.folder.reward_url.write_text("http://127.0.0.1:4711")
    loading.look_at(1000)
    loading.process.code = 1
    loading.look_at(2000)
    loading.look_at(2002)
    assert len(loading.told) == 1, "that it died"
    loading.look_at(2700)
    loading.look_at(2701)
    [_, told] = loading.told
    assert "reward_server.start_timeout_s=600" in told
    assert loading.part.progress.report().doing == "restart"
    loading.folder.reward_url.write_text("http://127.0.0.1:4711")
    loading.look_at(5000)
    assert loading.part.progress.report().doing == "serve"
