"""What torchrun's agent forks ranks from: all imported, no GPU touched, and deaf to what is the agent's to pass on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streamrl.learner.process.agent import main
from streamrl.learner.process.job import JOB_BEGAN, job_began

ROOT = Path(__file__).parents[2]

# In the fork server's place: its parent, the test, is the agent.
_NURSERY = """
import importlib, os, signal, sys, threading
import torch
touched = []
for name in ("is_available", "device_count", "current_device", "get_device_properties", "_lazy_init"):
    setattr(torch.cuda, name, lambda *_, name=name, **__: touched.append(name) or 0)
from streamrl.learner.process.agent import PRELOADED
for name in PRELOADED:
    importlib.import_module(name)
print(touched, "streamrl.learner.assemble" in sys.modules, threading.active_count(), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
rank = os.fork()
if rank == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]), flush=True)
signal.pause()
"""


def test_ranks_are_forked_from_a_server_that_has_everything_and_no_gpu_and_only_they_heed_sigterm() -> None:
    with subprocess.Popen([sys.executable, "-c", _NURSERY], cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "[] True 1\n"
            assert int(server.stdout.readline()) == 128 + signal.SIGTERM
            assert server.poll() is None
        finally:
            server.kill()


# torchrun makes a folder for logs, and multiprocessing one for sockets.
_AGENT = """
import sys, tempfile
from multiprocessing import util
from streamrl.learner.process.agent import main
def torchrun(arguments):
    print(tempfile.mkdtemp(), util.get_temp_dir(), flush=True)
    raise SystemExit(3)
main(["--nproc-per-node=1", "--", "x"], torchrun=torchrun)
"""


def test_what_an_agent_leaves_lying_about_goes_with_it() -> None:
    ended = subprocess.run([sys.executable, "-c", _AGENT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (3, "")
    made = [Path(word) for word in ended.stdout.split()]
    assert len({path.parent for path in made}) == 1
    assert made[0].parent.name.startswith("streamrl-scratch-")
    assert not made[0].parent.exists()


# Started by a job that was itself started by another one; torchrun's ranks have the agent's environment.
_JOB = """
import os, time
from streamrl.learner.process.agent import main
from streamrl.learner.process.job import job_began
def torchrun(arguments):
    print(job_began(os.environ))
print(time.monotonic())
main(["--nproc-per-node=1", "--", "x"], torchrun=torchrun)
print(time.monotonic())
"""


def test_ranks_are_told_when_the_job_began_which_is_with_their_agent() -> None:
    environment = {**os.environ, JOB_BEGAN: "1.5"}
    words = subprocess.run([sys.executable, "-c", _JOB], cwd=ROOT, env=environment, capture_output=True, check=True)
    before, told, after = map(float, words.stdout.split())
    assert before <= told <= after


def test_a_rank_without_an_agent_is_a_job_of_its_own() -> None:
    assert time.monotonic() - 60 < job_began({}) <= time.monotonic()
    assert job_began({JOB_BEGAN: "1.5"}) == 1.5


# A rank ends its agent by a signal, after it has said what a restart would bring, or not.
_ENDED = """
import os, signal, sys
from streamrl.learner.process.agent import main
from streamrl.learner.process.job import write_verdict
def torchrun(arguments):
    if sys.argv[1:]:
        write_verdict(int(sys.argv[1]), os.environ)
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("it went on")
main(["--nproc-per-node=1", "--", "x"], torchrun=torchrun)
"""


@pytest.mark.parametrize(("told", "code", "said"), [(["2"], 2, ""), ([], 0, "learner: ending on SIGTERM\n")])
def test_an_agent_that_its_rank_has_ended_ends_with_the_code_of_the_rank(told: list[str], code: int, said: str) -> None:
    words = [sys.executable, "-c", _ENDED, *told]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (code, said)


def test_an_agent_must_be_told_what_is_its_own() -> None:
    with pytest.raises(SystemExit, match="TORCHRUN_OPTIONS -- LEARNER_OPTIONS"):
        main(["--nproc-per-node=1", "--config", "x"])
