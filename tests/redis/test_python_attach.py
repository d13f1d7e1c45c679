"""A program's hand on a run that somebody else has started: its state, its end, and the word that ends it."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

import streamrl
from streamrl.config import schema
from streamrl.errors import PartError, ResourceError
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream


@pytest.fixture
def folder(tmp_path: Path, keys: Keys, redis_url: str) -> Path:
    (tmp_path / "config.yaml").write_text(f"name: {keys.name}\nredis: {{url: '{redis_url}'}}\n")
    return tmp_path


def test_a_run_that_goes_is_told_to_stop_and_has_its_time(learner: LearnerStream, folder: Path, keys: Keys) -> None:
    run = streamrl.attach(folder)
    assert (run.name, run.status().run.state) == (keys.name, "running")
    with pytest.raises(TimeoutError, match="has not ended within 0 s; it is still running"):
        run.wait(timeout=0)

    with pytest.raises(TimeoutError, match="has not stopped in 0 s; the stop command stays in force"):
        run.stop(timeout=0)

    assert learner.orders().control == "stop"
    learner.release("stopped")
    assert run.wait(timeout=240).state == "stopped"
    assert run.stop().state == "stopped"


def test_a_run_that_has_failed_raises_that(learner: LearnerStream, folder: Path) -> None:
    run = streamrl.attach(folder)
    learner.release("failed")

    with pytest.raises(PartError, match="failed at step 0"):
        run.wait(timeout=240)


def test_a_wait_outlasts_a_redis_that_starts_again(tmp_path: Path) -> None:
    keys, data = Keys("mine"), tmp_path / "redis"
    server = EmbeddedRedis.start(data)
    with ExitStack() as stack:
        stack.callback(lambda: server.stop())
        client = stack.enter_context(connect(server.url, schema.Redis()))
        learner = LearnerStream(client, keys, run_uid="uid", term=1, holder="job", lease_s=30.0)
        learner.claim(config_json="{}", fingerprint="model", wait_s=0.0)
        (tmp_path / "config.yaml").write_text(f"name: mine\nredis: {{url: '{server.url}'}}\n")
        run = streamrl.attach(tmp_path)
        ended: list[str] = []
        waiting = threading.Thread(target=lambda: ended.append(run.wait(timeout=240).state), name="waits for the run")

        server.stop()
        waiting.start()
        with pytest.raises(ResourceError):
            run.status()
        server = EmbeddedRedis.start(data)
        learner.release("stopped")
        waiting.join()

    assert ended == ["stopped"]
