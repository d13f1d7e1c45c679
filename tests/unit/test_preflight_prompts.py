"""What a check before the run says of the prompts: how many it has tokenised, and that there are more."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config.load import load_config
from streamrl.config.schema import Config
from streamrl.finding import Finding
from streamrl.learner.loading.tokenizer import TokenizerInfo, read_tokenizer_info
from streamrl.learner.preflight.prompts import check_prompts
from tests.tiny_models import make_model

_AT_ONCE = 1024  # prompts that the tokenizer gets in one call, which no time limit cuts short


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def info(model: Path) -> TokenizerInfo:
    return read_tokenizer_info(str(model))


def config_of(folder: Path, model: Path, *, num_prompts: int, groups_per_step: int = 16) -> Config:
    for name, sum_of, num in (("train", "3 + 4", num_prompts), ("held-out", "4 + 3", 3)):
        (folder / f"{name}.jsonl").write_text(f'{{"prompt": "{sum_of} =", "answer": "7"}}\n' * num)
    settings = {
        "model": {"path": str(model)},
        "data": {"train": str(folder / "train.jsonl"), "validation": str(folder / "held-out.jsonl")},
        "rewards": {"exact": {"type": "function", "target": "exact_match"}},
        "training": {"groups_per_step": groups_per_step},
    }
    return load_config(settings).config


def found(config: Config, info: TokenizerInfo, *, at_most_s: float) -> list[Finding]:
    return list(check_prompts(config, info, at_most_s=at_most_s))


def test_prompts_that_the_time_did_not_suffice_for_are_told(tmp_path: Path, model: Path, info: TokenizerInfo) -> None:
    config = config_of(tmp_path, model, num_prompts=_AT_ONCE + 500, groups_per_step=_AT_ONCE + 1)
    (finding,) = found(config, info, at_most_s=0.0)  # nor does it say that the data have too few
    assert (finding.level, finding.name) == ("ok", "prompts")
    told = f"{_AT_ONCE + 3} of {_AT_ONCE + 503} tokenised (0 s per dataset; the learner reads all)"
    assert finding.evidence.startswith(told)


def test_all_prompts_are_told_where_there_was_time(tmp_path: Path, model: Path, info: TokenizerInfo) -> None:
    (finding,) = found(config_of(tmp_path, model, num_prompts=50), info, at_most_s=600.0)
    assert finding.evidence.startswith("53 tokenised, ")


def test_data_with_too_few_prompts_for_a_step_are_a_warning(tmp_path: Path, model: Path, info: TokenizerInfo) -> None:
    config = config_of(tmp_path, model, num_prompts=50, groups_per_step=51)
    assert [f"{one.level} {one.name}" for one in found(config, info, at_most_s=600.0)] == [
        "ok prompts",
        "warning number of prompts",
    ]


def test_held_out_prompts_that_are_trained_on_are_a_warning(tmp_path: Path, model: Path, info: TokenizerInfo) -> None:
    config = config_of(tmp_path, model, num_prompts=50)
    with (tmp_path / "held-out.jsonl").open("a") as file:
        file.write('{"prompt": "3 + 4 =", "answer": "7"}\n')
    _, finding = found(config, info, at_most_s=600.0)
    assert (finding.level, finding.name) == ("warning", "held-out prompts")
    assert finding.evidence == "1 of 4 prompts of data.validation are in data.train, too"
