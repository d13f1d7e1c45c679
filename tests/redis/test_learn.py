"""`streamrl learn`: the torchrun line, and what is told before anything runs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from streamrl.config import schema
from streamrl.config.load import load_config
from streamrl.ops.cli.main import main
from streamrl.ops.monitor.runs import find_target
from streamrl.protocol.transport.acl import Role
from streamrl.protocol.transport.address import split_password
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.keys import Keys
from tests.gpus_world import machine_with
from tests.made_checkpoint import make_checkpoint
from tests.stand_ins import make_stand_in
from tests.tiny_models import make_model


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration whose files are all there."""
    make_model(tmp_path / "model", hidden=32, positions=2048)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"text": "say a:"}) + "\n")
    path = tmp_path / "run.yaml"
    path.write_text(
        f"name: mine\ndir: {tmp_path / 'runs'}\nmodel: {{path: {tmp_path / 'model'}}}\n"
        f"data: {{train: {tmp_path / 'prompts.jsonl'}}}\nvalidation: {{every_steps: 0}}\n"
        "rewards: {exact: {type: function, target: exact_match}}\n"
    )
    return path


def learn(file: Path, *arguments: str) -> int:
    return main(["learn", str(file), *arguments])


def line(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return shlex.split(capsys.readouterr().out)


def test_on_one_machine_the_line_is_that_of_up(
    file: Path, redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert learn(file, "--redis", redis_url, "--dry-run", "learner.processes=2", "learner.max_restarts=7") == 0

    words = line(capsys)
    assert words[0] == "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    assert words[2:4] == ["-m", "streamrl.learner.process.agent"]
    expected = {"--nnodes=1", "--nproc-per-node=2", "--max-restarts=7"}
    assert expected | {"--rdzv-conf=store_type=file,last_call_timeout=1,keep_alive_interval=31536000"} <= set(words)
    assert words[words.index("--redis") + 1] == redis_url
    assert not (tmp_path / "runs").exists()  # a dry run leaves nothing


def test_on_several_machines_all_agree_on_where_they_meet_and_who_they_are(
    file: Path, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--nodes", "1:4", "--rendezvous", "trainer-0:29400"]
    assert learn(file, "--redis", redis_url, "--dry-run", "--takeover", *where) == 0
    words = line(capsys)
    assert {"--nnodes=1:4", "--rdzv-endpoint=trainer-0:29400", "--takeover"} <= set(words)
    assert learn(file, "--redis", redis_url, "--dry-run", f"dir={file.parent / 'other'}", *where) == 0
    identity = {word for word in words if word.startswith("--rdzv-id=")}
    assert identity <= set(line(capsys))


def test_a_second_learner_on_the_machine_is_a_stranger_to_the_first(
    file: Path, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def identity() -> str:
        assert learn(file, "--redis", redis_url, "--dry-run") == 0
        return next(word for word in line(capsys) if word.startswith("--rdzv-id="))

    assert identity() != identity()


def test_a_password_in_the_url_goes_by_the_environment_and_is_not_shown(
    file: Path, role_urls: Mapping[Role, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert learn(file, "--redis", role_urls["learner"], "--dry-run") == 0
    told = capsys.readouterr().out
    assert "of-learner" not in told
    assert "STREAMRL_REDIS_PASSWORD=***" in told
    assert "--redis unix://learner@/" in told


def test_a_server_without_room_for_backlog_and_weights_is_refused_as_by_up(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["redis.max_backlog_bytes=50000000", "weights.max_store_bytes=60000000"]
    with EmbeddedRedis.start(tmp_path / "small") as server:
        with connect(server.url, schema.Redis()) as client:
            client.config_set("maxmemory", 100_000_000)
        assert learn(file, "--redis", server.url, "--dry-run", *sizes) == 2
        of_learn = capsys.readouterr().err
        assert main(["up", str(file), f"redis.url={server.url}", *sizes]) == 2
        assert capsys.readouterr().err == of_learn
        assert "redis.max_backlog_bytes = 50000000 and weights.max_store_bytes = 60000000" in of_learn
        assert learn(file, "--redis", server.url, "--dry-run", *sizes, "weights.store=file:/shared") == 0


def test_a_dry_run_needs_no_redis_and_says_that_none_was_asked(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = "redis://127.0.0.1:1/0"
    cluster = ["--nodes", "1:4", "--rendezvous", "trainer-0:29400", "checkpoint.resume=false"]
    for more in ([], cluster):
        assert learn(file, "--dry-run", "--redis", nowhere, "redis.connect_timeout_s=0.1", *more) == 0
        told = capsys.readouterr()
        words = shlex.split(told.out)
        assert words[words.index("--redis") + 1] == nowhere
        assert told.err.startswith("Redis was not checked (--dry-run): Redis at 127.0.0.1:1")
        assert "not to be run as it is: `streamrl learn` first writes the file" in told.err
        assert not Path(words[words.index("--config") + 1]).exists()
    assert learn(file, "--dry-run") == 0
    assert "that server is part of `streamrl up`" in capsys.readouterr().err


def test_a_learner_that_starts_before_its_redis_waits_for_it(file: Path, tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path / "redis") as server:
        url = server.url
    waits = "waiting for Redis: Redis at "

    with ExitStack() as servers, agent_faked(file, "--redis", url) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(waits)
        assert servers.enter_context(EmbeddedRedis.start(tmp_path / "redis")).url == url
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 7, errors
        assert waits not in errors, "it says so once"


def test_a_redis_that_stays_away_is_no_mistake_of_the_users(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With 2 nobody would start the learner again."""
    away = ["redis.give_up_after_s=0.1", "redis.connect_timeout_s=0.1"]
    assert learn(file, "--redis", "redis://127.0.0.1:1/0", *away) == 1
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("waiting for Redis: Redis at 127.0.0.1:1")
    assert last.startswith("error: ")


def test_torchruns_own_words_for_machines_and_ranks_are_understood(
    file: Path, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--nnodes", "2", "--rendezvous", "trainer-0:29400", "--nproc-per-node", "8"]
    assert learn(file, "--redis", redis_url, "--dry-run", *where) == 0
    assert {"--nnodes=2", "--nproc-per-node=8"} <= set(line(capsys))


def test_a_layout_may_want_several_machines(file: Path, redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--nodes", "2", "--rendezvous", "trainer-0:29400", "learner.layout.replicas=2"]
    assert learn(file, "--redis", redis_url, "--dry-run", *where) == 0


def test_a_recording_takes_the_place_of_redis(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert learn(file, "--replay", "recording", "--dry-run") == 0
    words = line(capsys)
    assert "--redis" not in words
    assert words[words.index("--replay") + 1] == "recording"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--nodes", "2"], "--rendezvous HOST:PORT"),
        (["--nodes", "4:1"], "must be a number of machines, such as 4, or a range, such as 1:4"),
        (["--nodes", "many"], "must be a number of machines"),
        (["learner.layout.replicas=2"], "learner.layout.replicas = 2 does not divide the learner's ranks, 1"),
        (["--nodes=2:4", "--rendezvous=h:1", "learner.layout.replicas=2"], "does not divide the learner's ranks, 3"),
        (["--nodes", "2", "--rendezvous", "here"], "must be HOST:PORT"),
        (["redis.url=embedded"], "that server is part of `streamrl up`"),
        (["--replay", "x", "--redis", "redis://h"], "--replay needs no Redis"),
        (["--new-data"], "--new-data needs --fork"),
        (["data.train=nowhere.jsonl", "--replay", "x"], "nowhere.jsonl"),
        (["--fork", "nowhere@3", "--replay", "x"], "give one of them"),
    ],
)
def test_mistakes_are_told_before_anything_is_made(
    file: Path, tmp_path: Path, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert learn(file, *arguments) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_fork_of_a_run_that_is_not_there_is_told(
    file: Path, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert learn(file, "--redis", redis_url, "--fork", "nowhere@3") == 2
    assert "there is no nowhere/checkpoints; name the folder of a run" in capsys.readouterr().err


# The parts that ask take the installed torch for one that uses GPUs.
_TORCH_FOR_GPUS = """
from streamrl import misfits
installed = misfits.version
misfits.version = lambda name: "2.13.0+cu130" if name == "torch" else installed(name)
"""


def agent_faked(file: Path, *arguments: str, gpus: int = 0) -> subprocess.Popen[str]:
    """`learn` whose agent, in this very process's place, only says what it was given. `gpus`: of its machine."""
    fake = file.parent / "fake"
    fake.mkdir(exist_ok=True)
    (fake / "sitecustomize.py").write_text(  # which Python imports before anything else
        "import os, sys\n"
        "if 'streamrl.learner.process.agent' in sys.orig_argv:\n"
        "    print(os.getpid(), *sys.orig_argv[3:], flush=True)\n"
        "    os._exit(7)\n" + (_TORCH_FOR_GPUS if gpus else "")
    )
    environment = {**os.environ, "PYTHONPATH": f"{fake}:{os.environ.get('PYTHONPATH', '')}"}
    environment |= machine_with(fake, gpus) if gpus else {}
    code = (
        "import os, sys; print(os.getpid()); "
        f"from streamrl.ops.cli.main import main; sys.exit(main({['learn', str(file), *arguments]}))"
    )
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    return subprocess.Popen(command, cwd=file.parent, env=environment, stdout=pipe, stderr=pipe, text=True)


def learn_with_a_fake_agent(file: Path, *arguments: str) -> list[str]:
    """Its lines: its pid, the command it shows, and the agent's pid and words."""
    with agent_faked(file, *arguments) as process:
        said, errors = process.communicate(timeout=240)
    assert process.returncode == 7, errors
    return said.splitlines()


def test_what_is_shown_is_what_runs(file: Path, tmp_path: Path) -> None:
    before, shown, ran = learn_with_a_fake_agent(file, "--replay", "recording")
    assert ran.split()[0] == before
    assert shlex.split(shown)[4:] == ran.split()[1:]
    assert (tmp_path / "runs" / "mine" / "config.yaml").is_file()


def test_a_model_without_room_on_the_fewest_machines_is_refused_with_how_many_it_needs(
    file: Path, tmp_path: Path
) -> None:
    model = make_stand_in(tmp_path / "large", "32B")
    (tmp_path / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "3 + 4 ="}], "answer": "7"}\n')
    asked = [f"model.path={model}", "training.micro_batch_tokens=4096", "learner.processes=8", "--replay", "recording"]

    with agent_faked(file, *asked, "--nodes", "1:2", "--rendezvous", "trainer-0:29400", gpus=8) as process:
        said, errors = process.communicate(timeout=240)

    assert process.returncode == 2, said + errors
    assert "--nodes 1:2: with 1 host " in errors
    assert "; start with --nodes 2\n" in errors
    assert not (tmp_path / "runs").exists()


def test_a_second_learner_changes_nothing_of_what_the_firsts_ranks_start_with_again(file: Path, tmp_path: Path) -> None:
    def asked(lr: str) -> Path:
        words = learn_with_a_fake_agent(file, "--replay", "recording", f"optimizer.lr={lr}")[-1].split()
        return tmp_path / words[words.index("--config") + 1]

    first = asked("1e-4")
    (tmp_path / "runs" / "mine" / "terms").mkdir()  # it has taken the run
    second = asked("2e-4")

    files = (first, second, tmp_path / "runs" / "mine" / "config.yaml")
    assert [load_config(path).config.optimizer.lr for path in files] == [1e-4, 2e-4, 1e-4]


def test_the_run_of_a_learner_is_found_in_its_folder_also_where_the_server_was_an_option(
    file: Path, tmp_path: Path, role_urls: Mapping[Role, str]
) -> None:
    learn_with_a_fake_agent(file, "--redis", role_urls["learner"])

    folder = tmp_path / "runs" / "mine"
    assert "of-learner" not in (folder / "config.yaml").read_text()
    assert find_target(folder, None, None).server() == split_password(role_urls["learner"])[0]


def test_a_run_that_may_not_resume_is_refused_when_it_is_started_and_may_be_joined(
    file: Path, redis_url: str, client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = ["--redis", redis_url, "--dry-run", "--nodes", "1:4", "--rendezvous", "trainer-0:29400"]
    fresh = "checkpoint.resume=false"
    assert learn(file, *cluster, fresh) == 0
    [identity] = [word.partition("=")[2] for word in line(capsys) if word.startswith("--rdzv-id=")]
    make_checkpoint(load_config(file).config)

    replay = ["--replay", "x", "--dry-run"]
    for start in (["learn", str(file), *cluster], ["learn", str(file), *replay], ["up", str(file)]):
        assert main([*start, fresh]) == 2
        assert "checkpoint.resume = false, but " in capsys.readouterr().err
    client.set(Keys("mine").lease, identity)  # the machines that started it are at work
    assert learn(file, *cluster, fresh) == 0
    client.set(Keys("mine").lease, "a stranger")
    assert learn(file, *cluster, fresh) == 2
    client.flushall()


def test_changes_since_the_checkpoint_are_shown_and_those_that_may_not_be_refused(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(load_config(file).config)

    assert learn(file, "--replay", "x", "--dry-run", "optimizer.lr=1e-4") == 0
    assert "changed since the checkpoint: optimizer.lr: 9e-07 -> 0.0001" in capsys.readouterr().err
    assert learn(file, "--replay", "x", "--dry-run", "seed=7") == 2
    assert "seed: 1234 -> 7: it decides which prompts this run's ticket numbers refer to" in capsys.readouterr().err


def test_up_tells_what_has_changed_as_learn_does_before_it_looks_for_a_server(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(load_config(file).config)
    nowhere = ["redis.url=redis://127.0.0.1:1/0", "redis.connect_timeout_s=0.1"]

    assert main(["up", str(file), *nowhere, "optimizer.lr=1e-4"]) == 2
    told = capsys.readouterr()
    assert "changed since the checkpoint: optimizer.lr: 9e-07 -> 0.0001" in told.out
    assert "Redis at 127.0.0.1:1" in told.err
    assert main(["up", str(file), *nowhere, "sampling.temperature=0.5"]) == 2
    told = capsys.readouterr()
    assert "sampling.temperature: 1.0 -> 0.5: this run's groups were sampled with it" in told.err
    assert "Redis at" not in told.err
