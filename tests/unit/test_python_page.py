"""`docs/python.md` as a reader follows it: its blocks run, one after another, with all but the run itself."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import streamrl
from streamrl.config.check import check_config
from streamrl.config.load import load_config
from streamrl.ops.python.launcher import EndOfRun
from streamrl.ops.python.request import make_request
from streamrl.ops.python.run import Run
from tests.unit.test_python_run import LifeDouble, trained

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
MINE = "extends: pretrained.yaml\nmodel: {path: sft}\ndata: {train: prompts.jsonl, validation: held-out.jsonl}\n"
SUMMARY = {"held_out": {"near": [0.1, 0.4]}}


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


class Started:
    """`streamrl`, whose `start` checks what it is asked, and has a run of two steps."""

    def __init__(self, folder: Path) -> None:
        self.rewards: list[list[str]] = []
        self._folder = folder
        (folder / "metrics.jsonl").write_text(trained(1, 0.5, loss=0.1) + trained(2, 0.5, loss=0.1))

    def start(self, config: Any, overrides: Any = None, *, rewards: Any = None) -> Run:
        request = make_request(config, overrides, rewards, takeover=False)
        loaded = load_config(request.config, request.overrides)
        check_config(loaded.config, loaded.origin)
        self.rewards.append(list(loaded.config.rewards))
        return self._run(loaded.config.name)

    def attach(self, folder: str) -> Any:
        status = SimpleNamespace(run=SimpleNamespace(state="finished"))
        return SimpleNamespace(status=lambda: status, wait=self._run(Path(folder).name).wait)

    def _run(self, name: str) -> Run:
        return Run(
            LifeDouble(ends=EndOfRun(state="finished", steps=2, summary=SUMMARY)), name=name, folder=self._folder
        )


def test_the_pages_programs_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(MINE)
    started = Started(tmp_path)
    space: dict[str, Any] = {"__name__": "__main__", "streamrl": started}

    for block in blocks():
        exec(block.replace("import streamrl\n", ""), space)

    assert started.rewards == [["near"], ["near"], ["near"], ["brief", "right"]]
    assert capsys.readouterr().out.splitlines() == [
        "1 0.5 0.1",
        "2 0.5 0.1",
        "finished 2 0.5 None",
        "lr-3e-05 0.5",
        "lr-0.0001 0.5",
        "finished {'near': [0.1, 0.4]}",
    ]


def test_the_page_names_what_there_is() -> None:
    for name in re.findall(r"`streamrl\.(\w+)", PAGE):
        assert hasattr(streamrl, name)
    for name in re.findall(r"run\.(\w+)\(", PAGE):
        assert hasattr(Run, name)


def test_the_public_names_are_these() -> None:
    assert sorted(streamrl.__all__) == ["Result", "Run", "Step", "StreamrlError", "UserError", "attach", "start"]
    assert {name: getattr(streamrl, name).__module__ for name in ("Run", "Step", "start")} == {
        "Run": "streamrl.ops.python.run",
        "Step": "streamrl.ops.python.steps",
        "start": "streamrl.ops.python.run",
    }
    with pytest.raises(AttributeError, match="module 'streamrl' has no attribute 'begin'"):
        _ = streamrl.begin


def test_the_package_itself_imports_next_to_nothing() -> None:
    """Every process of a run begins with it, those that run a reward function among them."""
    program = "import sys, streamrl; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=240)

    assert {"torch", "vllm", "transformers", "redis", "pydantic", "numpy", "rich"}.isdisjoint(done.stdout.split())
