"""docs/hosts: what has died is started again, by each script that starts it, and a mistake is not made again."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.helpers import wait_until
from tests.unit.test_docs import folder_of
from tests.unit.test_hosts_gpus import HOSTS, NAMES, tools
from tests.unit.test_skypilot import ADDRESSES, SECRETS, TASK

# In the place of streamrl: the part that dies does so twice.
STREAMRL = """echo "$1" >> starts
[ "$1" = "$DIES" ] || exit 0
[ "$(grep -c "$1" starts)" = 3 ] || exit "$CODE"
"""

Start = Callable[[Path, Mapping[str, str]], None]


def ssh(folder: Path, told: Mapping[str, str]) -> None:
    path = tools(folder / "tools", ssh='shift\nshift\neval "$*"', streamrl=STREAMRL, sleep="")
    hosts = {"LEARNERS": "a", "WORKERS": "c", "REWARD": "e", "STREAMRL_REDIS": "redis://host:6379"}
    call(["bash", str(HOSTS / "ssh.sh"), "run.yaml"], folder, {**NAMES, **hosts, **told, "PATH": path})


def slurm(folder: Path, told: Mapping[str, str]) -> None:
    srun = 'while [[ $1 == --* ]]; do shift; done\nexec "$@"'
    path = tools(folder / "tools", srun=srun, scontrol='echo "${3}-0"', streamrl=STREAMRL, sleep="")
    nodes = {f"SLURM_JOB_NODELIST_HET_GROUP_{n}": f"group{n}" for n in range(3)}
    variables = {**NAMES, **nodes, **told, "STREAMRL_REDIS": "redis://host:6379", "PATH": path}
    call(["bash", str(HOSTS / "slurm.sh")], folder, variables)


def skypilot(folder: Path, told: Mapping[str, str]) -> None:
    (folder / ".venv").mkdir()
    path = tools(folder / ".venv" / "bin", streamrl=STREAMRL, python="echo true", sleep="")
    rank = 0 if told["DIES"] == "learn" else len(ADDRESSES) - 1
    machine = {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "\n".join(ADDRESSES)}
    machine |= {"SKYPILOT_NUM_NODES": str(len(ADDRESSES)), "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    place = {"RUN_NAME": NAMES["RUN_NAME"], "RUNS": str(folder / "runs"), "HOME": str(folder), "PATH": path}
    call(["bash", "-c", TASK["run"]], folder, {**TASK["envs"], **SECRETS, **machine, **place, **told})


def call(words: list[str], folder: Path, variables: Mapping[str, str]) -> None:
    subprocess.run(words, env=variables, cwd=folder, check=False, timeout=240, capture_output=True)


def starts(start: Start, part: str, folder: Path, *, code: int) -> int:
    """How often that part was started, if it ends with this code twice."""
    start(folder, {"DIES": part, "CODE": str(code)})

    def has_ended() -> bool:
        return not any(cwd == folder for cwd in map(folder_of, Path("/proc").glob("[0-9]*")))

    told = folder / "starts"
    wait_until(lambda: told.exists() and has_ended(), description="nobody is started any more")
    return told.read_text().splitlines().count(part)


PARTS = [
    *((start, part) for start in (ssh, skypilot) for part in ("worker", "reward", "learn")),
    *((slurm, part) for part in ("worker", "reward")),
]


@pytest.mark.parametrize(("code", "number"), [(1, 3), (2, 1)])
@pytest.mark.parametrize(("start", "part"), PARTS)
def test_what_has_died_is_started_again_and_what_was_a_mistake_is_not(
    start: Start, part: str, code: int, number: int, tmp_path: Path
) -> None:
    assert starts(start, part, tmp_path, code=code) == number


@pytest.mark.parametrize(("age_s", "number"), [(-600, 1), (600, 3)], ids=["of this start", "of an earlier start"])
@pytest.mark.parametrize("start", [ssh, skypilot])
def test_nothing_is_started_again_once_a_learner_has_found_what_no_restart_would_mend(
    start: Start, age_s: float, number: int, tmp_path: Path
) -> None:
    found = tmp_path / "runs" / NAMES["RUN_NAME"] / "learner.error"
    found.parent.mkdir(parents=True)
    found.write_text("{}")
    written_at = time.time() - age_s
    os.utime(found, (written_at, written_at))
    assert starts(start, "worker", tmp_path, code=1) == number
