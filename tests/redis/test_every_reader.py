"""Every command that reads, on every kind of run: live with a Redis of its own or with another's, finished, crashed.
What each says first, and how soon, stands in pytest's summary; of a run that crashed, each in a process of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest

from streamrl.config import schema
from streamrl.config.load import dump_config
from streamrl.learner.groups.fetch import fetch_groups
from streamrl.learner.metrics.keepsakes import note_state
from streamrl.learner.metrics.record import Recorder
from streamrl.ops.cli.main import main
from streamrl.protocol.transport.connection import connect, connect_async
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.keys import Keys
from tests.redis.monitor_world import Watched
from tests.redis.run_world import RunWorld
from tests.terminal_world import in_terminal
from tests.unit.test_keepsakes import Words

KINDS = ("live, its own Redis", "live, another Redis", "finished", "crashed")
SOON_S = 30.0  # 2 s where the machine is quiet; it seldom is
_ANY = 1 << 30
_DIES = """
import sys
from pathlib import Path
from streamrl.learner.metrics.keepsakes import note_state
note_state(Path(sys.argv[1]), "running", term=1)
"""

# By command: its words, and the exit codes for a live run, a finished one, and one that crashed. 2: it is refused, in
# one line that says what to do.
COMMANDS: dict[str, tuple[str, int, int, int]] = {
    "status": ("status {run}", 0, 0, 5),
    "status --json": ("status {run} --json", 0, 0, 5),
    "why": ("why {run}", 0, 0, 5),
    "why --json": ("why {run} --json", 0, 0, 5),
    "groups tail": ("groups tail {run} -n 1", 0, 0, 0),
    "groups tail --json": ("groups tail {run} --json", 0, 0, 0),
    "groups show": ("groups show {run} 5", 0, 0, 0),
    "plot": ("plot {run} -o {out}/x.png", 0, 0, 0),
    "runs ls": ("runs ls --dir {run}/..", 0, 0, 0),
    "runs compare": ("runs compare {run}", 0, 0, 0),
    "audit": ("audit {run}", 0, 0, 0),
    "dead ls": ("dead ls {run}", 0, 2, 2),
    "weights ls": ("weights ls {run}", 0, 2, 2),
    "weights show": ("weights show {run}", 2, 2, 2),  # the stand-in publishes none
    "record --once": ("record {run} --once --output {out}/recording", 0, 2, 2),
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    code: int
    seconds: float
    out: str

    @property
    def first(self) -> str:
        return next((line for line in self.out.splitlines() if line.strip()), "")


@contextmanager
def a_run(kind: str, root: Path, keys: Keys, url: str) -> Iterator[Path]:
    """Its folder; of a live one its parts report as long as this lasts."""
    with ExitStack() as stack:
        folder = root / keys.name
        server = None
        if kind != "live, another Redis":
            server = stack.enter_context(EmbeddedRedis.start(folder / "redis"))
        run = _train(stack, root, keys, server.url if server else url)
        config = run.world.config
        config = config.model_copy(update={"redis": schema.Redis(url="embedded" if server else url)})
        (folder / "config.yaml").write_text(dump_config(config))
        if kind == "finished":
            run.world.learner.stream.release("finished")
            note_state(folder, "finished", term=1)
        elif kind == "crashed":
            subprocess.run([sys.executable, "-c", _DIES, str(folder)], check=True, timeout=240)
        if kind in ("finished", "crashed"):
            assert server is not None
            server.stop()
        else:
            note_state(folder, "running", term=1)
            stack.enter_context(run.alive())
        yield folder


def _train(stack: ExitStack, root: Path, keys: Keys, url: str) -> Watched:
    client = stack.enter_context(connect(url, schema.Redis()))
    loop = asyncio.new_event_loop()
    stack.callback(loop.close)
    async_client = connect_async(url, schema.Redis())
    stack.callback(lambda: loop.run_until_complete(async_client.aclose()))
    world = RunWorld(root, client=client, async_client=async_client, keys=keys, url=url)
    learner, run = world.learner, Watched(world)
    recorder = Recorder(folder=world.config.folder, journal=learner.stream, decoder=Words(), term=1)
    for _ in range(2):
        plan = loop.run_until_complete(world.next_step())
        groups = fetch_groups(learner.stream, plan, rank=0, vocabulary=_ANY).groups
        learner.train(plan)
        recorder.step(learner.step, {"train_rollouts/rewards": 0.5, "timers/step": 1.0, **learner.feed.metrics()})
        recorder.rollouts(learner.step, groups)
    learner.write_checkpoint(learner.feed.state())
    loop.run_until_complete(world.answer_all())
    run.healthy()
    return run


def ask(words: list[str]) -> Cell:
    began = time.monotonic()
    command = [sys.executable, "-m", "streamrl.ops.cli.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    return Cell(code=done.returncode, seconds=time.monotonic() - began, out=done.stdout + done.stderr)


def ask_here(words: list[str]) -> Cell:
    """Without a process of its own, which is half a second of a core."""
    began = time.monotonic()
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = main(words)
    return Cell(code=code, seconds=time.monotonic() - began, out=out.getvalue() + err.getvalue())


def look(run: Path) -> Iterator[tuple[str, Cell]]:
    """At what goes on until it is ended: a page, a terminal, figures."""
    for name, paths in {"dashboard": ("api/view", "api/history", "api/rollouts"), "export prometheus": ("",)}.items():
        began = time.monotonic()
        command = [sys.executable, "-m", "streamrl.ops.cli.main", *name.split(), str(run), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                url = process.stdout.readline().rpartition(" ")[2].strip()
                told = [urllib.request.urlopen(f"{url}{path}", timeout=240).read().decode() for path in paths]
            finally:
                process.terminate()
        yield name, Cell(code=0, seconds=time.monotonic() - began, out="\n".join(told))
    began = time.monotonic()
    with in_terminal(["top", str(run)], width=100) as program:
        text = program.shows("term 1", "q quit")
        seconds = time.monotonic() - began
        program.press("q")
        yield "top", Cell(code=program.process.wait(60), seconds=seconds, out=text)


def misleading(kind: str, cell: Cell) -> list[str]:
    wrong = ["Traceback"]
    if not kind.startswith("live"):
        wrong += ["start Redis", "does not answer", "unreachable", "REDIS IS GONE", "no such run"]
    return [word for word in wrong if word in cell.out]


@pytest.mark.parametrize("kind", KINDS)
def test_every_command_that_reads_answers_on(
    kind: str, tmp_path: Path, keys: Keys, redis_url: str, record_property: Callable[[str, str], None]
) -> None:
    place = {"finished": 2, "crashed": 3}.get(kind, 1)
    with a_run(kind, tmp_path / "runs", keys, redis_url) as run:
        words = {name: row[0].format(run=run, out=tmp_path).split() for name, row in COMMANDS.items()}
        asked = ask if kind == "crashed" else ask_here
        cells = {name: asked(own) for name, own in words.items()} | dict(look(run))
    for name, cell in cells.items():
        record_property("figure", f"{name:<18} exit {cell.code}  {cell.seconds:4.1f} s  {cell.first[:90]}")
    expected = dict.fromkeys(cells, 0) | {name: row[place] for name, row in COMMANDS.items()}
    assert {name: cell.code for name, cell in cells.items()} == expected
    assert {name: found for name, cell in cells.items() if (found := misleading(kind, cell))} == {}
    assert all(cell.seconds < SOON_S for cell in cells.values())
    refused = [cell.out.strip() for cell in cells.values() if cell.code == 2]
    assert all(out.startswith("error: ") and "\n" not in out for out in refused), refused
    assert json.loads(cells["groups tail --json"].out.splitlines()[-1])["samples"]
    is_up = f'streamrl_up{{run="{keys.name}"}} {float(kind.startswith("live"))}'
    assert is_up in cells["export prometheus"].out
    assert kind.split(",")[0].replace("live", "running") in cells["status"].first
