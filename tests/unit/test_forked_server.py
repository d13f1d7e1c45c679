"""multiprocessing's fork server as a fork of a process that has imported already: in a process of one thread, which no
test's own is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_PARENT = """
import json, multiprocessing.util, os, signal, sys, tempfile, threading, time
from contextlib import ExitStack, contextmanager
from multiprocessing import forkserver, resource_tracker
from streamrl.forked_server import forking_server

def grandchild(sending):
    sending.send("spawned")

def spawn():
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=grandchild, args=(sending,))
    process.start()
    sending.close()
    try:
        return receiving.recv()
    except EOFError:
        return None

def child(files, sending):
    sending.send({
        "server": os.getppid(),
        "imported_by": sys.modules["imported"].BY if "imported" in sys.modules else None,
        "sigterm": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "has_our_files": any(map(is_open, files)),
        "spawns": spawn(),
    })
    forkserver.ensure_running()  # the one that it comes from, which is not locked

@contextmanager
def held_folder():
    with tempfile.TemporaryDirectory() as folder:
        yield folder

def is_open(file):
    return any(os.path.exists(f"/proc/self/fd/{one}") and os.readlink(f"/proc/self/fd/{one}") == file
               for one in os.listdir("/proc/self/fd"))

if __name__ == "__main__":
    import imported
    signal.signal(signal.SIGTERM, lambda *_: None)
    if sys.argv[1] == "threads":
        threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()
    ours = open(__file__)
    assert is_open(os.path.realpath(__file__))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([])
    stack = ExitStack()
    folder = stack.enter_context(held_folder())
    multiprocessing.util.Finalize(None, stack.pop_all().close, exitpriority=1)
    with forking_server(["imported", "nowhere"] if sys.argv[1] == "not imported" else ["imported"]):
        forkserver.ensure_running()
    while not (words := open(f"/proc/{resource_tracker._resource_tracker._pid}/cmdline").read()):
        time.sleep(0.01)  # it is about to become its program
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=child, args=([os.path.realpath(__file__)], sending))
    process.start()
    told = receiving.recv()
    process.join(30)
    told |= {"us": os.getpid(), "code": process.exitcode}
    print(json.dumps(told | {"tracker_is_a_program": "-c" in words, "folder_stays": os.path.exists(folder)}))
"""


def ask(folder: Path, how: str) -> dict[str, Any]:
    (folder / "imported.py").write_text("import os\nBY = os.getpid()\n")
    (folder / "parent.py").write_text(_PARENT)
    done = subprocess.run(
        [sys.executable, str(folder / "parent.py"), how], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_it_has_what_this_process_has_imported_and_neither_its_files_nor_its_signal_handlers(tmp_path: Path) -> None:
    found = ask(tmp_path, "fork")

    assert found["imported_by"] == found["us"] != found["server"]
    assert (found["sigterm"], found["has_our_files"], found["code"]) == (True, False, 0)
    assert found["tracker_is_a_program"]
    assert found["folder_stays"], "a child did what is due at the end of its parent's parent"
    assert found["spawns"] == "spawned", "as an engine's process does with its ranks"


@pytest.mark.parametrize("why", ["not imported", "threads"])
def test_where_a_module_is_missing_or_another_thread_runs_it_is_a_program(tmp_path: Path, why: str) -> None:
    found = ask(tmp_path, why)

    assert (found["imported_by"], found["code"]) == (None, 0)


_AGENT = """
import multiprocessing, os, sys
from multiprocessing import forkserver
from streamrl.learner.process import agent

def look(sending):
    sending.send(open(f"/proc/{os.getppid()}/cmdline").read())

def torchrun(words):
    context = multiprocessing.get_context("forkserver")
    assert forkserver._forkserver._forkserver_pid, "it would begin when torchrun has been imported"
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=look, args=(sending,))
    process.start()
    print("forked" if receiving.recv() == open("/proc/self/cmdline").read() else "a program")
    process.join()

if __name__ == "__main__":
    agent.PRELOADED = ["json.tool"]
    if sys.argv[1] == "imported":
        import json.tool
    agent.main(["--nproc-per-node=1", "--"], torchrun=torchrun)
"""


@pytest.mark.parametrize(("what", "told"), [("imported", "forked"), ("nothing", "a program")])
def test_an_agent_that_has_imported_for_its_ranks_forks_their_server(tmp_path: Path, what: str, told: str) -> None:
    (tmp_path / "agent.py").write_text(_AGENT)
    command = [sys.executable, str(tmp_path / "agent.py"), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)

    assert done.stdout.split("\n")[0] == told, done.stderr
