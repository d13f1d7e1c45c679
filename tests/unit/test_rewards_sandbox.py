"""What a program in a sandbox cannot do, as root and as nobody, and that nothing is left of it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from streamrl.errors import RewardError
from streamrl.workers.confined.sandbox_cell import _ENVIRONMENT
from tests.http_reward_world import until
from tests.sandbox_world import KEEPER, USERS, children, keeper_of, outcomes, sandbox
from tests.tiny_rewards import make_item

IDLE = 5


async def test_no_expected_output_is_within_a_programs_reach() -> None:
    program = "import gc\nprint(any('sesame' in repr(one) for one in gc.get_objects() if isinstance(one, (str, dict))))"

    [why] = await outcomes(program.replace("sesame", "ses' + 'ame"), [{"input": "", "output": "open sesame"}])

    assert why == "printed 'False', not 'open sesame'"


EVERYTHING = """
import gc, sys
word = "".join(reversed("emases"))
frame, todo = sys._getframe(), gc.get_objects()
while (frame := frame.f_back) is not None:
    todo += [frame, *frame.f_locals.values()]
seen, found = set(), 0
while todo:
    one = todo.pop()
    if id(one) in seen or one is seen or one is todo:
        continue
    seen.add(id(one))
    if isinstance(one, (str, bytes, bytearray)):
        found += len(one) > len(word) and (word if isinstance(one, str) else word.encode()) in one
    else:
        todo += gc.get_referents(one)
print(found)
"""


async def test_no_other_program_nor_what_it_printed_is_within_a_programs_reach() -> None:
    async with sandbox() as reward:
        [before] = await reward.judge(make_item("print('sesame')", tests=[{"input": "", "output": "sesame"}]))
        other = make_item("import time\nprint('sesame', flush=True)\ntime.sleep(99)", tests=["pass"])
        running = asyncio.create_task(reward.judge(other))
        await until(lambda: children(keeper_of(reward)), "its cell")
        [looking] = await reward.judge(make_item(EVERYTHING, tests=[{"input": "", "output": "0"}]))
        assert not running.done()
    with pytest.raises(RewardError, match="the sandbox failed"):
        await running

    assert before.passed
    assert looking.why == ""


async def test_a_program_sees_no_variable_of_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "the worker's")
    program = "import json, os\nprint(json.dumps(dict(os.environ)))"

    assert await outcomes(program, [{"input": "", "output": json.dumps(_ENVIRONMENT)}]) == [""]


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


SEALED_ON_LINUX_5_19 = """
import ctypes, os, struct, sys
from streamrl.workers.confined import sandbox_guard
sandbox_guard._RIGHTS = {since: rights for since, rights in sandbox_guard._RIGHTS.items() if since <= 2}
sys.prefix, name = os.path.split(sys.argv[1])  # a folder that it may read
sandbox_guard.seal(memory_bytes=1 << 30, cpu_s=20)
def open_by_openat2(flags):
    call, how = ctypes.CDLL(None, use_errno=True).syscall, struct.pack("QQQ", flags, 0, 0)
    if call(437, -100, sys.argv[1].encode(), how, len(how)) < 0:
        raise OSError(ctypes.get_errno(), "by openat2")
def open_by_open(flags):  # where there is such a call
    if os.uname().machine != "x86_64": raise OSError("there is none")
    if ctypes.CDLL(None, use_errno=True).syscall(2, sys.argv[1].encode(), flags) < 0:
        raise OSError(ctypes.get_errno(), "by open")
for way in (lambda flags: os.open(sys.argv[1], flags), open_by_open, open_by_openat2):
    for mode in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_ACCMODE):
        try:
            way(mode | os.O_TRUNC)
        except OSError:
            continue
        print("emptied", way, mode)
print(open(sys.argv[1]).read())
print("lost", file=open(os.devnull, "w"))
"""


def test_a_program_empties_no_file_that_it_may_read_where_landlock_does_not_know_of_that(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("as it was")
    words = [sys.executable, "-c", SEALED_ON_LINUX_5_19, str(tmp_path / "there")]

    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout

    assert said == "as it was\n"


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
            share = Path(f"/proc/{keeper_of(reward)}/autogroup").read_text()
        except FileNotFoundError:
            pytest.skip("this kernel does not group processes by session")
    assert not share or share.endswith("nice 19\n")


async def test_nothing_is_left_of_a_program_or_of_its_keeper() -> None:
    async with sandbox(time_s=30.0) as reward:
        [passed] = await reward.judge(make_item("print(1)", tests=[{"input": "", "output": "1"}]))
        keeper = keeper_of(reward)
        running = asyncio.create_task(reward.judge(make_item("while True: pass", tests=["pass"])))
        [cell] = await until(lambda: children(keeper), "its cell")
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
        keeper = keeper_of(reward)
        [after] = await reward.judge(make_item("print(6)", tests=[{"input": "", "output": "6"}]))
        assert keeper_of(reward) == keeper, "it lives on"

    assert not attacked.passed
    assert after.passed
