"""T13: ten thousand messages by somebody who means ill, among the groups of a run that works: garbage, bombs, bodies
that are not what their headers say. None is trained, and each is counted with its reason."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import redis
import redis.asyncio

from streamrl.learner.groups.fetch import fetch_groups
from streamrl.learner.groups.ledger import DROPPED
from streamrl.learner.groups.plan import GroupCheck, Kind
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.wire.codec import pack
from tests.faults.report import report
from tests.feed_world import encode_answer
from tests.helpers import make_ticket
from tests.redis.run_world import RunWorld

NUM_MESSAGES = 10_000
NUM_PROMPTS = 600
MOST_MEMORY_BYTES = 64 << 20
BATCH = 250
Message = dict[str, bytes | str]


async def test_ten_thousand_hostile_messages_change_nothing_but_counters(
    tmp_path: Path, client: redis.Redis, async_client: redis.asyncio.Redis, keys: Keys, redis_url: str
) -> None:
    world = RunWorld(
        tmp_path, client=client, async_client=async_client, keys=keys, url=redis_url, num_prompts=NUM_PROMPTS
    )
    chance = random.Random(13)
    await step(world)
    memory = resident_bytes()
    peak, sent = memory, 0
    while sent < NUM_MESSAGES:
        with client.pipeline(transaction=False) as pipe:
            for _ in range(BATCH):
                pipe.xadd(keys.groups("train"), hostile(chance, world))
            pipe.execute()
        sent += BATCH
        while client.xlen(keys.groups("train")) > 10:  # until they are read and trimmed
            await step(world)
            peak = max(peak, resident_bytes())
    growth = peak - memory
    counted = sum(world.learner.feed.state().ledger.ignored.values())
    dropped = Counter(world.learner.feed.state().ledger.outcomes)
    while (await step(world)) is not Kind.END:
        pass
    world.learner.commit()
    audit = world.audit()
    report("T13", audit, injections=sent, crashes=0, memory_growth_mib=growth / (1 << 20), counted=counted)
    assert counted == NUM_MESSAGES
    assert [outcome for outcome in dropped if outcome.startswith(DROPPED)] == [], "who holds no lease ends no ticket"
    assert growth <= MOST_MEMORY_BYTES
    assert audit.outstanding == 0


async def step(world: RunWorld) -> Kind:
    """As the loop does it: the ranks look at the bodies, too."""
    await world.answer_all()
    plan = world.learner.feed.plan(step=world.learner.step, world_size=1, timeout_s=0.05)
    if plan is None:
        return Kind.IDLE
    if plan.kind is Kind.STEP:
        fetched = fetch_groups(world.learner.stream, plan, rank=0, vocabulary=1000)
        world.learner.train(plan, [GroupCheck(int(verdict)) for verdict in fetched.verdicts])
    world.learner.commit()
    return plan.kind


def hostile(chance: random.Random, world: RunWorld) -> Message:
    """One of them; at most one in forty is about a ticket that is open, or the data would soon be used up."""
    issued = int(world.learner.feed.metrics()["stream/issued"])
    number = chance.randrange(issued) if chance.random() < 0.025 else chance.randrange(max(1, issued - 12))
    uid = world.learner.uid
    header, body = encode_answer(make_ticket(number, run_uid=uid))
    message = chance.choice(HOSTILE)(chance, header, body)
    ours = {"n": str(number), "u": uid}
    return ours | message if chance.random() < 0.8 else message


def _garbage(chance: random.Random, header: bytes, body: bytes) -> Message:
    return {"h": chance.randbytes(chance.randrange(300)), "b": chance.randbytes(chance.randrange(300))}


def _cut_off(chance: random.Random, header: bytes, body: bytes) -> Message:
    return {"h": header[: chance.randrange(len(header))], "b": body}


def _flipped_body(chance: random.Random, header: bytes, body: bytes) -> Message:
    at = chance.randrange(len(body))
    return {"h": header, "b": body[:at] + bytes([body[at] ^ 1 << chance.randrange(8)]) + body[at + 1 :]}


def _bomb(chance: random.Random, header: bytes, body: bytes) -> Message:
    """Small, and hundreds of times larger when it is unpacked without limits."""
    size = chance.choice([1_000, 10_000, 60_000])
    bombs = [b"\x80" * size, b"\xdd" + size.to_bytes(4, "big") + b"\x80" * size, b"\x91" * size, b"\xdf" + b"\xff" * 4,
             b"\xc6\xff\xff\xff\xff" + b"x" * 100, b"\xc7\xff\x01" + b"x" * 255, b"\x82\xa1a\x01\xa1a\x02"]  # fmt: skip
    return {"h": chance.choice(bombs), "b": chance.choice(bombs)}


def _bomb_in_body(chance: random.Random, header: bytes, body: bytes) -> Message:
    return {"h": header, "b": _bomb(chance, header, body)["b"]}


def _other_schema(chance: random.Random, header: bytes, body: bytes) -> Message:
    return {"h": pack({"ticket": chance.choice([-1, 1 << 62, "one", None, [1], 0.5])}), "b": body}


def _no_fields(chance: random.Random, header: bytes, body: bytes) -> Message:
    return {"n": chance.choice(["", "-1", "9" * 30, "one", "\u0663"]), "what": "ever"}


HOSTILE = (_garbage, _cut_off, _flipped_body, _bomb, _bomb_in_body, _other_schema, _no_fields)


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not say how much memory we have")
