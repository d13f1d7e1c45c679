"""docker/compose.yaml, as docs/plain-hosts.md has it started: a run on one machine, to its end, by podman's means.

Of compose itself nothing is run; tests/images/composed.py does what it would. 154 s on two cores with a load of 5: six
steps with vLLM, 40 tickets, lost 0, twice 0.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.images.composed import Composed
from tests.images.engine import Engine
from tests.manifest_world import K8S, ROOT
from tests.pages import blocks
from tests.root.conftest import SMALL, fill
from tests.root.hosts import Hosts, hosts

pytestmark = [pytest.mark.images, pytest.mark.timeout(2400)]
Say = Callable[[str], None]
READY_S = 420.0
PATIENCE_S = 420.0
SOMEBODY = 12345  # no user of the images
PARTS = ("users", "redis", "reward", "learner", "worker", "monitor", "dashboard")
MAX_STEPS = 6


def test_a_run_in_containers_ends_and_its_workers_do_not_come_again(
    images: Engine, tmp_path: Path, say: Say, record_property: Callable[[str, object], None]
) -> None:
    place = tmp_path / "place"
    _lay_out(place)
    config = tmp_path / "run.yaml"
    config.write_text(_settings())
    given = {"PLACE": str(place), "AS": f"{SOMEBODY}:{SOMEBODY}", "RUN_CONFIG": str(config)}
    services = {name: f"{name}-0" for name in PARTS}
    with hosts(list(services.values()), tmp_path / "hosts", services=services) as world:
        composed = Composed(images, world, given, tmp_path)
        try:
            took = composed.up(ready_s=READY_S)
            say("well after " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in took.items()))
            composed.wait_for_end("learner", timeout_s=PATIENCE_S)
            composed.wait_for_end("worker", timeout_s=PATIENCE_S)
            ended = {name: composed.state(name) for name in ("learner", "worker")}
            assert [(one["ExitCode"], one["restarts"]) for one in ended.values()] == [(0, 0), (0, 0)]
            assert all(composed.state(name)["Running"] for name in ("redis", "reward", "monitor", "dashboard"))
            audit = _audit(world, place)
        finally:
            composed.down()
    assert (audit["step"], audit["lost"], audit["twice"], audit["clean"]) == (MAX_STEPS, 0, 0, True), audit
    secrets = [path.read_text().strip() for path in (place / "secrets").iterdir()]
    assert not any(value in composed.log(name) for value in secrets for name in PARTS)
    record_property("figure", f"{audit['step']} steps, {audit['issued']} tickets, lost 0, twice 0")


def _lay_out(place: Path) -> None:
    """By the page's words, all of somebody who is not root."""
    (block,) = [one for one in blocks(ROOT / "docs" / "plain-hosts.md", "sh") if "docker compose" in one.text]
    *words, last = block.text.replace("/srv/streamrl", str(place)).splitlines()
    assert last.startswith("docker compose -f docker/compose.yaml up")
    subprocess.run(["sh", "-ec", "\n".join(words)], check=True, timeout=60)
    fill(place / "models")
    subprocess.run(["chown", "-R", f"{SOMEBODY}:{SOMEBODY}", str(place)], check=True, timeout=60)


def _settings() -> str:
    """The overlay's, and over them what makes the run a small one; its workers generate with vLLM."""
    own = yaml.safe_load((K8S / "overlays" / "cpu" / "run.yaml").read_text())
    small = yaml.safe_load(SMALL.replace("engine: transformers, ", ""))
    small["training"]["max_steps"] = MAX_STEPS
    own |= {key: {**own.get(key, {}), **value} for key, value in small.items()}
    return str(yaml.safe_dump(own))


def _audit(world: Hosts, place: Path) -> dict[str, int]:
    """As the operator's, from the machine of Redis."""
    words = [sys.executable, "-m", "streamrl.ops.cli.main", "audit", str(place / "runs" / "run")]
    password = {"STREAMRL_REDIS_PASSWORD_FILE": str(place / "secrets" / "operator")}
    told = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **password}
    done = world.ask("redis-0", [*words, "--redis", "redis://operator@127.0.0.1:6379", "--json"], told)
    assert done.stdout, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found
