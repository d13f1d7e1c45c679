"""One rollout's session: answers an agent's requests, and traces all of them.

    chat / complete / generate ──► prompt tokens ──► engine ──► trace ──► the answer

Bounded in turns, tokens and bytes, and by its player in time. Turns may run concurrently; a turn waits while those in
flight might still use up the tokens it needs. The session ends with its rollout: requests in flight are cancelled,
later ones are refused. Blocks only on the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from streamrl.config import schema
from streamrl.config.of_model import NAME_AN_END, unseen_in
from streamrl.encoding import encode, encode_prompts
from streamrl.errors import EngineError, SampleError, StreamrlError
from streamrl.tasks import cancel_all
from streamrl.workers.engines.base import Engine, Generated, SampleRequest
from streamrl.workers.engines.model import ModelFacts
from streamrl.workers.sessions.conversation import Context, Conversation, read_messages
from streamrl.workers.sessions.openai_answers import Turn
from streamrl.workers.sessions.openai_requests import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    Refused,
    SamplingParams,
)
from streamrl.workers.sessions.tool_calls import Parse, Reply, Tools
from streamrl.workers.sessions.trace import Trace

MAX_SESSION_BYTES = 256 << 20  # over all requests
KEY_REDACTED = "[key]"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What all sessions of a worker share."""

    facts: ModelFacts
    parse: Parse  # for tool calls
    settings: schema.Environment
    date: str  # what its chat template takes for today
    max_length: int  # tokens of a prompt and its answer
    thread: Executor  # tokenizes conversations, which takes time for long ones

    @property
    def name(self) -> str:
        return self.facts.path


class Session:
    def __init__(self, model: Model, engine: Engine, request: SampleRequest, *, num_samples: int = 1) -> None:
        """`request` is the template for each request to the engine."""
        self.id, self.key = secrets.token_hex(8), secrets.token_urlsafe(32)
        self.model = model
        self.trace = Trace(request.prompt_ids, num_samples=num_samples)
        self.spent = ""  # the bound that was reached
        self.model_s = 0.0  # spent in the engine
        self.num_tool_calls = 0
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # an error ends the rollout
        self._engine, self._request = engine, request
        self._conversation = Conversation(model.facts.tokenizer, model.facts.stop_ids, date=model.date)
        self._generating: set[asyncio.Task[Generated]] = set()
        self._reserved = 0  # tokens that the requests in flight may add
        self._turn_done = asyncio.Event()  # replaced each time
        self._num_requests = 0  # requests in flight
        self._num_turns = self._num_bytes = 0
        self._quiet_since = time.monotonic()
        self._is_over = False

    # Access

    def accepts_key(self, key: str) -> bool:
        return hmac.compare_digest(key.encode(), self.key.encode())

    def redacted(self, text: str) -> str:
        return text.replace(self.key, KEY_REDACTED)

    @property
    def quiet_s(self) -> float:
        """Seconds since a request was last in flight."""
        return 0.0 if self._num_requests else time.monotonic() - self._quiet_since

    @contextlib.contextmanager
    def request_in_flight(self) -> Iterator[None]:
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1
            self._quiet_since = time.monotonic()

    def count_bytes(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_SESSION_BYTES:
            raise self._spend(f"all requests of a rollout may have {MAX_SESSION_BYTES} bytes in total")

    async def close(self) -> None:
        self._is_over = True
        await cancel_all(list(self._generating))
        if self.failure.done() and not self.failure.cancelled():
            self.failure.exception()  # mark it retrieved: the player may have ended the rollout for another reason
        self.failure.cancel()

    # Answers

    async def chat(self, request: ChatRequest) -> Turn:
        tools = request.tools or ()
        if tools and not self._conversation.knows_tools:
            message = f"the chat template of {self.model.name!r} does not render tools: describe them in a message"
            raise Refused(400, message, code="unsupported_parameter", param="tools")
        try:
            messages = read_messages(request.messages)
            context = await self._in_thread(partial(self._conversation.context, messages, tools))
        except (ValueError, SampleError) as error:
            raise Refused(400, str(error), code="invalid_value", param="messages") from None
        generated = await self._sample(context, request, token_limit=request.token_limit)
        reply = Reply(content=generated.text)
        if tools and request.tool_choice != "none":
            reply = self._parsed(generated, tools).with_ids(self.trace.num_turns)
            self.num_tool_calls += len(reply.calls)
        self._conversation.record_turn(context, generated.token_ids, messages=messages, tools=tools, reply=reply)
        return self._turn(context, generated, reply, wants_pieces=bool(request.logprobs))

    def _parsed(self, generated: Generated, tools: Tools) -> Reply:
        """Parse tool calls. If their tags are special tokens, the plain text lacks them, so parse the marked text."""
        facts = self.model.facts
        marked = facts.decode_marked(generated.token_ids.tolist())
        if marked is None or not (reply := self.model.parse(marked, tools)).calls:
            return self.model.parse(generated.text, tools)
        return replace(reply, content=facts.without_special(reply.content))

    async def complete(self, request: CompletionRequest) -> Turn:
        given, ids = ("", request.prompt) if isinstance(request.prompt, list) else (request.prompt, [])
        if given:
            ids = await self._in_thread(partial(self._encode, given, request.add_special_tokens))
        context = Context(token_ids=self._checked_prompt(ids), given=given)
        generated = await self._sample(context, request, token_limit=request.token_limit)
        reply = Reply(content=generated.text)
        return self._turn(context, generated, reply, wants_pieces=request.logprobs is not None)

    async def generate(self, request: GenerateRequest) -> Turn:
        context = Context(token_ids=self._checked_prompt(request.token_ids), given="")
        params = request.sampling_params
        generated = await self._sample(context, params, token_limit=params.token_limit)
        return self._turn(context, generated, Reply(content=generated.text), wants_pieces=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        tokenizer = self.model.facts.tokenizer
        [ids] = encode_prompts(tokenizer, [text]) if add_special_tokens else encode(tokenizer, [text])
        return ids

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.model.thread, work)

    async def _sample(self, context: Context, params: SamplingParams, *, token_limit: int | None) -> Generated:
        self._check_ends(params)
        sampling = await self._sampling(context, token_limit, params.stops)
        self._num_turns += 1
        reserved = sampling.max_tokens + self.trace.num_given(context.token_ids)
        self._reserved += reserved
        request = replace(
            self._request,
            request_id=f"{self._request.request_id}-{self._num_turns}",
            prompt_ids=context.token_ids,
            sampling=sampling,
        )
        generating = asyncio.create_task(self._engine.generate(request), name=f"turn {request.request_id}")
        self._generating.add(generating)
        began = time.monotonic()
        try:
            generated = await generating
            self.trace.take(context.token_ids, generated, given=context.given)
        except asyncio.CancelledError:
            if self._is_over:
                raise session_over() from None
            raise
        except (EngineError, SampleError) as error:
            raise self._fail(error) from None
        finally:
            self.model_s += time.monotonic() - began
            self._generating.discard(generating)
            self._reserved -= reserved
            self._turn_done.set()
            self._turn_done = asyncio.Event()
        return generated

    async def _sampling(self, context: Context, token_limit: int | None, stops: Sequence[str]) -> schema.Sampling:
        """Return the run's sampling with the agent's permitted limits. Refused if a bound is reached."""
        run, length = self._request.sampling, len(context.token_ids)
        room = self.model.max_length - length
        wanted = min(run.max_tokens, room, token_limit or run.max_tokens)
        while (left := self._tokens_left(context)) < self._reserved + wanted and self._reserved:
            await self._turn_done.wait()
        if room < 1:
            message = f"the messages are {length} tokens; the model takes {self.model.max_length}, its answer included"
            raise Refused(400, message, code="context_length_exceeded", param="messages")
        num_tokens = min(wanted, left)
        return run.model_copy(
            update={
                "max_tokens": num_tokens,
                "min_tokens": min(num_tokens, run.min_tokens),
                "stop": (*run.stop, *(stop for stop in stops if stop)),
            }
        )

    def _check_ends(self, params: SamplingParams) -> None:
        """Refuse stop tokens if the model ends at none of them, and stop strings that no text of it can contain: its
        turns would run on to their limit."""
        ends, wanted = self.model.facts.stop_ids, params.stop_token_ids
        if wanted and not set(wanted) & set(ends):
            message = f"stop_token_ids {wanted}: the model ends its turns with {list(ends)}; {NAME_AN_END}"
            raise Refused(400, message, code="unsupported_parameter", param="stop_token_ids")
        for stop in params.stops:
            if (token := unseen_in(stop, self.model.facts.tokenizer, ends)) is not None:
                message = f"stop {stop!r}: {token!r} is a special token, which texts are decoded without; {NAME_AN_END}"
                raise Refused(400, message, code="unsupported_parameter", param="stop")

    def _tokens_left(self, context: Context) -> int:
        """Return how many tokens a turn with this prompt could sample if it ran alone. Refused if none."""
        settings = self.model.settings
        if self._is_over:
            raise session_over()
        if self._num_turns >= settings.max_turns:
            raise self._spend(f"environment.max_turns = {settings.max_turns}: the rollout has used all its turns")
        left = settings.max_tokens - self.trace.num_tokens - self.trace.num_given(context.token_ids)
        if left < 1:
            raise self._spend(f"environment.max_tokens = {settings.max_tokens}: the rollout has used all its tokens")
        return left

    def _checked_prompt(self, token_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        if not token_ids or max(token_ids) >= self.model.facts.vocab_size:
            vocabulary = f"[0, {self.model.facts.vocab_size})"
            raise Refused(400, f"a prompt needs at least one token, all of them in {vocabulary}", code="invalid_value")
        return np.asarray(token_ids, dtype=np.int32)

    def _turn(self, context: Context, generated: Generated, reply: Reply, *, wants_pieces: bool) -> Turn:
        facts = self.model.facts
        return Turn(
            id=f"{self.id}-{self.trace.num_turns}",
            model=self.model.name,
            context_ids=context.token_ids,
            generated=generated,
            reply=reply,
            pieces=tuple(facts.decode([i]) for i in generated.token_ids.tolist()) if wants_pieces else (),
        )

    def _spend(self, bound: str) -> Refused:
        self.spent = self.spent or bound
        return Refused(400, bound, code="rollout_spent")

    def _fail(self, error: StreamrlError) -> Refused:
        """End the rollout, however the agent reacts."""
        if not self.failure.done():
            self.failure.set_exception(error)
        return Refused(503, f"the rollout cannot continue: {error}", code="rollout_failed")


def session_over() -> Refused:
    return Refused(404, "no such session: its rollout is over, or it never existed", code="session_over")
