"""The demo as a demonstration: what it says, how its answers are judged, how it is prepared."""

from __future__ import annotations

from streamrl.demo import sums
from streamrl.demo.model import NAME
from streamrl.demo.prepare import check, prepare
from streamrl.showcase.report import Task
from streamrl.showcase.run import Showcase

TASK = Task(
    source="right",
    question=lambda _, fields: f"{fields['metadata']['expression']} =",
    is_right=sums.is_right,
    prepared="model and data",
)
DEMO = Showcase(
    name="demo",
    explanation=(
        "Task: sums of two numbers up to 100, asked and judged by reasoning-gym.",
        f"The model, {NAME}, rambles: one in five is right. Now rewards.",
    ),
    task=TASK,
    check=check,
    prepare=prepare,
)
