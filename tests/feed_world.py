"""A learner's feed on the in-memory stream, workers controlled by the test, and a clock that advances on waits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from streamrl.config import schema
from streamrl.learner.groups.curriculum import open_order
from streamrl.learner.groups.ledger import Ending, FeedState
from streamrl.learner.groups.numbering import Retries
from streamrl.learner.groups.open_feed import open_feed
from streamrl.learner.groups.plan import GroupCheck, Kind, Plan
from streamrl.learner.groups.prompts import Prompt, PromptSet
from streamrl.learner.groups.quarantine import Quarantine
from streamrl.protocol.transport.double import LearnerStreamDouble, MemoryServer
from streamrl.protocol.wire.group import GroupHeader, decode_header, encode_group
from streamrl.protocol.wire.ticket import Ticket
from streamrl.recipe.algorithms import make_algorithm
from streamrl.versions import make_version
from tests.helpers import make_group, make_sample

RUN = "uid"
MODEL = "model"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def make_prompts(count: int, *, shuffle: bool = True, own_tokens: bool = False, seed: int = 1) -> PromptSet:
    """`own_tokens`: each prompt has its own tokens, so that answers can be told apart."""
    first = [i if own_tokens else 0 for i in range(count)]
    rows = [
        Prompt(line=i + 1, text=f"prompt {i}", token_ids=np.arange(3, dtype=np.int32) + first[i], fields={"answer": i})
        for i in range(count)
    ]
    return PromptSet(rows, seed=seed, shuffle=shuffle)


def make_config(**sections: dict[str, Any]) -> schema.Config:
    """A batch of 2 groups, a lag of 1 step, and the test's changes by section."""
    values: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"train": "train.jsonl"},
        "rewards": {"exact": {"type": "function", "target": "exact_match"}},
        "sampling": {"num_samples": 2},
        "training": {"groups_per_step": 2},
        "lag": {"max_steps": 1},
        "learner": {"idle_timeout_s": 600.0},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return schema.Config.model_validate(values)


def state_of(value: Mapping[str, Any]) -> FeedState:
    """Return the state as it is read from a checkpoint."""
    return TypeAdapter(FeedState).validate_python(value)


def drop_reason(header: GroupHeader) -> str | None:
    return "zero_variance" if len(set(header.sample_rewards)) == 1 else None


def encode_answer(
    ticket: Ticket, *, rewards: tuple[float, ...] = (0.0, 1.0), num_tokens: int = 4, **header: Any
) -> Any:
    """Return (header, body) of a group that answers the ticket."""
    version = header.pop("version", ticket.min_version or make_version(1, 0))
    samples = tuple(make_sample(num_tokens=num_tokens, version=version, reward=reward) for reward in rewards)
    return encode_group(make_group(ticket, samples=samples, **header))


def encode_failure(ticket: Ticket, error: str = "the engine said no") -> Any:
    return encode_group(make_group(ticket, samples=(), error=error))


class FeedWorld:
    """One run: the server, the dataset, the last commit, and the feed of the current learner."""

    def __init__(
        self,
        config: schema.Config | None = None,
        *,
        num_prompts: int = 10,
        prompts: PromptSet | None = None,
        folder: Path | None = None,  # for the notes on suspects
        draws: Path | None = None,  # for a curriculum's draws
    ) -> None:
        self.folder, self.draws = folder, draws
        self.clock = Clock()
        self.server = MemoryServer(wait=self.clock.advance)
        self.config = config or make_config()
        self.prompts = prompts or make_prompts(num_prompts)
        self.committed = FeedState()
        self.committed_step = self.committed_term = 0
        self.journal: dict[str, tuple[str | None, tuple[Ending, ...]]] = {}  # by file: the previous one, and endings
        self.term = 0
        self.published: dict[int, int] = {}  # step of each version, over all terms
        self.start()

    def start(self) -> None:
        """Start a learner from the last commit; what its predecessor held in memory is lost."""
        self.term += 1
        self.step = self.committed_step
        self.stream = LearnerStreamDouble(self.server, term=self.term)
        order = open_order(
            self.config, self.prompts, root=self.draws, term=self.term, since=self.committed_term, state=self.committed
        )
        self.feed = open_feed(
            stream=self.stream,
            prompts=self.prompts,
            order=order,
            config=self.config,
            run_uid=RUN,
            fingerprint=MODEL,
            drop_reason=make_algorithm(self.config.algorithm).drop_reason,
            state=self.committed,
            quarantine=Quarantine(self.folder, term=self.term),
            clock=self.clock,
            sleep=self.clock.advance,
        )
        self.num_published = 0
        self.publish()

    def row_of(self, number: int) -> int:
        """Return this ticket's prompt, from the data or from the log of draws."""
        place = Retries(self.feed.state().ledger.retries).place(number)
        if not self.config.data.curriculum:
            return self.prompts.locate(place)[1]
        assert self.draws is not None, "a curriculum notes its draws"
        return rows_drawn(self.draws)[place]

    def publish(self) -> None:
        version = make_version(self.term, self.num_published)
        self.published[version] = self.step
        self.feed.note_version(version, self.step)
        self.num_published += 1

    def plan(self, *, timeout_s: float = 0.0, world_size: int = 1) -> Plan | None:
        return self.feed.plan(step=self.step, world_size=world_size, timeout_s=timeout_s)

    def train(self, plan: Plan, verdicts: Sequence[GroupCheck] | None = None) -> None:
        """Do what a step does to the feed."""
        self.feed.settle(plan, verdicts or [GroupCheck.SOUND] * len(plan.entries), trained=True)
        self.step += 1
        self.publish()

    def lags(self, plan: Plan) -> list[int]:
        """Return how many steps the oldest tokens of each group are behind."""
        entries = self.stream.fetch("train", [entry.entry_id for entry in plan.entries])
        return [self.step - self.published[decode_header(e.header).min_version] for e in entries if e is not None]

    def commit(self, *, told: bool = True) -> None:
        """Make a checkpoint; without `told` the feed goes on as if there were none."""
        state, name = self.feed.state(), f"file {len(self.journal)}"
        self.journal[name] = (state.journal, state.uncommitted)
        self.committed, self.committed_step, self.committed_term = state.committed(name), self.step, self.term
        if told:
            self.feed.committed(self.committed, step=self.committed_step)

    def ended(self) -> list[Ending]:
        """Return the endings in the journal of the last commit."""
        found: list[Ending] = []
        name = self.committed.journal
        while name is not None:
            name, endings = self.journal[name]
            found += endings
        return found

    # Workers

    def tickets(self) -> dict[int, Ticket]:
        """The tickets waiting for workers, by number."""
        return {ticket.number: ticket for ticket in self.server.tickets["train"].values()}

    def ticket_id(self, number: int) -> str:
        return next(i for i, ticket in self.server.tickets["train"].items() if ticket.number == number)

    def answer(self, number: int, **changes: Any) -> None:
        self._deliver(number, lambda ticket: encode_answer(ticket, **changes))

    def fail(self, number: int, error: str = "the engine said no") -> None:
        self._deliver(number, lambda ticket: encode_failure(ticket, error))

    def answer_all(self) -> None:
        for number in sorted(self.tickets()):
            self.answer(number)

    def _deliver(self, number: int, encode: Callable[[Ticket], tuple[bytes, bytes]]) -> None:
        header, body = encode(self.tickets()[number])
        assert self.server.deliver("train", self.ticket_id(number), header, body)

    def forge(self, number: int, *, run_uid: str = RUN, header: bytes = b"", body: bytes = b"", **fields: str) -> str:
        """Append to the stream what anybody might append."""
        return self.server.append("train", number=number, run_uid=run_uid, header=header, body=body, **fields)

    def deliver(self, number: int, header: bytes, body: bytes = b"") -> None:
        """Deliver what the holder of the ticket's lease might deliver."""
        assert self.server.deliver("train", self.ticket_id(number), header, body)

    def run_to_end(self, *, max_rounds: int = 1000) -> list[int]:
        """Let workers answer everything until the data is used up; return the tickets trained."""
        trained: list[int] = []
        for _ in range(max_rounds):
            plan = self.plan(timeout_s=200.0)
            match plan.kind if plan else Kind.IDLE:
                case Kind.END:
                    return trained
                case Kind.COMMIT:
                    self.commit()
                case Kind.STEP:
                    trained += planned(plan)
                    assert plan is not None
                    self.train(plan)
            self.answer_all()
        raise AssertionError(f"no end after {max_rounds} rounds; {self.feed.metrics()}")


def rows_drawn(root: Path) -> dict[int, int]:
    """Return the row drawn for each place, by the newest term."""
    found: dict[int, int] = {}
    for path in sorted((root / "curriculum").glob("*.jsonl")):
        for line in path.read_text().splitlines()[1:]:
            told = json.loads(line)
            found |= {place: row for place, (_, row) in enumerate(told["asked"], told["first"])}
    return found


def planned(plan: Plan | None) -> list[int]:
    assert plan is not None, "nothing is ready"
    assert plan.kind is Kind.STEP
    return [entry.ticket for entry in plan.entries]
