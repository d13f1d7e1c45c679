"""Errors that no restart can fix and that one rank alone meets: all ranks end, and their agents on all hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
import torch.distributed as dist

from streamrl.config import schema
from streamrl.config.load import dump_config
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.keys import Keys
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
    """Both are this machine, and meet at the test, which stays. Each resolves its own dtypes, and these differ."""
    config = make_run(tmp_path, name="hosts")
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    agents, folders = list[subprocess.Popen[bytes]](), [tmp_path / "host-0", tmp_path / "host-1"]
    with ExitStack() as stack:
        for folder, dtype in zip(folders, ("float32", "bfloat16"), strict=True):
            folder.mkdir()
            model = config.model.model_copy(update={"dtype": dtype})
            (folder / "config.yaml").write_text(dump_config(config.model_copy(update={"model": model})))
            out = stack.enter_context((folder / "out").open("wb"))
            agents.append(
                subprocess.Popen(host_command(folder, url, meeting.port), cwd=ROOT, env=ENVIRONMENT, stderr=out)
            )
            stack.callback(agents[-1].wait)
            stack.callback(agents[-1].kill)
        codes = [agent.wait(PATIENCE_S) for agent in agents]
    said = [(folder / "out").read_text() for folder in folders]
    assert codes == [2, 2], "\n".join(said)
    for folder, text in zip(folders, said, strict=True):
        assert "all ranks must have the same" in json.loads((folder / "error.json").read_text())["error"]
        assert "all ranks must have the same" in text


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
