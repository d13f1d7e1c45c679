"""What torchrun's agent forks ranks from: all imported, no GPU touched, and deaf to what is the agent's to pass on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streamrl.config import schema
from streamrl.config.load import dump_config
from streamrl.errors import Refused, TrainingError, UserError
from streamrl.learner.process.agent import main
from streamrl.learner.process.failing import write_error
from streamrl.learner.process.job import JOB_BEGAN, job_began, prepare_verdict, read_verdict, write_verdict

ROOT = Path(__file__).parents[2]
PATIENCE_S = 240

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
    open(sys.argv[1]).close()
    raise SystemExit(3)
main(["--nproc-per-node=1", "--", "--config", sys.argv[1], "--own-config"], torchrun=torchrun)
"""


def test_what_an_agent_leaves_lying_about_goes_with_it_and_so_does_a_configuration_of_its_own(tmp_path: Path) -> None:
    own = tmp_path / "asked.yaml"
    own.touch()
    words = [sys.executable, "-c", _AGENT, str(own)]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (3, "")
    assert not own.exists()
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


# Only this rank lacks the configuration, and it is not its agent's first.
_LONE_FAILURE = """
import os, time
from streamrl.learner.process.agent import main
os.environ |= {"RANK": "3", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "run"}
def torchrun(arguments):
    if os.fork():
        time.sleep(240)
    from streamrl.learner.main import main as rank
    os._exit(rank(["--config", "missing.yaml", "--redis", "redis://nowhere", "--error-file", "error.json"]))
main(["--nproc-per-node=2", "--", "x"], torchrun=torchrun)
"""


def test_an_error_that_no_restart_fixes_is_told_by_whichever_rank_has_it(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", _LONE_FAILURE]
    ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    [said] = [line for line in ended.stderr.splitlines() if line.startswith("learner: ")]
    assert (ended.returncode, "missing.yaml" in said) == (2, True)
    told = json.loads((tmp_path / "error.json").read_text())
    assert told == {"error": said.removeprefix("learner: "), "exit_code": 2}


# The run ends while it stands by. As under torchrun, it waits for its agent if it exits with 0.
_ENDED_IN_WAITING = """
import multiprocessing, os, signal, sys
from multiprocessing import util
from streamrl.errors import Ended
from streamrl.learner import main as learner
from streamrl.learner.process.agent import main
def learn(**_):
    raise Ended("an operator has ended the run")
def live():
    learner.learn = learn
    if code := learner.main(["--config", "config.yaml", "--redis", "redis://nowhere", "--standby"]):
        os._exit(code)
    while True:
        signal.pause()
os.environ |= {"TORCHELASTIC_RUN_ID": "run", "LOCAL_RANK": "0"}
def torchrun(arguments):
    kept = list(util._finalizer_registry.values())  # else a fork drops them, and the agent's folder is removed
    rank = multiprocessing.get_context("fork").Process(target=live)
    rank.start()
    rank.join()
    sys.exit(f"the agent was not told: {rank.exitcode}")
main(["--shutdown-timeout=1000", "--", "x"], torchrun=torchrun)
"""


def test_a_rank_whose_run_was_ended_by_an_operator_does_not_keep_its_agent(tmp_path: Path) -> None:
    config = schema.Config(
        name="ended",
        dir=tmp_path,
        model=schema.Model(path="none"),
        data=schema.Data(train="none.jsonl"),
        rewards={"r": schema.FunctionReward(type="function", target="none")},
    )
    (tmp_path / "config.yaml").write_text(dump_config(config))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", _ENDED_IN_WAITING]
    ended = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("learner: an operator has ended the run") == 1


@pytest.mark.parametrize(("rank", "kept"), [(0, "its own"), (3, "another's")])
def test_an_error_file_has_the_error_of_rank_0_or_the_first(tmp_path: Path, rank: int, kept: str) -> None:
    file = tmp_path / "error.json"
    write_error(file, TrainingError("another's"), rank=1)
    write_error(file, UserError("its own"), rank=rank)
    assert json.loads(file.read_text())["error"] == kept


def test_where_another_learner_has_the_run_there_is_no_error_file(tmp_path: Path) -> None:
    write_error(tmp_path / "error.json", Refused("another learner"), rank=0)
    assert list(tmp_path.iterdir()) == []


def test_of_several_ranks_with_such_errors_the_first_speaks_for_its_agent(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    file = prepare_verdict(tmp_path, environment)
    assert [write_verdict(code, environment) for code in (2, 1)] == [True, False]
    assert read_verdict(file) == 2
    assert [write_verdict(2, {"LOCAL_RANK": rank}) for rank in ("0", "1")] == [True, False]


def test_where_no_verdict_can_be_written_the_lowest_rank_speaks_all_the_same(tmp_path: Path) -> None:
    """The disk may be full, which may be the very error."""
    environment: dict[str, str] = {}
    prepare_verdict(tmp_path, environment).parent.rmdir()
    assert [write_verdict(1, {**environment, "LOCAL_RANK": rank}) for rank in ("0", "1")] == [True, False]


def test_an_agent_must_be_told_what_is_its_own() -> None:
    with pytest.raises(SystemExit, match="TORCHRUN_OPTIONS -- LEARNER_OPTIONS"):
        main(["--nproc-per-node=1", "--config", "x"])
