"""What a reward model reads of a chat: the tokens of the whole conversation as its template writes it, none twice."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from streamrl.config import schema
from streamrl.data.prompts import read_prompts
from streamrl.data.settings import DATE
from streamrl.ops.cli.rewards.scoring import encoder_of, score_pairs
from streamrl.protocol.wire.ticket import Ticket
from streamrl.versions import make_version
from streamrl.workers.engines.model import ModelFacts
from streamrl.workers.reward_server.model import RewardModel
from streamrl.workers.rewards.base import RewardDouble
from streamrl.workers.rewards.mixing import Rewards, Weighted
from streamrl.workers.rollout.answer import Answerer
from tests.helpers import make_ticket
from tests.http_reward_world import connect, lengths
from tests.session_world import TEMPLATE, Teller, chat_facts, chat_tokenizer, write_calling_model
from tests.tiny_models import begin_all_with
from tests.tiny_rewards import make_item, make_reward_model
from tests.worker_world import worker_config

START, ASKED = "<s>", [{"role": "user", "content": "2 + 3"}]
ROWS = {"streamrl": "texts", "openrlhf": "query", "vllm-classify": "input", "vllm-pooling": "input"}


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    """As Llama's: the tokenizer puts a token in front of every text, and so does the template."""
    facts = chat_facts(START, special=True)
    begin_all_with(facts.tokenizer, START)
    facts.tokenizer.chat_template = START + TEMPLATE
    return facts


@pytest.fixture(scope="module")
def scorer(facts: ModelFacts, tmp_path_factory: pytest.TempPathFactory) -> RewardModel:
    """A reward model of the same family."""
    settings = schema.RewardServer(model=str(make_reward_model(tmp_path_factory.mktemp("model") / "rm")))
    return RewardModel(RewardModel.load(settings).model, facts.tokenizer, settings)


class Service:
    """Scores nothing, and keeps the tokens that a reward model would read."""

    def __init__(self, form: str, scorer: RewardModel) -> None:
        self._form, self._scorer = form, scorer
        self.read: list[list[int]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        asked = json.loads(request.content)
        texts = asked[ROWS[self._form]]
        if "vllm" in self._form:
            added = asked.get("add_special_tokens", True)  # vLLM's default
            self.read += self._scorer.tokenizer(texts, add_special_tokens=added)["input_ids"]
            scores = [{"index": index, "probs": [0.5], "data": [0.5]} for index in range(len(texts))]
            return httpx.Response(200, json={"data": scores})
        self.read += self._scorer.encode(texts)
        return httpx.Response(200, json={"rewards": [0.5] * len(texts)})


async def read_of(
    ticket: Ticket, facts: ModelFacts, scorer: RewardModel, form: str, *, max_tokens: int = 100
) -> list[int]:
    """Let a worker answer the ticket with `5`; return the tokens that the reward model of its service reads."""
    service = Service(form, scorer)
    engine = Teller(facts, lambda asked: "5")
    engine.loads.append((Path("weights"), make_version(1, 1), 1))
    reward = connect(service, form=form)
    config = worker_config()
    config = config.model_copy(update={"sampling": config.sampling.model_copy(update={"max_tokens": max_tokens})})
    answerer = Answerer(
        rewards=Rewards({"mine": Weighted(reward=reward, weight=1.0)}),
        config=config,
        worker="w",
        fingerprint="tiny",
        ends=facts.ends(),
    )
    group = await answerer.answer(ticket, engine)
    await reward.close()
    assert group.header.error == ""
    [read] = service.read
    return read


def chat_ticket(facts: ModelFacts) -> Ticket:
    """As the learner makes it."""
    text = facts.tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    ids = facts.tokenizer(text, add_special_tokens=False)["input_ids"]
    fields = {"messages": ASKED}
    return make_ticket(1, prompt=text, token_ids=np.array(ids, np.int32), fields=fields, num_samples=1)


@pytest.mark.parametrize("form", ROWS)
async def test_a_chat_is_read_as_its_template_writes_it_to_the_end(
    facts: ModelFacts, scorer: RewardModel, form: str
) -> None:
    whole = [*ASKED, {"role": "assistant", "content": "5"}]
    written = facts.tokenizer.apply_chat_template(whole, tokenize=True, return_dict=False)

    read = await read_of(chat_ticket(facts), facts, scorer, form)

    assert read == written
    assert facts.tokenizer.decode(read).endswith("5<|im_end|>\n")
    assert facts.tokenizer.decode(read).count(START) == 1


@pytest.mark.parametrize("form", ROWS)
async def test_an_answer_that_was_cut_off_has_no_end(facts: ModelFacts, scorer: RewardModel, form: str) -> None:
    read = await read_of(chat_ticket(facts), facts, scorer, form, max_tokens=1)

    assert facts.tokenizer.decode(read).endswith("assistant\n5")


@pytest.mark.parametrize("form", ROWS)
async def test_a_plain_text_is_read_as_it_was_and_begins_as_the_tokenizer_says(
    facts: ModelFacts, scorer: RewardModel, form: str
) -> None:
    ids = np.array(facts.tokenizer("2 + 3 = ")["input_ids"], np.int32)
    plain = make_ticket(1, prompt="2 + 3 = ", token_ids=ids, num_samples=1)

    assert facts.tokenizer.decode(await read_of(plain, facts, scorer, form)) == f"{START}2 + 3 = 5"


async def test_chats_and_plain_texts_of_the_same_moment_are_asked_about_apart() -> None:
    requests: list[list[str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(json.loads(request.content)["texts"])
        return lengths(request)

    plain = [make_item("p" * i, prompt="") for i in range(1, 71)]
    chats = [replace(make_item("c" * i, prompt="", messages=ASKED), end="e") for i in range(1, 71)]
    items = [item for pair in zip(plain, chats, strict=True) for item in pair]
    reward = connect(answer)

    scores = await asyncio.gather(*(reward.score(item) for item in items))

    await reward.close()
    assert scores == [len(item.text) for item in items]
    assert sorted(map(len, requests)) == [6, 6, 64, 64]
    assert all(len({text[0] for text in texts}) == 1 for texts in requests)


def with_template(facts: ModelFacts, template: str | None) -> ModelFacts:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=facts.tokenizer.backend_tokenizer, eos_token="<|im_end|>", bos_token=START
    )
    tokenizer.chat_template = template
    return replace(facts, tokenizer=tokenizer, stop_ids=(facts.stop_ids[0], tokenizer.bos_token_id))


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (TEMPLATE, "<|im_end|>\n"),
        ("{% for one in messages %}{{ one['content'] | upper }}<|im_end|>\n{% endfor %}", "<|im_end|>"),
        ("{% for one in messages %}{{ one['content'] }} next{% endfor %}", "<|im_end|>"),
        ("{{ raise_exception('system first') }}", "<|im_end|>"),
        ("{{ messages[0]['no such key'] + 1 }}", "<|im_end|>"),
        (None, "<|im_end|>"),
    ],
)
def test_an_end_is_its_token_and_what_the_template_writes_after_it_if_that_can_be_told(
    facts: ModelFacts, template: str | None, end: str
) -> None:
    other = with_template(facts, template)

    assert other.ends() == {facts.stop_ids[0]: end, other.tokenizer.bos_token_id: START}


async def test_a_trial_with_the_policys_model_is_given_the_same_text(tmp_path: Path) -> None:
    write_calling_model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": ASKED}) + "\n")
    [row] = read_prompts(tmp_path / "rows.jsonl", malformed="error").rows
    reward = RewardDouble()

    await score_pairs(reward, [(row, ["5"])], encoder_of(str(tmp_path / "model"), DATE))

    whole = [*ASKED, {"role": "assistant", "content": "5"}]
    assert reward.items[0].text == chat_tokenizer().apply_chat_template(whole, tokenize=False)
