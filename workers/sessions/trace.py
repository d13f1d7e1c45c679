"""The token-exact trace of a multi-turn rollout: which tokens were sampled, and which were given.

    prompt | given | turn | given | turn | given | turn
           |         ^^^^           ^^^^           ^^^^   sampled: logprobs, versions, loss; given tokens have none
           └ given | turn | given | turn                  a branch: a context that continues from earlier tokens

For each turn the caller passes the model's whole context and what was sampled. If the context begins with exactly the
tokens of a row so far, the rest was given, and the turn continues that row; nothing is tokenized again. Any other
context starts a branch: the template dropped reasoning, the history was shortened, or another agent took over. A branch
shares the longest prefix that ends where the prompt or something given or sampled ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streamrl.errors import SampleError
from streamrl.protocol.wire.branches import MAX_BRANCHES, MAX_KEPT_TOKENS, Branch
from streamrl.protocol.wire.routes import Routes, ending
from streamrl.protocol.wire.sample import FinishReason, Sample, Span
from streamrl.workers.engines.base import Generated

Ids = npt.NDArray[np.int32]


class Played(NamedTuple):
    sample: Sample  # not scored yet; its finish reason is stop if the environment was done
    text: str  # all turns, and what was given between them
    reward: float = 0.0  # the environment's
    rewards: Mapping[str, float] = MappingProxyType({})  # its parts, by source
    turn_rewards: tuple[float, ...] = ()  # unweighted, one per turn, in the sample's order
    model_s: float = 0.0  # waiting for the engine
    environment_s: float = 0.0  # waiting for the environment
    num_tool_calls: int = 0
    prompt_routes: Routes | None = None  # [P, ...] where samples have routes
    last_id: int | None = None  # sampled last; with branches it need not be the last of the sample's tokens


@dataclass(slots=True, kw_only=True)
class _Row:
    so_far: Ids  # the prompt or the prefix kept of another row, then its own tokens
    row: int  # the row it branches from
    keep: int  # where its own tokens begin
    ends: list[int]  # where the prompt and each given or sampled piece end, the kept prefix included
    tokens: list[Ids] = field(default_factory=list)
    logprobs: list[npt.NDArray[np.float32]] = field(default_factory=list)
    runs: list[int] = field(default_factory=lambda: [0])  # lengths, alternately sampled and given
    spans: list[Span] = field(default_factory=list)  # relative to the start of its own tokens
    routes: list[Routes] = field(default_factory=list)  # of its own tokens, if the engine reports them

    def add_given(self, token_ids: Ids) -> None:
        if len(self.runs) % 2 == 1:
            self.runs.append(0)
        self._add(token_ids, np.zeros(len(token_ids), dtype=np.float32))

    def add_sampled(self, generated: Generated) -> None:
        if len(self.runs) % 2 == 0:
            self.runs.append(0)
        begin = len(self.so_far) - self.keep
        self.spans += [span._replace(start=span.start + begin, end=span.end + begin) for span in generated.spans]
        self._add(generated.token_ids, generated.logprobs)

    def add_routes(self, routes: Routes, *, begin: int) -> None:
        """Add a turn's routes from token `begin` of the row on. The last token of the previous turn gets its route only
        now, when this turn has read it; in a branch it is left as it is."""
        if self.routes and begin:
            self.routes[-1][-1] = routes[begin - 1]
        self.routes.append(ending(routes[begin:]))

    def _add(self, token_ids: Ids, logprobs: npt.NDArray[np.float32]) -> None:
        self.so_far = np.concatenate([self.so_far, token_ids])
        self.ends.append(len(self.so_far))
        self.tokens.append(token_ids)
        self.logprobs.append(logprobs)
        self.runs[-1] += len(token_ids)


class Trace:
    def __init__(self, prompt_ids: Ids, *, num_samples: int = 1) -> None:
        """`num_samples`: how many rollouts share what a group's branches may keep."""
        first = _Row(so_far=prompt_ids, row=0, keep=len(prompt_ids), ends=[len(prompt_ids)])
        self._rows = [first]
        self._prompt_ids = prompt_ids
        self._num_samples = num_samples
        self._prompt_routes: Routes | None = None
        self._texts: list[str] = []
        self._last_id: int | None = None
        self._turns: list[tuple[int, int]] = []  # (row, position in it) of each turn that sampled something
        self.num_turns = 0
        self.num_tokens = 0  # after the prompt, sampled and given, each counted once

    @property
    def num_branches(self) -> int:
        return len(self._rows) - 1

    def num_given(self, context_ids: Ids) -> int:
        """Return how many tokens a turn with this context adds, apart from those it samples."""
        return len(context_ids) - self._longest_shared(context_ids)[1]

    def take(self, context_ids: Ids, generated: Generated, *, given: str = "") -> None:
        """Record a turn: the model's whole context and its answer. `given` is the text before the answer, as rewards
        read it. SampleError if there are too many branches, or they repeat too much."""
        self.num_turns += 1
        self._texts += [given, generated.text]
        if len(generated.token_ids) == 0:
            return  # without sampled tokens there is nothing to train on
        at, keep = self._longest_shared(context_ids)
        row, new_ids = self._rows[at], context_ids[keep:]
        # A turn directly after another is a branch too, which records where it began.
        if keep < len(row.so_far) or (row.tokens and not len(new_ids)):
            at, row = len(self._rows), self._branch(at, keep)
        if len(new_ids):
            row.add_given(new_ids)
        self._turns.append((at, len(row.so_far)))
        row.add_sampled(generated)
        self._last_id = int(generated.token_ids[-1])
        if generated.routes is not None:
            self._add_routes(row, context_ids, keep, generated.routes)
        self.num_tokens += len(new_ids) + len(generated.token_ids)

    def played(self, finish_reason: FinishReason, reward: float, turn_rewards: Sequence[float] = ()) -> Played:
        """Build the sample. `turn_rewards`: one per turn that sampled something, in the order taken; or none."""
        starts = list(accumulate((len(row.so_far) - row.keep for row in self._rows), initial=0))
        spans = [
            span._replace(start=span.start + start, end=span.end + start)
            for row, start in zip(self._rows, starts, strict=False)
            for span in row.spans
        ]
        branches = [
            Branch(start=start, row=row.row, keep=row.keep)
            for row, start in zip(self._rows[1:], starts[1:], strict=False)
        ]
        sample = Sample(
            token_ids=np.concatenate([np.zeros(0, np.int32), *(ids for row in self._rows for ids in row.tokens)]),
            logprobs=np.concatenate([np.zeros(0, np.float32), *(lp for row in self._rows for lp in row.logprobs)]),
            mask_runs=_joined_runs([row.runs for row in self._rows]) if self.num_tokens else (),
            spans=tuple(spans),
            finish_reason=finish_reason,
            rewards={},
            reward=0.0,
            branches=tuple(branches),
            routes=np.concatenate(routes) if (routes := [part for row in self._rows for part in row.routes]) else None,
        )
        in_order = sorted(zip(self._turns, turn_rewards, strict=True)) if turn_rewards else []
        earned = tuple(value for _, value in in_order)
        return Played(
            sample=sample,
            text="".join(self._texts),
            reward=reward,
            turn_rewards=earned,
            prompt_routes=self._prompt_routes,
            last_id=self._last_id,
        )

    def _add_routes(self, row: _Row, context_ids: Ids, keep: int, routes: Routes) -> None:
        row.add_routes(routes, begin=keep)
        num_prompt = len(self._prompt_ids)
        if self._prompt_routes is None and np.array_equal(context_ids[:num_prompt], self._prompt_ids):
            self._prompt_routes = routes[:num_prompt]

    def _longest_shared(self, context_ids: Ids) -> tuple[int, int]:
        """Return (a row, how many of its tokens the context begins with): the whole row, or up to where a piece ends.
        The longest match wins; among equals, a row that ends there and can be continued, else the first."""
        best, found = (-1, False), (0, 0)
        for at, row in enumerate(self._rows):
            common = _common(row.so_far, context_ids)
            keep = max((end for end in row.ends if end <= common), default=0)
            if (keep, keep == len(row.so_far)) > best:
                best, found = (keep, keep == len(row.so_far)), (at, keep)
        return found

    def _branch(self, at: int, keep: int) -> _Row:
        if self.num_branches == MAX_BRANCHES:
            raise SampleError(f"more than {MAX_BRANCHES} turns continued from a context other than the previous one")
        num_kept = keep + sum(row.keep for row in self._rows[1:])
        if num_kept > MAX_KEPT_TOKENS // self._num_samples:
            raise SampleError(
                f"{self.num_branches + 1} turns continued from a context other than the previous one, and repeat "
                f"{num_kept} tokens; a group's {self._num_samples} samples may repeat {MAX_KEPT_TOKENS} together: let "
                "later turns append to earlier ones, or make environment.max_turns or sampling.num_samples smaller"
            )
        parent = self._rows[at]
        ends = [end for end in parent.ends if end <= keep]
        self._rows.append(_Row(so_far=parent.so_far[:keep], row=at, keep=keep, ends=ends))
        return self._rows[-1]


def _common(these: Ids, those: Ids) -> int:
    """Return the length of the common prefix."""
    length = min(len(these), len(those))
    differs = np.flatnonzero(these[:length] != those[:length])
    return int(differs[0]) if len(differs) else length


def _joined_runs(rows: list[list[int]]) -> tuple[int, ...]:
    """Concatenate the runs of rows; each row begins with a sampled run, possibly of length 0."""
    runs = [0]
    for row in rows:
        if len(runs) % 2 == 0:
            runs.append(0)
        runs[-1] += row[0]
        runs += row[1:]
    return tuple(runs)
