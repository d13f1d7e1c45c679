"""Environments of the user's in their child processes: good ones, and every kind of bad one beside them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import schema
from streamrl.errors import ConfigError, SampleError
from streamrl.permissions import Permissions
from streamrl.workers.environments.base import Answer
from streamrl.workers.environments.own import OwnEnvironment, build_children
from streamrl.workers.environments.own_child import THREADS
from tests.helpers import wait_until_async

CODE = r"""
import asyncio, os, threading, time

class Echo:
    left = 0
    def __init__(self, *, shout=False): self.shout = shout
    def reset(self, row):
        print("a print must not disturb the answers")
        self.row = row
        return row.get("opening")
    def step(self, completion):
        said = completion.upper() if self.shout else completion
        return f"{self.row['name']}: {said}", 1, completion == "bye"
    def close(self): Echo.left += 1

class Left(Echo):
    def step(self, completion): return str(Left.left), 0, False
    def close(self): Left.left += 1

class Choosy(Left):
    def reset(self, row):
        if row["name"] == "nobody": raise KeyError("nobody")
        if row["name"] == "late": time.sleep(3600)

class Bad(Echo):
    def step(self, completion):
        if completion == "raise": raise KeyError("what")
        if completion == "exit": os._exit(3)
        if completion == "write":
            for pipe in os.listdir("/proc/self/fd"):
                if os.readlink(f"/proc/self/fd/{pipe}").startswith("pipe:") and int(pipe) > 2:
                    try: os.write(int(pipe), b"garbage\n" * 10)
                    except OSError: pass
            time.sleep(3600)
        if completion == "hang": time.sleep(3600)
        if completion == "nan": return "", float("nan"), False
        if completion == "two": return "", 1.0
        if completion == "number": return 7, 1.0, False
        if completion == "huge": return "x" * (1 << 28), 1.0, False
        if completion == "wide": return "\U0001f600" * (1 << 20), 1.0, False
        if completion == "wider": return "\U0001f600" * ((1 << 20) + 1), 1.0, False
        if completion == "half": return "half a \ud800 character", 1.0, False
        if completion == "tell": raise ValueError("half a \ud800 character")
        if completion == "word": return "", "one", False
        if completion == "eat": return "x" * (1 << 34), 1.0, False
        return "well", 0.0, False

class Waits:
    async def reset(self, row): await asyncio.sleep(0)
    async def step(self, completion):
        await asyncio.sleep(0.5)
        return None, 1.0, True

class Sleeps(Waits):
    async def reset(self, row): pass
    def step(self, completion):
        time.sleep(0.5)
        return None, 1.0, True

class Slow:
    closed, running, most = [], [], 0
    together = threading.Barrier(64)
    def __init__(self, *, slow): self.slow = slow
    def wait(self, method):
        Slow.running.append(self)
        Slow.most = max(Slow.most, len(Slow.running))
        if method == self.slow: time.sleep(0.5)
        Slow.running.remove(self)
    def reset(self, row): self.wait("reset")
    def step(self, completion):
        if completion == "hang": time.sleep(3600)
        if completion == "meet": self.together.wait()
        self.wait("step")
        return f"{os.getpid()} {len(Slow.closed)} {Slow.most}", 0.0, True
    def close(self):
        self.wait("close")
        Slow.closed.append(self)

class Late:
    stepping, met = False, []
    def reset(self, row): pass
    def step(self, completion):
        if completion == "met": return str(Late.met), 0.0, False
        Late.stepping = True
        time.sleep(3.0)
        Late.stepping = False
    def close(self): Late.met.append(Late.stepping)

class Stuck:
    def reset(self, row): pass
    def step(self, completion): return str(os.getpid()), 0.0, False
    def close(self): time.sleep(3600)

class Meets(Waits):
    together = threading.Barrier(128)
    def __init__(self): self.together.wait()

class Mute:
    def reset(self, row): pass

number = 7
"""

Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    (tmp_path / "mine.py").write_text(CODE)

    @asynccontextmanager
    async def start(name: str, longest_wait_s: float | None = None, **settings: Any) -> AsyncIterator[OwnEnvironment]:
        target = f"{tmp_path / 'mine.py'}:{name}"
        made = schema.Environment(target=target, **{"timeout_s": 60.0, **settings})
        permissions = Permissions(reward_code=(target,))
        environment = OwnEnvironment(build_children(made, permissions, longest_wait_s=longest_wait_s))
        await environment.start()
        try:
            yield environment
        finally:
            await environment.close()

    return start


async def test_each_rollout_has_an_instance_of_its_own(start: Start) -> None:
    async with start("Echo", options={"shout": True}, processes=2) as environment:
        rollouts = [await environment.begin({"name": name, "opening": f"hi {name}"}) for name in "abc"]
        assert [one.opening for one in rollouts] == ["hi a", "hi b", "hi c"]
        told = await asyncio.gather(*(one.step("x") for one in rollouts))
        assert told == [Answer(observation=f"{name}: X", reward=1.0) for name in "abc"]
        assert (await rollouts[0].step("bye")).done


async def test_a_rollout_that_is_over_is_closed(start: Start) -> None:
    async with start("Left") as environment:
        watching = await environment.begin({})
        for _ in range(3):
            await (await environment.begin({})).close()

        async def all_closed() -> bool:
            return (await watching.step("")).observation == "3"

        await wait_until_async(all_closed, description="three rollouts are closed")


async def test_a_rollout_that_could_not_begin_is_closed_too(start: Start) -> None:
    async with start("Choosy", timeout_s=2.0) as environment:
        watching = await environment.begin({"name": "a"})
        with pytest.raises(SampleError, match=r"failed in reset: KeyError: 'nobody'"):
            await environment.begin({"name": "nobody"})
        with pytest.raises(SampleError, match="failed in reset: no answer within 2 s"):
            await environment.begin({"name": "late"})

        async def all_closed() -> bool:
            return (await watching.step("")).observation == "2"

        await wait_until_async(all_closed, description="what they had made is closed")


@pytest.mark.parametrize("name", ["Waits", "Sleeps"])
async def test_rollouts_that_wait_do_so_together(start: Start, name: str) -> None:
    async with start(name) as environment:
        rollouts = [await environment.begin({}) for _ in range(40)]
        began = time.monotonic()
        await asyncio.gather(*(one.step("") for one in rollouts))
        assert time.monotonic() - began < 0.5 * 40 / 2, "not one after the other"


@pytest.mark.parametrize("method", ["reset", "step", "close"])
async def test_a_call_that_waits_for_a_thread_is_not_late(start: Start, method: str) -> None:
    """The calls take a quarter of their time each, but the last ones begin when it would be over."""
    async with start("Slow", options={"slow": method}, timeout_s=2.0) as environment:
        rollouts = await asyncio.gather(*(environment.begin({}) for _ in range(8 * THREADS)))
        told = await asyncio.gather(*(one.step("") for one in rollouts))
        for one in rollouts:
            await one.close()
        watching = await environment.begin({})

        async def all_closed() -> list[str] | None:
            process, num_closed, _ = (await watching.step("")).observation.split()
            return [process] if int(num_closed) == len(rollouts) else None

        processes = await wait_until_async(all_closed, description="all are closed")
        assert {one.observation.split()[0] for one in told} == set(processes), "in the same process"


async def test_instances_of_an_asynchronous_class_are_made_side_by_side(start: Start) -> None:
    async with start("Meets", timeout_s=20.0) as environment:
        assert len(await asyncio.gather(*(environment.begin({}) for _ in range(128)))) == 128


async def test_a_call_that_finds_no_thread_in_time_is_not_made(start: Start) -> None:
    async with start("Slow", longest_wait_s=0.01, options={"slow": "reset"}) as environment:
        begun = await asyncio.gather(*(environment.begin({}) for _ in range(THREADS + 1)), return_exceptions=True)
        refused = [str(one) for one in begun if isinstance(one, Exception)]
        assert refused == ["no thread was free within 0.01 s"]
        assert await environment.begin({}), "they are free again"


async def test_a_rollout_is_closed_however_long_that_waits_for_a_thread(start: Start) -> None:
    async with start("Slow", longest_wait_s=0.01, options={"slow": "step"}) as environment:
        busy = [await environment.begin({}) for _ in range(THREADS)]
        over = await environment.begin({})
        steps = [asyncio.create_task(one.step("")) for one in busy]
        await asyncio.sleep(0)
        await over.close()
        await asyncio.gather(*steps)

        async def num_closed() -> bool:
            return (await busy[0].step("")).observation.split()[1] == "1"

        await wait_until_async(num_closed, description="it is closed")


async def test_a_rollout_is_closed_when_its_late_call_has_ended_and_not_before(start: Start) -> None:
    async with start("Late", timeout_s=2.0) as environment:
        late, watching = await environment.begin({}), await environment.begin({})
        with pytest.raises(SampleError, match="no answer within 2 s"):
            await late.step("")
        await late.close()

        async def closed() -> str:
            return (await watching.step("met")).observation.strip("[]")

        assert await wait_until_async(closed, description="it is closed") == "False", "nobody is in its `step`"


async def test_closes_that_hang_cost_the_process_and_not_all_rollouts_after_it(start: Start) -> None:
    async with start("Stuck", timeout_s=1.0) as environment:

        async def pid() -> str:
            episodes = [await environment.begin({}) for _ in range(8)]
            pids = {(await episode.step("")).observation for episode in episodes}
            for episode in episodes:
                await episode.close()
            return pids.pop()

        first = await pid()

        async def is_replaced() -> bool:
            try:
                return await pid() != first
            except SampleError:  # it was with the process
                return False

        await wait_until_async(is_replaced, description="another process")


async def test_threads_that_hang_are_not_among_those_that_a_call_waits_for(start: Start) -> None:
    async with start("Slow", options={"slow": ""}, timeout_s=5.0) as environment:
        rollouts = [await environment.begin({}) for _ in range(THREADS)]
        few = THREADS // 2 - 1
        hung = await asyncio.gather(*(one.step("hang") for one in rollouts[:few]), return_exceptions=True)
        assert {str(error) for error in hung} == {"the environment failed in step: no answer within 5 s"}
        told = await asyncio.gather(*(one.step("meet") for one in rollouts))
        assert len(told) == THREADS, "all at once"


async def test_a_call_whose_caller_has_gone_keeps_its_thread_until_it_ends(start: Start) -> None:
    async with start("Slow", options={"slow": "reset"}) as environment:
        watching = await environment.begin({})

        async def most_at_once() -> int:
            return int((await watching.step("")).observation.split()[-1])

        async def all_begin() -> bool:
            return await most_at_once() >= THREADS - 1

        gone = [asyncio.create_task(environment.begin({})) for _ in range(THREADS - 1)]
        await wait_until_async(all_begin, description="all but one of the threads are taken")
        for begun in gone:
            begun.cancel()
        await asyncio.gather(*(environment.begin({}) for _ in range(THREADS)))
        assert await most_at_once() <= THREADS


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("raise", r"KeyError: 'what' \(mine.py:\d+: if completion == \"raise\""),
        ("nan", "step\\(\\) must return a finite number as reward, not nan"),
        ("two", "step\\(\\) must return \\(observation, reward, done\\)"),
        ("number", "step\\(\\) must return a text or None, not 7"),
        ("eat", "MemoryError"),
        ("huge", "step\\(\\) may return at most 1048576 characters, not 268435456"),
        ("wider", "step\\(\\) may return at most 1048576 characters, not 1048577"),
        ("half", "UnicodeEncodeError"),
        ("tell", "ValueError: half a . character"),
        ("word", "step\\(\\) must return a finite number"),
    ],
)
async def test_what_fails_a_rollout_fails_no_other(start: Start, said: str, why: str) -> None:
    async with start("Bad", memory_mb=1024) as environment:
        good, bad = await environment.begin({}), await environment.begin({})
        with pytest.raises(SampleError, match=f"the environment failed in step: .*{why}"):
            await bad.step(said)
        assert (await good.step("")).observation == "well"


async def test_the_longest_text_that_is_allowed_arrives_whatever_its_characters(start: Start) -> None:
    async with start("Bad") as environment:
        good, wide = await environment.begin({}), await environment.begin({})
        told = await wide.step("wide")
        assert told == Answer(observation="\U0001f600" * (1 << 20), reward=1.0)
        assert (await good.step("")).observation == "well", "of the same process"


@pytest.mark.parametrize(
    ("said", "why"), [("exit", "ended with status 3"), ("hang", "no answer within 0.5 s"), ("write", "not an answer")]
)
async def test_a_child_that_is_lost_takes_its_rollouts_along_and_another_begins(
    start: Start, said: str, why: str
) -> None:
    async with start("Bad", timeout_s=0.5 if said == "hang" else 60.0) as environment:
        bad = await environment.begin({})
        with pytest.raises(SampleError, match=why):
            await bad.step(said)
        await bad.close()
        for _ in range(2):
            next_one = await environment.begin({})
            assert (await next_one.step("")).observation == "well"


async def test_threads_that_hang_are_not_what_others_wait_for(start: Start) -> None:
    """More of them than a process has: it goes on with those that are left, and then another takes its place."""
    async with start("Bad", timeout_s=1.0) as environment:
        for _ in range(4):
            hanging = [await environment.begin({}) for _ in range(20)]
            for error in await asyncio.gather(*(one.step("hang") for one in hanging), return_exceptions=True):
                assert isinstance(error, SampleError)
        good = await environment.begin({})
        assert (await good.step("")).observation == "well"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Mute", "has no method step"),
        ("Missing", "has no 'Missing'"),
        ("number", "is a int, not a function"),
        ("Echo", "cannot be called"),
    ],
)
async def test_what_cannot_be_used_is_an_error_at_start(start: Start, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"environment.target: .*{why}"):
        async with start(name, options={"unknown": 1} if name == "Echo" else {}):
            pass


async def test_a_file_that_writes_on_the_pipe_while_it_is_imported_is_an_error_at_start(tmp_path: Path) -> None:
    """And no worse when a child is begun anew in the midst of a run."""
    write = "import os\nfor pipe in range(3, 20):\n  try: os.write(pipe, b'garbage\\n')\n  except OSError: pass\n"
    (tmp_path / "mine.py").write_text(f"{write}class Game:\n  def reset(self, row): pass\n  step = reset\n")
    target = f"{tmp_path / 'mine.py'}:Game"
    environment = OwnEnvironment(build_children(schema.Environment(target=target), Permissions(reward_code=(target,))))
    with pytest.raises(ConfigError, match=r"environment\.target: cannot use .*not an answer"):
        await environment.start()
    with pytest.raises(SampleError, match="not an answer"):
        await environment.begin({})
    await environment.close()


async def test_code_that_nobody_allowed_is_not_run() -> None:
    with pytest.raises(ConfigError, match=r"environment\.target: this worker may not run 'mine\.py:Echo'"):
        build_children(schema.Environment(target="mine.py:Echo"), Permissions())
