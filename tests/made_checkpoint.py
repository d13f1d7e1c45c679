"""A checkpoint as a run of some configuration would have left it."""

from __future__ import annotations

from streamrl.config import schema
from streamrl.learner.checkpoints.checkpoint import CheckpointRoot, CheckpointState
from streamrl.learner.checkpoints.resume import settings_to_compare
from streamrl.learner.checkpoints.terms import CheckpointName, claim_run
from streamrl.learner.groups.ledger import FeedState


def make_checkpoint(config: schema.Config, *, data_fingerprint: str = "") -> None:
    root = CheckpointRoot(config.folder)
    uid = claim_run(config.folder)
    root.claim_term(uid)
    name = CheckpointName(1, 5)
    (root.new_folder(name) / "weights").write_bytes(b"w")
    extra = settings_to_compare(config)
    state = CheckpointState(run_uid=uid, step=5, stream=FeedState(), data_fingerprint=data_fingerprint, extra=extra)
    root.commit(name, state)
