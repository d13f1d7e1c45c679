"""docs/tutorial.md, followed to the letter by somebody who has installed streamrl and stands in an empty folder."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from streamrl.process import free_port
from tests.helpers import wait_until

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"
LIMIT_S = 15 * 60

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    language: str
    text: str
    file: str  # that the page names last before it: where a program or a configuration is saved


def blocks() -> list[Block]:
    page = PAGE.read_text()
    return [
        Block(
            language=found[1],
            text=found[2],
            file=(re.findall(r"`([\w-]+\.(?:py|yaml))`", page[: found.start()]) or [""])[-1],
        )
        for found in re.finditer(r"^```(\w+)[^\n]*\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    ]


class Reader:
    """Who does what the page says. `took` has the seconds of each command block, by its first words."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        self._folder, self._variables = folder, variables
        self.took: dict[str, float] = {}

    def run(self, text: str, *, warns: bool = False) -> str:
        """One that `warns` may end with 3, as `doctor` and `status` do where somebody should look."""
        with self._timed(text):
            done = self._bash(text, "+e" if warns else "-e")
        assert done.returncode in ((0, 3) if warns else (0,)), f"{text}{done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def beside(self, text: str, *, ends: bool) -> Iterator[None]:
        """In another terminal; one that does not end by itself is ended."""
        with self._timed(text), (self._folder / "terminal.log").open("w") as log:
            process = subprocess.Popen(
                ["bash", "-e", "-c", text],
                cwd=self._folder,
                env=self._variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                yield
                if ends:
                    assert process.wait(LIMIT_S) == 0, (self._folder / "terminal.log").read_text()
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                process.wait(60)

    def succeeds(self, text: str) -> bool:
        return self._bash(text, "-e").returncode == 0

    def _bash(self, text: str, option: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", option, "-c", text],
            cwd=self._folder,
            env=self._variables,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    @contextmanager
    def _timed(self, text: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.took[" ".join(text.split()[:3])] = time.monotonic() - began


def test_a_stranger_goes_from_own_data_to_a_served_model(
    empty: Path, alone: dict[str, str], record_property: Callable[[str, object], None]
) -> None:
    reader, port = Reader(empty, alone), str(free_port("127.0.0.1"))
    said: dict[str, str] = {}  # by a block's first words
    todo = iter(blocks())
    for block in todo:
        first = " ".join(block.text.split()[:2])
        if block.language != "bash":
            (empty / block.file).write_text(block.text)
        elif first == "streamrl up":
            look = next(todo).text
            with reader.beside(block.text, ends=True):
                wait_until(
                    partial(reader.succeeds, "grep -q step runs/mine/metrics.jsonl"),
                    description="the run makes steps",
                    timeout_s=300.0,
                    poll_s=2.0,
                )
                said["look"] = reader.run(look, warns=True)
        elif first == "streamrl serve":
            ask = next(todo).text.replace("8000", port)
            with reader.beside(f"{block.text.strip()} --port {port}", ends=False):
                asked = partial(reader.succeeds, ask.strip() + " -f")
                wait_until(asked, description="it serves", timeout_s=300.0, poll_s=2.0)
                said["served"] = reader.run(ask)
        else:
            said[first] = reader.run(block.text, warns="doctor" in block.text)

    total_s = sum(reader.took.values())
    told = ", ".join(f"{words} {seconds:.0f} s" for words, seconds in reader.took.items())
    record_property("figure", f"{total_s:.0f} s in all: {told}")
    before, after = map(float, re.findall(r"(?m)^reward +([\d.]+)", said["streamrl eval"]))
    assert after >= before + 0.2
    assert re.fullmatch(r"\d+\s*", said["streamrl chat"]), said["streamrl chat"]
    assert re.fullmatch(r"\d+", json.loads(said["served"])["choices"][0]["text"])
    assert [word for word in ("health", "ticket", "sample 1") if word not in said["look"]] == []
    assert total_s <= LIMIT_S, told
