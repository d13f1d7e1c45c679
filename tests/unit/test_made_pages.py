"""`docs/metrics.md` and `docs/troubleshooting.md` say what the code says, of every metric and of every cause."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from streamrl.ops.monitor.causes import TABLE, find_causes
from streamrl.ops.monitor.charts import CHARTS
from streamrl.telemetry.metrics import FAMILIES, METRICS, explained
from tests.made_pages import METRICS_PAGE, TROUBLE_PAGE, is_explained, made, names, of_metrics, of_prometheus, renewed
from tests.pages import PAGES, ROOT
from tests.trouble import VIEWS, WELL, causes


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_says_what_the_code_says(page: Path) -> None:
    assert page.read_text() == renewed(page), "python -m tests.made_pages"


def test_every_metric_and_every_cause_has_its_place() -> None:
    assert sorted(names(METRICS_PAGE)) == sorted([*of_metrics(), *of_prometheus()])
    assert sorted(names(TROUBLE_PAGE)) == sorted(f"cause {name}" for name in causes())
    assert set(made()) == {*names(METRICS_PAGE), *names(TROUBLE_PAGE)}
    assert set(re.findall(r"^\| `(.+?)` ", "".join(of_metrics().values()), re.MULTILINE)) == {
        *METRICS,
        *(f"{name}..." for name in FAMILIES),
    }


def test_every_figure_for_prometheus_is_in_a_table() -> None:
    exporter, worker, server = (text.count("\n") - 2 for text in of_prometheus().values())
    assert exporter == (ROOT / "streamrl/ops/monitor/exporter.py").read_text().count("yield self._")
    assert worker == len(re.findall(r"yield _(?:gauge|counter)\(", (ROOT / "workers/http.py").read_text()))
    assert server == (ROOT / "workers/reward_server/openapi.py").read_text().count("registry=self._registry")


def test_the_unit_of_a_chart_is_that_of_what_it_draws() -> None:
    for chart in CHARTS:
        members = [name for name in (*METRICS, *FAMILIES) if name.startswith(tuple(chart.families.values()))]
        units = {explained(metric)[0] for metric in (*chart.series.values(), *chart.marks.values(), *members)}
        assert not chart.unit or units == {chart.unit}, chart.name


@pytest.mark.parametrize("name", TABLE)
def test_a_run_in_trouble_is_told_of_it_and_one_that_is_well_of_nothing(name: str) -> None:
    assert find_causes(VIEWS[name])[0].name == name
    assert find_causes(WELL) == ()


def test_each_cause_is_explained_beside_what_the_code_says() -> None:
    text = TROUBLE_PAGE.read_text()
    for name in causes():
        section = re.search(rf"^### {name}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
        assert section, name
        by_hand = re.sub(r"<!-- made: .*?<!-- end -->", "", section[1], flags=re.DOTALL)
        assert len(by_hand.split()) >= 8, f"{name}: what does it mean?"


def test_a_metric_that_the_page_does_not_explain_is_told_from_one_that_it_does() -> None:
    assert is_explained("lag/mean")
    assert is_explained("idle/groups"), "of a family"
    assert not is_explained("lag/meaning")
    assert not is_explained("nobody/knows")
