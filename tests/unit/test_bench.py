"""The benches' framework: what a program reads from it, and judges that notice what they are there for."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from bench.__main__ import make_command
from bench.catalogue import BENCHES, Entry
from bench.entropy import delta_entropy_bits, knowing_exponents
from bench.measure import Rounds, Say
from bench.mutations import WRONG, Trial
from bench.publishing import RUN_UID
from bench.report import Bar, Fact, Line, Report, describe_machine, record, table, to_json
from streamrl.errors import ResourceError
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.mirror import Mirror

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
