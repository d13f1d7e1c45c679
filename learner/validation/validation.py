"""Runs a validation beside training: issues its prompts as evaluation tickets, and collects answers as they arrive.

Evaluation tickets have their own stream, which workers serve first, and their own numbers, which grow over restarts:
`term << 32 | k`. They are not audited like training tickets, and not in checkpoints: a validation that times out is
reported as far as it got, one that a crash cuts short is not. Each ticket names the minimum version to evaluate; a
worker may have a newer one, so the result holds the range of steps that answered.

Only `poll` waits, and only if asked to. An unsound answer counts as a failure of its ticket, like a reported failure.
Tickets that a full Redis refuses are sent by a later `poll`, and so are tickets and answers that Redis has lost, once
nothing has come for some seconds.

A prompt whose ticket failed `max_attempts` times is given up, and is in no mean: it has no reward, not even a low one.
One that always fails (its row is wrong, a judge refuses it) is missing everywhere alike. But if many are missing, those
that were answered may just be the easy ones: then the result ranks no checkpoint. Nor does it if it timed out, when the
prompts with long answers are missing. In the same way pass@k needs nearly all prompts to have k samples, some of which
may have failed: without it, there may be nothing to rank a checkpoint by.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import structlog

from streamrl.config import schema
from streamrl.errors import WireError
from streamrl.learner.checkpoints.scores import BEST_METRIC
from streamrl.learner.groups.prompts import Prompt
from streamrl.learner.metrics.record import ValidationResult
from streamrl.protocol.transport.types import START, Entry, GroupStream
from streamrl.protocol.wire.group import Group, decode_body, decode_header
from streamrl.protocol.wire.ticket import Ticket
from streamrl.recipe.held_out import (
    AnswerSearch,
    judge_samples,
    majority,
    mean_over_prompts,
    passes,
    rewards_by_source,
)

_READ_COUNT = 64
_LOOK_EVERY_S = 10.0
_NUM_SHOWN = 8
_ENOUGH = 0.95  # of the prompts of each dataset: the rest moves a mean less than chance does

log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class _Round:
    """One validation in progress."""

    step: int
    version: int
    numbers: range  # ticket numbers, in the order of the prompts
    spent_s: float  # so far, without the operator's pauses, in which workers take no tickets
    counted_at: float
    attempts: dict[int, int]  # open ticket -> failures so far
    answers: dict[int, Group]
    unsent: list[int]  # tickets still to be sent
    looked_at: float  # when an answer last came, or the lost ones were looked for


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
        best_by: str = BEST_METRIC,  # the metric that ranks checkpoints
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._prompts = prompts
        self._settings = settings
        self._decode = decode
        self._search = None if settings.answer is None else AnswerSearch(settings.answer)
        self._best_by = best_by
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
        self._next_number, now = numbers.stop, self._clock()
        current = _Round(
            step=step,
            version=version,
            numbers=numbers,
            spent_s=0.0,
            counted_at=now,
            attempts=dict.fromkeys(numbers, 0),
            answers={},
            unsent=list(numbers),
            looked_at=now,
        )
        self._send(current)
        self._round = current

    def poll(self, *, wait_s: float = 0.0, paused: bool = False) -> ValidationResult | None:
        """Process what has come, waiting up to `wait_s` for the first; return the result once complete or timed out.

        `paused`: the operator has paused the run, so the time since the last poll does not count.
        """
        current = self._round
        if current is None:
            return None
        entries = self._stream.read("eval", after=START, count=_READ_COUNT, block_ms=int(wait_s * 1000))
        for entry in entries:
            self._receive(current, entry)
        if entries:
            milliseconds, _, sequence = entries[-1].id.partition("-")
            self._stream.trim_eval(below=f"{milliseconds}-{int(sequence) + 1}")
        now = self._clock()
        if entries:
            current.looked_at = now
        elif now - current.looked_at >= _LOOK_EVERY_S:
            current.unsent, current.looked_at = self._missing(current), now
        self._send(current)
        current.spent_s += 0.0 if paused else now - current.counted_at
        current.counted_at = now
        if current.attempts and current.spent_s < self._settings.timeout_s:
            return None
        if current.attempts:
            self._withdraw()
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

    def _missing(self, current: _Round) -> list[int]:
        """The open tickets that Redis lacks. Tickets before answers: a delivery moves one from here to there."""
        present = {number for number, _ in self._stream.waiting("eval")}
        present |= {group.number for group in self._stream.present_groups("eval", after=START)}
        missing = [number for number in current.attempts if number not in present]
        if lost := set(missing).difference(current.unsent):
            log.warning("validation tickets were lost and are issued again", tickets=len(lost))
        return missing

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
        num_samples = self._settings.sampling.num_samples
        metrics = {
            **self._metrics(current, answers),
            "val_rollouts/num_unanswered": float(len(current.numbers) - len(answers)),
            "val_rollouts/num_incomplete": float(sum(len(group.samples) < num_samples for _, group in answers)),
        }
        ranks = self._ranks(current, metrics)
        return ValidationResult(
            step=current.step,
            version=current.version,
            complete=len(answers) == len(current.numbers),
            ranks=ranks,
            metrics={**metrics, "val_rollouts/ranks": float(ranks)},
            shown=tuple((prompt, group.samples[0]) for prompt, group in answers[:_NUM_SHOWN]),
        )

    def _ranks(self, current: _Round, metrics: Mapping[str, float]) -> bool:
        """Whether it was not cut short, each dataset has enough answers, and they give a score; else logs why not."""
        asked = Counter(prompt.dataset for prompt in self._prompts)
        answered = Counter(self._prompt(current, number).dataset for number in current.answers)
        if current.attempts:
            log.warning(
                "validation timed out: it scores no checkpoint",
                unanswered=len(current.attempts),
                timeout_s=self._settings.timeout_s,
            )
        elif not all(answered[name] >= _ENOUGH * number for name, number in asked.items()):
            log.warning(
                "validation prompts were given up: it scores no checkpoint",
                unanswered=len(current.numbers) - len(current.answers),
                prompts=len(current.numbers),
            )
        elif self._best_by not in metrics:
            log.warning(
                "validation has no checkpoint.best_by: it scores no checkpoint",
                best_by=self._best_by,
                incomplete=int(metrics["val_rollouts/num_incomplete"]),
                prompts=len(current.numbers),
            )
        else:
            return True
        return False

    def _metrics(self, current: _Round, answers: Sequence[tuple[Prompt, Group]]) -> dict[str, float]:
        """Metrics over all prompts, and per dataset if they have names."""
        ended = Counter(self._prompt(current, n).dataset for n in current.numbers if n not in current.attempts)
        found = _means([group for _, group in answers])
        found |= self._passing([group for _, group in answers], num_ended=ended.total())
        for name in dict.fromkeys(prompt.dataset for prompt in self._prompts if prompt.dataset):
            groups = [group for prompt, group in answers if prompt.dataset == name]
            if (mean := _mean_reward(groups)) is not None:
                found[f"val_rollouts/rewards_by_dataset/{name}"] = mean
            found |= self._passing(groups, of=name, num_ended=ended[name])
        return found

    def _passing(self, groups: Sequence[Group], *, num_ended: int, of: str = "") -> dict[str, float]:
        """pass@k where enough of the prompts that ended have k samples, and the majority."""
        settings = self._settings
        if settings.pass_by is None:
            return {}
        judged = [
            judge_samples(
                group.samples,
                by=settings.pass_by,
                at_least=settings.pass_score,
                search=self._search,
                stop=settings.sampling.stop,
                decode=self._decode,
            )
            for group in groups
        ]
        place = f"_by_dataset/{of}" if of else ""
        passing = passes(judged, num_samples=settings.sampling.num_samples)
        found = {
            f"val_rollouts/pass_at{place}/{k}": one.share
            for k, one in passing.items()
            if one.num_prompts >= _ENOUGH * num_ended
        }
        if settings.answer is not None and (share := majority(judged)) is not None:
            found[f"val_rollouts/majority{place}"] = share
        return found


def _means(groups: Sequence[Group]) -> dict[str, float]:
    """Means over prompts of rewards, and over samples of what describes a sample, if there are any."""
    samples = [sample for group in groups for sample in group.samples]
    steps = [span.step for sample in samples for span in sample.spans]
    found = {"val_rollouts/num_prompts": float(len(groups))}
    if (mean := _mean_reward(groups)) is not None:
        found["val_rollouts/rewards"] = mean
        found["val_rollouts/response_lengths"] = fmean(len(sample.token_ids) for sample in samples)
        found["val_rollouts/fraction_of_samples_properly_ended"] = fmean(s.finish_reason == "stop" for s in samples)
    if steps:
        found["val_rollouts/min_version_step"], found["val_rollouts/max_version_step"] = min(steps), max(steps)
    by_source = rewards_by_source([group.samples for group in groups])
    return found | {f"val_rollouts/rewards/{source}": mean for source, mean in by_source.items()}


def _mean_reward(groups: Sequence[Group]) -> float | None:
    return mean_over_prompts([sample.reward for sample in group.samples] for group in groups)
