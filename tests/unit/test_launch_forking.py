"""Programs that are forked from one import: each as if it had been started, and all gone with the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from streamrl.demos.run import program, run_all
from streamrl.errors import PartError, UserError
from streamrl.ops.launch.forking import Forking, PartsAhead
from streamrl.ops.launch.processes import Command, Process
from tests.helpers import wait_until

_IMPORTED = "import os\nPID = os.getpid()\n"
_NO_ROOM = """
fork, full = os.fork, os.path.join(os.path.dirname(__file__), "full")
def fork_if_there_is_room():
    if os.path.exists(full): raise BlockingIOError(11, "there is no room")
    return fork()
os.fork = fork_if_there_is_room
"""
_PROGRAM = """
import os, sys, time
import imported
print("words", *sys.argv[1:], "of one import" if imported.PID == os.getppid() else "", flush=True)
if sys.argv[1] == "tell":
    print(*(os.environ.get(name) for name in ("OF_IMPORT", "OF_LAUNCHER", "OF_PROGRAM")), os.getsid(0) == os.getpid())
    print("more" in sys.modules, open("/proc/self/comm").read().strip())
    print(open("/proc/self/cmdline").read().rstrip("\\0"))
if sys.argv[1] == "wait":
    time.sleep(600)
if sys.argv[1] == "refuse":
    print("error: no such thing")
sys.exit({"end": 0, "tell": 0, "fail": 3, "refuse": 2}[sys.argv[1]])
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "imported.py").write_text(_IMPORTED)
    (tmp_path / "a_program.py").write_text(_PROGRAM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return tmp_path


def asked(folder: Path, name: str, word: str) -> Command:
    return program(name, ["-m", "a_program", word], {"--with": name}, logs=folder)


def until_said(process: Process, what: str) -> None:
    deadline = time.monotonic() + 60
    while not any(what in line for line in process.last_words()):
        assert time.monotonic() < deadline, "the program did not begin"
        time.sleep(0.01)


def test_programs_are_of_one_import_and_each_has_its_words_and_its_log(modules: Path) -> None:
    with Forking(["imported", "not_there"], log=modules / "imports.log") as forking:
        run_all([asked(modules, "a", "end"), asked(modules, "b", "end")], lambda _: None, start=forking.start)

    assert [(modules / f"{name}.log").read_text() for name in "ab"] == [
        f"words end --with={name} of one import\n" for name in "ab"
    ]


def test_a_program_that_fails_has_its_own_exit_code_and_the_others_end(modules: Path) -> None:
    with Forking(["imported"], log=modules / "imports.log") as forking:
        programs = [asked(modules, "waiting", "wait"), asked(modules, "failing", "fail")]
        with pytest.raises(PartError, match="failing ended with exit code 3"):
            run_all(programs, lambda _: None, start=forking.start)
        children = Path(f"/proc/{forking.server.pid}/task/{forking.server.pid}/children")
        wait_until(lambda: not children.read_text(), description="the other has ended")


def test_a_program_that_refuses_is_a_mistake_of_the_users(modules: Path) -> None:
    refused = pytest.raises(UserError, match="a: no such thing")
    with Forking(["imported"], log=modules / "imports.log") as forking, refused:
        run_all([asked(modules, "a", "refuse")], lambda _: None, start=forking.start)


def test_a_program_has_a_name_an_environment_and_a_session_of_its_own(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_LAUNCHER", "now")
    environment = {"OF_IMPORT": "1", "OF_LAUNCHER": "before"}
    with Forking(["imported"], log=modules / "imports.log", environment=environment) as forking:
        process = forking.start(replace(asked(modules, "a", "tell"), environment={"OF_PROGRAM": "2"}))
        assert process.wait(60)

    *told, title = (modules / "a.log").read_text().splitlines()[1:]
    assert told == ["None now 2 True", "False a"]
    assert title == f"{sys.executable} -m a_program tell --with=a"


def test_long_command_lines_are_shown_whole_also_where_the_environment_is_small(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in os.environ.keys() - {"PYTHONPATH", "PATH"}:
        monkeypatch.delenv(name)
    long = program("a", ["-m", "a_program", "tell"], {"--with": "a" * 2000}, logs=modules)
    with Forking(["imported"], log=modules / "imports.log") as forking:
        assert forking.start(long).wait(60)

    assert (modules / "a.log").read_text().splitlines()[-1].endswith(f"a_program tell --with={'a' * 2000}")


@pytest.mark.parametrize(
    ("wanted", "given"), [("3", "threads 3"), ("2,1", "threads 2"), ("", "words end --with=a of one import")]
)
def test_torch_gets_the_threads_of_the_program_s_environment(modules: Path, wanted: str, given: str) -> None:
    (modules / "torch.py").write_text("def set_num_threads(number):\n    print('threads', number, flush=True)\n")
    with Forking(["imported", "torch"], log=modules / "imports.log", environment={"OMP_NUM_THREADS": "1"}) as forking:
        process = forking.start(replace(asked(modules, "a", "end"), environment={"OMP_NUM_THREADS": wanted}))
        assert process.wait(60)

    assert (modules / "a.log").read_text().splitlines()[0] == given


def test_what_is_imported_later_is_there_for_later_programs(modules: Path) -> None:
    (modules / "more.py").touch()
    (modules / "broken.py").write_text("raise RuntimeError('it cannot be imported here')\n")
    with Forking(["imported"], log=modules / "imports.log") as forking:
        early = forking.start(asked(modules, "a", "tell"))
        forking.import_also(["broken", "more"])
        late = forking.start(asked(modules, "b", "tell"))
        assert early.wait(60)
        assert late.wait(60)

    assert [(modules / f"{name}.log").read_text().splitlines()[2] for name in "ab"] == ["False a", "True b"]
    assert "it cannot be imported here" in (modules / "imports.log").read_text()


def test_a_program_that_has_no_room_for_a_process_fails_alone(modules: Path) -> None:
    """The server is made to find no room when it is told to, as a limit of processes would."""
    (modules / "imported.py").write_text(_IMPORTED + _NO_ROOM)
    with Forking(["imported"], log=modules / "imports.log") as forking:
        stays = forking.start(asked(modules, "stays", "wait"))
        until_said(stays, "words")
        (modules / "full").touch()
        fails = forking.start(asked(modules, "fails", "end"))
        assert fails.wait(60)
        (modules / "full").unlink()
        late = forking.start(asked(modules, "late", "end"))
        assert late.wait(60)

        assert (fails.poll(), late.poll(), stays.poll()) == (1, 0, None)
        assert fails.last_words() == ["fails could not be started: [Errno 11] there is no room"]


def test_a_program_that_is_told_to_end_ends_alone(modules: Path) -> None:
    with Forking(["imported"], log=modules / "imports.log") as forking:
        stays, goes = (forking.start(asked(modules, name, "wait")) for name in ("stays", "goes"))
        for process in (stays, goes):
            until_said(process, "words")
        goes.terminate()

        assert goes.wait(30)
        assert goes.poll() == -signal.SIGTERM
        assert stays.poll() is None
        assert not stays.wait(0.01)
        assert stays.pid != goes.pid


def test_a_program_that_is_ended_before_its_modules_are_imported_never_begins(modules: Path) -> None:
    (modules / "endless.py").write_text("import time\ntime.sleep(600)\n")
    with Forking(["endless"], log=modules / "imports.log") as forking:
        process = forking.start(asked(modules, "a", "end"))
        process.kill()
        assert process.poll() == -signal.SIGKILL
    assert (modules / "a.log").read_text() == ""


def test_parts_begin_by_themselves_where_nothing_is_imported_or_what_imported_has_died(modules: Path) -> None:
    command = asked(modules, "learner", "end")
    with ExitStack() as stack:
        ahead = PartsAhead(stack)
        words = []
        for step in ("nothing is imported", "forked", "it has died"):
            if step == "forked":
                forking = ahead.importing(["imported"], log=modules / "imports.log")
            if step == "it has died":
                forking.server.kill()
                forking.server.wait()
            process = ahead.start(command)
            assert process.wait(60)
            words.append(process.last_words()[-1].endswith("of one import"))
    assert words == [False, True, False]


def test_a_program_whose_import_was_killed_counts_as_ended(modules: Path) -> None:
    with Forking(["imported"], log=modules / "imports.log") as forking:
        process = forking.start(asked(modules, "a", "wait"))
        until_said(process, "words")
        forking.server.kill()
        assert process.wait(30)
        assert process.poll() == -signal.SIGKILL


def test_nothing_is_left_of_a_launcher_that_is_killed(modules: Path) -> None:
    code = f"""
import pathlib, time
from streamrl.ops.launch.forking import Forking, PartsAhead
from streamrl.demos.run import program
folder = pathlib.Path({str(modules)!r})
with Forking(["imported"], log=folder / "imports.log") as forking:
    forking.start(program("a", ["-m", "a_program", "wait"], {{}}, logs=folder))
    while "words" not in (folder / "a.log").read_text():
        time.sleep(0.01)
    children = pathlib.Path(f"/proc/{{forking.server.pid}}/task/{{forking.server.pid}}/children").read_text()
    print(forking.server.pid, children, flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        server, child = map(int, launcher.stdout.readline().split())
        launcher.kill()
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in (server, child)):
        assert time.monotonic() < deadline, "a process outlived the launcher"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """One that has ended counts for the kernel until somebody asks for its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
