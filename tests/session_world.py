"""Agents and sessions in memory: a tokenizer whose template supports tools, an engine that says what the test wants,
and agents from a file, in their child processes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from streamrl.config import schema
from streamrl.permissions import Permissions
from streamrl.protocol.wire.sample import Span
from streamrl.protocol.wire.ticket import Ticket
from streamrl.versions import make_version
from streamrl.workers.engines.base import Generated, SampleRequest
from streamrl.workers.engines.double import EngineDouble
from streamrl.workers.engines.model import ModelFacts
from streamrl.workers.environments.agents import AgentPlayer
from streamrl.workers.environments.playing import playing
from streamrl.workers.sessions.trace import Played
from tests.helpers import make_ticket
from tests.tiny_models import PAD, UNKNOWN

# ChatML with tools, as in Qwen's and Hermes' models.
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
CALL = '<tool_call>{"name": "add", "arguments": {"a":2,"b":3}}</tool_call>'  # not formatted like the template's
Say = Callable[[list[SampleRequest]], str]


def well(_: object) -> str:
    return "well"


# Agents without dependencies, good and bad.
PLAIN = '''
import asyncio, json, os, socket, time, urllib.error, urllib.request

def ask(session, key=None, content="hello", path="/chat/completions"):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    headers = {"authorization": f"Bearer {key or session.api_key}", "content-type": "application/json"}
    request = urllib.request.Request(session.base_url + path, body, headers)
    with urllib.request.urlopen(request, timeout=240) as answer:
        return json.loads(answer.read())["choices"][0]["message"]["content"]

async def bad(session, row):
    """Asks once, and goes wrong as the row says."""
    what = row.get("what")
    said = await asyncio.to_thread(ask, session)
    if what == "raise": raise KeyError("what")
    if what == "tell": raise ValueError(f"cannot reach {session.base_url} with {session.api_key}")
    if what == "exit": os._exit(3)
    if what == "kill": os.kill(os.getpid(), 9)
    if what == "hang": await asyncio.sleep(3600)
    if what == "block": time.sleep(3600)
    if what == "text": return "good"
    if what == "nothing": return None
    if what == "nan": return float("nan")
    if what == "names": return {"no name": 1.0}
    if what == "eat": return "x" * (1 << 34)
    if what == "write": os.write(int(max(os.listdir("/proc/self/fd"), key=int)) - 1, b"garbage\\n" * 100)
    if what == "huge":
        try: await asyncio.to_thread(ask, session, None, "x" * (1 << 27))
        except (urllib.error.URLError, OSError): return 7.0
    return 1.0

def plain(session, row):
    if row.get("what") == "block": time.sleep(3600)
    ask(session)
    return 1.0

def talks(session, row):
    for _ in range(100): ask(session)

def silent(session, row): return 1.0

def afterwards(session, row):
    """Tries another's session."""
    place = row["place"]
    if not os.path.exists(place):
        ask(session)
        with open(place, "w") as file: json.dump([session.base_url, session.api_key], file)
        return 1.0
    with open(place) as file: url, key = json.load(file)
    ask(session)
    refused = []
    for base, bearer in ((url, key), (session.base_url, key), (url, session.api_key)):
        try: ask(type(session)(base_url=base, api_key=bearer, model=""))
        except urllib.error.HTTPError as error: refused.append(error.code)
    return float(refused == [404, 401, 404])

def connects(session, row):
    ask(session)
    refused = 0
    for family, address in ((socket.AF_INET, ("127.0.0.1", row["port"])), (socket.AF_UNIX, row["path"])):
        try:
            with socket.socket(family) as one: one.connect(address)
        except OSError as error: refused += error.errno == 64
    return float(refused)
'''


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, plus ChatML's."""
    special = [PAD, UNKNOWN, "<|im_start|>", "<|im_end|>"]
    vocab = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _fast(tokenizer)


def calling_tokenizer() -> PreTrainedTokenizerFast:
    """So few tokens, a whole tool call among them, that an untrained model makes a call now and then."""
    special = [PAD, UNKNOWN, "<|im_start|>", "<|im_end|>"]
    vocab = {token: i for i, token in enumerate([*special, *"0123456789", "\u010a"])}  # the last is a line break
    tokenizer = Tokenizer(models.BPE(vocab, merges=[], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = _fast(tokenizer)
    made.add_tokens([CALL])
    return made


def write_calling_model(folder: Path, tokenizer: PreTrainedTokenizerFast | None = None) -> None:
    tokenizer = tokenizer or calling_tokenizer()
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
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


def chat_facts(*more: str, special: bool = False) -> ModelFacts:
    """`more`: additional tokens, special ones if `special`."""
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(list(more), special_tokens=special)
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
    """Returns the text that `say` makes from all requests so far, ended like a model's answer."""

    def __init__(self, facts: ModelFacts, say: Say, **others: Any) -> None:
        super().__init__(**others)
        self._facts, self._say = facts, say
        self.said: list[tuple[list[int], Generated]] = []  # (whole context, answer)

    async def generate(self, request: SampleRequest) -> Generated:
        await super().generate(request)
        text = self._say(self.requests)
        ids = self._facts.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = [*ids, self._facts.stop_ids[0]][: request.sampling.max_tokens]
        ended = ids[-1] == self._facts.stop_ids[0]
        generated = Generated(
            token_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -0.5, np.float32),
            text=self._facts.decode(ids),
            finish_reason="stop" if ended else "length",
            spans=(Span(version=make_version(1, 1), step=1, start=0, end=len(ids)),),
        )
        self.said.append((request.prompt_ids.tolist(), generated))
        return generated


class AgentWorld:
    """`play` runs an agent of `code`, one rollout after another or several concurrently."""

    def __init__(self, player: AgentPlayer, facts: ModelFacts, config: schema.Config) -> None:
        self.player, self.facts, self.config = player, facts, config

    @property
    def num_open(self) -> int:
        return self.player.sessions.num_open

    async def play(self, say: Say, row: Mapping[str, Any] | None = None, **changes: Any) -> tuple[Played, Teller]:
        engine = self.teller(say, **changes)
        return await self.play_with(engine, row), engine

    def teller(self, say: Say = well, **others: Any) -> Teller:
        """One that has loaded weights, for `play_with`."""
        engine = Teller(self.facts, say, **others)
        engine.loads.append((Path("weights"), make_version(1, 1), 1))
        return engine

    async def play_with(self, engine: EngineDouble, row: Mapping[str, Any] | None = None) -> Played:
        ticket = self.ticket(row or {})
        request = SampleRequest(
            request_id="train-1-1", prompt_ids=ticket.token_ids, sampling=schema.Sampling(max_tokens=200)
        )
        return await self.player.play(ticket, engine, request)

    def ticket(self, row: Mapping[str, Any]) -> Ticket:
        """Its prompt is the start of every conversation in these tests."""
        ids = self.facts.tokenizer("<|im_start|>", add_special_tokens=False)["input_ids"]
        return make_ticket(1, token_ids=np.array(ids, np.int32), prompt="2 + 3", fields=dict(row))


@contextlib.asynccontextmanager
async def agent_world(folder: Path, code: str, name: str, **settings: Any) -> AsyncIterator[AgentWorld]:
    (folder / "agent.py").write_text(code)
    async with world_of(f"{folder / 'agent.py'}:{name}", **settings) as world:
        yield world


@contextlib.asynccontextmanager
async def world_of(target: str, **settings: Any) -> AsyncIterator[AgentWorld]:
    environment = schema.Environment(target=target, **{"timeout_s": 60.0, "max_tokens": 4096, **settings})
    config = schema.Config.model_validate(
        {"model": {"path": "m"}, "data": {"train": "t.jsonl", "max_prompt_tokens": 512}, "environment": environment}
    )
    facts = chat_facts()
    allowed = Permissions(reward_code=(target,), reward_network=(target,), reward_environment=environment.environment)
    async with playing(config, allowed, facts) as player:
        assert isinstance(player, AgentPlayer)
        yield AgentWorld(player, facts, config)
