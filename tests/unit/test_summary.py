"""The last words of a run: numbers from its folder, of the steps that count."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.ops.audit import Audit
from streamrl.ops.launch.summary import (
    Loads,
    RunSummary,
    TokenLag,
    held_out_of,
    lag_of,
    summarise,
    summary_lines,
)
from streamrl.ops.monitor.comparison import compare
from streamrl.ops.monitor.history import History
from tests.run_folders import make_folder


def step(number: int, **changes: float) -> dict[str, float]:
    return {
        "step": number,
        "term": 1,
        "at": 0.0,
        "train_rollouts/response_lengths": 5.0,
        "train_rollouts/rollout_size": 10.0,
        "lag/mean": 1.0,
        "lag/max": 2.0,
        **changes,
    }


def validation(number: int, exact: float, **changes: float) -> dict[str, float]:
    means = {"val_rollouts/rewards": exact, "val_rollouts/rewards/exact": exact}
    return {"step": number, "term": 1, "at": 0.0, **means, **changes}


def write(folder: Path, *records: dict[str, float], torn: str = "") -> Path:
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines + torn)
    return folder


def make_audit(**changes: Any) -> Audit:
    counts = ("trained", "dead", "outstanding", "waiting", "delivered", "lost", "twice", "contradictory")
    counts += (
        "misanswered",
        "unproven",
        "wasted_steps",
        "wasted_tickets",
        "leftover_tickets",
        "leftover_groups",
        "dead_letters",
    )
    fields: dict[str, Any] = {
        **dict.fromkeys((*counts, "eval_tickets", "eval_groups", "issued"), 0),
        **{"run": "mine", "run_uid": "uid", "folder": "f", "redis": None, "learner_is_live": False},
        **{"term": 1, "checkpoint": None, "step": 2, "dropped": {}, "malformed": {}, "examples": {}},
        **{"problems": (), "unchecked": ()},
    }
    return Audit(**{**fields, **changes})


def make_summary(folder: Path, **audit: Any) -> RunSummary:
    return summarise(
        folder=folder,
        state="finished",
        seconds=61.26,
        audit=make_audit(**audit),
        versions_published=4,
        loads=Loads(loaded=9, in_flight=7),
        restarts={"worker/0": 2},
    )


def test_the_lag_is_of_tokens_not_of_steps(tmp_path: Path) -> None:
    write(tmp_path, step(1, **{"lag/mean": 0.0}), step(2, **{"lag/mean": 3.0, "train_rollouts/rollout_size": 30.0}))

    assert lag_of(History.read(tmp_path).steps.records) == TokenLag(mean=pytest.approx(2.25), max=2)


def test_of_a_step_that_was_made_again_the_later_record_counts(tmp_path: Path) -> None:
    write(tmp_path, step(1), step(2, **{"lag/max": 50.0}), step(2, term=2), validation(0, 0.3), validation(0, 0.4))

    history = History.read(tmp_path)

    assert lag_of(history.steps.records) == TokenLag(mean=1.0, max=2)
    assert held_out_of(history) == {"exact": (0.4, 0.4)}


def test_a_validation_that_ranks_no_checkpoint_is_neither_before_nor_after(tmp_path: Path) -> None:
    cut_short, whole = {"val_rollouts/ranks": 0.0}, {"val_rollouts/ranks": 1.0}
    history = History.read(
        write(
            tmp_path,
            validation(0, 0.1, **cut_short),
            validation(1, 0.3),  # of a version that did not say
            validation(2, 0.6, **whole),
            validation(3, 0.9, **cut_short),
        )
    )

    assert held_out_of(history) == {"exact": (0.3, 0.6)}


def test_a_run_whose_validations_all_rank_nothing_has_no_before_and_after(tmp_path: Path) -> None:
    history = History.read(write(tmp_path, validation(0, 0.9, **{"val_rollouts/ranks": 0.0})))

    assert held_out_of(history) == {}


def test_of_steps_only_the_metrics_that_are_needed_are_kept(tmp_path: Path) -> None:
    write(tmp_path, step(1, **{"train_optim/loss": 0.5}), step(2), validation(2, 0.4))

    history = History.read(tmp_path, of_steps=("lag/mean", "train_optim/loss"))

    assert [record.values for record in history.steps.records] == [
        {"lag/mean": 1.0, "train_optim/loss": 0.5},
        {"lag/mean": 1.0},
    ]
    assert held_out_of(history) == {"exact": (0.4, 0.4)}


def test_a_run_is_summed_up_and_compared_in_little_memory(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "mine", "finished")
    others = {f"train_rollouts/made_up/{number}": float(number) for number in range(200)}
    write(folder, *(step(number, **others) for number in range(500)))

    def peak_bytes(read: Callable[[], object]) -> int:
        tracemalloc.start()
        try:
            read()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    whole = peak_bytes(lambda: History.read(folder))
    assert peak_bytes(lambda: make_summary(folder)) < whole / 5
    assert peak_bytes(lambda: compare([folder])) < whole / 2  # with all metrics of the end, which is one megabyte


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path: Path) -> None:
    history = History.read(write(tmp_path, step(1), torn='{"step": 2, "la'))

    assert len(history.steps.records) == 1


def test_a_run_without_a_step_has_no_lag(tmp_path: Path) -> None:
    assert lag_of(History.read(tmp_path).steps.records) is None


def test_the_summary_tells_before_and_after_and_the_fate_of_each_ticket(tmp_path: Path) -> None:
    write(tmp_path, validation(0, 0.4), step(1), step(2), validation(2, 0.9))

    summary = make_summary(tmp_path, issued=10, trained=6, dropped={"stale": 1}, outstanding=3)
    lines = dict(summary_lines(summary))

    assert lines["groups trained"] == "6 of 10 tickets"
    assert lines["dropped"] == "1 (1 stale)"
    assert lines["lost, twice"] == "0, 0"
    assert lines["weight versions"].startswith("4 published; ")
    assert lines["held out: exact"] == "0.400 → 0.900"
    assert lines["restarts"] == "worker/0 2 times"
    assert json.loads(json.dumps(summary.to_json()))["loads"] == {"loaded": 9, "in_flight": 7}


def test_what_the_audit_could_not_settle_is_said(tmp_path: Path) -> None:
    lines = summary_lines(make_summary(tmp_path, problems=("journal torn",), unchecked=("Redis away",)))

    assert [value for name, value in lines if name == "remark"] == ["journal torn", "Redis away"]


def test_a_model_is_named_only_where_there_is_one(tmp_path: Path) -> None:
    assert make_summary(tmp_path).export is None

    (tmp_path / "export").mkdir()
    assert make_summary(tmp_path).export == str(tmp_path / "export")
