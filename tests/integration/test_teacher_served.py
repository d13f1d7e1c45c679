"""A teacher on vLLM's own server: what it says of given tokens is what a plain forward pass says."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import transformers

from streamrl.config.schema import Teacher as Settings
from streamrl.errors import ConfigError
from streamrl.permissions import Permissions
from streamrl.workers.rewards.teacher import ServedTeacher, build_teacher
from tests.served import Served
from tests.tiny_models import make_model, response_logprobs


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    make_model(folder / "teacher", seed=3)
    options = ("--max-model-len", "128", "--dtype", "float32", "--enforce-eager")
    with Served(folder / "teacher", logs=folder, options=options) as server:
        yield server


def connect(served: Served, tokenizer: transformers.PreTrainedTokenizerBase) -> ServedTeacher:
    settings = Settings(urls=(served.url,))
    return build_teacher(settings, Permissions(hosts=("127.0.0.1",)), tokenizer, model="./policy", longest=100)


async def test_the_log_probs_of_given_tokens_are_those_of_a_plain_forward_pass(served: Served) -> None:
    teacher = connect(served, transformers.AutoTokenizer.from_pretrained(served.model))
    rng = np.random.default_rng(1)
    for num_context, num in ((1, 1), (5, 20), (40, 60)):
        context, tokens = (rng.integers(3, 40, n).astype(np.int32) for n in (num_context, num))

        told = await teacher.logprobs(context, tokens)

        truth = response_logprobs(served.model, context.tolist(), tokens.tolist()).numpy()
        np.testing.assert_allclose(told, truth, atol=2e-4)
    assert teacher.state == "well"
    await teacher.close()


async def test_its_tokenizer_is_found_to_be_another(served: Served) -> None:
    ours = transformers.AutoTokenizer.from_pretrained(served.model)
    ours.add_tokens(["<of our own>"])
    teacher = connect(served, ours)

    with pytest.raises(ConfigError, match=r"another tokenizer than model.path = './policy'.*tokens 0 to 49"):
        await teacher.logprobs(np.array([5], np.int32), np.array([6], np.int32))
    await teacher.close()
