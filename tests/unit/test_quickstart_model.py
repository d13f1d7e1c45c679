"""The quickstart's model: a folder that loads like any real one, and that supervised training improves."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path

import pytest
import torch
import transformers

from streamrl.demos.quickstart import VOCABULARY, examples, write_base_model
from streamrl.errors import DataError
from streamrl.learner.model.sft import Settings, collate, main, read_rows, train


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_base_model(folder, seed=1)
    return folder


@pytest.fixture(scope="module")
def tokenizer(base: Path) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(base)


def write_demonstrations(path: Path, count: int) -> Path:
    shown = islice(examples(random.Random(1)), count)
    path.write_text("".join(json.dumps({"prompt": e.prompt, "completion": e.answer}) + "\n" for e in shown))
    return path


def settings(base: Path, data: Path, output: Path) -> Settings:
    return Settings(model=base, data=data, output=output, batch_rows=16, lr=2e-3, seed=1)


def test_one_token_a_character_there_and_back(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    ids = tokenizer("52918>")["input_ids"]

    assert [VOCABULARY[i] for i in ids] == list("52918>")
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "52918>"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


def test_all_weights_are_there_and_none_is_left_over(base: Path) -> None:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(base, output_loading_info=True)

    assert not any(info.values())
    assert 600_000 < model.num_parameters() < 750_000
    assert model.generation_config.eos_token_id == 1


def test_the_seed_decides_the_weights(base: Path, tmp_path: Path) -> None:
    for name, seed in (("same", 1), ("other", 2)):
        write_base_model(tmp_path / name, seed=seed)

    def weights(folder: Path) -> bytes:
        return (folder / "model.safetensors").read_bytes()

    assert weights(tmp_path / "same") == weights(base)
    assert weights(tmp_path / "other") != weights(base)


def test_supervised_training_lowers_the_loss_and_leaves_a_model_folder(base: Path, tmp_path: Path) -> None:
    data = write_demonstrations(tmp_path / "data.jsonl", 16 * 40)
    said: list[str] = []

    loss = train(settings(base, data, tmp_path / "sft"), said.append)

    assert said[0].startswith("step 2 of 40: loss 2.")
    assert loss < 1.9
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "sft")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "sft").get_vocab()[">"] == VOCABULARY.index(">")


def test_training_is_a_function_of_its_seed(base: Path, tmp_path: Path) -> None:
    data = write_demonstrations(tmp_path / "data.jsonl", 64)

    losses = [train(settings(base, data, tmp_path / name), lambda _: None) for name in ("a", "b")]

    assert losses[0] == losses[1]


def test_the_loss_covers_completion_and_end_not_prompt_and_padding(
    tokenizer: transformers.PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    (tmp_path / "data.jsonl").write_text(
        '{"prompt": "21<", "completion": "12"}\n{"prompt": "3210<", "completion": "0123"}\n'
    )

    ids, mask, labels = collate(read_rows(tmp_path / "data.jsonl", tokenizer), pad=0)

    assert ids.shape == mask.shape == labels.shape == (2, 10)
    assert mask.sum(1).tolist() == [6, 10]
    covered = labels != -100
    assert covered.sum(1).tolist() == [3, 5]
    assert torch.equal(labels[covered], ids[covered])
    assert labels[0, 3:6].tolist() == [*tokenizer("12")["input_ids"], tokenizer.eos_token_id]


@pytest.mark.parametrize("line", ["not json", "[]", '{"prompt": "1<"}', '{"prompt": 1, "completion": "1"}'])
def test_a_malformed_demonstration_is_named_with_its_line(
    tokenizer: transformers.PreTrainedTokenizerBase, tmp_path: Path, line: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "1<", "completion": "1"}\n' + line + "\n")

    with pytest.raises(DataError, match=r"data.jsonl:2: expected"):
        read_rows(path, tokenizer)


def test_the_command_line_tells_a_mistake_in_one_line(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(base), "--data", str(tmp_path / "none.jsonl"), "--output", str(tmp_path / "out")]

    assert main(words) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: cannot read the demonstrations '{tmp_path / 'none.jsonl'}': No such file or directory"
    ]
