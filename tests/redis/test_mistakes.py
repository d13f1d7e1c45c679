"""Typical mistakes: each is one clear line before any engine starts, with the setting and what to do."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.load import load_config
from streamrl.ops.cli.main import main
from streamrl.ops.monitor.doctor.trials import try_rewards
from streamrl.protocol.transport.acl import Role
from tests.redis.mistakes import (
    CONFIG,
    OF_OTHER_MODELS,
    OF_PLACES,
    OF_REWARDS,
    OF_SETTINGS,
    OF_THE_MODEL,
    REWARDS,
    TRAIN,
    Mistake,
    edited,
    mine,
)
from tests.tiny_models import make_model

_LIMIT_S = 120.0  # of a busy machine; the figures say what it took

Note = Callable[[str, object], None]


@pytest.fixture(scope="session")
def sound_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("sound") / "model", hidden=32)


@pytest.fixture
def folder(sound_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that would go well; whatever is named relatively lies in here."""
    shutil.copytree(sound_model, tmp_path / "model")
    for name, text in {"run.yaml": CONFIG, "train.jsonl": TRAIN, "rewards.py": REWARDS}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], note: Note, *words: str) -> str:
    """The one line of a command that must end with 2."""
    began = time.monotonic()
    code = main(list(words))
    took_s = time.monotonic() - began
    told = capsys.readouterr().err
    note("seconds", round(took_s, 2))
    assert code == 2, told
    [line] = told.splitlines()
    assert line.startswith("error: ")
    assert took_s < _LIMIT_S
    return line


@pytest.mark.parametrize("name", [*OF_SETTINGS, *OF_PLACES, *OF_REWARDS, *OF_THE_MODEL, *OF_OTHER_MODELS])
def test_up_tells_a_mistake_in_one_line_before_anything_starts(
    name: str,
    folder: Path,
    role_urls: Mapping[Role, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    record_property: Note,
) -> None:
    mistake = {**OF_SETTINGS, **OF_PLACES, **OF_REWARDS, **OF_THE_MODEL}.get(name) or of_model(folder, name)
    places = {"{folder}": str(folder), "{redis}": role_urls["learner"].replace(":of-learner", "")}
    for file, text in mistake.files.items():
        (folder / file).write_text(text)
    for file in mistake.gone:
        (folder / file).unlink()
    for variable, value in mistake.environment.items():
        monkeypatch.setenv(variable, value)
    overrides = [filled(override, places) for override in mistake.overrides]

    line = said(capsys, record_property, "up", "run.yaml", *overrides)

    assert [part for part in mistake.says if part not in line] == [], line
    assert not (folder / "runs").exists()


def filled(text: str, places: Mapping[str, str]) -> str:
    for name, value in places.items():
        text = text.replace(name, value)
    return text


def of_model(folder: Path, name: str) -> Mistake:
    """One that the model's own configuration makes."""
    settings, says = OF_OTHER_MODELS[name]
    return Mistake(
        files={"model/config.json": edited((folder / "model/config.json").read_text(), **settings)}, says=says
    )


def test_a_port_that_is_taken_is_told(folder: Path, capsys: pytest.CaptureFixture[str], record_property: Note) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = f"reward_server={json.dumps({'model': 'model', 'port': port})}"
        local = "rewards.rm={type: http, url: local}"

        line = said(capsys, record_property, "up", "run.yaml", server, local)

    assert f"reward_server.port = {port}" in line
    assert "Address already in use; choose another one, or 0" in line


def test_the_doctor_tells_all_that_it_has_tried(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "run.yaml", "redis.url=embedded", *mine("rewards.py:takes_less"), "--json"]) == 2

    told: Any = json.loads(capsys.readouterr().out)
    assert set(told["findings"][0]) == {"name", "level", "evidence", "remedy"}
    levels = {finding["name"]: finding["level"] for finding in told["findings"]}
    wrong = [name for name, level in levels.items() if level == "error"]
    tried = ["reward exact", "algorithm", "prompts", "model structure"]
    assert (told["worst"], wrong) == ("error", ["reward mine"])
    assert {levels[name] for name in tried} == {"ok"}


def test_rows_without_the_field_of_a_reward_are_counted(folder: Path) -> None:
    (folder / "train.jsonl").write_text(TRAIN + '{"prompt": "1+3="}\n')
    _, scored, lacking = try_rewards(load_config("run.yaml"))  # behind what processes are kept from
    assert (scored.level, lacking.level) == ("ok", "warning")
    assert "the field 'answer', which is not in 1 row (train.jsonl:3)" in lacking.evidence


def test_a_service_is_asked_for_a_score_only_when_the_user_says_so(folder: Path) -> None:
    asked: list[Any] = []

    class Service(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"rewards": [0.5]}')

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Service) as server:
        thread = threading.Thread(target=server.serve_forever, name="reward service")
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        loaded = load_config("run.yaml", [f"rewards.judge={{type: http, url: '{url}'}}"])
        try:
            assert [finding.name for finding in try_rewards(loaded)] == ["reward processes", "reward exact"]
            assert asked == []
            found = {finding.name: finding.evidence for finding in try_rewards(loaded, ask_services=True)}
        finally:
            server.shutdown()
            thread.join()
    assert len(asked) == 1
    assert found["reward judge"] == "0.5 for a made-up completion of train.jsonl:1"


def test_a_doubtful_run_passes_without_torch_and_is_told_why(folder: Path) -> None:
    """What needs torch is tried in processes of its own."""
    code = (
        "import sys; from streamrl.ops.cli.main import main; "
        "code = main(['config', 'check', 'run.yaml', 'training.groups_per_step=3']); "
        "print(code, *sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)

    assert done.stdout.splitlines() == ["run.yaml: good", "0"]
    [line] = done.stderr.splitlines()
    assert line.startswith("warning: data.train gives 2 prompts in training.max_epochs = 1")
    assert line.endswith("lower training.groups_per_step, or raise training.max_epochs")


def test_a_learner_whose_workers_are_elsewhere_only_tells_what_rewards_lack_here(
    folder: Path, redis_url: str, capsys: pytest.CaptureFixture[str], record_property: Note
) -> None:
    nowhere = 'rewards.mine={"type": "function", "target": "no_such_module:score"}'
    words = ["learn", "run.yaml", f"redis.url={redis_url}", nowhere, "data.max_prompt_tokens=3"]

    assert main(words) == 2

    warned, refused = capsys.readouterr().err.splitlines()
    assert warned.startswith("warning: rewards.mine.target: cannot use it: ModuleNotFoundError")
    assert refused.startswith("error: train.jsonl:1: the prompt has 4 tokens")
