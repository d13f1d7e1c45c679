"""A worker's threads: what hangs in some of them, such as the look-up of a name, holds up no other work."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from streamrl.permissions import Permissions
from streamrl.workers import service
from streamrl.workers.main import Options, _run

OPTIONS = Options(redis_url="redis://nowhere", run="run", worker="worker", permissions=Permissions())


def test_names_that_take_long_to_look_up_hold_up_neither_other_work_nor_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Event()
    waited_s: list[float] = []

    async def serve(options: Options, stop: asyncio.Event, **others: Any) -> None:
        loop = asyncio.get_running_loop()
        hanging = [loop.run_in_executor(None, answers.wait, 20.0) for _ in range(100)]
        began = time.monotonic()
        await asyncio.to_thread(lambda: None)
        waited_s.append(time.monotonic() - began)
        assert not any(one.done() for one in hanging)

    monkeypatch.setattr(service, "serve", serve)
    began = time.monotonic()
    try:
        assert _run(OPTIONS) == 0
    finally:
        answers.set()
    assert waited_s[0] < 10.0
    assert time.monotonic() - began < 15.0
