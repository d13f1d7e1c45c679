"""A teacher model served by vLLM: the logprob of each token of a sample, by exact token ids.

    POST /tokenize, /detokenize     once per address, and again after a failure: its tokens must be the policy's
    POST /v1/completions            {"prompt": [ids], "prompt_logprobs": 0, "max_tokens": 1}
                                    {"choices": [{"prompt_logprobs": [null, {"ID": {"logprob": -0.1}}, ...]}]}

Workers ask the teacher, not the learner: a slow teacher then delays only tickets in flight, which are bounded anyway,
and never a learner step; and its logprobs travel with their tokens under one digest, so that a replay has them too.
Requests are retried as in `rewards.asking`. An answer without a finite logprob for each token id is rejected, never
filled in. Servers return logprobs at temperature 1, with no token banned.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import numpy.typing as npt

from streamrl.config import schema
from streamrl.config.places import teacher_base
from streamrl.errors import ConfigError, RewardError
from streamrl.permissions import Permissions
from streamrl.protocol.wire.fingerprint import PROBE_TEXTS
from streamrl.workers.rewards.asking import FIRST_PAUSE_S, Service
from streamrl.workers.rewards.http_client import check_host
from streamrl.workers.rewards.http_request import TryAgain, make_client, post
from streamrl.workers.rewards.teaching import Ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Query = tuple[list[int], int]  # token ids, and for how many of the last ones a logprob is wanted
_ANSWER_BYTES, _ANSWER_BYTES_PER_TOKEN = 1 << 16, 512
_FLOAT32_MAX = float(np.finfo(np.float32).max)  # the dtype in which they are sent on


def build_teacher(
    settings: schema.Teacher,
    permissions: Permissions,
    tokenizer: PreTrainedTokenizerBase,
    *,
    model: str,
    longest: int,
    transport: httpx.AsyncBaseTransport | None = None,
    first_pause_s: float = FIRST_PAUSE_S,
) -> ServedTeacher:
    """Check the addresses and this worker's permission for their hosts; connects to nothing yet. `model`: the owner of
    the tokenizer; `longest`: the most tokens of a prompt and its response."""
    for url in settings.urls:
        check_host("teacher.urls", url, permissions)
    client = make_client(
        settings,
        key="teacher",
        timeout_s=settings.timeout_s,
        transport=transport,
        max_connections=settings.max_concurrency,
    )
    return ServedTeacher(settings, client, tokenizer, model=model, longest=longest, first_pause_s=first_pause_s)


class ServedTeacher:
    def __init__(
        self,
        settings: schema.Teacher,
        client: httpx.AsyncClient,
        tokenizer: PreTrainedTokenizerBase,
        *,
        model: str,
        longest: int,
        first_pause_s: float,
    ) -> None:
        self._settings, self._client, self._tokenizer, self._model = settings, client, tokenizer, model
        self._longest = longest
        urls = list(map(teacher_base, settings.urls))
        self._service: Service[_Query, npt.NDArray[np.float32]] = Service(
            urls, self._request, settings, max_rows=1, first_pause_s=first_pause_s
        )
        self._locks: dict[str, asyncio.Lock] = {}  # a lock per address for comparing its tokenizer with ours
        self._same_tokenizer: set[str] = set()  # addresses whose tokenizer is the same

    def outage(self) -> str | None:
        outage = self._service.health().outage
        return None if outage is None else f"teacher: {outage}"

    @property
    def state(self) -> str:
        return self._service.health().state

    async def close(self) -> None:
        await self._service.close()
        await self._client.aclose()

    async def logprobs(self, context: Ids, tokens: Ids) -> npt.NDArray[np.float32]:
        ids = [*context.tolist(), *tokens.tolist()]
        found = np.zeros(len(tokens), np.float32)
        if num := min(len(tokens), len(ids) - 1):
            try:
                found[-num:] = await self._service.ask((ids, num))
            except RewardError as error:
                raise type(error)(f"teacher: {error}") from None
        return found

    async def _request(self, url: str, queries: Sequence[_Query]) -> list[npt.NDArray[np.float32]]:
        try:
            await self._check_tokenizer(url)
            return [await self._ask(url, ids, num) for ids, num in queries]
        except TryAgain as error:
            if error.rest_s is None:  # not merely rate-limited: another model may take its place
                self._same_tokenizer.discard(url)
            raise

    async def _ask(self, url: str, ids: list[int], num: int) -> npt.NDArray[np.float32]:
        question = {"prompt": ids, "prompt_logprobs": 0, "max_tokens": 1, "temperature": 0.0}
        answer = await self._post(f"{url}/v1/completions", question, _ANSWER_BYTES_PER_TOKEN * len(ids))
        return _read(answer, ids, num)

    async def _check_tokenizer(self, url: str) -> None:
        """Compare the address's tokenizer with ours. ConfigError if its token ids mean something else."""
        async with self._locks.setdefault(url, asyncio.Lock()):
            if url in self._same_tokenizer:
                return
            for text in PROBE_TEXTS:
                ours = self._tokenizer(text, add_special_tokens=False)["input_ids"]
                answer = await self._post(f"{url}/tokenize", {"prompt": text, "add_special_tokens": False}, 0)
                self._require_equal(url, text, ours, answer.get("tokens"))
            room = answer.get("max_model_len")
            if isinstance(room, int) and room <= self._longest:
                raise ConfigError(
                    f"teacher.urls: {url} serves at most {room} tokens, but data.max_prompt_tokens + "
                    f"sampling.max_tokens + 1 = {self._longest + 1}: start it with a larger --max-model-len"
                )
            # The whole vocabulary at once: so tokens that are invalid UTF-8 by themselves are compared, too.
            all_ids = list(range(len(self._tokenizer)))
            answer = await self._post(f"{url}/detokenize", {"tokens": all_ids}, 64 * len(all_ids))
            what, ours = f"tokens 0 to {all_ids[-1]}", self._tokenizer.decode(all_ids)
            self._require_equal(url, what, ours, answer.get("prompt"))
            self._same_tokenizer.add(url)

    def _require_equal(self, url: str, what: str, ours: object, theirs: object) -> None:
        if ours != theirs:
            our_part, their_part = _first_difference(ours, theirs)
            raise ConfigError(
                f"teacher.urls: the model that {url} serves has another tokenizer than model.path = {self._model!r}, "
                f"so token ids would mean something else: {what!r} is {our_part} here and {their_part} there"
            )

    async def _post(self, url: str, question: Mapping[str, Any], num_bytes: int) -> dict[str, Any]:
        timeout_s = self._settings.timeout_s
        body = await post(self._client, url, question, timeout_s=timeout_s, max_bytes=_ANSWER_BYTES + num_bytes)
        try:
            answer = json.loads(body.content)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise TryAgain(f"the answer is not a JSON object: {body.shown()}", answered=True)
        return answer


def _first_difference(ours: object, theirs: object) -> tuple[str, str]:
    """Return the parts where the two begin to differ, short enough for an error message."""
    if not (isinstance(ours, str | list) and isinstance(theirs, type(ours))):
        return f"{ours!r:.80}", f"{theirs!r:.80}"
    unlike = (at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    begin = max(0, next(unlike, min(len(ours), len(theirs))) - 5)
    return f"{ours[begin : begin + 20]!r:.80}", f"{theirs[begin : begin + 20]!r:.80}"


def _read(answer: Mapping[str, Any], ids: Sequence[int], num: int) -> npt.NDArray[np.float32]:
    """Read the logprobs of the last `num` ids. TryAgain if one is missing."""
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    entries = first.get("prompt_logprobs") if isinstance(first, dict) else None
    if not isinstance(entries, list) or len(entries) != len(ids):
        raise TryAgain(f"the answer has no prompt_logprobs for {len(ids)} tokens", answered=True)
    found = [_logprob(entry, token) for entry, token in zip(entries[-num:], ids[-num:], strict=True)]
    return np.array(found, dtype=np.float32)


def _logprob(entry: Any, token: int) -> float:
    of_token = entry.get(str(token)) if isinstance(entry, dict) else None
    value: Any = of_token.get("logprob") if isinstance(of_token, dict) else None
    if type(value) not in (int, float) or not -_FLOAT32_MAX <= value <= 1e-3:  # the comparison is false for NaN
        raise TryAgain(f"the answer has no log-prob of token {token}: {str(entry)[:100]}", answered=True)
    return float(value)
