"""Response bodies for agents, in the format of OpenAI's API and of vLLM's `/inference/v1/generate`.

The engine returns a turn as a whole, so a stream sends it in a few chunks once it is complete.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamrl.workers.engines.base import Generated
from streamrl.workers.sessions.openai_requests import ChatRequest, CompletionRequest
from streamrl.workers.sessions.tool_calls import Reply

Body = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request and its answer."""

    id: str  # session id and turn number
    model: str
    context_ids: npt.NDArray[np.int32]
    generated: Generated
    reply: Reply
    pieces: tuple[str, ...] = ()  # the text of each token, if logprobs are requested

    @property
    def usage(self) -> Body:
        given, made = len(self.context_ids), len(self.generated.token_ids)
        return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.reply.calls else self.generated.finish_reason


def chat(turn: Turn, request: ChatRequest) -> Body:
    message: Body = {"role": "assistant", "content": turn.reply.content or None, "refusal": None}
    if calls := _calls(turn):
        message["tool_calls"] = calls
    elif message["content"] is None:
        message["content"] = ""
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": turn.finish_reason,
        "logprobs": _chat_logprobs(turn, request),
    }
    return _whole(turn, "chat.completion", "chatcmpl", choice, wants_ids=bool(request.return_token_ids))


def chat_chunks(turn: Turn, request: ChatRequest) -> Iterator[Body]:
    deltas: list[Body] = [{"role": "assistant", "content": ""}]
    if turn.reply.content:
        deltas.append({"content": turn.reply.content})
    deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(_calls(turn))]
    logprobs = _chat_logprobs(turn, request)
    for index, delta in enumerate(deltas):
        choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": logprobs if index == 0 else None}
        chunk = _chunk(turn, "chat.completion.chunk", "chatcmpl", [choice])
        yield _with_ids(turn, chunk, choice) if index == 0 and request.return_token_ids else chunk
    last = {"index": 0, "delta": {}, "finish_reason": turn.finish_reason, "logprobs": None}
    yield _chunk(turn, "chat.completion.chunk", "chatcmpl", [last])
    if request.wants_usage:
        yield {**_chunk(turn, "chat.completion.chunk", "chatcmpl", []), "usage": turn.usage}


def completion(turn: Turn, request: CompletionRequest) -> Body:
    return _whole(turn, "text_completion", "cmpl", _text(turn, request), wants_ids=bool(request.return_token_ids))


def completion_chunks(turn: Turn, request: CompletionRequest) -> Iterator[Body]:
    chunk = _chunk(turn, "text_completion", "cmpl", [choice := _text(turn, request)])
    yield _with_ids(turn, chunk, choice) if request.return_token_ids else chunk
    if request.wants_usage:
        yield {**_chunk(turn, "text_completion", "cmpl", []), "usage": turn.usage}


def generate(turn: Turn) -> Body:
    made = turn.generated
    logprobs = [{"token": _name(i), "token_id": i, "logprob": p, "top_logprobs": []} for i, p in _tokens(turn)]
    choice = {
        "index": 0,
        "token_ids": made.token_ids.tolist(),
        "finish_reason": made.finish_reason,
        "stop_reason": None,
        "logprobs": {"content": logprobs},
        "weight_versions": [{"version": str(s.version), "start": s.start, "end": s.end} for s in made.spans],
    }
    return {"request_id": turn.id, **_head(turn, "generate"), "choices": [choice], "usage": turn.usage}


def _whole(turn: Turn, kind: str, prefix: str, choice: Body, *, wants_ids: bool) -> Body:
    body: Body = {"id": f"{prefix}-{turn.id}", **_head(turn, kind), "choices": [choice], "usage": turn.usage}
    return _with_ids(turn, body, choice) if wants_ids else body


def _with_ids(turn: Turn, body: Body, choice: Body) -> Body:
    """Add the fields that vLLM adds."""
    choice["token_ids"] = turn.generated.token_ids.tolist()
    return {**body, "prompt_token_ids": turn.context_ids.tolist()}


def _chunk(turn: Turn, kind: str, prefix: str, choices: list[Body]) -> Body:
    return {"id": f"{prefix}-{turn.id}", **_head(turn, kind), "choices": choices}


def _head(turn: Turn, kind: str) -> Body:
    return {"object": kind, "created": int(time.time()), "model": turn.model}


def _calls(turn: Turn) -> list[Body]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in turn.reply.calls
    ]


def _chat_logprobs(turn: Turn, request: ChatRequest) -> Body | None:
    if not request.logprobs:
        return None
    names = [_name(i) for i, _ in _tokens(turn)] if request.return_tokens_as_token_ids else turn.pieces
    return {
        "content": [
            {"token": name, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
            for name, piece, (_, logprob) in zip(names, turn.pieces, _tokens(turn), strict=True)
        ],
        "refusal": None,
    }


def _text(turn: Turn, request: CompletionRequest) -> Body:
    logprobs = None
    if request.logprobs is not None:
        names = [_name(i) for i, _ in _tokens(turn)] if request.return_tokens_as_token_ids else list(turn.pieces)
        logprobs = {"tokens": names, "token_logprobs": [p for _, p in _tokens(turn)], "top_logprobs": None}
    reason = turn.generated.finish_reason
    return {"index": 0, "text": turn.generated.text, "finish_reason": reason, "logprobs": logprobs}


def _name(token_id: int) -> str:
    """vLLM's token name when ids are requested; clients that train on responses expect it."""
    return f"token_id:{token_id}"


def _tokens(turn: Turn) -> list[tuple[int, float]]:
    return list(zip(turn.generated.token_ids.tolist(), turn.generated.logprobs.tolist(), strict=True))
