"""How rank 0 is admitted to a run: what it finds in Redis decides, and who is refused leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import redis
import transformers

from learner.lease import LeaseKeeper
from learner.policy.model import Speech
from learner.start import Admitted, admit, take_lease
from streamrl.config import schema
from streamrl.errors import RunGone
from streamrl.transport.keys import Keys
from streamrl.transport.operate import remove_run
from tests.feed_world import MODEL, make_config, make_prompts

SPEECH = Speech(
    tokenizer=cast(transformers.PreTrainedTokenizerBase, None), end_ids=(2,), vocabulary=100, fingerprint=MODEL
)

Come = Callable[..., Admitted]


@pytest.fixture
def config(tmp_path: Path, keys: Keys) -> schema.Config:
    return make_config().model_copy(update={"name": keys.name, "dir": tmp_path})


@pytest.fixture
def come(config: schema.Config, learner_client: redis.Redis, keys: Keys) -> Come:
    """Be admitted, as one rank 0 after the other under the same agent."""

    def come(*, takeover: bool = False, **more: Any) -> Admitted:
        take_lease(config, learner_client, keys, holder="job", takeover=takeover)
        return admit(
            config=config,
            client=learner_client,
            keys=keys,
            keeper=LeaseKeeper(lambda: None, lease_s=30.0),
            prompts=make_prompts(4),
            speech=SPEECH,
            holder="job",
            takeover=takeover,
            **more,
        )

    return come


def epochs(config: schema.Config) -> list[str]:
    return sorted(path.name for path in (config.folder / "epochs").iterdir())


def test_a_run_that_was_removed_is_refused_without_a_trace_and_told_how_it_goes_on(
    come: Come, config: schema.Config, client: redis.Redis, keys: Keys
) -> None:
    come()
    remove_run(client, keys)

    with pytest.raises(RunGone, match=r"was removed from Redis at .*: with --takeover it goes on there"):
        come()

    assert epochs(config) == ["000001"]


def test_a_takeover_begins_a_removed_run_anew(
    come: Come, config: schema.Config, client: redis.Redis, keys: Keys
) -> None:
    before = come()
    remove_run(client, keys)

    again = come(takeover=True)

    assert (again.start.run_uid, again.start.epoch) == (before.start.run_uid, 2)
    assert client.hget(keys.meta, "state") == b"running"
    assert come().start.epoch == 3, "once begun anew it is a run like others"
