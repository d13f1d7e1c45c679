"""Rewards from LLM judges behind any OpenAI-compatible URL: pointwise, or pairwise against another answer.

    score ──► question (`verdicts`) ──► each judge: cached? ─ yes ─► its verdict
                                            │ no
                                            ▼
                                   service (`asking`, with a limit of requests per second) ──► verdict, or RewardError

Judges are services: one that hangs, fails, rate-limits or answers nonsense is retried. While one of several judges is
out, all samples wait, since the mean of the others would be a different reward. The same question is asked only once,
even while its answer is in flight. A verdict is one of the offered values, or an error.

Once the token budget is spent, samples wait as in an outage: none of them is at fault. The budget is the run's: each
answer is counted in Redis, which returns what all workers have spent. Requests in flight may exceed it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import httpx

from streamrl.config import schema
from streamrl.config.places import judge_base
from streamrl.errors import ConfigError, RewardError, RewardOutage, TransportError
from streamrl.permissions import Permissions
from streamrl.protocol.wire.ticket import MAX_TOKENS
from streamrl.workers.rewards.asking import FIRST_PAUSE_S, Service
from streamrl.workers.rewards.base import ScoreItem, SourceHealth, Spend
from streamrl.workers.rewards.http_client import check_host
from streamrl.workers.rewards.http_request import make_client, post
from streamrl.workers.rewards.verdicts import Question, field_of, limit_of, pairwise, pointwise, read, request, worth

_MAX_ANSWER_BYTES = 1 << 16  # plus an allowance per token of the verdict
_MAX_BYTES_PER_TOKEN = 64
Ask = Callable[[Question], Coroutine[Any, Any, float]]


def build_judge_reward(
    name: str,
    source: schema.JudgeReward,
    permissions: Permissions,
    spend: Spend | None = None,
    *,
    transport: httpx.AsyncBaseTransport | None = None,
    first_pause_s: float = FIRST_PAUSE_S,
) -> JudgeReward | JudgeOfGroups:
    """Check the addresses and this worker's permission for hosts and keys; connects to nothing yet."""
    budget = Budget(source.token_budget, name=name, spend=spend)
    judges = {}
    for judge_name, judge in source.judges.items():
        key = f"rewards.{name}.judges.{judge_name}"
        for url in judge.urls:
            check_host(f"{key}.url", url, permissions)
        if judge.token_env is not None and judge.token_env not in permissions.reward_environment:
            raise ConfigError(
                f"{key}.token_env: this worker does not pass {judge.token_env} to judges; to allow it, start the "
                f"worker with --allow-reward-env {judge.token_env}"
            )
        limit = source.max_concurrency
        client = make_client(judge, key=key, timeout_s=source.timeout_s, transport=transport, max_connections=limit)
        judges[judge_name] = AskedJudge(judge, source, client, budget, first_pause_s=first_pause_s)
    panel = JudgePanel(judges, source, budget)
    return JudgeOfGroups(source, panel) if source.of_group else JudgeReward(source, panel)


def address(url: str) -> str:
    """Return the chat completions URL."""
    return f"{judge_base(url)}/chat/completions"


class Budget:
    """Tokens that a source's judges have read and written, in all workers of the run."""

    def __init__(self, limit: int | None, *, name: str, spend: Spend | None) -> None:
        self.own = 0  # spent by this worker
        self._total = 0  # spent by all workers, as far as known; never decreases, even if Redis loses it
        self._unreported = 0  # not yet reported to Redis
        self._limit, self._name, self._spend = limit, name, spend

    async def add(self, num: int) -> None:
        self.own += num
        self._total += num
        if self._limit is None or self._spend is None:
            return
        reporting, self._unreported = self._unreported + num, 0
        try:
            total = await self._spend(f"rewards/{self._name}/tokens", reporting)
        except TransportError:  # the worker's own loop handles this; the verdict is valid all the same
            self._unreported += reporting
        else:
            self._total = max(self._total, total)

    @property
    def outage(self) -> str | None:
        if self._limit is None or self._total < self._limit:
            return None
        return (
            f"rewards.{self._name}.token_budget = {self._limit}: its judges have used {self._total} tokens; raise it, "
            "or leave it out, and resume the run"
        )


class CachedAsk:
    """Caches the newest `size` answers by question; concurrent identical questions share one request."""

    def __init__(self, ask: Ask, *, size: int) -> None:
        self._ask, self._size = ask, size
        self._answers: OrderedDict[bytes, asyncio.Task[float]] = OrderedDict()

    async def __call__(self, question: Question) -> float:
        if not self._size:
            return await self._ask(question)
        key = hashlib.blake2b(question.text.encode(errors="replace"), digest_size=16).digest()
        if key not in self._answers:
            self._answers[key] = task = asyncio.ensure_future(self._ask(question))
            task.add_done_callback(partial(self._drop_failed, key))
            if len(self._answers) > self._size:
                self._answers.popitem(last=False)
        self._answers.move_to_end(key)
        return await asyncio.shield(self._answers[key])  # a cancelled caller must not cancel it for the others

    def _drop_failed(self, key: bytes, task: asyncio.Task[float]) -> None:
        if (task.cancelled() or task.exception() is not None) and self._answers.get(key) is task:
            del self._answers[key]


class AskedJudge:
    """One judge model with one or more replicas."""

    def __init__(
        self,
        judge: schema.Judge,
        source: schema.JudgeReward,
        client: httpx.AsyncClient,
        budget: Budget,
        *,
        first_pause_s: float,
    ) -> None:
        self._judge, self._source, self._client, self._budget = judge, source, client, budget
        self._service = Service(
            [address(url) for url in judge.urls],
            self._request,
            source,
            max_rows=1,
            per_s=source.max_requests_per_s,
            first_pause_s=first_pause_s,
        )
        self.ask = CachedAsk(self._service.ask, size=source.cache_size)

    def health(self) -> SourceHealth:
        return self._service.health()

    async def close(self) -> None:
        await self._service.close()
        await self._client.aclose()

    async def _request(self, url: str, questions: Sequence[Question]) -> list[float]:
        [question] = questions
        if (outage := self._budget.outage) is not None:
            raise RewardOutage(outage)
        payload = request(question, self._judge, self._source)
        limit = limit_of(payload, self._judge)
        most_tokens = max(self._source.max_tokens, min(limit.num_tokens, MAX_TOKENS))
        max_bytes = _MAX_ANSWER_BYTES + _MAX_BYTES_PER_TOKEN * most_tokens
        body = await post(self._client, url, payload, timeout_s=self._source.timeout_s, max_bytes=max_bytes)
        answer = read(body, question)
        await self._budget.add(answer.num_tokens)  # an invalid verdict costs as much
        return [worth(answer, question, structured=self._source.structured, limit=limit.name)]


class JudgePanel:
    """All judges of a source, asked concurrently."""

    def __init__(self, judges: Mapping[str, AskedJudge], source: schema.JudgeReward, budget: Budget) -> None:
        self._judges, self._budget = judges, budget
        self.start = partial(budget.add, 0)  # fetches what others have spent
        self._combine = fmean if source.combine == "mean" else majority

    async def ask(self, question: Question) -> float:
        return self._combine(await _all(judge.ask(question) for judge in self._judges.values()))

    def health(self) -> SourceHealth:
        each = {name: judge.health() for name, judge in self._judges.items()}
        outages = [f"judge {name!r}: {health.outage}" for name, health in each.items() if health.outage is not None]
        states = [f"judge {name!r}: {health.state}" for name, health in each.items() if health.state != "well"]
        spent = self._budget.outage
        outage = spent or (outages[0] if outages else None)
        return SourceHealth(outage=outage, state=spent or "; ".join(states) or "well", num_tokens=self._budget.own)

    async def close(self) -> None:
        await asyncio.gather(*(judge.close() for judge in self._judges.values()))


def majority(verdicts: Sequence[float]) -> float:
    """Return the most frequent verdict; the mean of several that are equally frequent."""
    counts = Counter(verdicts)
    top = max(counts.values())
    return fmean(verdict for verdict, count in counts.items() if count == top)


class _Judged:
    def __init__(self, source: schema.JudgeReward, panel: JudgePanel) -> None:
        self._source, self._panel = source, panel

    async def start(self) -> None:
        """Ask no judge: one that is not up yet is an outage, not a user's mistake."""
        await self._panel.start()

    def health(self) -> SourceHealth:
        return self._panel.health()

    async def close(self) -> None:
        await self._panel.close()


class JudgeReward(_Judged):
    """Scores each sample on its own, or against a text in its row."""

    async def score(self, item: ScoreItem) -> float:
        if self._source.against is None:
            return await self._panel.ask(pointwise(self._source, item))
        return await _compare(self._panel, self._source, item, field_of(item, self._source.against))


class JudgeOfGroups(_Judged):
    """Scores each sample against others of its group: the share of comparisons won, ties count half."""

    async def score_group(self, items: Sequence[ScoreItem]) -> list[float | RewardError]:
        pairs = neighbours(len(items), self._source.opponents)
        asking = [_compare(self._panel, self._source, items[i], items[j].completion) for i, j in pairs]
        won: list[list[float]] = [[] for _ in items]
        errors: dict[tuple[int, int], RewardError] = {}
        for (i, j), share in zip(pairs, await asyncio.gather(*asking, return_exceptions=True), strict=True):
            if isinstance(share, RewardOutage) or (isinstance(share, BaseException) and type(share) is not RewardError):
                raise share
            if isinstance(share, RewardError):
                errors[i, j] = share
            else:
                won[i].append(share)
                won[j].append(1 - share)
        failed = _failed(errors, has_score=[bool(shares) for shares in won])
        return [failed.get(i) or (fmean(shares) if shares else _NO_OPPONENT) for i, shares in enumerate(won)]


_NO_OPPONENT = 0.5  # without anything to compare with, neither better nor worse


def _failed(errors: Mapping[tuple[int, int], RewardError], has_score: Sequence[bool]) -> dict[int, RewardError]:
    """Return the samples that fail, with an error of theirs. One that no judge compared with any other fails without
    them; between others, a missing comparison fails both, since the remaining ones would be a different reward."""
    failed: dict[int, RewardError] = {}
    for pair, error in errors.items():
        alone = [i for i in pair if not has_score[i]]
        failed |= dict.fromkeys(alone or pair, error)
    return failed


def neighbours(num_samples: int, reach: int) -> list[tuple[int, int]]:
    """Pair each sample with the next `reach` on a circle, each pair once. Samples of a prompt have no order."""
    steps = ((i, (i + d) % num_samples) for d in range(1, reach + 1) for i in range(num_samples))
    return sorted({(min(i, j), max(i, j)) for i, j in steps if i != j})


async def _compare(panel: JudgePanel, source: schema.JudgeReward, item: ScoreItem, other: str) -> float:
    """Return the item's share of wins against `other`. Judges favour a position, so both orders are asked."""
    in_order, swapped = pairwise(source, item, item.completion, other), pairwise(source, item, other, item.completion)
    share, other_share = await _all(map(panel.ask, (in_order, swapped)))
    return (share + 1 - other_share) / 2


async def _all(asking: Iterable[Coroutine[Any, Any, float]]) -> list[float]:
    """Await all, so that a failure leaves none of the others running."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in asking]
    await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]
