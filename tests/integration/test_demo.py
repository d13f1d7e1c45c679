"""The demo as a newcomer runs it, with the packages that only `.ci/setup demo` installs: a pretrained model learns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from streamrl.demos import sums
from streamrl.demos.pretrained import NAME, check_gguf, find_gguf, write_data
from streamrl.demos.sums import right

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_the_real_questions_and_their_judge_are_those_of_the_demo(tmp_path: Path) -> None:
    check_gguf(find_gguf())
    write_data(tmp_path, sums.entries(3))

    held_out, train = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("validation.jsonl", "train.jsonl")
    )
    asked = [{row["messages"][0]["content"] for row in rows} for rows in (held_out, train)]
    assert [len(each) for each in asked] == [160, 2000]
    assert not asked[0] & asked[1]
    for row in (*held_out, *train):
        expression = row["metadata"]["expression"]
        assert sum(map(int, expression.split(" + "))) == int(row["answer"])
        assert right("", f"{expression} = {row['answer']}.", (), row) == 1.0
        assert right("", f"{expression} = {int(row['answer']) + 1}.", (), row) == 0.0


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_demo_teaches_a_pretrained_model(tmp_path: Path) -> None:
    words = ["-m", "streamrl.ops.cli.main", "demo", "--json", f"dir={tmp_path}"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=1700, check=False)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rise"] >= 0.3
    assert found["prompts"]["in_both"] == 0
    assert (found["lost"], found["twice"], found["clean"]) == (0, 0, True)
    assert found["loads"]["in_flight"] >= 20
    assert found["total_s"] <= 1500
    tokenizer = transformers.AutoTokenizer.from_pretrained(found["export"])
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False).startswith("<|im_start|>")
    assert [path.name for path in (tmp_path / "models").iterdir()] == [NAME]
