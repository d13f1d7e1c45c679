"""What a loss tells of itself is seen wherever a run is: in words, and as a chart of its own."""

from __future__ import annotations

from streamrl.ops.monitor.build import build_view
from streamrl.ops.monitor.charts import charts_of
from streamrl.ops.monitor.history import History
from streamrl.ops.monitor.text import metrics_lines
from tests.launch_world import make_snapshot, step_record

OWN = {"loss/bonus": 0.25, "loss/\x1b[31mred": 1.0}


def test_metrics_of_a_loss_stand_beside_ours_and_draw_nothing_on_the_terminal() -> None:
    history = History()
    history.add(step_record(1, **OWN))
    [line] = metrics_lines(build_view(make_snapshot(), run_name="run", server="here", history=history))
    assert "bonus 0.250" in line
    assert "\x1b" not in line


def test_they_are_a_chart_where_there_are_any() -> None:
    history = History()
    history.add(step_record(1))
    assert "own" not in {chart.name for chart in charts_of(history)}
    history.add(step_record(2, **OWN))
    own = next(chart for chart in charts_of(history) if chart.name == "own")
    assert own.series["bonus"] == "loss/bonus"
