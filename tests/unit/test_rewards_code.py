"""Programs in a sandbox: what each test of a row tells of them, and what they cannot do, as root and as nobody."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import schema
from streamrl.errors import ConfigError, RewardError
from streamrl.permissions import Permissions
from streamrl.workers.confined.sandbox_cell import _ENVIRONMENT
from streamrl.workers.rewards.code import CodeReward, build_code_reward
from streamrl.workers.rewards.code_tests import Case, cases_of, program_of
from tests.http_reward_world import until
from tests.tiny_rewards import make_item

KEEPER = "streamrl.workers.confined.sandbox_keeper"
PROMPT, NOBODY, STARVED = "tests.keepers.prompt", "tests.keepers.nobody", "tests.keepers.starved"
USERS = [PROMPT, NOBODY]  # the first is root's where the tests are
IDLE = 5


@asynccontextmanager
async def sandbox(keeper: str = PROMPT, *, timeout_s: float = 60.0, **tests: Any) -> AsyncIterator[CodeReward]:
    source = schema.CodeReward(type="code", timeout_s=timeout_s, tests=schema.Tests(**{"time_s": 20.0, **tests}))
    reward = CodeReward(source, key="rewards.mine", keeper=keeper)
    try:
        yield reward
    finally:
        await reward.close()


async def outcomes(program: str, tests: Any, *, keeper: str = PROMPT, **settings: Any) -> list[str]:
    """Of each test, empty: it passed."""
    async with sandbox(keeper, **settings) as reward:
        return [one.why for one in await reward.judge(make_item(program, tests=tests))]


# --- what is asked --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("held", "cases"),
    [
        ([{"input": "1\n", "output": "2\n"}], [Case(stdin="1\n", expected="2\n")]),
        ({"inputs": ["1", "3"], "outputs": ["2", "4"]}, [Case(stdin="1", expected="2"), Case(stdin="3", expected="4")]),
        (["assert f(1) == 2"], [Case(then="assert f(1) == 2")]),
        ("assert f(1) == 2", [Case(then="assert f(1) == 2")]),
        ('["assert f(1) == 2"]', [Case(then="assert f(1) == 2")]),
        pytest.param("[" * 100_000, [Case(then="[" * 100_000)], id="what nests too deep"),
        ('{"inputs": ["1"], "outputs": ["2"]}', [Case(stdin="1", expected="2")]),
    ],
)
def test_tests_are_read_in_the_forms_that_datasets_have(held: Any, cases: list[Case]) -> None:
    assert cases_of({"tests": held}, "tests") == cases


@pytest.mark.parametrize(
    "held", [[], "", 3, None, [3], [{"input": "1"}], {"inputs": ["1"], "outputs": []}, {"fn_name": "f"}]
)
async def test_a_row_without_tests_is_an_error_and_no_score(held: Any) -> None:
    with pytest.raises(RewardError, match="field 'tests' holds no tests"):
        await outcomes("pass", held)


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("print(1)", "print(1)"),
        ("First:\n```python\nx = 1\n```\nBetter:\n```python\nx = 2\n```\nDone.", "x = 2\n"),
        ("```\nx = 3\n```", "x = 3\n"),
        ("It is\n```py\nx = 4\n", "x = 4\n"),
    ],
)
def test_the_program_is_the_last_block_of_a_completion(completion: str, program: str) -> None:
    assert program_of(completion) == program


# --- what is told ---------------------------------------------------------------------------------------------------
ADD = "def add(a, b):\n    return a + b\n"
ECHO = "import sys\nfor line in sys.stdin:\n    print(int(line) * 2, ' ')\nprint()\n"


async def test_each_test_says_what_became_of_it() -> None:
    tests = ["assert add(2, 3) == 5", "assert add(1, 1) == 3, 'not three'", "add(1)"]

    first, second, third = await outcomes(ADD, tests)

    assert (first, second) == ("", "AssertionError: not three")
    assert "missing 1 required positional argument" in third


async def test_what_is_printed_counts_but_for_spaces_at_the_ends_of_lines() -> None:
    tests = {"inputs": ["1\n2\n", "3", "x"], "outputs": ["2\n4\n", "7\n", "?"]}

    passed, wrong, raised = await outcomes(ECHO, tests)

    assert (passed, wrong) == ("", "printed '6', not '7'")
    assert "ValueError: invalid literal for int()" in raised
    assert "(line 3 of the program)" in raised


@pytest.mark.parametrize(("partial", "score"), [(False, 0.0), (True, 0.5)])
async def test_the_score_is_of_all_tests_or_the_share_that_passes(partial: bool, score: float) -> None:
    async with sandbox(partial=partial) as reward:
        assert await reward.score(make_item(ADD, tests=["assert add(1, 1) == 3", "assert add(1, 1) == 2"])) == score
        assert await reward.score(make_item(ADD, tests=["assert add(1, 1) == 2"])) == 1.0


@pytest.mark.parametrize("ending", ["exit()", "raise SystemExit", "import os; os._exit(0)", "quit(0)"])
async def test_a_program_that_ends_itself_before_its_test_has_not_passed(ending: str) -> None:
    ending = ending.replace("exit()", "import sys; sys.exit()").replace("quit(0)", "import sys; sys.exit(0)")

    [why] = await outcomes(f"{ADD}{ending}", ["assert add(1, 1) == 2"])

    assert why == "exited with status 0"


async def test_a_program_may_end_itself_when_it_has_printed() -> None:
    case = [{"input": "", "output": "5"}]

    assert await outcomes("print(5, flush=True)\nimport os\nos._exit(0)", case) == [""]
    assert await outcomes("print(5)\nraise SystemExit(1)", case) == ["exited with status 1"]


async def test_threads_event_loops_and_main_blocks_work() -> None:
    program = """
import asyncio, threading
async def say(): await asyncio.sleep(0.01); print("loop")
if __name__ == "__main__":
    asyncio.run(say())
    threading.Thread(target=lambda: print("thread")).start()
"""
    assert await outcomes(program, [{"input": "", "output": "loop\nthread\n"}]) == [""]


async def test_no_expected_output_is_within_a_programs_reach() -> None:
    program = "import gc\nprint(any('sesame' in repr(one) for one in gc.get_objects() if isinstance(one, (str, dict))))"

    [why] = await outcomes(program.replace("sesame", "ses' + 'ame"), [{"input": "", "output": "open sesame"}])

    assert why == "printed 'False', not 'open sesame'"


async def test_a_program_sees_no_variable_of_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "the worker's")
    program = "import json, os\nprint(json.dumps(dict(os.environ)))"

    assert await outcomes(program, [{"input": "", "output": json.dumps(_ENVIRONMENT)}]) == [""]


# --- what it cannot do ----------------------------------------------------------------------------------------------
ATTACKS = {
    "a fork bomb": ("import os\nwhile True:\n    os.fork()", "not permitted"),
    "a thread bomb": (
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(99,)).start()",
        "can't start new thread",
    ),
    "a memory bomb": ("held = []\nwhile True:\n    held.append(bytearray(1 << 24))", "MemoryError"),
    "shared memory": (
        "import mmap\nheld = []\nwhile True:\n    held.append(mmap.mmap(-1, 1 << 26))",
        "allocate memory",
    ),
    "files in memory": ("import os\nos.memfd_create('x')", "not permitted"),
    "an endless loop": ("while True:\n    pass", "took more than 0.2 s"),
    "an endless wait": ("import time\ntime.sleep(999)", "took more than 0.2 s"),
    "a deaf loop": (
        "import signal\nfor one in (15, 24):\n    signal.signal(one, signal.SIG_IGN)\nwhile True:\n    pass",
        "took more than 0.2 s",
    ),
    "endless output": ("while True:\n    print('x' * 1000)", "printed more than 512 KiB"),
    "another program": ("import os\nos.execv('/bin/true', ['true'])", "not permitted|Permission denied"),
    "its keeper's end": ("import os\nos.kill(os.getppid(), 9)", "not permitted"),
    "everybody's end": ("import os\nos.kill(-1, 9)", "not permitted"),
    "its own end as if by others": ("import os\nos.kill(os.getpid(), 9)", "not permitted"),
    "its thread's end as if by others": (
        "import signal, threading\nsignal.pthread_kill(threading.main_thread().ident, 9)",
        "not permitted",
    ),
    "its own end by other calls": (
        "import ctypes, os\ncall, me = ctypes.CDLL(None, use_errno=True).syscall, os.getpid()\n"
        "of_x86, of_arm = (62, 200, 234, 129, 297), (129, 130, 131, 138, 240)\n"
        "numbers = of_arm if os.uname().machine == 'aarch64' else of_x86\n"
        "for number, given in zip(numbers, [(me, 9), (me, 9), (me, me, 9), (me, 9, 0), (me, me, 9, 0)]):\n"
        "    call(number, *given)\n"
        "raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))",
        "not permitted",
    ),
    "a stop": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "took more than 0.2 s"),
    "an end of its first thread alone": (
        "import ctypes, os, threading, time\nthreading.Thread(target=time.sleep, args=(999,)).start()\n"
        "ctypes.CDLL(None).syscall(93 if os.uname().machine == 'aarch64' else 60, 0)",
        "took more than 0.2 s",
    ),
    "its time's end before its time": ("import os\nos.kill(os.getpid(), 24)", "ended by SIGXCPU"),
    "a signal by a file": ("import fcntl\nfcntl.fcntl(0, 8, 1)", "not permitted"),
    "the network": ("import _socket\n_socket.socket()", "not permitted"),
    "a look at others": ("open('/proc/1/environ')", "Permission denied"),
    "a look at files": ("open('/etc/passwd')", "Permission denied"),
    "a better place": ("import os\nos.sched_setscheduler(0, 0, os.sched_param(0))", "not permitted"),
    "higher limits": ("import resource\nresource.setrlimit(7, (9, 9))", "not allowed|not permitted"),
    "another root": ("import os\nos.chroot('/')", "not permitted"),
    "a crash": ("import os\nos.abort()", "ended by SIGABRT"),
    "a signal without a name": ("import os\nos.kill(os.getpid(), 40)", "ended by signal 40"),
}


@pytest.mark.parametrize("keeper", USERS)
@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_program_cannot(attack: str, keeper: str) -> None:
    program, why = ATTACKS[attack]
    async with sandbox(keeper, time_s=0.2 if "0.2 s" in why else 20.0, memory_mb=256) as reward:
        [attacked] = await reward.judge(make_item(program, tests=[{"input": "", "output": ""}]))
        [after] = await reward.judge(make_item("print(6)", tests=[{"input": "", "output": "6"}]))

    assert not attacked.passed
    assert re.search(why, attacked.why), attacked.why
    assert after.passed, "its keeper goes on"


@pytest.mark.parametrize("keeper", USERS)
async def test_a_program_writes_no_file_anywhere(keeper: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    folders = [str(tmp_path), tempfile.gettempdir(), "/dev/shm", "/var/tmp", os.getcwd(), str(Path.home()), "/"]
    name = f"of-a-sandbox-{os.getpid()}"
    program = f"""
import os
for folder in {folders}:
    for attempt in (lambda place: open(place, "w"), os.mkdir, lambda place: os.symlink("/", place),
                    lambda place: os.open(folder, os.O_TMPFILE | os.O_RDWR)):
        try:
            attempt(folder + "/{name}")
        except OSError:
            continue
        print(folder)
open("/dev/null", "w").write("lost")
print("none")
"""
    (tmp_path / "there").write_text("as it was")
    program += f"os.unlink({str(tmp_path / 'there')!r})"

    [why] = await outcomes(program, [{"input": "", "output": "?"}], keeper=keeper)

    assert "not permitted" in why
    assert (tmp_path / "there").read_text() == "as it was"
    assert [folder for folder in folders if (Path(folder) / name).exists()] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has capabilities to lose")
def test_a_cell_of_roots_has_no_capabilities() -> None:
    """What its status says; it could not open that file any more, once it is sealed."""
    cell = "from streamrl.workers.confined.sandbox_guard import seal\nstatus = open('/proc/self/status')\n"
    sealed = "seal(memory_bytes=1 << 30, cpu_s=20)\n"
    show = "print([line.split()[1] for line in status if line.startswith(('CapPrm', 'CapEff'))])"

    before, after = (
        subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True).stdout
        for words in (f"{cell}{show}", f"{cell}{sealed}{show}")
    )

    none = f"{['0' * 16] * 2}\n"
    assert before != none
    assert after == none


@pytest.mark.parametrize("keeper", USERS)
async def test_what_a_sandbox_may_is_proved_at_the_start(keeper: str) -> None:
    async with sandbox(keeper) as reward:
        await reward.start()


async def test_programs_run_when_nobody_else_wants_the_processor() -> None:
    tests = [{"input": "", "output": str(IDLE)}]

    assert await outcomes("import os\nprint(os.sched_getscheduler(0))", tests, keeper=KEEPER) == [""]


async def test_a_keepers_session_has_the_least_share_of_the_processors() -> None:
    async with sandbox(KEEPER) as reward:
        await reward.start()
        try:
            share = Path(f"/proc/{_keeper_of(reward)}/autogroup").read_text()
        except FileNotFoundError:
            pytest.skip("this kernel does not group processes by session")
    assert not share or share.endswith("nice 19\n")


async def test_nothing_is_left_of_a_program_or_of_its_keeper() -> None:
    async with sandbox(time_s=30.0) as reward:
        [passed] = await reward.judge(make_item("print(1)", tests=[{"input": "", "output": "1"}]))
        keeper = _keeper_of(reward)
        running = asyncio.create_task(reward.judge(make_item("while True: pass", tests=["pass"])))
        [cell] = await until(lambda: _children(keeper), "its cell")
        assert passed.passed
    with pytest.raises(RewardError, match="the sandbox failed"):
        await running
    await until(lambda: not Path(f"/proc/{cell}").exists() and not Path(f"/proc/{keeper}").exists(), "both are gone")


FORGED = {
    "half a line": b'{"ended": "exited"}',
    "no map": b"[1]",
    "no JSON": b"{",
    "a deep one": b"[" * 60_000,
    "an end that it cannot have": b'{"ended": "patience", "why": "I had no time"}',
    "an end before its begin": b'{"ended": "not begun", "why": "no sandbox here"}',
    "a word that is none": b'{"ended": "raised", "why": {}}',
    "a status that is none": b'{"ended": "exited", "status": [0]}',
}


@pytest.mark.parametrize("forged", FORGED)
async def test_a_program_that_writes_its_own_end_fails_its_test_and_nobody_elses(forged: str) -> None:
    program = f"import os\nos.write(3, {FORGED[forged]!r})\nos._exit(3)"
    async with sandbox() as reward:
        [attacked] = await reward.judge(make_item(program, tests=["pass"]))
        keeper = _keeper_of(reward)
        [after] = await reward.judge(make_item("print(6)", tests=[{"input": "", "output": "6"}]))
        assert _keeper_of(reward) == keeper, "it lives on"

    assert not attacked.passed
    assert after.passed


# --- what is no word of the program ---------------------------------------------------------------------------------
async def test_a_keeper_that_dies_is_an_error_and_the_next_program_has_another() -> None:
    async with sandbox(time_s=30.0) as reward:
        running = asyncio.create_task(reward.score(make_item("while True: pass", tests=["pass"])))
        await until(lambda: reward._cells._keeper and _children(_keeper_of(reward)), "its cell")
        os.kill(_keeper_of(reward), signal.SIGKILL)

        with pytest.raises(RewardError, match="the sandbox failed: the process ended"):
            await running
        assert await reward.score(make_item(ADD, tests=["assert add(1, 1) == 2"])) == 1.0


async def test_a_keeper_that_cannot_be_started_for_a_moment_is_no_mistake_of_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(*words: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async with sandbox() as reward:
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "create_subprocess_exec", refuse)
            with pytest.raises(RewardError, match=r"no process could be started: .*temporarily unavailable"):
                await reward.start()
        await reward.start()


async def test_a_cell_that_others_kill_is_an_error() -> None:
    async with sandbox(time_s=30.0) as reward:
        running = asyncio.create_task(reward.score(make_item("while True: pass", tests=["pass"])))
        [cell] = await until(lambda: reward._cells._keeper and _children(_keeper_of(reward)), "its cell")
        os.kill(cell, signal.SIGKILL)

        with pytest.raises(RewardError, match="killed from outside"):
            await running


async def test_a_program_that_the_machine_had_no_time_for_is_an_error() -> None:
    with pytest.raises(RewardError, match=r"the machine was too busy: no 0\.1 s of CPU time for it in 0\.3 s"):
        await outcomes("while True: pass", ["pass"], keeper=STARVED, timeout_s=0.3, time_s=0.1)


def test_a_worker_must_be_told_that_it_may_run_programs() -> None:
    source = schema.CodeReward(type="code")
    with pytest.raises(ConfigError, match=r"rewards\.mine: .*--allow-reward-code sandbox"):
        build_code_reward("mine", source, Permissions())
    build_code_reward("mine", source, Permissions(reward_code=("sandbox",)))


def _keeper_of(reward: CodeReward) -> int:
    keeper = reward._cells._keeper
    assert keeper is not None
    return keeper._process.pid


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # also one that is buried while it is read (ESRCH)
        return []
