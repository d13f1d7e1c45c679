"""The quickstart as a newcomer runs it: a model learns, nothing is lost, and it does not take long."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from streamrl.demos.quickstart import FALLING, RISING, solve

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1234, 2, 3])
def test_the_quickstart_learns_what_imitation_did_not_teach(
    tmp_path: Path, seed: int, record_property: Callable[[str, object], None]
) -> None:
    words = ["-m", "streamrl.ops.cli.main", "quickstart", "--json", f"dir={tmp_path}", f"seed={seed}"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    record_property("figure", f"seed {seed}: {found['total_s']:.0f} s, {found['before']:.1%} to {found['after']:.1%}")
    assert found["after"] >= 0.8
    assert found["rise"] >= 0.4
    assert (found["lost"], found["twice"], found["clean"]) == (0, 0, True)
    assert found["lag"]["mean"] > 0.5
    assert found["loads"]["in_flight"] >= 30
    assert found["total_s"] <= 360
    assert Path(found["plot"]).exists()
    assert answers_rightly(found["export"])


def answers_rightly(folder: str) -> bool:
    """Whether plain transformers loads the model, and what it then answers is mostly right."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    right = 0
    for digits in ("3142", "52918", "777", "90817"):
        for sign in (RISING, FALLING):
            asked = tokenizer(digits + sign, return_tensors="pt")
            answer = model.generate(**asked, max_new_tokens=12, do_sample=False)[0, asked["input_ids"].shape[1] :]
            right += tokenizer.decode(answer, skip_special_tokens=True) == solve(digits, sign)
    return right >= 6
