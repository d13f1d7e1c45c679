"""Agents against sessions, in memory: a tokenizer with a template that writes tools, an engine that says what it is
told to, and agents of a file, in their child processes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from streamrl.config import schema
from streamrl.permissions import Permissions
from streamrl.protocol.wire.group import Span
from streamrl.protocol.wire.ticket import Ticket
from streamrl.versions import make_version
from streamrl.workers.engines.base import Generated, SampleRequest
from streamrl.workers.engines.double import EngineDouble
from streamrl.workers.engines.model import ModelFacts
from streamrl.workers.environments.agents import AgentPlayer
from streamrl.workers.environments.playing import playing
from streamrl.workers.environments.trace import Played
from tests.helpers import make_ticket
from tests.tiny_models import PAD, UNKNOWN

# ChatML with tools, as Qwen's and Hermes' models have it.
TEMPLATE = """
{%- set told = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}
{%- if tools %}<|im_start|>system
{{ told }}tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>
{% elif told %}<|im_start|>system
{{ told }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message['role'] == 'tool' %}<|im_start|>user
<tool_response>{{ message['content'] }}</tool_response><|im_end|>
{% elif message['role'] != 'system' %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}
{%- for call in message['tool_calls'] or [] %}{%- set called = call['function'] -%}
<tool_call>{"name": "{{ called['name'] }}", "arguments": {{ called['arguments'] | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds two numbers",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
CALL = '<tool_call>{"name": "add", "arguments": {"a":2,"b":3}}</tool_call>'  # not as the template would write it
Say = Callable[[list[SampleRequest]], str]


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, and ChatML's own."""
    special = [PAD, UNKNOWN, "<|im_start|>", "<|im_end|>"]
    vocab = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token="<|im_end|>",
        unk_token=UNKNOWN,
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    return made


def chat_facts() -> ModelFacts:
    tokenizer = chat_tokenizer()
    return ModelFacts(
        path="tiny-chat",
        tokenizer=tokenizer,
        stop_ids=(tokenizer.eos_token_id,),
        vocab_size=len(tokenizer),
        max_positions=None,
        fingerprint="tiny",
        trust_remote_code=False,
    )


class Teller(EngineDouble):
    """Says the text that `say` makes of all that it was asked so far, and ends it as models do."""

    def __init__(self, facts: ModelFacts, say: Say, **others: Any) -> None:
        super().__init__(**others)
        self._facts, self._say = facts, say
        self.said: list[tuple[list[int], Generated]] = []  # (the whole context, what came)

    async def generate(self, request: SampleRequest) -> Generated:
        await super().generate(request)
        text = self._say(self.requests)
        ids = self._facts.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = [*ids, self._facts.stop_ids[0]][: request.sampling.max_tokens]
        ended = ids[-1] == self._facts.stop_ids[0]
        generated = Generated(
            token_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -0.5, np.float32),
            text=text if ended else self._facts.decode(ids),
            finish_reason="stop" if ended else "length",
            spans=(Span(version=make_version(1, 1), step=1, start=0, end=len(ids)),),
        )
        self.said.append((request.prompt_ids.tolist(), generated))
        return generated


class AgentWorld:
    """`play` runs an agent of `code`, one rollout after another or several at once."""

    def __init__(self, player: AgentPlayer, facts: ModelFacts) -> None:
        self.player, self.facts = player, facts

    @property
    def num_open(self) -> int:
        return self.player.sessions.num_open

    async def play(self, say: Say, row: Mapping[str, Any] | None = None, **changes: Any) -> tuple[Played, Teller]:
        engine = Teller(self.facts, say, **changes)
        engine.loads.append((Path("weights"), make_version(1, 1), 1))
        return await self.play_with(engine, row), engine

    async def play_with(self, engine: EngineDouble, row: Mapping[str, Any] | None = None) -> Played:
        ticket = self.ticket(row or {})
        request = SampleRequest(
            request_id="train-1-1", prompt_ids=ticket.token_ids, sampling=schema.Sampling(max_tokens=200)
        )
        return await self.player.play(ticket, engine, request)

    def ticket(self, row: Mapping[str, Any]) -> Ticket:
        """Its prompt is what every conversation of these tests begins with."""
        ids = self.facts.tokenizer("<|im_start|>", add_special_tokens=False)["input_ids"]
        return make_ticket(1, token_ids=np.array(ids, np.int32), prompt="2 + 3", fields=dict(row))


@contextlib.asynccontextmanager
async def agent_world(folder: Path, code: str, name: str, **settings: Any) -> AsyncIterator[AgentWorld]:
    (folder / "agent.py").write_text(code)
    target = f"{folder / 'agent.py'}:{name}"
    environment = schema.Environment(target=target, **{"timeout_s": 60.0, "max_tokens": 4096, **settings})
    config = schema.Config.model_validate(
        {"model": {"path": "m"}, "data": {"train": "t.jsonl", "max_prompt_tokens": 512}, "environment": environment}
    )
    facts = chat_facts()
    allowed = Permissions(reward_code=(target,), reward_network=(target,))
    async with playing(config, allowed, facts) as player:
        assert isinstance(player, AgentPlayer)
        yield AgentWorld(player, facts)
