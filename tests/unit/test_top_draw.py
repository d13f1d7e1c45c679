"""What `top` has room for: nothing that matters is cut off on a small terminal, and a large one is used."""

from __future__ import annotations

from streamrl.ops.monitor.charts import sketches_of
from streamrl.ops.monitor.history import History
from streamrl.ops.monitor.top.draw import draw
from streamrl.ops.monitor.top.screen import Screen
from streamrl.ops.monitor.view import View
from tests.launch_world import make_record, make_report, make_snapshot, make_view, step_record

METRICS = {
    "train_rollouts/rewards": 0.54,
    "all_rollouts/rewards": 0.71,
    "train_rollouts/init_policy_kl": 0.0123,
    "train_optim/loss": -0.0456,
    "policy/ratio_mean": 1.01,
    "policy/ess": 0.987,
    "policy/entropy": 1.234,
    "lag/mean": 1.4,
    "lag/max": 3.0,
    "throughput/tokens_per_s": 12345.0,
    "loss/weight": 0.9,
}
RECORDS = (
    *(step_record(step, **METRICS) for step in range(1, 61)),
    make_record(0, **{"val_rollouts/rewards": 0.3}),
    make_record(50, **{"val_rollouts/rewards": 0.93}),
)


def busy(num_workers: int, *, doing: str = "generate") -> View:
    reports = [make_report("learner/0", detail={"step": 60})]
    reports += [make_report(f"worker/{n}", doing=doing, detail={"step": 57}) for n in range(num_workers)]
    return make_view(*RECORDS, snapshot=make_snapshot(reports=tuple(reports), latest_version_step=60))


def shown(view: View, *, width: int, height: int) -> list[str]:
    curves = sketches_of(History.of(RECORDS))
    return [line.plain for line in draw(view, Screen(), width=width, height=height, curves=curves)]


def test_a_small_terminal_shows_the_lag_and_every_other_metric_of_ours() -> None:
    lines = shown(busy(30), width=80, height=24)
    text = "\n".join(lines)
    for told in ("reward 0.540", "of all groups 0.710", "lag 1.400", "max lag 3", "KL 0.012", "loss -0.046"):
        assert told in text, text
    assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in lines if "loss" in line), "what has no room is out"
    assert sum(line.startswith(tuple("0123456789")) for line in lines) >= 4, "workers are on the screen, too"


def test_a_narrow_terminal_cuts_off_what_matters_least() -> None:
    title = next(line for line in shown(busy(3), width=60, height=24) if line.startswith("worker "))
    assert title.split()[:5] == ["worker", "state", "lag", "tokens/s", "progress"]


def test_a_large_terminal_is_used_for_curves_and_for_what_holds_the_run_back() -> None:
    lines = shown(busy(3), width=160, height=50)
    [all_groups] = [line for line in lines if line.startswith("Reward: all groups")]
    assert "0.710 → 0.710" in all_groups
    [held_out] = [line for line in lines if line.startswith("Reward: held out")]
    assert "0.300 → 0.930" in held_out
    assert sum(not line.strip() for line in lines) < 25, "\n".join(lines)


def test_workers_come_before_curves() -> None:
    lines = shown(busy(30), width=160, height=44)
    assert not any(line.startswith("Reward: ") for line in lines)
    assert any("by name" in line for line in lines)
