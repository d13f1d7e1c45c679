"""A run in pods that has ended, as the audit, the judge, and who looks for secrets find it."""

from __future__ import annotations

from streamrl.config import schema
from tests.images.deployed import Deployed
from tests.images.judged import say_otherwise

SEED, MAX_LAG = schema.Config.model_fields["seed"].default, schema.Lag().hard_limit_steps


def judged(namespace: Deployed, last: int) -> str:
    """What was found, in short."""
    audit = namespace.ask("audit")
    assert (audit["step"], audit["lost"], audit["twice"], audit["clean"]) == (last, 0, 0, True), audit
    seen = namespace.ask("status")
    assert (seen["run"]["state"], seen["run"]["step"]) == ("finished", last)
    prompts = namespace.volumes.claim("models") / "data" / "train.jsonl"
    verdict = namespace.judge.verdict(namespace.run_folder, prompts, seed=SEED, max_lag=MAX_LAG)
    assert say_otherwise(verdict, audit) == []
    assert verdict.steps_checked > 0
    assert namespace.secrets_shown() == []
    started_again = {pod.name: pod.restarts for pod in namespace.pods if pod.restarts and "worker" not in pod.name}
    assert started_again == {}, "but workers, which a Deployment starts again when their run has ended"
    return (
        f"{last} steps, {audit['issued']} tickets: {audit['trained']} trained, lost {audit['lost']}, "
        f"twice {audit['twice']}; the judge made {verdict.steps_checked} of the steps again from what it saw"
    )
