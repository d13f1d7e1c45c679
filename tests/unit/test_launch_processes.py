"""Child processes: their logs, their ends, and how a dead one is started again. Real processes, but small ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest

from streamrl.ops.launch.processes import Command, Interrupts, Process, SupervisedProcess, end_all
from tests.helpers import wait_until

ROOT = Path(__file__).resolve().parents[2]


def shell(folder: Path, script: str) -> Command:
    return Command(name="part/0", arguments=("/bin/sh", "-c", script), log=folder / "part.out")


def is_alive(pid: int) -> bool:
    """Not counting what has ended and only waits to be asked for its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # also one that is buried while it is read (ESRCH)
        return False


def test_what_a_process_writes_is_in_its_log_and_its_last_words_begin_at_its_own_start(tmp_path: Path) -> None:
    for word in ("first", "second"):
        process = Process(shell(tmp_path, f"echo {word}; echo {word} error >&2"))
        assert process.wait(10)

    assert process.last_words() == ["second", "second error"]
    assert "first" in (tmp_path / "part.out").read_text()


def test_its_environment_is_the_launchers_and_what_the_command_adds(tmp_path: Path) -> None:
    command = Command(
        name="part/0",
        arguments=("/bin/sh", "-c", 'echo $ADDED; test -n "$PATH" && echo path'),
        log=tmp_path / "part.out",
        environment={"ADDED": "yes"},
    )

    process = Process(command)

    assert process.wait(10)
    assert process.last_words() == ["yes", "path"]


def test_a_process_dies_with_its_launcher(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from streamrl.ops.launch.processes import Command, Process\n"
        f"p = Process(Command(name='p', arguments=('/bin/sleep', '600'), log=Path({str(tmp_path / 'log')!r})))\n"
        "print(p.pid, flush=True); time.sleep(600)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert launcher.stdout is not None
    child = int(launcher.stdout.readline())
    wait_until(lambda: Path(f"/proc/{child}/comm").read_text().strip() == "sleep", description="the child is itself")

    launcher.kill()

    launcher.communicate()
    wait_until(lambda: not is_alive(child), description="the child is gone")


def test_ctrl_c_at_the_terminal_does_not_reach_the_parts(tmp_path: Path) -> None:
    process = Process(shell(tmp_path, "sleep 600"))
    try:
        assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
    finally:
        process.kill()


def test_one_that_heeds_no_request_to_end_is_killed_with_its_children(tmp_path: Path) -> None:
    process = Process(shell(tmp_path, "trap '' TERM; sleep 600 & echo $!; while :; do sleep 1; done"))
    [child] = wait_until(process.last_words, description="the script has begun")

    end_all([process], within_s=0.2)

    assert process.poll() == -signal.SIGKILL
    wait_until(lambda: not is_alive(int(child)), description="its child is gone too")


def test_one_that_is_killed_leaves_no_semaphores(tmp_path: Path) -> None:
    code = "import multiprocessing, time; lock = multiprocessing.get_context('spawn').Lock(); print(lock._semlock.name)"
    arguments = (sys.executable, "-uc", f"{code}; time.sleep(600)")
    process = Process(Command(name="part/0", arguments=arguments, log=tmp_path / "part.out"))
    [name] = wait_until(process.last_words, description="it has a semaphore")
    semaphore = Path(f"/dev/shm/sem.{name.removeprefix('/')}")
    assert semaphore.exists()

    process.kill()

    assert not semaphore.exists()


def test_one_that_ends_when_asked_is_not_killed(tmp_path: Path) -> None:
    process = Process(shell(tmp_path, "trap 'echo bye; exit 0' TERM; echo here; while :; do sleep 0.05; done"))
    wait_until(process.last_words, description="the script has begun")

    end_all([process], within_s=30)

    assert process.poll() == 0
    assert process.last_words()[-1] == "bye"


class Lives:
    """A double of processes: each start is the next of these exit codes; None is a life that goes on."""

    def __init__(self, *codes: int | None) -> None:
        self._codes = list(codes)
        self.num_started = 0
        self.refusal: OSError | None = None

    def start(self, command: Command) -> Process:
        if self.refusal is not None:
            raise self.refusal
        self.num_started += 1
        return cast(Process, _Life(self._codes.pop(0)))


class _Life:
    def __init__(self, code: int | None) -> None:
        self._code = code

    def poll(self) -> int | None:
        return self._code


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def supervise(lives: Lives, clock: Clock, notify: Callable[[str], None] = lambda _: None) -> SupervisedProcess:
    command = Command(name="worker/0", arguments=("x",), log=Path("worker.out"))
    return SupervisedProcess(command, notify=notify, clock=clock, start=lives.start)


def test_a_dead_process_is_started_again_after_a_pause_and_people_are_told() -> None:
    lives, clock, said = Lives(-9, None), Clock(), list[str]()
    supervised = supervise(lives, clock, said.append)

    supervised.look()
    assert lives.num_started == 1
    clock.now += 1.1
    supervised.look()

    assert (lives.num_started, supervised.num_restarts, supervised.process.poll()) == (2, 1, None)
    assert said == ["worker/0 was ended by signal 9; restarting it (see worker.out)"]


def test_the_pause_grows_while_it_keeps_dying() -> None:
    lives, clock = Lives(1, 1, None), Clock()
    supervised = supervise(lives, clock)
    supervised.look()
    clock.now += 1.1
    supervised.look()  # the second life, dead at once
    supervised.look()

    clock.now += 0.9  # the second pause is at least a second
    supervised.look()
    assert lives.num_started == 2
    clock.now += 1.2
    supervised.look()
    assert lives.num_started == 3


def test_one_that_dies_again_and_again_is_given_up() -> None:
    lives, clock, said = Lives(*[1] * 5, None), Clock(), list[str]()
    supervised = supervise(lives, clock, said.append)

    for _ in range(20):
        supervised.look()
        clock.now += 31

    assert supervised.has_given_up
    assert lives.num_started == 5
    assert said[-1].startswith("worker/0 ended with exit code 1; giving up on it")


def test_one_that_cannot_be_started_for_a_moment_is_started_later() -> None:
    lives, clock, said = Lives(1, None), Clock(), list[str]()
    supervised = supervise(lives, clock, said.append)
    lives.refusal = BlockingIOError(11, "Resource temporarily unavailable")

    for _ in range(3):
        supervised.look()
        clock.now += 1.1
    lives.refusal = None
    clock.now += 5
    supervised.look()

    assert (lives.num_started, supervised.num_restarts, supervised.process.poll()) == (2, 1, None)
    assert "could not be started: [Errno 11] Resource temporarily unavailable; restarting it" in said[1]


def test_one_that_can_never_be_started_again_is_given_up() -> None:
    lives, clock = Lives(1), Clock()
    supervised = supervise(lives, clock)
    lives.refusal = BlockingIOError(11, "Resource temporarily unavailable")

    for _ in range(20):
        supervised.look()
        clock.now += 31

    assert supervised.has_given_up


def test_a_long_life_makes_earlier_failures_forgotten() -> None:
    lives, clock = Lives(*[1] * 10, None), Clock()
    supervised = supervise(lives, clock)

    for _ in range(5):
        clock.now += 121  # alive for so long, then found dead
        supervised.look()
        clock.now += 1.1
        supervised.look()

    assert not supervised.has_given_up
    assert lives.num_started == 6


@pytest.mark.parametrize(("code", "given_up"), [(0, False), (2, True)])
def test_one_that_is_done_or_whose_user_made_a_mistake_is_not_started_again(code: int, given_up: bool) -> None:
    lives, clock = Lives(code, None), Clock()
    supervised = supervise(lives, clock)

    for _ in range(3):
        supervised.look()
        clock.now += 31

    assert (lives.num_started, supervised.has_given_up) == (1, given_up)


def test_one_that_left_and_is_needed_comes_back_as_often_as_it_leaves_and_never_in_haste() -> None:
    lives, clock, said = Lives(*[0] * 10, None), Clock(), list[str]()
    supervised = supervise(lives, clock, said.append)
    started_at = [clock.now]

    while lives.num_started < 11:
        supervised.look(is_needed=True)
        clock.now += 0.1
        if lives.num_started > len(started_at):
            started_at.append(clock.now)

    pauses = [after - before for before, after in pairwise(started_at)]
    assert not supervised.has_given_up
    assert pauses[0] < 2
    assert min(pauses[-3:]) > 10
    assert said[0] == "worker/0 exited before the run ended; restarting it (see worker.out)"


def test_having_left_often_is_not_held_against_one_that_dies() -> None:
    lives, clock = Lives(*[0] * 5, 1, None), Clock()
    supervised = supervise(lives, clock)

    for _ in range(20):
        supervised.look(is_needed=True)
        clock.now += 31

    assert (lives.num_started, supervised.has_given_up) == (7, False)


def test_one_that_left_is_not_started_again_when_the_need_has_gone_meanwhile() -> None:
    lives, clock = Lives(0, None), Clock()
    supervised = supervise(lives, clock)

    supervised.look(is_needed=True)
    clock.now += 31
    supervised.look()

    assert lives.num_started == 1


def test_who_was_started_by_nohup_is_not_asked_to_end_when_the_terminal_goes() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupts.count == 0
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupts.count == 1
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_of_which_shell_and_kernel_tell_is_one_request_and_no_second_one() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)
            assert (interrupts.count, interrupts.exit_code) == (1, 129)
            os.kill(os.getpid(), signal.SIGINT)
            assert (interrupts.count, interrupts.exit_code) == (2, 129)
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGHUP)
            assert (interrupts.count, interrupts.exit_code) == (1, 130)
    finally:
        signal.signal(signal.SIGHUP, before)
