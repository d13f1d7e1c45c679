"""The quickstart's model: a folder that loads like any real one, whose weights the seed decides."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from streamrl.demos.quickstart import VOCABULARY, write_base_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_base_model(folder, seed=1)
    return folder


@pytest.fixture(scope="module")
def tokenizer(base: Path) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(base)


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
