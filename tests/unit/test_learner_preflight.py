"""What a check before the run finds out about its model, so that no rank and no worker starts in vain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamrl.config.load import load_config
from streamrl.errors import ConfigError
from streamrl.learner.preflight.examine import examine
from tests.tiny_models import make_model

POSITIONS = 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), architecture="llama")


def found(model: Path, folder: Path, **sampling: Any) -> list[str]:
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "3 + 4 =", "answer": "7"}\n' * 64)
    settings = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": str(prompts), "max_prompt_tokens": 64},
        "rewards": {"exact": {"type": "function", "target": "exact_match"}},
        "sampling": {"max_tokens": 64, **sampling},
    }
    return [f"{one.level} {one.name}" for one in examine(load_config(settings).config)]


def test_sequences_longer_than_workers_could_make_are_refused(model: Path, tmp_path: Path) -> None:
    assert "ok model structure" in found(model, tmp_path, max_tokens=POSITIONS - 64)
    with pytest.raises(
        ConfigError, match=r"data\.max_prompt_tokens and sampling\.max_tokens .* 513 tokens; .* only 512"
    ):
        found(model, tmp_path, max_tokens=POSITIONS - 63)


def test_stop_strings_at_which_no_response_would_end_are_refused(model: Path, tmp_path: Path) -> None:
    assert "ok model structure" in found(model, tmp_path, stop=[".", "<eos>"])
    with pytest.raises(ConfigError, match=r"sampling\.stop = 'a<unk>': '<unk>' is a special token, .*eos_token_id"):
        found(model, tmp_path, stop=["a<unk>"])
