"""The learner of `test_any_order`: as far as the stream is concerned, on made-up prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from streamrl.config import schema
from streamrl.learner.groups.plan import Plan
from streamrl.learner.groups.prompts import Prompt, PromptSet
from streamrl.learner.validation.validation import Validation
from streamrl.protocol.transport.types import Announcement
from streamrl.versions import make_version
from tests.feed_world import MODEL
from tests.redis.disaster_site import LEASE_S
from tests.redis.run_world import Learner

if TYPE_CHECKING:
    from tests.redis.disaster_world import DisasterWorld


class Life(Learner):
    """What it has trained, and when it last looked at Redis as a whole."""

    def __init__(self, world: DisasterWorld, *, holder: str, takeover: bool) -> None:
        super().__init__(world, holder=holder, takeover=takeover, lease_s=LEASE_S, clock=world.clock)
        self.trained = list(world.trained_at[str(self.parent.name)]) if self.parent else []
        self.plan_in_work: Plan | None = None
        self.num_looks = 0
        self.num_late = self.feed.state().ledger.ignored.get("late_failure", 0)
        self.num_published = 0
        self.validation = Validation(
            stream=self.stream,
            prompts=make_prompts(2).rows,
            settings=schema.Validation(),
            run_uid=self.uid,
            term=self.term,
            fingerprint=MODEL,
            max_attempts=2,
            decode=str,
            clock=world.clock,
        )
        reconcile = self.feed.reconcile

        def counted(*, step: int) -> None:
            reconcile(step=step)
            self.num_looks += 1

        self.feed.reconcile = counted  # type: ignore[method-assign]

    def publish(self) -> int:
        """Announce the weights of now; the version."""
        version = make_version(self.term, self.num_published)
        announcement = Announcement(version=version, base=0, step=self.step, manifest=b"m")
        self.stream.announce(announcement, keep=[])
        if self.num_published:
            self.feed.note_version(version, self.step)
        self.num_published += 1
        return version


def make_prompts(count: int) -> PromptSet:
    """Each has token ids of its own, so that its answers can be told from others."""
    rows = [
        Prompt(line=i + 1, text=f"prompt {i}", token_ids=np.array([i, i], dtype=np.int32), fields={})
        for i in range(count)
    ]
    return PromptSet(rows, seed=1, shuffle=True)
