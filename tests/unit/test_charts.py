"""What is drawn of a run: the same curves in the PNG, on the page and in Grafana, each with its meaning."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from streamrl.ops.monitor.alerts import grafana_dashboard
from streamrl.ops.monitor.charts import CHARTS, charts_of, save_report
from streamrl.ops.monitor.history import History
from streamrl.ops.monitor.web.server import curves, read_page
from streamrl.telemetry.metrics import is_metric, meaning
from tests.launch_world import make_record, step_record

TIMES = {"timers/rollout": 1.0, "timers/train": 2.0, "timers/publish": 0.5}
GPU = {"gpu/use": 0.9, "gpu/memory": 0.5}
SOURCES = {"train_rollouts/rewards/exact": 0.5, "train_rollouts/rewards/format": 0.9}
DATASETS = {"all_rollouts/rewards_by_dataset/math": 0.2, "all_rollouts/rewards_by_dataset/chat": 0.3}


def drawn(history: History) -> dict[str, Any]:
    """What the page gets, by the names of charts."""
    return {chart["name"]: chart for chart in curves(history)["charts"]}


def run_with(**more: float) -> History:
    """Of a thousand steps, with a checkpoint every hundredth."""
    return History.of(
        step_record(step, **TIMES, **more, **({"timers/checkpoint": 5.0} if step % 100 == 0 else {}))
        for step in range(1, 1001)
    )


def test_checkpoints_are_marks_where_they_were_written_and_nothing_between() -> None:
    time = drawn(run_with())["time"]
    assert time["marks"] == {"checkpoint": [(step, 5.0) for step in range(100, 1001, 100)]}
    assert "checkpoint" not in time["series"]


def test_all_layers_of_a_stack_have_the_same_steps_also_where_one_has_no_value() -> None:
    records = [step_record(step, **{"timers/rollout": 1.0}) for step in range(1, 500)]
    records += [step_record(step, **TIMES) for step in range(500, 1001)]
    series = drawn(History.of(records))["time"]["series"]
    assert len({tuple(step for step, _ in points) for points in series.values()}) == 1
    assert (series["trains"][0], series["trains"][-1]) == ((1, 0.0), (1000, 2.0))


def test_who_looks_closer_gets_every_step_of_what_is_looked_at() -> None:
    found = curves(run_with(), range(301, 501))
    time = next(chart for chart in found["charts"] if chart["name"] == "time")
    assert [step for step, _ in time["series"]["trains"]] == list(range(301, 501))
    assert time["marks"] == {"checkpoint": [(400, 5.0), (500, 5.0)]}
    assert found["newest"] == 1000


def test_the_page_is_one_file_with_its_script_and_the_meanings_of_metrics() -> None:
    page = read_page()
    assert "/* " not in page, "a place that was not filled"
    assert "function chart(series, options)" in page
    assert meaning("lag/mean") in page
    named = set(re.findall(r'"((?:train|all|val)_rollouts/[a-z_/]+|lag/[a-z]+|stream/[a-z_]+)"', page))
    assert {name for name in named if not is_metric(name)} == set()
    assert not re.search(r"(?:src|href)=[^ >]*//|@import|url\(", page)


def test_sources_datasets_and_gpu_have_charts_where_the_run_has_them() -> None:
    assert not {"sources", "datasets", "gpu"} & set(drawn(run_with()))
    assert "sources" not in drawn(run_with(**{"train_rollouts/rewards/exact": 0.5})), "of one source the sum says all"
    history = run_with(**SOURCES, **DATASETS, **GPU)
    history.add(make_record(1000, **{"val_rollouts/rewards": 0.7, "val_rollouts/rewards/exact": 0.6}))
    found = drawn(history)
    assert list(found["sources"]["series"]) == ["exact", "format", "held out, exact"]
    assert found["sources"]["series"]["held out, exact"] == [(1000, 0.6)]
    assert list(found["datasets"]["series"]) == ["chat", "math"]
    assert list(found["gpu"]["series"]) == ["memory", "use"]


def test_each_curve_is_explained() -> None:
    for chart in drawn(run_with(**SOURCES, **DATASETS, **GPU, **{"loss/bonus": 1.0})).values():
        labels = {**chart["series"], **chart["marks"]}
        assert set(chart["meanings"]) == set(labels)
        assert all(is_metric(metric) and text for metric, text in chart["meanings"].values()), chart["meanings"]
    assert meaning("nobody/knows") == ""


def test_the_reward_is_drawn_before_the_filter_and_after() -> None:
    reward = next(chart for chart in CHARTS if chart.name == "reward")
    assert list(reward.series.values()) == ["all_rollouts/rewards", "train_rollouts/rewards", "val_rollouts/rewards"]


def test_grafana_has_a_panel_for_each_chart_and_asks_for_families_by_how_they_begin() -> None:
    asked = {target["expr"] for panel in grafana_dashboard()["panels"] for target in panel["targets"]}
    assert {chart.title for chart in CHARTS} <= {panel["title"] for panel in grafana_dashboard()["panels"]}
    assert 'streamrl_metric{run="$run",name=~"train_rollouts/rewards/.+"}' in asked
    assert 'streamrl_metric{run="$run",name="timers/checkpoint"}' in asked


def test_the_png_has_them_all(tmp_path: Path) -> None:
    history = run_with(**SOURCES, **GPU)
    assert len(charts_of(history)) > 12
    save_report(tmp_path / "plot.png", history, title="run")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
