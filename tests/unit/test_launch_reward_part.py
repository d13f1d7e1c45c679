"""The run's own reward server: ready when it says so, each time anew, and always at the same address."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from streamrl.config import schema
from streamrl.ops.launch.parts import RewardPart, RunFolder
from streamrl.ops.launch.processes import Command, Process
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
    part = RewardPart(schema.RewardServer(model="m"), folder, notify=lambda text: None, start=start)
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
