"""Every target for CPUs is built from the Dockerfile as it stands, and holds what its pods need and little else.

Measured: monitor 0.44 GB, learner 1.39 GB, worker-cpu 2.94 GB.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version

import pytest

from tests.images.conftest import TARGETS
from tests.images.engine import Engine

pytestmark = [pytest.mark.images, pytest.mark.timeout(2400)]  # who comes first builds them
MOST_BYTES = {"monitor": 0.7e9, "learner": 2.0e9, "worker-cpu": 3.2e9}
_LOOK = """
import json, pathlib
root = pathlib.Path("/opt/streamrl")
sources = [p for p in root.rglob("*.py")]
bare = [p for p in sources if not list((p.parent / "__pycache__").glob(f"{p.stem}.*.pyc"))]
told = json.loads((root / "sbom.cdx.json").read_text())
print(json.dumps({"sources": len(sources), "bare": len(bare), "names": [one["name"] for one in told["components"]]}))
"""
# What package managers leave: lists, archives and caches.
_LEFT = ("/var/lib/apt/lists", "/var/cache/apt", "/root/.cache", "/home/streamrl", "/tmp", "/src")


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_is_small_runs_as_nobody_and_is_compiled(
    target: str, images: Engine, record_property: Callable[[str, object], None]
) -> None:
    image = f"streamrl-{target}:0.1.0"
    told = images.inspect("image", image)
    assert told["User"] == "10001:10001"
    record_property("figure", f"{target}: {told['Size'] / 1e9:.2f} GB")
    assert told["Size"] <= MOST_BYTES[target]

    done = images.podman(
        "run", "--rm", "--pull=never", "--network", "none", "--read-only", image, "python", "-c", _LOOK
    )
    found = json.loads(done.stdout)
    assert found["bare"] <= 0.01 * found["sources"], "imports are compiled again by each process that starts"
    assert "triton" not in found["names"], "it compiles kernels of GPUs"
    assert ("torch" in found["names"]) == (target != "monitor")


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_says_what_it_is_and_holds_nothing_of_what_built_it(target: str, images: Engine) -> None:
    image = f"streamrl-{target}:0.1.0"
    labels = images.inspect("image", image)["Labels"]
    assert labels["org.opencontainers.image.version"] == version("streamrl")
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.title"].startswith("streamrl: ")

    look = ["find", *_LEFT, "-type", "f"]
    words = ["run", "--rm", "--pull=never", "--network", "none", "--user", "0", "--entrypoint", look[0]]
    left = images.podman(*words, image, *look[1:], check=False).stdout.split()
    assert not [path for path in left if not path.endswith((".bashrc", ".profile", ".bash_logout", "/lock"))]


def test_the_workers_image_constrains_what_is_sampled_without_triton(images: Engine) -> None:
    ask = (
        "import torch, xgrammar as x\n"
        "tokens = [chr(i) for i in range(32, 127)] + ['<eos>']\n"
        "info = x.TokenizerInfo(tokens, stop_token_ids=[len(tokens) - 1])\n"
        'grammar = x.GrammarCompiler(info).compile_json_schema(\'{"type": "integer"}\')\n'
        "mask = x.allocate_token_bitmask(1, len(tokens))\n"
        "x.GrammarMatcher(grammar).fill_next_token_bitmask(mask)\n"
        "logits = torch.zeros(1, len(tokens))\n"
        "x.apply_token_bitmask_inplace(logits, mask)\n"
        "print(''.join(token for token, logit in zip(tokens, logits[0]) if logit == 0))\n"
    )
    image = "streamrl-worker-cpu:0.1.0"
    done = images.podman("run", "--rm", "--pull=never", "--network", "none", image, "python", "-c", ask)
    assert done.stdout == "-0123456789\n"
