"""The reward model of `docs/reward-services.md`, step by step: trained, served by hand, and served by the evaluation of
`docs/rewards.md`.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from streamrl.ops.cli.main import main
from tests.helpers import wait_until
from tests.pages import ROOT, blocks
from tests.tiny_models import make_model
from tests.unit.test_rewards_page import CONFIGURATIONS, PAGE, PLAIN, SERVICES

SHELL = [block for page in (SERVICES, PAGE) for block in blocks(page, "sh")]
OF_A_MODEL = [block.text for block in SHELL if block.note == str(Path(__file__).relative_to(ROOT))]
TRAIN, SERVE, EVAL = [shlex.split(line) for text in OF_A_MODEL for line in text.splitlines()]


def test_a_reward_model_is_trained_served_and_asked_by_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(Path("base"), hidden=32)
    make_model(Path("sft"), hidden=32)
    pairs = [{"prompt": f"say {i}:", "chosen": " aa", "rejected": " bb"} for i in range(20)]
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    Path("prompts.jsonl").write_text('{"text": "say 1:"}\n{"text": "say 2:"}\n')

    assert main(TRAIN[1:]) == 0
    assert re.search(r"serve it with --reward-mean \S+ --reward-std \S+", capsys.readouterr().out)
    assert served([("0" if word == "5555" else word) for word in SERVE[1:]]) == 2

    (block,) = [block for block in CONFIGURATIONS if "reward_server:" in block]
    Path("run.yaml").write_text(PLAIN + block)
    sampling = ["validation.sampling.max_tokens=4", "weights.dtype=float32", "model.dtype=float32"]
    assert main([*EVAL[1:], *sampling]) == 0
    answers = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert [answer["prompt"] for answer in answers] == ["say 1:", "say 2:"]
    for answer in answers:
        (sample,) = answer["samples"]
        assert list(sample["rewards"]) == ["judge"]
        assert isinstance(sample["completion"], str)


def served(words: list[str]) -> int:
    """How many texts the server scores."""
    url_file = Path("url")
    command = [sys.executable, "-m", "streamrl.ops.cli.main", *words, "--url-file", str(url_file), "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: url_file.exists() or process.poll() is not None, description="the server says its URL")
        answer = httpx.post(f"{url_file.read_text()}/score", json={"texts": ["say 1: aa", "say 1: bb"]}, timeout=30)
        return len(answer.json()["rewards"])
    finally:
        process.kill()
        process.wait()
