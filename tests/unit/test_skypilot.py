"""docs/hosts/skypilot.yaml: what each of its machines runs, with a streamrl that only says how it was called."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from bench.memory import sizes_of
from bench.memory_cases import CASES
from streamrl.config.load import load_config
from streamrl.config.schema import HttpReward
from streamrl.learner.planning.memory import refuse_too_large
from tests.manifest_world import ROOT
from tests.unit.test_manifests_programs import command_of

TASK = yaml.safe_load((ROOT / "docs" / "hosts" / "skypilot.yaml").read_text())
ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4")
GPUS = 8
SECRETS = {"REDIS_PASSWORD": "secret-of-redis", "REWARD_TOKEN": "secret-of-reward"}
SAYS = """#!/bin/bash
for name in REDIS_PASSWORD REWARD_TOKEN; do [ -z "${!name:-}" ] || echo "$name is told to all"; done >> "$CALLS"
printf '%s\\n' "${CUDA_VISIBLE_DEVICES:-all} streamrl $*" >> "$CALLS"
"""


def called(folder: Path, rank: int) -> list[str]:
    """GPUs and words of each streamrl on the machine of that rank."""
    tools, calls = folder / ".venv" / "bin", folder / "calls"
    tools.mkdir(parents=True)
    for name, text in {"streamrl": SAYS, "python": "#!/bin/bash\necho true\n"}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    told = {**TASK["envs"], **SECRETS, "RUNS": str(folder / "runs"), "HOME": str(folder), "CALLS": str(calls)}
    told |= {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "\n".join(ADDRESSES)}
    told |= {"SKYPILOT_NUM_NODES": str(len(ADDRESSES)), "SKYPILOT_NUM_GPUS_PER_NODE": str(GPUS)}
    words = ["bash", "-c", TASK["run"] + "\nwait"]
    subprocess.run(words, cwd=folder, env={"PATH": os.environ["PATH"], **told}, check=True, timeout=240)
    return sorted(calls.read_text().splitlines())


def test_the_first_learn_and_the_others_generate_beside_the_reward_server(tmp_path: Path) -> None:
    machines = []
    for rank in range(len(ADDRESSES)):
        (tmp_path / str(rank)).mkdir()
        machines.append(called(tmp_path / str(rank), rank))
    first, second, third, last = machines
    learns = "all streamrl learn conf/gpu_qwen_32b.yaml name=run "
    assert [line.startswith(learns) for line in (*first, *second)] == [True, True]
    assert [line.split()[:3] for line in third] == [[gpus, "streamrl", "worker"] for gpus in ("0,1,2,3", "4,5,6,7")]
    assert [line.split()[::2][:2] for line in last] == [["0,1,2,3", "worker"], ["7", "reward"]]
    everything = [line for machine in machines for line in machine]
    assert not any(secret in line for line in everything for secret in SECRETS.values())
    assert not any("is told to all" in line for line in everything)
    for line in everything:
        command, words = command_of(line.split()[1:])
        command.make_parser(command.make_context("it", [], resilient_parsing=True)).parse_args(words)


def test_secrets_are_files_of_their_owner_alone(tmp_path: Path) -> None:
    called(tmp_path, 0)
    private = tmp_path / "private"
    assert private.stat().st_mode & 0o777 == 0o700
    assert sorted(file.name for file in private.iterdir()) == ["redis", "redis.conf", "reward"]
    assert {file.stat().st_mode & 0o777 for file in private.iterdir()} == {0o600}
    assert SECRETS["REDIS_PASSWORD"] in (private / "redis.conf").read_text()


def test_its_settings_exist_and_its_learners_take_all_gpus_of_a_machine() -> None:
    named = re.findall(r"\b([a-z_]+(?:\.[a-z_]+)+)=", TASK["run"])
    settings = {"model.path", "training.max_time", "weights.store"}
    assert set(named) == {*settings, "rewards.model.url", "rewards.model.token_file"}
    given = [f"{name}=http://x" for name in named if name not in settings]
    given += re.findall(r"training\.max_time=\S+", TASK["run"])
    [store] = re.findall(r'weights\.store="file:\$RUNS(\S+)"', TASK["run"])
    given += [f"weights.store=file:{TASK['envs']['RUNS']}{store}"]
    config = load_config(ROOT / TASK["envs"]["RUN_CONFIG"], given).config
    assert config.training.max_time is None, "nothing starts a next job"
    assert isinstance(config.rewards["model"], HttpReward)
    assert TASK["resources"]["accelerators"].endswith(f":{config.learner.processes}")
    assert TASK["envs"]["GPUS_OF_A_WORKER"] == str(config.worker.gpus)
    assert TASK["envs"]["RUNS"] in TASK["volumes"], "every machine sees the weights there"


def test_its_model_has_room_on_the_fewest_machines_with_which_it_learns(tmp_path: Path) -> None:
    [learns, *_] = called(tmp_path, 0)
    words = learns.split()
    fewest, most = map(int, words[words.index("--nodes") + 1].split(":"))
    config = load_config(ROOT / TASK["envs"]["RUN_CONFIG"]).config
    assert config.model.path == "Qwen/Qwen2.5-32B-Instruct"
    sizes, of_an_h100 = sizes_of(CASES["32B full, 16 GPUs"]), 81_559 << 20
    refuse_too_large(sizes, config, ranks=fewest * config.learner.processes, room=of_an_h100)
    assert most == int(TASK["envs"]["LEARNERS"])


@pytest.mark.parametrize("part", ["setup", "run"])
def test_each_part_is_a_script_whose_variables_are_its_own_or_skypilots(part: str) -> None:
    subprocess.run(["bash", "-n", "-c", TASK[part]], check=True, timeout=240)
    known = {*TASK["envs"], *TASK["secrets"], "PWD", "PATH", "HOME"}
    used = set(re.findall(r"\$\{?([A-Z_]+)\b", TASK[part]))
    assert {name for name in used if not name.startswith("SKYPILOT_")} <= known
    extras = set(re.findall(r"^([a-z-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    assert set(re.findall(r"[a-z-]+", " ".join(re.findall(r"parts=([a-z,-]+)", TASK[part])))) <= extras
