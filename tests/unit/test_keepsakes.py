"""What the learner leaves in its folder for the time after: its state, and some rollouts of the whole run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from streamrl.learner.metrics.keepsakes import RolloutKeeper, append_line, note_state
from streamrl.ops.monitor.history import read_lines
from streamrl.ops.record.kept import KeptGroups
from streamrl.protocol.wire.sample import Span
from streamrl.versions import make_version
from tests.helpers import make_group, make_sample, make_ticket
from tests.unit.test_record import files_up_to

SEPARATORS = "one\u2028two\u2029three\x85four\x0bfive\x1csix\rseven\neight"  # of which JSON escapes but a few


class Words:
    """A tokenizer whose tokens are their numbers."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        return " ".join(str(int(token)) for token in token_ids)


def group(number: int, *, num_tokens: int = 4, num_samples: int = 2) -> Any:
    samples = tuple(make_sample(num_tokens=num_tokens, reward=float(at)) for at in range(num_samples))
    return make_group(make_ticket(number), samples=samples)


def test_what_is_kept_is_read_as_groups_are(tmp_path: Path) -> None:
    keeper = RolloutKeeper(tmp_path, Words(), term=2)
    keeper.keep(1, [group(7)])
    keeper.keep(2, [])
    [kept] = KeptGroups(tmp_path).latest(10)
    assert (kept["step"], kept["term"], kept["ticket"], kept["id"]) == (1, 2, 7, "1-7")
    assert [sample["reward"] for sample in kept["samples"]] == [0.0, 1.0]
    assert kept["samples"][0]["text"].count(" ") == 3


def test_few_are_kept_and_of_the_whole_run(tmp_path: Path) -> None:
    keeper = RolloutKeeper(tmp_path, Words(), term=1)
    for step in range(1, 1001):
        keeper.keep(step, [group(step)])
        if step == 500:
            with (tmp_path / "rollouts.jsonl").open("a") as file:
                file.write('{"id": "500-')  # it was killed
            keeper = RolloutKeeper(tmp_path, Words(), term=2)  # another learner goes on
    steps = [record["step"] for record in KeptGroups(tmp_path).latest(1000)]
    assert len(steps) <= 128
    assert steps == sorted(steps)
    assert steps[0] == 1
    assert steps[-32:] == list(range(969, 1001))
    assert max(later - step for step, later in pairwise(steps)) < 100


def test_a_line_cut_inside_a_character_costs_no_other_and_no_start(tmp_path: Path) -> None:
    keeper = RolloutKeeper(tmp_path, Words(), term=1)
    keeper.keep(1, [group(1)])
    with (tmp_path / "rollouts.jsonl").open("ab") as file:
        file.write('{"id": "2-2", "prompt": "ж'.encode()[:-1])  # it was killed
    keeper = RolloutKeeper(tmp_path, Words(), term=2)
    keeper.keep(2, [group(2)])
    assert [record["step"] for record in KeptGroups(tmp_path).latest(9)] == [1, 2]
    for step in range(3, 140):  # with one thinning
        keeper.keep(step, [group(step)])
    assert [record["step"] for record in KeptGroups(tmp_path).latest(40)] == list(range(100, 140))


def test_a_line_after_one_that_was_cut_inside_a_character_is_read(tmp_path: Path) -> None:
    path, line = tmp_path / "metrics.jsonl", {"step": 1, "term": 1, "at": 1.0, "train_rollouts/rewards/ж": 0.5}
    append_line(path, line)
    path.write_bytes(path.read_bytes() + '{"step": 2, "train_rollouts/rewards/ж'.encode()[:-1])
    append_line(path, line)
    assert list(read_lines(path)) == [line, line]


class Separators:
    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        return SEPARATORS


def test_text_with_line_separators_is_kept_and_found(tmp_path: Path) -> None:
    keeper = RolloutKeeper(tmp_path, Separators(), term=1)
    for step in range(1, 130):  # with one thinning
        keeper.keep(step, [group(step)])
    records = KeptGroups(tmp_path).latest(1000)
    assert [record["step"] for record in records[-65:]] == list(range(65, 130))
    assert {record["prompt"] for record in records} == {SEPARATORS}
    assert KeptGroups(tmp_path).find("129")["samples"][0]["text"] == SEPARATORS


def test_lines_of_metrics_may_name_anything(tmp_path: Path) -> None:
    line = {"step": 1, "term": 1, "at": 1.0, f"train_rollouts/rewards/{SEPARATORS}": 0.5}
    append_line(tmp_path / "metrics.jsonl", line)
    append_line(tmp_path / "metrics.jsonl", line)
    assert list(read_lines(tmp_path / "metrics.jsonl")) == [line, line]


def test_a_long_text_is_cut_and_a_large_group_is_sampled(tmp_path: Path) -> None:
    RolloutKeeper(tmp_path, Words(), term=1).keep(1, [group(1, num_tokens=20_000, num_samples=16)])
    [kept] = KeptGroups(tmp_path).latest(1)
    assert len(kept["samples"]) == 8
    assert (tmp_path / "rollouts.jsonl").stat().st_size < 100_000


class Counting(Words):
    def __init__(self) -> None:
        self.num_tokens = 0

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        self.num_tokens += len(token_ids)
        return super().decode(token_ids)


def test_a_rollout_of_many_turns_is_decoded_little_more_than_once(tmp_path: Path) -> None:
    num_tokens, size = 20_000, 250
    spans = tuple(
        Span(version=make_version(1, 0), step=0, start=start, end=start + size)
        for start in range(0, num_tokens, 2 * size)
    )
    sample, decoder = make_sample(num_tokens=num_tokens, spans=spans), Counting()
    RolloutKeeper(tmp_path, decoder, term=1).keep(1, [make_group(make_ticket(1), samples=(sample,))])
    [kept] = KeptGroups(tmp_path).latest(1)
    turns = kept["samples"][0]["turns"]
    assert [(turn["by"], turn["start"]) for turn in turns[:3]] == [("model", 0), ("given", 250), ("model", 500)]
    assert len(turns) == 32  # of 80
    assert decoder.num_tokens < 2 * num_tokens


def test_a_full_disk_costs_the_rollouts_and_nothing_else(tmp_path: Path) -> None:
    keeper = RolloutKeeper(tmp_path, Words(), term=1)
    keeper.keep(1, [group(1)])
    with capture_logs() as logs, files_up_to((tmp_path / "rollouts.jsonl").stat().st_size + 5):
        keeper.keep(2, [group(2)])
    keeper.keep(3, [group(3)])
    assert [entry["event"] for entry in logs] == ["rollout not kept"]
    assert [record["step"] for record in KeptGroups(tmp_path).latest(9)] == [1, 3]


def test_keeping_costs_a_step_next_to_nothing(tmp_path: Path, record_property: Callable[[str, str], None]) -> None:
    keeper, groups = RolloutKeeper(tmp_path, Words(), term=1), [group(1, num_tokens=500, num_samples=8)]
    began = time.process_time()
    for step in range(300):
        keeper.keep(step, groups)
    cost_ms = (time.process_time() - began) / 300 * 1000
    record_property("figure", f"a group of 8 samples of 500 tokens kept: {cost_ms:.2f} ms")
    assert cost_ms < 50


def test_the_state_says_who_runs_and_how_it_ended(tmp_path: Path) -> None:
    note_state(tmp_path, "running", term=3)
    assert json.loads((tmp_path / "state.json").read_text())["state"] == "running"
    note_state(tmp_path, "failed", term=3, error="no such reward")
    told = json.loads((tmp_path / "state.json").read_text())
    assert (told["state"], told["term"], told["error"]) == ("failed", 3, "no such reward")
    with capture_logs() as logs:
        note_state(tmp_path / "nowhere", "finished", term=3)
    assert [entry["event"] for entry in logs] == ["not written"]
