"""Reward functions in their child processes: good ones, and every kind of bad one beside them."""

from __future__ import annotations

import asyncio
import linecache
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import schema
from streamrl.errors import ConfigError, RewardError
from streamrl.permissions import Permissions
from streamrl.recipe.own import pickled
from streamrl.workers.rewards.functions import build_function_reward
from tests.helpers import wait_until
from tests.http_reward_world import until
from tests.tiny_rewards import beginning, make_item

Start = Callable[..., Any]

CODE = """
import asyncio, os, sys, time
import neighbour

def echo(prompt, completion, token_ids, fields, *, factor=1.0):
    print("a print must not disturb the answers")
    return factor * (float(fields["answer"]) + len(token_ids))

def obey(prompt, completion, token_ids, fields):
    if completion == "eat":
        eaten = []
        while True: eaten.append(bytearray(1 << 30))
    if completion == "loop":
        while True: pass
    if completion == "exit": os._exit(3)
    if completion == "leave": sys.exit("bye")
    if completion == "raise": raise KeyError("what")
    if completion == "nan": return float("nan")
    if completion == "none": return None
    if completion == "text": return "1.0"
    if completion == "scribble": scribble()
    if completion == "fork": fork_away()
    if completion == "detach": detach()
    if completion == "pid": return os.getpid()
    return neighbour.VALUE

async def obey_async(prompt, completion, token_ids, fields):
    if completion == "sleep": await asyncio.sleep(3600)
    await asyncio.sleep(0.05)
    return obey(prompt, completion, token_ids, fields)

leaked = []
def leak(prompt, completion, token_ids, fields):
    leaked.append(bytes(range(256)) * 80_000)
    return neighbour.VALUE

async def leak_async(prompt, completion, token_ids, fields):
    return leak(prompt, completion, token_ids, fields)

def scribble():
    for descriptor in range(3, 10):
        try: os.write(descriptor, b"?\\n")
        except OSError: pass

def fork_away():
    if not (away := os.fork()):
        os.setsid()
        time.sleep(600)
    with open(__file__ + ".pid", "w") as file: file.write(str(away))
    os._exit(3)

async def in_threads(prompt, completion, token_ids, fields):
    await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.2) for _ in range(8)))
    return os.getpid()

def detach():
    import subprocess
    away = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open(__file__ + ".pid", "w") as file: file.write(str(away.pid))
    time.sleep(600)

def three(prompt, completion, token_ids): return 0.0
"""


@pytest.fixture
def start(tmp_path: Path) -> Start:
    (tmp_path / "rewards.py").write_text(CODE)
    (tmp_path / "neighbour.py").write_text("VALUE = 7.0")

    return beginning(tmp_path / "rewards.py")


async def test_a_function_gets_tokens_fields_and_options_and_may_print(start: Start) -> None:
    async with start("echo", options={"factor": 2.0}) as reward:
        assert await reward.score(make_item("four", answer=10)) == 28.0


async def test_built_in_functions_need_no_permission() -> None:
    reward = build_function_reward("mine", schema.FunctionReward(type="function", target="exact_match"), Permissions())
    await reward.start()
    assert await reward.score(make_item("42", answer="42")) == 1.0
    await reward.close()


async def test_a_module_on_the_path_can_be_named(start: Start) -> None:
    async with start("streamrl.recipe.rewards:exact_match") as reward:
        assert await reward.score(make_item("42", answer="43")) == 0.0


async def test_a_notebooks_function_runs_and_its_error_shows_the_line_that_no_file_has(
    start: Start, tmp_path: Path
) -> None:
    """Also where that line is another cell's, which the function calls."""
    cells = {
        "<cell 6>": ["def number(text):\n", "    return float(text)\n"],
        "<cell 7>": ["def cell(prompt, completion, token_ids, fields):\n", "    return offset + number(completion)\n"],
    }
    space: dict[str, Any] = {"__name__": "__main__", "offset": 1.0}
    for name, lines in cells.items():
        linecache.cache[name] = (len("".join(lines)), None, lines, name)
        exec(compile("".join(lines), name, "exec"), space)
    (tmp_path / "cell.pkl").write_bytes(pickled(space["cell"]))

    async with start(f"{tmp_path}/cell.pkl:cell") as reward:
        assert await reward.score(make_item("41")) == 42.0
        with pytest.raises(RewardError, match=r"could not convert .*: 'x' \(<cell 6>:2: return float\(text\)"):
            await reward.score(make_item("x"))


async def test_many_calls_at_once_come_back_each_with_its_own_answer(start: Start) -> None:
    async with start("echo", processes=2) as reward:
        scores = await asyncio.gather(*(reward.score(make_item("", answer=i)) for i in range(300)))
    assert scores == [float(i) for i in range(300)]


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("loop", "no answer within 0.5 s"),
        ("exit", "the process ended with status 3"),
        ("leave", "SystemExit: bye"),
        ("raise", r"KeyError: 'what' \(rewards.py:"),
        ("eat", "MemoryError"),
        ("nan", "returned nan, not a finite number"),
        ("none", "returned None, not a number"),
        ("text", "returned '1.0', not a number"),
        ("scribble", "wrote something that is not an answer"),
    ],
)
async def test_a_function_that_misbehaves_fails_its_sample_and_no_other(
    start: Start, completion: str, reason: str
) -> None:
    async with start("obey", timeout_s=0.5, memory_mb=256) as reward:
        before = reward.score(make_item("good"))
        bad = reward.score(make_item(completion))
        after = reward.score(make_item("good"))
        scores = await asyncio.gather(before, bad, after, return_exceptions=True)
        assert (scores[0], scores[2]) == (7.0, 7.0)
        assert isinstance(scores[1], RewardError)
        with pytest.raises(RewardError, match=reason):
            raise scores[1]


@pytest.mark.parametrize("completion", ["fork", "detach"])
async def test_what_a_function_has_forked_away_holds_its_pipe_and_nobody_up_and_ends(
    start: Start, tmp_path: Path, completion: str
) -> None:
    """Also where it has a session of its own, whether its parent ends before it or is killed because it is late."""
    async with start("obey", timeout_s=2.0) as reward:
        with pytest.raises(RewardError):
            await reward.score(make_item(completion))
        away = int((tmp_path / "rewards.py.pid").read_text())
        assert await asyncio.wait_for(reward.score(make_item("good")), 30) == 7.0
        await until(lambda: not Path(f"/proc/{away}").exists(), "it is gone")


@pytest.mark.parametrize("line", ["'x' * (1 << 21)", "'[]'", "'{}'", "'[' * 100_000"])
async def test_a_process_that_begins_with_no_word_of_its_function_is_an_error_of_its_settings(
    start: Start, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nif '-m' in sys.orig_argv: print({line}, flush=True)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(
        ConfigError, match=r"rewards\.mine\.target: cannot use it: the process wrote something that is no"
    ):
        async with start("obey"):
            pass


async def test_a_process_that_cannot_be_started_for_a_moment_fails_a_sample(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*words: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async with start("obey") as reward:
        with pytest.raises(RewardError):
            await reward.score(make_item("exit"))
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "create_subprocess_exec", refuse)
            with pytest.raises(RewardError, match=r"no process could be started: .*temporarily unavailable"):
                await reward.score(make_item("good"))
        assert await reward.score(make_item("good")) == 7.0


@pytest.mark.parametrize("function", ["leak", "leak_async"])
async def test_a_function_that_leaks_fails_a_sample_now_and_then_and_goes_on_in_a_fresh_process(
    start: Start, function: str
) -> None:
    async with start(function, memory_mb=256) as reward:
        scores = [(await asyncio.gather(reward.score(make_item()), return_exceptions=True))[0] for _ in range(40)]
    failed = [score for score in scores if score != 7.0]
    assert 1 <= len(failed) <= 4
    assert all("MemoryError" in str(score) for score in failed)


async def test_calls_of_an_async_function_run_side_by_side(start: Start) -> None:
    async with start("obey_async", timeout_s=10) as reward:
        scores = await asyncio.wait_for(asyncio.gather(*(reward.score(make_item("good")) for _ in range(200))), 5)
    assert scores == [7.0] * 200


async def test_an_async_function_that_keeps_threads_busy_is_not_late(start: Start) -> None:
    """Its calls are read meanwhile, and asyncio's own number of threads, 6 on two cores, is not its limit."""
    async with start("in_threads", timeout_s=4) as reward:
        scores = await asyncio.gather(*(reward.score(make_item("")) for _ in range(64)))
    assert len(set(scores)) == 1, "one process, which nobody killed"


async def test_an_async_call_that_is_late_costs_nobody_else_a_process(start: Start) -> None:
    async with start("obey_async", timeout_s=0.3) as reward:
        pid = await reward.score(make_item("pid"))
        late, good = await asyncio.gather(
            reward.score(make_item("sleep")), reward.score(make_item("good")), return_exceptions=True
        )
        assert good == 7.0
        assert "no answer within 0.3 s" in str(late)
        assert await reward.score(make_item("pid")) == pid


@pytest.mark.parametrize("completion", ["exit", "loop"])
async def test_the_one_async_call_that_takes_the_process_down_is_found_out(start: Start, completion: str) -> None:
    async with start("obey_async", timeout_s=0.5) as reward:
        items = [make_item("good") for _ in range(8)] + [make_item(completion)]
        scores = await asyncio.gather(*(reward.score(item) for item in items), return_exceptions=True)
    assert scores[:8] == [7.0] * 8
    assert isinstance(scores[8], RewardError)


async def test_a_call_that_is_given_up_does_not_eat_the_time_of_the_next(start: Start) -> None:
    async with start("obey", timeout_s=3600) as reward:
        looping = asyncio.create_task(reward.score(make_item("loop")))
        await asyncio.sleep(0)
        looping.cancel()
        assert await asyncio.wait_for(reward.score(make_item("good")), 10) == 7.0


async def test_closing_ends_the_child_processes(start: Start) -> None:
    async with start("obey") as reward:
        pid = int(await reward.score(make_item("pid")))
        assert alive(pid)
    wait_until(lambda: not alive(pid), description="the child is gone")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("nothing", "has no 'nothing'"),
        ("three", "cannot be called: too many positional arguments"),
        ("neighbour", "is a module, not a function"),
        ("no.such.module:f", "No module named 'no'"),
        ("no/such/file.py:f", "no such file: no/such/file.py"),
    ],
)
async def test_what_cannot_be_loaded_is_one_clear_error_at_the_start(start: Start, function: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"rewards\.mine\.target: cannot use it: .*{reason}"):
        async with start(function):
            pass


async def test_options_that_the_function_does_not_take_are_refused_at_the_start(start: Start) -> None:
    with pytest.raises(ConfigError, match="unexpected keyword argument 'speed'"):
        async with start("echo", options={"speed": 1}):
            pass


def test_a_child_in_an_endless_loop_dies_with_its_worker(tmp_path: Path) -> None:
    (tmp_path / "looping.py").write_text(LOOP)
    (tmp_path / "worker.py").write_text(WORKER)
    worker = subprocess.Popen([sys.executable, tmp_path / "worker.py", f"{tmp_path}/looping.py:f"])
    try:
        pid_file = tmp_path / "pid"
        wait_until(lambda: pid_file.exists() and pid_file.read_text(), description="the function loops", timeout_s=240)
    finally:
        worker.kill()
        worker.wait()
    pid = int(pid_file.read_text())
    wait_until(lambda: not alive(pid), description="the child is gone")


LOOP = """
import os, pathlib
def f(prompt, completion, token_ids, fields):
    pathlib.Path(__file__).with_name("pid").write_text(str(os.getpid()))
    while True: pass
"""
WORKER = """
import asyncio, sys
from streamrl.config import schema
from tests.tiny_rewards import beginning, make_item
from streamrl.permissions import Permissions
from streamrl.recipe.own import pickled
from streamrl.workers.rewards.functions import build_function_reward

async def main():
    source = schema.FunctionReward(type="function", target=sys.argv[1], timeout_s=3600)
    reward = build_function_reward("mine", source, Permissions(reward_code=(sys.argv[1],)))
    await reward.start()
    await reward.score(make_item())

asyncio.run(main())
"""


def alive(pid: int) -> bool:
    """Running, that is: neither gone nor a zombie that its new parent has not collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
