"""Agents of every bad kind, many of each, in a worker's loop: every ticket ends once, and no session outlives its
rollout."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from streamrl.protocol.transport.types import RunInfo
from streamrl.protocol.wire.group import decode_header
from streamrl.telemetry.progress import Progress
from streamrl.workers.rewards.mixing import Rewards
from streamrl.workers.rollout.answer import Answerer
from streamrl.workers.rollout.loop import Rollout
from streamrl.workers.rollout.roles import TicketsDouble
from streamrl.workers.weights.roles import WeightsDouble
from tests.helpers import make_ticket, wait_until_async
from tests.session_world import PLAIN, Teller, agent_world
from tests.worker_world import FIRST_VERSION

KINDS = ("raise", "exit", "kill", "hang", "block", "text", "eat", "huge", "good")


@pytest.mark.parametrize("each", [2, pytest.param(20, marks=pytest.mark.long)])
async def test_every_ticket_ends_once_and_no_session_outlives_its_rollout(tmp_path: Path, each: int) -> None:
    async with agent_world(tmp_path, PLAIN, "bad", timeout_s=5.0, memory_mb=1024, processes=2) as world:
        info = RunInfo(uid="uid", name="run", term=1, config_json="{}", fingerprint="model", state="running")
        tickets, engine = TicketsDouble(info), Teller(world.facts, lambda asked: "well")
        ids = np.array([5, 6, 7], np.int32)
        for number in range(each * len(KINDS)):
            fields = {"what": KINDS[number % len(KINDS)]}
            tickets.waiting.append(make_ticket(number, token_ids=ids, fields=fields, num_samples=2))
        answerer = Answerer(
            rewards=Rewards({}), config=world.config, worker="0", fingerprint="model", player=world.player
        )
        rollout = Rollout(
            tickets=tickets,
            weights=WeightsDouble(version=FIRST_VERSION),
            answerer=answerer,
            config=world.config,
            has_other_settings=lambda info: False,
            progress=Progress(part="worker/0", role="worker"),
        )
        stop = asyncio.Event()
        working = asyncio.create_task(rollout.run(engine, stop), name="rollout")

        async def all_ended() -> bool:
            return working.done() or len(tickets.delivered) >= each * len(KINDS)

        await wait_until_async(all_ended, description="every ticket has ended", timeout_s=240 * each)
        stop.set()
        await working
        told = Counter(number for number, _, _ in tickets.delivered)
        assert told == Counter(range(each * len(KINDS)))
        assert tickets.handed_back == []
        ends = {number: decode_header(header).failed for number, header, _ in tickets.delivered}
        bad = [failed for number, failed in ends.items() if KINDS[number % len(KINDS)] not in ("good", "huge")]
        assert all(bad)
        assert world.num_open == 0
        assert engine.stats().in_flight == 0
