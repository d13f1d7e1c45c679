"""The launcher of a program's run, as the program sees it: what it says, how it is ended, and that it outlives nobody.

The launcher here is a few lines that say what a test wants; the real one's are tried by the integration tests.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from streamrl.errors import DataError, PartError
from streamrl.ops.python.launcher import Launcher
from streamrl.ops.python.request import Request
from tests.helpers import wait_until

REQUEST = Request(config="mine.yaml", overrides=(), functions={}, takeover=False)
HEAD = """
import json, os, signal, sys, threading
sys.stdin.read()
def tell(kind, **told): print(json.dumps({"kind": kind, **told}), flush=True)
asked = threading.Event()
"""
HEEDS = HEAD + "signal.signal(signal.SIGTERM, lambda *_: asked.set())\n"
BEGUN = 'tell("begun", name="mine", folder="/runs/mine")\n'
ENDED = 'tell("ended", state={state!r}, steps=7, summary={{"steps": 7}})\n'
BUSY = """
def interrupt_program(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    asked.wait(1.5)
    os.kill(int(sys.argv[1]), signal.SIGINT)
signal.signal(signal.SIGTERM, interrupt_program)
"""
IN_ORDER = HEEDS + BEGUN + "asked.wait()\n" + ENDED.format(state="stopped")
NEVER = "\nwhile True: signal.pause()\n"


def launch(script: str) -> Launcher:
    return Launcher(REQUEST, command=(sys.executable, "-c", script))


def begun(script: str) -> Launcher:
    launcher = launch(script)
    launcher.wait_until_started(lambda text: None)
    return launcher


def test_what_it_says_is_heard_until_it_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    said = 'tell("said", text="worker/0 was ended by signal 9; restarting it")\ntell("phase", text="ending")\n'
    with caplog.at_level(logging.WARNING, logger="streamrl"):
        launcher = begun(HEAD + BEGUN + said + ENDED.format(state="finished"))
        assert launcher.wait(60)

    assert (launcher.name, launcher.folder, launcher.phase) == ("mine", Path("/runs/mine"), "ending")
    assert launcher.ended is not None
    assert (launcher.ended.state, launcher.ended.steps, launcher.ended.summary) == ("finished", 7, {"steps": 7})
    assert [record.message for record in caplog.records] == ["worker/0 was ended by signal 9; restarting it"]


def test_what_is_wrong_before_it_begins_is_raised_as_the_error_that_it_is() -> None:
    heard: list[str] = []
    script = HEAD + 'tell("doing", text="trying prompts ...")\nimport time; time.sleep(0.5)\n'
    script += 'tell("failed", type="DataError", error="rewards.near fails")\n'

    with pytest.raises(DataError, match=r"^rewards.near fails$"):
        launch(script).wait_until_started(heard.append)
    assert set(heard) == {"trying prompts ..."}


def test_a_launcher_that_ends_without_a_word_has_failed() -> None:
    launcher = launch(HEAD + BEGUN + "os.kill(os.getpid(), signal.SIGKILL)")

    assert launcher.wait(60)
    assert launcher.ended is not None
    with pytest.raises(PartError, match=r"^the launcher was ended by signal 9 \(see /runs/mine/logs/launcher.log\)$"):
        launcher.ended.check()


def test_a_launcher_that_ends_before_its_run_begins_has_no_log_to_look_into() -> None:
    with pytest.raises(PartError, match=r"^the launcher was ended by signal 9$"):
        launch(HEAD + "os.kill(os.getpid(), signal.SIGKILL)").wait_until_started(lambda text: None)


def test_a_launcher_that_is_killed_in_mid_word_has_failed() -> None:
    launcher = launch(
        HEAD + BEGUN + 'sys.stdout.write(\'{"kind": "ended\'); sys.stdout.flush()\nos.kill(os.getpid(), 9)'
    )

    assert launcher.wait(60)
    assert launcher.ended is not None
    assert (launcher.ended.state, launcher.name) == ("failed", "mine")


def test_it_ends_in_good_order_when_it_is_asked_to() -> None:
    launcher = begun(IN_ORDER)

    launcher.end(60)

    assert launcher.ended is not None
    assert launcher.ended.state == "stopped"


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """As a program at a terminal; whatever is begun in the background does not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_ctrl_c")
def test_who_waits_for_its_end_is_told_why_and_another_ctrl_c_ends_it_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The launcher is busy with its end, and the program hears Ctrl-C in the middle of that."""
    launcher = begun(HEAD + BUSY + BEGUN + NEVER)

    with pytest.raises(KeyboardInterrupt):
        launcher.end(60)

    assert launcher.ended is not None
    assert capsys.readouterr().err == "streamrl: run mine is writing a checkpoint and stopping (Ctrl-C: at once)\n"


def test_it_is_ended_at_once_when_good_order_takes_too_long() -> None:
    at_once = (
        'signal.signal(signal.SIGINT, lambda *_: (tell("ended", state="stopped", steps=4, summary=None), os._exit(0)))'
    )
    launcher = begun(HEEDS + at_once + "\n" + BEGUN + NEVER)

    launcher.end(0.1)

    assert launcher.ended is not None
    assert (launcher.ended.state, launcher.ended.steps) == ("stopped", 4)


def test_a_wait_is_over_when_its_time_is() -> None:
    launcher = begun(HEAD + BEGUN + NEVER)

    assert not launcher.wait(0.01)

    launcher.end_now()
    assert launcher.ended is not None
    assert launcher.ended.state == "stopped"


def test_a_program_that_gives_up_while_the_run_begins_leaves_no_launcher() -> None:
    launcher = launch(HEAD + 'tell("doing", text="trying")' + NEVER)

    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launcher.wait_until_started(interrupt)
    assert launcher.ended is not None


# A program that starts a launcher which, like the real one, looks for its parent and counts what asks it to end.
PROGRAM = f"""
import sys
from streamrl.ops.python.launcher import Launcher
from streamrl.ops.python.request import Request
trace, way = sys.argv[1:]
script = '''{HEAD}
import time
from pathlib import Path
from streamrl.ops.launch.processes import Interrupts
from streamrl.process import ask_to_end_with
trace, way, program = sys.argv[1:]
ask_to_end_with(int(program))
(looks,) = [thread for thread in threading.enumerate() if thread.name == "looks for the parent"]
with Interrupts() as interrupts:
    {BEGUN}
    while not interrupts.count:
        time.sleep(0.01)
    Path(trace).write_text("ending")
    if way != "ends":
        looks.join()
    Path(trace).write_text("in good order" if interrupts.count == 1 else "at once")
'''
command = (sys.executable, "-c", script, trace, way)
launcher = Launcher(Request(config="", overrides=(), functions={{}}, takeover=False), command=command)
launcher.wait_until_started(lambda text: None)
print(launcher._process.pid, flush=True)
if way == "killed while it ends":
    launcher.end(None)
elif way != "ends":
    launcher.wait(None)
"""


@pytest.mark.parametrize("way", ["killed", "ends", "killed while it ends", "killed under nohup"])
def test_the_run_of_a_program_that_is_killed_or_ends_is_ended_in_good_order(tmp_path: Path, way: str) -> None:
    """A program that has asked for the end and is then killed, as a kernel is that takes long to shut down, does not
    ask twice."""
    trace = tmp_path / "trace"
    words = [sys.executable, "-c", PROGRAM, str(trace), way]
    pipe, of_terminal = subprocess.PIPE, signal.SIG_IGN if way == "killed under nohup" else signal.SIG_DFL
    heeds = partial(signal.signal, signal.SIGHUP, of_terminal)
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, preexec_fn=heeds) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        if way == "killed while it ends":
            wait_until(lambda: trace.exists() and trace.read_text() == "ending", description="a request to end")
        if way != "ends":
            program.send_signal(signal.SIGKILL)
        wait_until(lambda: not is_there(pid), description="no launcher")
        _, told = program.communicate(timeout=240)
    assert trace.read_text() == "in good order"
    assert told == "" or way == "killed while it ends"


def is_there(pid: int) -> bool:
    """Whoever has taken an orphan may not have asked for its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_a_program_forks_does_not_end_its_run() -> None:
    launcher = begun(IN_ORDER)
    pid = os.fork()
    if pid == 0:
        launcher._end_at_exit()
        os._exit(0)
    os.waitpid(pid, 0)

    assert not launcher.wait(0.3)
    launcher.end(60)
