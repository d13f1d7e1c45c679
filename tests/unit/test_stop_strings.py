"""Stop strings: what the transformers engine cuts off, and which ones no response would ever end at."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn

from streamrl.config import schema
from streamrl.errors import ConfigError
from streamrl.recipe.held_out import completion_of
from streamrl.workers.engines.base import EngineSettings, Generated
from streamrl.workers.engines.decoder import Decoder, Row
from streamrl.workers.engines.model import ModelFacts
from tests.worker_world import a_sample_request, worker_config

PAD, EOS, FOUR, LINE, LINES, HEAD, REST = range(7)
VOCABULARY = ["<pad>", "<eos>", "4", "\u010a", "\u010a\u010a", "\u00c3", "\u00a9"]  # line breaks; the two bytes of é


def facts() -> ModelFacts:
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate(VOCABULARY)}, merges=[(VOCABULARY[LINE],) * 2])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return ModelFacts(
        path="",
        tokenizer=transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
        ),
        stop_ids=(EOS,),
        vocab_size=len(VOCABULARY),
        max_positions=None,
        fingerprint="",
        trust_remote_code=False,
    )


class Script(nn.Module):
    """A model that says these tokens, whatever it is given."""

    def __init__(self, *token_ids: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._next = iter(token_ids)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        logits = torch.full((len(input_ids), 1, len(VOCABULARY)), -torch.inf)
        logits[:, -1, next(self._next)] = 0.0
        return SimpleNamespace(logits=logits)


def sample(*token_ids: int, stop: tuple[str, ...]) -> Generated:
    decoder = Decoder(Script(*token_ids), EngineSettings(model=facts(), config=worker_config(), seed=1))
    nobody: Any = None
    decoder.arrived.append(Row(request=a_sample_request(stop=stop), max_tokens=len(token_ids), done=nobody))
    while not (finished := decoder.step()):
        pass
    return finished[0][1]


@pytest.mark.parametrize(
    ("token_ids", "stop", "text"),
    [
        ((FOUR, LINES), "\n", "4"),
        ((FOUR, FOUR, LINE), "4\n", "4"),
        ((FOUR, LINE, FOUR), "\n4", "4"),
        ((FOUR, HEAD, REST), "\u00e9", "4"),  # its character is whole only with the second of its bytes
    ],
)
def test_the_text_ends_before_the_first_stop_string_that_the_last_token_completed(
    token_ids: tuple[int, ...], stop: str, text: str
) -> None:
    got = sample(*token_ids, PAD, stop=(stop,))
    assert got.token_ids.tolist() == list(token_ids)
    assert (got.finish_reason, got.text) == ("stop", text)
    assert completion_of(list(token_ids), (stop,), facts().decode) == text


@pytest.mark.parametrize("section", ["sampling", "validation.sampling"])
@pytest.mark.parametrize("stop", ["<|im_end|>", "4<|im_end|>\n"])
def test_an_engine_is_not_built_for_a_special_token_that_is_no_end_token(section: str, stop: str) -> None:
    model = facts()
    model.tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    config = settings(section, ["\n", stop])
    with pytest.raises(ConfigError, match=rf"{re.escape(section)}\.stop = .*'<\|im_end\|>' is a special token"):
        EngineSettings(model=model, config=config, seed=1)
    end = model.tokenizer.convert_tokens_to_ids("<|im_end|>")
    EngineSettings(model=replace(model, stop_ids=(EOS, end)), config=config, seed=1)


def settings(section: str, stop: list[str]) -> schema.Config:
    of_section = (
        schema.Sampling(stop=tuple(stop))
        if section == "sampling"
        else schema.Validation.model_validate({"sampling": {"stop": stop}})
    )
    return worker_config().model_copy(update={section.partition(".")[0]: of_section})
