"""`streamrl eval` that is ended early: answers that are there, and were paid for, are printed and written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import schema
from streamrl.config.load import dump_config
from streamrl.learner.checkpoints.checkpoint import CheckpointRoot
from streamrl.learner.checkpoints.terms import CheckpointName
from streamrl.ops.cli.main import main
from tests.replay_world import make_entries, make_recording, make_replay_run, run_replay

_TRIED = 1  # request, before the model is loaded


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> schema.Config:
    """A run with checkpoints of two steps, and an export."""
    folder = tmp_path_factory.mktemp("run")
    config = make_replay_run(
        folder,
        num_prompts=10,
        training=schema.Training(groups_per_step=4, max_steps=4),
        checkpoint=schema.Checkpoint(every_steps=2, keep_last=5),
        validation=schema.Validation(every_steps=0, at_start=False, sampling=schema.ValidationSampling(max_tokens=8)),
    )
    run_replay(config, make_recording(folder / "recording", config, make_entries(config, range(16))))
    return config


@contextmanager
def scoring(may_answer: Callable[[int], bool]) -> Iterator[str]:
    """A reward service on loopback; `may_answer` is asked with the number of the request, from 0, before it answers."""
    numbers = iter(range(10_000))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            answers = may_answer(next(numbers))
            body = json.dumps({"rewards": [1.0]}).encode()
            self.send_response(200 if answers else 503)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def words(run: schema.Config, url: str, *subjects: str) -> list[str]:
    """One prompt at a time, so that those before are answered."""
    judge = json.dumps({"type": "http", "url": url, "outage_s": 0.3, "attempts": 1})
    settings = ["rewards.favourite=null", f"rewards.judge={judge}", "worker.max_groups_in_flight=1"]
    return ["eval", *(subjects or (str(run.folder),)), "--prompts", str(run.data.train), *settings]


def test_a_reward_that_goes_out_for_good_costs_no_answer_that_was_scored(
    run: schema.Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "answers.jsonl"
    with scoring(lambda number: number < _TRIED + 3) as url:
        assert main([*words(run, url), "--output", str(output), "--json"]) == 1
    said = capsys.readouterr()
    assert "error: reward 'judge': no replica answered for 0.3 s" in said.err
    told = json.loads(said.out)
    assert (told["num_prompts"], told["num_answered"], told["num_failed"], told["reward"]) == (10, 3, 0, 1.0)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [len(line["samples"]) for line in lines] == [1] * 3 + [0] * 7
    assert {line["error"] for line in lines[3:]} == {"not answered"}


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """As every program but one that runs tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_too(run: schema.Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "answers.jsonl"

    def interrupts(number: int) -> bool:
        if number == _TRIED + 4:
            os.kill(os.getpid(), signal.SIGINT)
        return True

    with scoring(interrupts) as url:
        assert main([*words(run, url), "--output", str(output), "--json"]) == 130
    told = json.loads(capsys.readouterr().out)
    assert told["num_answered"] in (4, 5)
    assert len(output.read_text().splitlines()) == 10


def test_a_checkpoint_that_its_run_removes_meanwhile_is_left_out(
    run: schema.Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, file = tmp_path / run.name, tmp_path / "run.yaml"
    shutil.copytree(run.folder, copy)
    file.write_text(dump_config(run))
    older = CheckpointRoot(copy).folder_of(CheckpointName(1, 2))

    def removes(number: int) -> bool:
        shutil.rmtree(older, ignore_errors=True)
        return True

    subjects = (f"{copy}@4", f"{copy}@2", str(copy / "export"))
    with scoring(removes) as url:
        assert main([*words(run, url, *subjects), "--config", str(file), "--json", "--max-prompts", "2"]) == 2
    said = capsys.readouterr()
    assert [one["step"] for one in json.loads(said.out)["checkpoints"]] == [4, None]
    assert f"error: {older} is gone: its run has removed it meanwhile (checkpoint.keep_last)" in said.err
