"""The benches' framework: what a program reads from it, and judges that notice what they are there for."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from bench.__main__ import make_command
from bench.catalogue import BENCHES, Entry
from bench.entropy import delta_entropy_bits, knowing_exponents
from bench.house import type_errors
from bench.measure import Rounds, Say
from bench.monitor import process
from bench.mutations import WRONG, Trial
from bench.proofs import what_is_measured
from bench.publishing import RUN_UID
from bench.report import Bar, Fact, Line, Report, describe_machine, record, table, to_json
from bench.start import start
from bench.worker import Versions
from bench.worker_model import SMALL, write_model
from streamrl.errors import ResourceError
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.stores import MemoryStore
from streamrl.tasks import run_beside
from streamrl.versions import make_version

ROOT = Path(__file__).parents[2]
FAST = Bar(name="speed / peer", value=0.75, unit="x", goal=0.5, better="higher")
SLOW = Bar(name="delay", value=7.0, unit="ms", goal=5.0, better="lower")
COUNT = Fact(name="groups", value=1234, unit="")
COLUMNS = (("reward", ""), ("entropy", "nats"))


def small_bench(*, quick: bool, say: Say) -> list[Line]:
    say(f"quick: {quick}")
    return [FAST, SLOW, COUNT]


def broken_bench(*, quick: bool, say: Say) -> list[Line]:
    raise ResourceError("there is no such thing here")


SAMPLE = {
    "small": Entry("tests.unit.test_bench:small_bench", "A small one."),
    "broken": Entry("tests.unit.test_bench:broken_bench", "A broken one."),
}


def make_report() -> Report:
    return Report(bench="small", quick=True, machine=describe_machine(), lines=(FAST, SLOW, COUNT))


def test_the_last_line_of_json_has_the_promised_form() -> None:
    result = CliRunner().invoke(make_command(SAMPLE), ["small", "--json", "--quick"])

    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["bench"] == "small"
    assert found["quick"] is True
    assert set(found["machine"]) == {"cpu", "cores", "memory_gb", "system", "python"}
    assert found["bars"] == [
        {"name": "speed / peer", "value": 0.75, "unit": "x", "goal": 0.5, "better": "higher", "ok": True},
        {"name": "delay", "value": 7.0, "unit": "ms", "goal": 5.0, "better": "lower", "ok": False},
    ]
    assert found["facts"] == [{"name": "groups", "value": 1234, "unit": ""}]


def test_progress_goes_to_stderr_only() -> None:
    result = CliRunner().invoke(make_command(SAMPLE), ["small", "--json"])

    assert "quick: False" in result.stderr
    assert len(result.stdout.splitlines()) == 1


def test_what_cannot_be_measured_is_one_line_and_an_exit_code() -> None:
    result = CliRunner().invoke(make_command(SAMPLE), ["broken"])

    assert result.exit_code == ResourceError.exit_code
    assert result.stderr == "error: there is no such thing here\n"


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_named_in_help_exists(name: str) -> None:
    shown = CliRunner().invoke(make_command(BENCHES), ["--help"]).stdout

    assert f"  {name} " in shown
    assert BENCHES[name].help in shown
    assert callable(BENCHES[name].load())


def test_figures_of_numpy_are_figures_in_json() -> None:
    bar = Bar(name="x", value=np.float64(2.0), unit="x", goal=1, better="higher")
    report = Report(bench="small", quick=False, machine=describe_machine(), lines=(bar,))

    assert json.loads(to_json(report))["bars"][0]["ok"] is True


def test_the_table_says_which_bars_are_missed() -> None:
    rows = table(make_report()).splitlines()

    assert rows[1].endswith("ok")
    assert rows[2].endswith("MISSED")
    assert "1,234" in rows[3]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_figure_that_could_not_be_measured_is_a_dash_and_null_and_its_bar_is_missed(value: float) -> None:
    bar = Bar(name="speed / peer", value=value, unit="x", goal=0.5, better="higher")
    lines = (bar, Fact(name="groups", value=value, unit=""))
    report = Report(bench="small", quick=False, machine=describe_machine(), lines=lines)

    found = json.loads(to_json(report))
    assert [(one["value"], one.get("ok")) for one in (*found["bars"], *found["facts"])] == [(None, False), (None, None)]
    assert [row.split()[-1] for row in table(report).splitlines()[1:]] == ["MISSED", "-"]


def test_figures_that_several_things_have_are_shown_as_a_grid() -> None:
    facts = [Fact(name=f"lag {lag}: {what}", value=lag, unit=unit) for lag in (0, 4, 8) for what, unit in COLUMNS]
    plain = Fact(name="broke with workers", value=7, unit="")
    report = Report(bench="small", quick=False, machine=describe_machine(), lines=(*facts, plain))

    assert table(report).splitlines()[1:] == [
        "  broke with workers          7 ",
        "",
        "         reward  entropy (nats)",
        "  lag 0       0               0",
        "  lag 4       4               4",
        "  lag 8       8               8",
    ]


def test_the_record_holds_what_a_command_gave_last(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    path.write_text("# Results\n\n## 2026-01-01: python -m bench other\n\nkept\n")
    old, new = (datetime(2026, month, 20, tzinfo=UTC) for month in (1, 11))

    record(make_report(), path, now=old)
    record(replace(make_report(), bench="third"), path, now=old)
    record(make_report(), path, now=new)

    titles = [line for line in path.read_text().splitlines() if line.startswith("## ")]
    assert titles == [
        "## 2026-01-01: python -m bench other",
        "## 2026-11-20: python -m bench small --quick",
        "## 2026-01-20: python -m bench third --quick",
    ]
    assert "kept" in path.read_text()


def test_the_record_gets_a_dated_section_with_the_command(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    path.write_text("# Results\n")

    record(make_report(), path, now=datetime(2026, 11, 20, tzinfo=UTC))

    assert path.read_text().startswith(
        "# Results\n\n## 2026-11-20: python -m bench small --quick\n\n```\nsmall (quick)"
    )


def test_ways_are_measured_by_turns_and_compared_within_a_round() -> None:
    order: list[str] = []
    slow, fast = iter([1.0, 10.0, 100.0]), iter([2.0, 30.0, 400.0])

    def measure(name: str, figures: object) -> float:
        order.append(name)
        return next(figures)  # type: ignore[call-overload]

    rounds = Rounds({"slow": lambda: measure("slow", slow), "fast": lambda: measure("fast", fast)}, num_rounds=3)

    assert order == ["slow", "fast"] * 3
    assert rounds.median("slow") == 10.0
    assert rounds.ratio("fast", to="slow") == 3.0


def test_the_entropy_of_a_delta_counts_places_and_values() -> None:
    old = {"a": np.zeros(8192, dtype=np.uint16)}
    every_second = np.tile(np.array([0, 1], dtype=np.uint16), 4096)
    by_two_values = np.tile(np.array([0, 1, 0, 2], dtype=np.uint16), 2048)

    assert delta_entropy_bits({"a": every_second}, old) == pytest.approx(8192)
    assert delta_entropy_bits({"a": by_two_values}, old) == pytest.approx(8192 + 4096)


def test_who_knows_the_exponents_needs_fewer_bits() -> None:
    old = {"a": np.repeat(np.array([0, 1 << 7], dtype=np.uint16), 4096)}
    only_the_larger_move = old["a"] + (old["a"] > 0)

    assert knowing_exponents({"a": only_the_larger_move}, old) == pytest.approx(0, abs=1)
    assert delta_entropy_bits({"a": only_the_larger_move}, old) == pytest.approx(8192)


def test_a_mypy_that_does_not_run_is_an_error_and_no_figure() -> None:
    with pytest.raises(ResourceError, match="mypy did not run: there is no mypy"):
        type_errors([sys.executable, "-c", "raise SystemExit('there is no mypy')"])


def test_a_quickstart_that_never_loads_a_version_is_an_error_and_no_figure(tmp_path: Path) -> None:
    main = tmp_path / "streamrl" / "ops" / "cli" / "main.py"
    main.parent.mkdir(parents=True)
    for file in (main, *(folder / "__init__.py" for folder in main.parents[:3])):
        file.touch()
    with pytest.raises(ResourceError, match="has no version_loaded"):
        start(tmp_path)


def test_a_command_that_fails_is_not_timed() -> None:
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    assert process(command, codes=(0, 3))() > 0
    with pytest.raises(ResourceError, match="exited with 3"):
        process(command)()


def test_a_round_of_the_worker_that_runs_out_of_updates_fails(tmp_path: Path) -> None:
    write_model(tmp_path, SMALL)
    versions = Versions(tmp_path, MemoryStore())
    versions.prepare(2)

    async def round_() -> None:
        await run_beside(asyncio.Event().wait(), {"announce versions": versions.announce_all(every_s=0.0)})

    with pytest.raises(AssertionError, match="3 times as long"):
        asyncio.run(round_())
    assert versions.announcements.newest is not None
    assert versions.announcements.newest.version == make_version(1, 2)


def test_kept_results_of_proofs_are_of_the_measured_code_of_one_vllm_and_machine(tmp_path: Path) -> None:
    for folder in ("bench", "workers", "learner"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    before = what_is_measured(tmp_path)
    (tmp_path / "learner" / "publishing" / "host_copy.py").write_text("# another\n")

    assert what_is_measured(tmp_path) != before
    assert re.search(r"\bvllm(-cpu)? \d+\.\d+", before)
    assert str(describe_machine()) in before


def test_a_mirror_serves_nothing_wrong_however_it_is_misled(tmp_path: Path) -> None:
    trial = Trial(Mirror(tmp_path, run_uid=RUN_UID), seed=0)
    trial.run(200)

    assert trial.outcomes.total() == 200
    assert trial.outcomes[WRONG] == 0


def test_a_mirror_that_verifies_nothing_is_found_out(tmp_path: Path) -> None:
    class CredulousMirror(Mirror):
        def _prove(self, manifest: Manifest, touched: set[str], *, num_threads: int) -> None:
            self.version = manifest.version

    trial = Trial(CredulousMirror(tmp_path, run_uid=RUN_UID), seed=1)
    trial.run(400)

    assert trial.outcomes[WRONG] > 0
