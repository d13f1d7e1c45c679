"""`streamrl sft` as people use it: killed outright, the same command goes on, to the model that it would have made."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path

from streamrl.demos.quickstart import examples, write_base_model
from tests.helpers import wait_until
from tests.warm import start


def words(output: str) -> list[str]:
    named = ["--model", "base", "--data", "data.jsonl", "--output", output, "--lr", "0.002", "--threads", "1"]
    more = ["--batch-size", "16", "--epochs", "3", "--save-every", "2", "--held-out", "0.1", "--json"]
    return ["streamrl.ops.cli.main", "sft", *named, *more]


def test_what_was_killed_goes_on_to_the_model_that_it_would_have_made(tmp_path: Path) -> None:
    write_base_model(tmp_path / "base", seed=1)
    rows = ({"prompt": one.prompt, "completion": one.answer} for one in islice(examples(random.Random(1)), 800))
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    state = tmp_path / "sft.training" / "ranks" / "state.json"

    with tempfile.TemporaryFile("w+") as said:
        whole = start(*words("whole"), out=said, folder=tmp_path)
        assert whole.wait(240) == 0
        said.seek(0)
        expected = json.loads(said.read().splitlines()[-1])
        killed = start(*words("sft"), out=said, folder=tmp_path)
        wait_until(state.exists, description="a state was saved", timeout_s=240)
        killed.kill()
        killed.wait()
    assert not (tmp_path / "sft").exists()
    command = [sys.executable, "-m", *words("sft")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True)

    told = json.loads(again.stdout)
    assert told["went_on_from"] > 0
    assert f"resuming at step {told['went_on_from']} of 135" in again.stderr.decode()
    assert {**told, "went_on_from": 0, "output": "whole"} == expected
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "sft" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "data.jsonl", "sft", "whole"]
