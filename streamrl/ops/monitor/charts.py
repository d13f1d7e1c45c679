"""What is drawn of a run, in one table for the PNG report, the page and Grafana."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from streamrl.ops.monitor.history import History
from streamrl.telemetry.metrics import OF_LOSS


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    name: str
    title: str
    unit: str
    series: Mapping[str, str]  # label -> metric
    is_stacked: bool = False  # the series are shares of one whole


CHARTS = (
    Chart(
        name="reward",
        title="Reward",
        unit="",
        series={"trained": "train_rollouts/rewards", "held out": "val_rollouts/rewards"},
    ),
    Chart(name="kl", title="KL to the reference", unit="nats", series={"KL": "train_rollouts/init_policy_kl"}),
    Chart(
        name="lag",
        title="Lag of trained tokens",
        unit="steps",
        series={"mean": "lag/mean", "largest": "lag/max", "in flight": "lag/in_flight"},
    ),
    Chart(
        name="throughput",
        title="Trained tokens per second",
        unit="tokens/s",
        series={"tokens/s": "throughput/tokens_per_s"},
    ),
    Chart(
        name="time",
        title="Where a step's time goes",
        unit="s",
        series={
            "waits for groups": "timers/rollout",
            "trains": "timers/train",
            "publishes": "timers/publish",
            "checkpoints": "timers/checkpoint",
        },
        is_stacked=True,
    ),
    Chart(
        name="correction",
        title="Off-policy correction",
        unit="",
        series={"mean ratio": "policy/ratio_mean", "effective samples": "policy/ess"},
    ),
    Chart(
        name="fresh",
        title="Engine against learner, on fresh samples",
        unit="nats",
        series={"mean difference": "policy/fresh_mismatch", "KL": "policy/fresh_mismatch_kl"},
    ),
    Chart(
        name="loss",
        title="Loss and gradient",
        unit="",
        series={"loss": "train_optim/loss", "gradient": "train_optim/grad_norm"},
    ),
    Chart(
        name="length",
        title="Response length",
        unit="tokens",
        series={"trained": "train_rollouts/response_lengths", "held out": "val_rollouts/response_lengths"},
    ),
)


def charts_of(history: History) -> tuple[Chart, ...]:
    """With a chart of what the run's loss tells of itself, if it tells anything."""
    newest = history.steps.records[-1].values if history.steps.records else {}
    own = {name.removeprefix(OF_LOSS): name for name in sorted(newest) if name.startswith(OF_LOSS)}
    return (*CHARTS, Chart(name="own", title="What the loss tells", unit="", series=own)) if own else CHARTS
