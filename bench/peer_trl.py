"""TRL's RLOO trainer on the same samples: its learning step, in its own environment.

The environment is created once, in the user's cache folder. It sees this environment's torch and transformers, and adds
TRL and its other dependencies from PyPI. It runs `bench/trl_steps.py`, which makes one step for each line on stdin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.measure import Say
from streamrl.errors import ResourceError

if TYPE_CHECKING:
    from bench.long_tailed import Size
    from streamrl.protocol.wire.group import Group

_MAKE_S = 600
_STAMP = "made"


class Trl:
    """A running TRL process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.version = self._read()["trl"]

    def step(self) -> float:
        """Return the seconds of one learning step over all samples."""
        assert self._process.stdin is not None, "it was opened"
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return float(self._read()["seconds"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "it was opened"
        line = self._process.stdout.readline()
        if not line:
            raise ResourceError("TRL ended early; see its output above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def running(groups: Sequence[Group], size: Size, *, max_length: int, folder: Path, say: Say) -> Iterator[Trl]:
    python = environment(say)
    task = {
        "config": size.config(max_length=max_length).to_dict(),
        "vocabulary": size.vocabulary,
        "num_samples": len(groups[0].samples),
        "prompts": [group.prompt_ids.tolist() for group in groups for _ in group.samples],
        "responses": [sample.token_ids.tolist() for group in groups for sample in group.samples],
        "rewards": [sample.reward for group in groups for sample in group.samples],
        "output": str(folder / "trl"),
    }
    (folder / "task.json").write_text(json.dumps(task))
    script = Path(__file__).with_name("trl_steps.py")
    quiet = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONPATH": "", "WANDB_DISABLED": "true"}
    process = subprocess.Popen(
        [python, "-W", "ignore", str(script), str(folder / "task.json")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **quiet},
    )
    try:
        yield Trl(process)
    finally:
        process.kill()
        process.wait()


def environment(say: Say) -> Path:
    """Return the environment's interpreter; create the environment if needed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "streamrl" / "bench-trl"
    python, stamp, beside = cache / "bin" / "python", cache / _STAMP, os.path.realpath(sysconfig.get_path("purelib"))
    if stamp.exists() and stamp.read_text() == beside:  # another checkout's packages may be gone
        return python
    say(f"making an environment with TRL in {cache}")
    venv.create(cache, clear=True, with_pip=True)
    [site] = cache.glob("lib/python*/site-packages")
    (site / "beside.pth").write_text(f"{beside}\n")
    done = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "trl"],
        stdout=sys.stderr,
        check=False,
        timeout=_MAKE_S,
        env={**os.environ, "PYTHONPATH": ""},
    )
    if done.returncode != 0:
        raise ResourceError("TRL could not be installed from PyPI; --quick skips the comparison with it")
    stamp.write_text(beside)
    return python
