from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from streamrl.config import schema
from streamrl.errors import TransportError
from streamrl.learner.metrics.record import ValidationResult
from streamrl.learner.validation.validation import Validation
from streamrl.protocol.transport.double import LearnerStreamDouble, MemoryServer
from streamrl.protocol.wire.group import encode_group
from streamrl.protocol.wire.sample import Span
from streamrl.protocol.wire.ticket import Ticket
from streamrl.telemetry.metrics import is_metric
from streamrl.versions import make_version
from tests.feed_world import MODEL, RUN, Clock, encode_answer, encode_failure, make_prompts
from tests.helpers import make_group, make_sample

VERSION = make_version(2, 7)


class ValidationWorld:
    def __init__(
        self,
        *,
        term: int = 2,
        num_prompts: int = 3,
        datasets: Sequence[str] = ("",),
        best_by: str = "val_rollouts/rewards",
        **settings: Any,
    ) -> None:
        self.best_by = best_by
        self.clock = Clock()
        self.server = MemoryServer(wait=self.clock.advance)
        self.settings = schema.Validation.model_validate({"timeout_s": 60.0, **settings})
        rows = make_prompts(num_prompts).rows
        self.prompts = [replace(row, dataset=datasets[i % len(datasets)]) for i, row in enumerate(rows)]
        self.validation = self.learner(term)

    def learner(self, term: int) -> Validation:
        return Validation(
            stream=LearnerStreamDouble(self.server, term=term),
            prompts=self.prompts,
            settings=self.settings,
            run_uid=RUN,
            term=term,
            fingerprint=MODEL,
            max_attempts=2,
            decode=lambda token_ids: " ".join(map(str, token_ids)),
            best_by=self.best_by,
            clock=self.clock,
        )

    def tickets(self) -> list[Ticket]:
        return sorted(self.server.tickets["eval"].values(), key=lambda ticket: ticket.number)

    def deliver(self, ticket: Ticket, encoded: tuple[bytes, bytes]) -> None:
        entry_id = next(i for i, t in self.server.tickets["eval"].items() if t.number == ticket.number)
        assert self.server.deliver("eval", entry_id, *encoded)

    def answer(self, ticket: Ticket, **changes: Any) -> None:
        self.deliver(ticket, encode_answer(ticket, **{"rewards": (1.0,), **changes}))

    def result(self) -> ValidationResult:
        result = self.validation.poll()
        assert result is not None
        return result


def test_each_prompt_goes_out_once_for_the_version_to_evaluate() -> None:
    world = ValidationWorld(num_prompts=2)
    world.validation.start(step=5, version=VERSION)
    first, second = world.tickets()
    assert [first.number, second.number] == [2 << 32, (2 << 32) + 1]
    assert [first.prompt, second.prompt] == ["prompt 0", "prompt 1"]
    assert (first.purpose, first.min_version, first.issued_step, first.num_samples) == ("eval", VERSION, 5, 1)
    assert world.validation.running
    assert world.validation.poll() is None


def test_the_result_tells_means_by_source_lengths_and_the_steps_that_answered() -> None:
    world = ValidationWorld()
    world.validation.start(step=5, version=VERSION)
    spans = [(Span(version=VERSION, step=5 + i, start=0, end=4),) for i in range(2)]
    kinds = [{"finish_reason": "stop", "rewards": {"exact": 1.0, "style": 0.5}, "reward": 1.5},
             {"finish_reason": "length", "rewards": {"exact": 0.0, "style": 0.5}, "reward": 0.5}]  # fmt: skip
    world.clock.advance(2.0)
    for i, ticket in enumerate(world.tickets()):
        sample = make_sample(**{"num_tokens": 4, **kinds[i % 2], "spans": spans[i % 2]})
        world.deliver(ticket, encode_group(make_group(ticket, samples=(sample,))))
    result = world.result()
    assert result.metrics == {
        "val_rollouts/num_prompts": 3,
        "val_rollouts/rewards": pytest.approx(3.5 / 3),
        "val_rollouts/rewards/exact": pytest.approx(2 / 3),
        "val_rollouts/rewards/style": 0.5,
        "val_rollouts/response_lengths": 4.0,
        "val_rollouts/fraction_of_samples_properly_ended": pytest.approx(2 / 3),
        "val_rollouts/min_version_step": 5,
        "val_rollouts/max_version_step": 6,
        "val_rollouts/num_unanswered": 0,
        "val_rollouts/num_incomplete": 0,
        "val_rollouts/ranks": 1,
    }
    assert (result.step, result.version, result.complete) == (5, VERSION, True)
    assert [prompt.text for prompt, _ in result.shown] == ["prompt 0", "prompt 1", "prompt 2"]
    assert result.shown[0][1].token_ids.tolist() == [0, 1, 2, 3]
    assert not world.validation.running
    assert world.validation.poll() is None


def test_several_datasets_are_told_of_by_their_names_and_passing_by_a_source() -> None:
    world = ValidationWorld(
        num_prompts=4, datasets=("sums", "words"), pass_by="exact", answer=r"\d+", sampling={"num_samples": 2}
    )
    world.validation.start(step=5, version=VERSION)
    for i, ticket in enumerate(world.tickets()):
        samples = tuple(
            make_sample(num_tokens=2, rewards={"exact": float(right)}, reward=float(right))
            for right in ((True, False) if i % 2 == 0 else (True, True))
        )
        world.deliver(ticket, encode_group(make_group(ticket, samples=samples)))

    metrics = world.result().metrics

    assert all(map(is_metric, metrics))
    told = {name.removeprefix("val_rollouts/"): value for name, value in metrics.items()}
    assert (told["rewards"], told["rewards_by_dataset/sums"], told["rewards_by_dataset/words"]) == (0.75, 0.5, 1.0)
    assert (told["pass_at/1"], told["pass_at/2"]) == (0.75, 1.0)
    assert (told["pass_at_by_dataset/sums/1"], told["pass_at_by_dataset/sums/2"]) == (0.5, 1.0)
    assert (told["pass_at_by_dataset/words/1"], told["majority_by_dataset/words"]) == (1.0, 1.0)
    assert told["majority"] == 0.75


def test_tickets_that_redis_has_lost_are_issued_again_once_nothing_has_come_for_a_while() -> None:
    world = ValidationWorld(num_prompts=4)
    world.validation.start(step=5, version=VERSION)
    asked = [ticket.number for ticket in world.tickets()]
    world.answer(world.tickets()[0])
    assert world.validation.poll() is None
    world.server.flush()
    assert world.validation.poll() is None
    assert world.tickets() == [], "it looks only now and then"
    world.clock.advance(30.0)
    assert world.validation.poll() is None
    assert [ticket.number for ticket in world.tickets()] == asked[1:]

    world.answer(world.tickets()[0])
    del world.server.tickets["eval"][next(iter(world.server.tickets["eval"]))]
    assert world.validation.poll() is None
    world.clock.advance(15.0)
    assert world.validation.poll() is None
    assert sorted(ticket.number for ticket in world.tickets()) == asked[2:], "of those that are there none comes twice"
    for ticket in world.tickets():
        world.answer(ticket)
    assert world.result().complete


def test_all_metrics_have_names_that_are_known() -> None:
    world = ValidationWorld()
    world.validation.start(step=5, version=VERSION)
    for ticket in world.tickets():
        world.answer(ticket)
    metrics = world.result().metrics
    assert metrics["val_rollouts/rewards"] == 1.0
    assert metrics["val_rollouts/rewards/exact"] == 1.0
    assert metrics["val_rollouts/num_prompts"] == 3.0
    assert [name for name in metrics if not is_metric(name)] == []


def test_time_runs_out_with_a_partial_result_and_the_tickets_are_withdrawn() -> None:
    world = ValidationWorld()
    world.validation.start(step=5, version=VERSION)
    world.answer(world.tickets()[1])
    assert world.validation.poll() is None
    world.clock.advance(60.0)
    result = world.result()
    assert not result.complete
    assert not result.ranks
    assert (result.metrics["val_rollouts/num_prompts"], result.metrics["val_rollouts/rewards"]) == (1, 1.0)
    assert world.tickets() == []


def test_a_validation_whose_tickets_cannot_go_out_is_not_under_way() -> None:
    world = ValidationWorld()

    def away(point: str) -> None:
        raise TransportError(f"away at {point}")

    world.server.fault = away
    with pytest.raises(TransportError):
        world.validation.start(step=5, version=VERSION)
    assert not world.validation.running
    world.server.fault = lambda point: None
    world.validation.start(step=6, version=VERSION)
    assert {ticket.issued_step for ticket in world.tickets()} == {6}


def test_without_any_answer_there_is_no_reward_to_report() -> None:
    world = ValidationWorld()
    world.validation.start(step=5, version=VERSION)
    world.clock.advance(60.0)
    counted = {"num_prompts": 0.0, "num_unanswered": 3.0, "num_incomplete": 0.0, "ranks": 0.0}
    assert world.result().metrics == {f"val_rollouts/{name}": value for name, value in counted.items()}


def test_waiting_for_an_answer_is_bounded() -> None:
    world = ValidationWorld()
    world.validation.start(step=5, version=VERSION)
    began = world.clock.now
    assert world.validation.poll(wait_s=1.5) is None
    assert world.clock.now - began == 1.5


@pytest.mark.parametrize(
    "unsound",
    [
        encode_failure,
        lambda ticket: encode_answer(ticket, fingerprint="another"),
        lambda ticket: (b"rubbish", b""),
        lambda ticket: (encode_answer(ticket)[0], b"another body"),
    ],
)
def test_a_prompt_without_sound_answers_is_tried_again_and_then_given_up(
    unsound: Callable[[Ticket], tuple[bytes, bytes]],
) -> None:
    world = ValidationWorld(num_prompts=2)
    world.validation.start(step=5, version=VERSION)
    first, second = world.tickets()
    world.answer(second)
    world.deliver(first, unsound(first))
    assert world.validation.poll() is None
    (again,) = world.tickets()
    assert (again.number, again.attempt) == (first.number, 1)
    world.deliver(again, unsound(again))
    result = world.result()
    assert (result.metrics["val_rollouts/num_prompts"], result.complete) == (1, False)


@pytest.mark.parametrize(
    ("num_failing", "datasets", "ranks"),
    [(0, ("",), True), (1, ("",), True), (2, ("",), False), (1, ("sums", "words"), False)],
)
def test_a_result_ranks_its_checkpoint_only_if_nearly_all_prompts_of_each_dataset_were_answered(
    num_failing: int, datasets: Sequence[str], ranks: bool
) -> None:
    """The few that were answered may happen to be right."""
    world = ValidationWorld(num_prompts=20, datasets=datasets)
    world.validation.start(step=5, version=VERSION)
    for ticket in world.tickets()[num_failing:]:
        world.answer(ticket)
    while (result := world.validation.poll()) is None:
        for ticket in world.tickets():
            world.deliver(ticket, encode_failure(ticket))
    assert (result.ranks, result.complete) == (ranks, num_failing == 0)
    told = [result.metrics[f"val_rollouts/{name}"] for name in ("rewards", "num_prompts", "num_unanswered", "ranks")]
    assert told == [1.0, 20 - num_failing, num_failing, ranks]


@pytest.mark.parametrize(
    ("num_lacking", "best_by", "told", "ranks"),
    [
        (1, "val_rollouts/pass_at/8", ["1", "2", "4", "8"], True),
        (2, "val_rollouts/pass_at/8", ["1", "2", "4"], False),
        (2, "val_rollouts/pass_at/4", ["1", "2", "4"], True),
    ],
)
def test_a_failed_sample_leaves_the_score_of_all_other_prompts_and_too_many_of_them_rank_nothing(
    num_lacking: int, best_by: str, told: list[str], ranks: bool
) -> None:
    world = ValidationWorld(num_prompts=20, best_by=best_by, pass_by="exact", sampling={"num_samples": 8})
    world.validation.start(step=5, version=VERSION)
    for i, ticket in enumerate(world.tickets()):
        world.answer(ticket, rewards=(1.0,) * 7 + ((0.0,) if i >= num_lacking else ()))
    with capture_logs() as logs:
        result = world.result()
    prefix = "val_rollouts/pass_at/"
    assert [name.removeprefix(prefix) for name in result.metrics if name.startswith(prefix)] == told
    assert (result.ranks, result.metrics["val_rollouts/ranks"]) == (ranks, ranks)
    assert result.metrics["val_rollouts/num_incomplete"] == num_lacking
    unranked = "validation has no checkpoint.best_by: it scores no checkpoint"
    assert [entry["event"] for entry in logs] == ([] if ranks else [unranked])


def test_a_validation_cut_short_tells_pass_at_k_of_the_prompts_that_were_answered() -> None:
    world = ValidationWorld(num_prompts=20, pass_by="exact", sampling={"num_samples": 2})
    world.validation.start(step=5, version=VERSION)
    world.answer(world.tickets()[0], rewards=(1.0, 0.0))
    world.clock.advance(60.0)
    metrics = world.result().metrics
    assert (metrics["val_rollouts/pass_at/1"], metrics["val_rollouts/pass_at/2"]) == (0.5, 1.0)


def test_a_prompt_whose_samples_failed_weighs_as_much_as_any_other() -> None:
    world = ValidationWorld(num_prompts=2, datasets=("sums",), sampling={"num_samples": 3})
    world.validation.start(step=5, version=VERSION)
    first, second = world.tickets()
    world.answer(first, rewards=(1.0, 1.0, 1.0))
    world.answer(second, rewards=(0.0,))
    metrics = world.result().metrics
    for name in ("rewards", "rewards/exact", "rewards_by_dataset/sums"):
        assert metrics[f"val_rollouts/{name}"] == 0.5


def test_the_time_of_a_pause_is_not_a_validations() -> None:
    world = ValidationWorld()
    world.validation.start(step=5, version=VERSION)
    world.clock.advance(59.0)
    assert world.validation.poll() is None
    for _ in range(3):
        world.clock.advance(900.0)
        assert world.validation.poll(paused=True) is None
    assert world.validation.poll() is None, "it goes on where it was"
    assert len(world.tickets()) == 3
    world.clock.advance(1.0)
    assert not world.result().ranks


def test_answers_that_nobody_asked_for_are_ignored_and_leave_the_stream() -> None:
    world = ValidationWorld(num_prompts=1)
    world.validation.start(step=5, version=VERSION)
    (ticket,) = world.tickets()
    header, body = encode_answer(ticket, rewards=(0.0,))
    world.server.append("eval", number=7, run_uid=RUN, header=header, body=body)
    world.server.append("eval", number=ticket.number, run_uid="another", header=header, body=body)
    world.answer(ticket)
    world.server.append("eval", number=ticket.number, run_uid=RUN, header=header, body=body)
    result = world.result()
    assert (result.metrics["val_rollouts/num_prompts"], result.metrics["val_rollouts/rewards"]) == (1, 1.0)
    assert world.server.groups["eval"] == {}


def test_prompts_that_a_full_redis_refuses_go_out_when_there_is_room() -> None:
    world = ValidationWorld(num_prompts=2)
    world.server.full = True
    world.validation.start(step=5, version=VERSION)
    assert world.validation.poll() is None
    assert world.tickets() == []
    world.server.full = False
    assert world.validation.poll() is None
    first, second = world.tickets()
    world.answer(second)
    world.server.full = True
    world.deliver(first, encode_failure(first))
    assert world.validation.poll() is None
    assert world.tickets() == []
    world.server.full = False
    assert world.validation.poll() is None
    (again,) = world.tickets()
    assert (again.number, again.attempt) == (first.number, 1)
    world.answer(again)
    assert world.result().complete


def test_numbers_grow_over_validations_and_over_learners() -> None:
    world = ValidationWorld(num_prompts=2)
    numbers: list[int] = []
    for term in (2, 2, 3):
        validation = world.validation if term == 2 else world.learner(term)
        validation.start(step=5, version=VERSION)
        numbers += [ticket.number for ticket in world.tickets()]
        for ticket in world.tickets():
            world.answer(ticket)
        assert validation.poll() is not None
    assert numbers == sorted(set(numbers))


def test_what_a_learner_before_has_left_is_withdrawn() -> None:
    world = ValidationWorld(num_prompts=2)
    world.validation.start(step=5, version=VERSION)
    world.learner(3).start(step=5, version=VERSION)
    assert [ticket.number for ticket in world.tickets()] == [3 << 32, (3 << 32) + 1]
