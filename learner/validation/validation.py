"""Runs a validation beside training: issues its prompts as evaluation tickets, and collects answers as they arrive.

Evaluation tickets have their own stream, which workers serve first, and their own numbers, which grow over restarts:
`term << 32 | k`. They are not audited like training tickets, and not in checkpoints: a validation that times out is
reported as far as it got, one that a crash cuts short is not. Each ticket names the minimum version to evaluate; a
worker may have a newer one, so the result holds the range of steps that answered.

Only `poll` waits, and only if asked to. An unsound answer counts as a failure of its ticket, like a reported failure.
Tickets that a full Redis refuses are sent by a later `poll`.

A prompt whose ticket failed `max_attempts` times is given up, and is in no mean: it has no reward, not even a low one.
One that always fails (its row is wrong, a judge refuses it) is missing everywhere alike. But if many are missing, those
that were answered may just be the easy ones: then the result ranks no checkpoint. Nor does it if it timed out, when the
prompts with long answers are missing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import structlog

from streamrl.config import schema
from streamrl.errors import WireError
from streamrl.learner.groups.prompts import Prompt
from streamrl.learner.metrics.record import ValidationResult
from streamrl.protocol.transport.types import START, Entry, GroupStream
from streamrl.protocol.wire.group import Group, decode_body, decode_header
from streamrl.protocol.wire.ticket import Ticket
from streamrl.recipe.held_out import judge_samples, majority, passes

_READ_COUNT = 64
_NUM_SHOWN = 8
_ENOUGH = 0.95  # of the prompts of each dataset: the rest moves a mean less than chance does

log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class _Round:
    """One validation in progress."""

    step: int
    version: int
    numbers: range  # ticket numbers, in the order of the prompts
    started_at: float
    attempts: dict[int, int]  # open ticket -> failures so far
    answers: dict[int, Group]
    unsent: list[int]  # tickets still to be sent


class Validation:
    def __init__(
        self,
        *,
        stream: GroupStream,
        prompts: Sequence[Prompt],
        settings: schema.Validation,
        run_uid: str,
        term: int,
        fingerprint: str,  # of model and tokenizer; answers must carry it
        max_attempts: int,
        decode: Callable[[list[int]], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._prompts = prompts
        self._settings = settings
        self._decode = decode
        self._run_uid = run_uid
        self._fingerprint = fingerprint
        self._max_attempts = max_attempts
        self._clock = clock
        self._next_number = term << 32
        self._round: _Round | None = None

    @property
    def running(self) -> bool:
        return self._round is not None

    def start(self, *, step: int, version: int) -> None:
        """Issue tickets to be answered by this version, or a newer one."""
        assert self._round is None, "one validation at a time"
        self._withdraw()  # tickets left by a previous learner
        numbers = range(self._next_number, self._next_number + len(self._prompts))
        self._next_number = numbers.stop
        current = _Round(
            step=step,
            version=version,
            numbers=numbers,
            started_at=self._clock(),
            attempts=dict.fromkeys(numbers, 0),
            answers={},
            unsent=list(numbers),
        )
        self._send(current)
        self._round = current

    def poll(self, *, wait_s: float = 0.0) -> ValidationResult | None:
        """Process what has come, waiting up to `wait_s` for the first; return the result once complete or timed out."""
        current = self._round
        if current is None:
            return None
        entries = self._stream.read("eval", after=START, count=_READ_COUNT, block_ms=int(wait_s * 1000))
        for entry in entries:
            self._receive(current, entry)
        if entries:
            milliseconds, _, sequence = entries[-1].id.partition("-")
            self._stream.trim_eval(below=f"{milliseconds}-{int(sequence) + 1}")
        self._send(current)
        duration_s = self._clock() - current.started_at
        if current.attempts and duration_s < self._settings.timeout_s:
            return None
        if current.attempts:
            log.warning(
                "validation timed out: it scores no checkpoint",
                unanswered=len(current.attempts),
                timeout_s=self._settings.timeout_s,
            )
            self._withdraw()
        elif not self._ranks(current):
            log.warning(
                "validation prompts were given up: it scores no checkpoint",
                unanswered=len(current.numbers) - len(current.answers),
                prompts=len(current.numbers),
            )
        self._round = None
        return self._summarise(current)

    def _receive(self, current: _Round, entry: Entry) -> None:
        if entry.run_uid != self._run_uid or entry.number not in current.attempts or not entry.ticket_entry:
            return  # of an earlier validation, already answered, or not delivered by a lease holder
        try:
            current.answers[entry.number] = self._open(entry, identity=self._ticket(current, entry.number).identity)
        except WireError as error:
            current.attempts[entry.number] += 1
            if current.attempts[entry.number] < self._max_attempts:
                current.unsent.append(entry.number)
                return
            log.warning("validation prompt given up", line=self._prompt(current, entry.number).line, error=str(error))
        del current.attempts[entry.number]

    def _open(self, entry: Entry, *, identity: str) -> Group:
        """The group; WireError if it is not a sound answer."""
        header = decode_header(entry.header)
        if header.failed:
            raise WireError(f"reported by worker {header.worker}: {header.error}")
        expected = (entry.number, identity, self._run_uid, "eval", self._fingerprint)
        if (header.ticket, header.identity, header.run_uid, header.purpose, header.fingerprint) != expected:
            raise WireError("the answer belongs to another ticket or another model")
        return decode_body(header, entry.body)

    def _send(self, current: _Round) -> None:
        if current.unsent:
            refused = self._stream.issue([self._ticket(current, number) for number in current.unsent])
            current.unsent = [ticket.number for ticket in refused]

    def _ticket(self, current: _Round, number: int) -> Ticket:
        prompt = self._prompt(current, number)
        return Ticket(
            number=number,
            run_uid=self._run_uid,
            purpose="eval",
            data_epoch=0,
            prompt_index=number - current.numbers.start,
            prompt=prompt.text,
            token_ids=prompt.token_ids,
            fields=prompt.fields,
            num_samples=self._settings.sampling.num_samples,
            attempt=current.attempts[number],
            issued_step=current.step,
            min_version=current.version,
        )

    def _withdraw(self) -> None:
        """Delete unanswered tickets, so that no worker spends time on them."""
        left = [ticket.entry_id for ticket in self._stream.present_tickets("eval")]
        if left:
            self._stream.delete_tickets("eval", left)

    def _prompt(self, current: _Round, number: int) -> Prompt:
        return self._prompts[number - current.numbers.start]

    def _summarise(self, current: _Round) -> ValidationResult:
        answers = [(self._prompt(current, number), current.answers[number]) for number in sorted(current.answers)]
        return ValidationResult(
            step=current.step,
            version=current.version,
            complete=len(answers) == len(current.numbers),
            ranks=self._ranks(current),
            metrics={
                **self._metrics(answers),
                "val_rollouts/num_unanswered": float(len(current.numbers) - len(current.answers)),
                "val_rollouts/ranks": float(self._ranks(current)),
            },
            shown=tuple((prompt, group.samples[0]) for prompt, group in answers[:_NUM_SHOWN]),
        )

    def _ranks(self, current: _Round) -> bool:
        """Whether it was not cut short, and each dataset has enough answers."""
        asked = Counter(prompt.dataset for prompt in self._prompts)
        answered = Counter(self._prompt(current, number).dataset for number in current.answers)
        return not current.attempts and all(answered[name] >= _ENOUGH * number for name, number in asked.items())

    def _metrics(self, answers: Sequence[tuple[Prompt, Group]]) -> dict[str, float]:
        """Metrics over all prompts, and per dataset if they have names."""
        found = _means([group for _, group in answers])
        found |= self._passing([group for _, group in answers])
        for name in dict.fromkeys(prompt.dataset for prompt in self._prompts if prompt.dataset):
            groups = [group for prompt, group in answers if prompt.dataset == name]
            rewards = [sample.reward for group in groups for sample in group.samples]
            found |= {f"val_rollouts/rewards_by_dataset/{name}": _mean(rewards)} if rewards else {}
            found |= self._passing(groups, of=name)
        return found

    def _passing(self, groups: Sequence[Group], *, of: str = "") -> dict[str, float]:
        settings = self._settings
        if settings.pass_by is None:
            return {}
        judged = [
            judge_samples(
                group.samples,
                by=settings.pass_by,
                at_least=settings.pass_score,
                answer=settings.answer,
                decode=self._decode,
            )
            for group in groups
        ]
        place = f"_by_dataset/{of}" if of else ""
        found = {f"val_rollouts/pass_at{place}/{k}": share for k, share in passes(judged).items()}
        if settings.answer is not None and (share := majority(judged)) is not None:
            found[f"val_rollouts/majority{place}"] = share
        return found


def _means(groups: Sequence[Group]) -> dict[str, float]:
    """Means over samples, if there are any."""
    samples = [sample for group in groups for sample in group.samples]
    steps = [span.step for sample in samples for span in sample.spans]
    found = {"val_rollouts/num_prompts": float(len(groups))}
    if samples:
        found["val_rollouts/rewards"] = _mean(sample.reward for sample in samples)
        found["val_rollouts/response_lengths"] = _mean(len(sample.token_ids) for sample in samples)
        found["val_rollouts/fraction_of_samples_properly_ended"] = _mean(s.finish_reason == "stop" for s in samples)
    if steps:
        found["val_rollouts/min_version_step"], found["val_rollouts/max_version_step"] = min(steps), max(steps)
    for source in sorted({source for sample in samples for source in sample.rewards}):
        found[f"val_rollouts/rewards/{source}"] = _mean(s.rewards[source] for s in samples if source in s.rewards)
    return found


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
