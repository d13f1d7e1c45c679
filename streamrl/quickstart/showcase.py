"""The quickstart as a demonstration: what it says, how its answers are judged, how it is prepared."""

from __future__ import annotations

from streamrl.quickstart.prepare import prepare
from streamrl.quickstart.task import EXPLANATION
from streamrl.showcase.report import Task
from streamrl.showcase.run import Showcase

TASK = Task(
    source="exact",
    question=lambda prompt, _: prompt,
    is_right=lambda completion, fields: completion == fields["answer"],
    prepared="data, warm-up and reward model",
)
QUICKSTART = Showcase(name="quickstart", explanation=EXPLANATION, task=TASK, check=lambda _: None, prepare=prepare)
