"""What one rank or host alone meets, and no restart can fix: all ranks end, and their agents on all hosts. Such are
errors, and an order to end where no host may leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import redis
import torch.distributed as dist

from streamrl.config import schema
from streamrl.config.load import dump_config
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.keys import Keys
from tests.faults.agents import last_step
from tests.helpers import wait_until
from tests.integration.learner_world import ROOT, made_up_worker, make_run, output, running_learner

PATIENCE_S = 240


@pytest.fixture
def url(redis_server: EmbeddedRedis, client: redis.Redis) -> Iterator[str]:
    yield redis_server.url
    client.flushall()


def test_an_error_that_only_one_rank_meets_in_a_step_ends_the_run_and_is_told(
    url: str, tmp_path: Path, client: redis.Redis
) -> None:
    config = make_run(tmp_path, name="alone", algorithm=schema.Algorithm(loss="tests.own_loss:failing_on_rank_1"))
    with made_up_worker(config, url), running_learner(config, url, processes=2) as agent:
        assert agent.wait(PATIENCE_S) == 1, output(config)
    said = "something that only this rank meets"
    assert output(config).count(f"learner: {said}") == 1
    told = json.loads((config.folder / "error.json").read_text())
    assert told["error"].startswith("rank 1 on "), "rank 0 has recorded why the others have left"
    assert told["error"].endswith(said)
    assert client.hget(Keys(config.name).meta, "state") == b"failed"
    assert [path.name for path in (config.folder / "terms").iterdir()] == ["000001"], "nothing was tried again"


def test_an_error_of_one_host_ends_the_agents_of_all(url: str, tmp_path: Path) -> None:
    """Each resolves its own dtypes, and these differ."""
    config = make_run(tmp_path, name="hosts")
    configs = [
        config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
        for dtype in ("float32", "bfloat16")
    ]
    with running_hosts(tmp_path, url, configs) as agents:
        codes = [agent.wait(PATIENCE_S) for agent in agents]
    folders = [tmp_path / "host-0", tmp_path / "host-1"]
    said = [(folder / "out").read_text() for folder in folders]
    assert codes == [2, 2], "\n".join(said)
    for folder, text in zip(folders, said, strict=True):
        assert "all ranks must have the same" in json.loads((folder / "error.json").read_text())["error"]
        assert "all ranks must have the same" in text


def test_a_host_that_is_told_to_end_takes_the_others_along(url: str, tmp_path: Path, client: redis.Redis) -> None:
    config = make_run(tmp_path, name="fixed", training=schema.Training(groups_per_step=4, max_steps=10_000))
    with made_up_worker(config, url), running_hosts(tmp_path, url, [config, config]) as agents:
        wait_until(lambda: last_step(config) > 0, description="steps are made", timeout_s=PATIENCE_S)
        agents[1].send_signal(signal.SIGTERM)
        codes = [agent.wait(PATIENCE_S) for agent in agents]
    said = "\n".join((tmp_path / f"host-{n}" / "out").read_text() for n in (0, 1))
    assert codes == [0, 0], said
    assert client.hget(Keys(config.name).meta, "state") == b"stopped"
    assert [path.name for path in (config.folder / "terms").iterdir()] == ["000001"], "nothing was tried again"


@contextmanager
def running_hosts(
    folder: Path, url: str, configs: Sequence[schema.Config]
) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    """Agents of as many hosts, each with its configuration. All are this machine, and meet at the test, which stays."""
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    agents = list[subprocess.Popen[bytes]]()
    with ExitStack() as stack:
        for number, config in enumerate(configs):
            place = folder / f"host-{number}"
            place.mkdir()
            (place / "config.yaml").write_text(dump_config(config))
            out = stack.enter_context((place / "out").open("wb"))
            agents.append(
                subprocess.Popen(host_command(place, url, meeting.port), cwd=ROOT, env=ENVIRONMENT, stderr=out)
            )
            stack.callback(agents[-1].wait)
            stack.callback(agents[-1].kill)
        yield agents


ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def host_command(folder: Path, url: str, port: int) -> list[str]:
    torchrun = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--local-addr=127.0.0.1"]
    torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=hosts"]
    torchrun += ["--rdzv-conf=is_host=0,last_call_timeout=1,keep_alive_interval=2"]
    ranks = ["--config", str(folder / "config.yaml"), "--redis", url, "--error-file", str(folder / "error.json")]
    return [sys.executable, "-m", "streamrl.learner.process.agent", *torchrun, "--", *ranks]
