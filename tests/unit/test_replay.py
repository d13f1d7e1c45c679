"""A learner fed from a recording: the same groups give the same weights, and nothing is silently left out."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from streamrl.config import schema
from streamrl.crashpoints import CrashAt, Point, SimulatedCrash, armed
from streamrl.errors import ConfigError, DataError, TrainingError
from streamrl.learner.checkpoints.terms import claim_run
from streamrl.ops.audit import audit_folder
from streamrl.ops.record.kept import KeptGroups
from streamrl.ops.record.write import RecordingWriter
from streamrl.protocol.recording import Origin, Recording
from streamrl.protocol.transport.types import Entry
from streamrl.protocol.wire.group import Group, decode_header, encode_group
from tests.integration.learner_world import lines
from tests.replay_world import (
    last_state,
    last_tensors,
    make_entries,
    make_recording,
    make_replay_run,
    run_replay,
    same_bits,
)

ENDLESS = schema.Training(groups_per_step=4)


@pytest.fixture
def config(tmp_path: Path) -> schema.Config:
    return make_replay_run(tmp_path)


def test_two_replays_of_a_recording_give_the_same_weights_bit_by_bit(config: schema.Config, tmp_path: Path) -> None:
    recording = make_recording(tmp_path / "recording", config, make_entries(config, range(24)))
    other = make_replay_run(tmp_path, name="other")

    assert [run_replay(config, recording), run_replay(other, recording)] == ["finished", "finished"]

    assert last_state(config)["step"] == 6
    assert same_bits(last_tensors(config), last_tensors(other))
    assert (config.folder / "export" / "model.safetensors").is_file()


def test_a_checkpoint_is_committed_beside_the_steps_which_tell_what_it_took(tmp_path: Path) -> None:
    training, checkpoint = schema.Training(groups_per_step=4, max_steps=6), schema.Checkpoint(every_steps=3)
    config = make_replay_run(tmp_path, training=training, checkpoint=checkpoint)
    recording = make_recording(tmp_path / "recording", config, make_entries(config, range(24)))
    durable, committed, steps = threading.Event(), threading.Event(), count(1)

    def at_point(point: Point) -> None:
        if point == "shard.synced":
            durable.set()
        elif point == "checkpoint.committed":
            committed.set()
        elif point == "group.settled":  # the loop makes a step meanwhile, and another
            awaited = {4: durable, 5: committed}.get(next(steps))
            assert awaited is None or awaited.wait(60)

    with armed(at_point):
        assert run_replay(config, recording) == "finished"

    told = {line["step"]: line for line in lines(config.folder / "metrics.jsonl")}
    assert [step for step in told if "timers/checkpoint" in told[step]] == [3, 6]
    # Durable in the fourth step, which may end before the thread that wrote it has said so, or after.
    assert [step for step in told if "timers/checkpoint_write" in told[step]] in ([4], [5])
    assert [step for step in told if "timers/checkpoint_wait" in told[step]] == []
    assert sorted(path.name for path in (config.folder / "checkpoints").iterdir()) == [
        "e000001-s00000003",
        "e000001-s00000006",
    ]


def test_the_replay_of_a_run_with_a_curriculum_trains_what_was_recorded(config: schema.Config, tmp_path: Path) -> None:
    """Failures and holes too: nobody knows what their tickets asked, and nobody has to."""
    entries = make_entries(config, range(24))
    del entries[5:8]
    header = decode_header(entries[9].header)
    failed = Group(header=structs.replace(header, error="the engine said no"), prompt_ids=np.array([1], dtype=np.int32))
    answer, entries[9] = entries[9], replace(entries[9], header=encode_group(failed)[0])
    entries.insert(10, replace(answer, id=f"{answer.id[:-1]}1"))
    with_it = config.data.model_copy(update={"curriculum": True})
    plain = make_replay_run(tmp_path, name="plain", training=ENDLESS)
    runs = [plain, make_replay_run(tmp_path, name="chosen", training=ENDLESS, data=with_it)]
    recording = make_recording(tmp_path / "recording", config, entries)

    assert [run_replay(run, recording) for run in runs] == ["finished", "finished"]
    assert last_state(runs[0])["step"] == last_state(runs[1])["step"] == 5
    assert same_bits(*map(last_tensors, runs))


def test_a_run_whose_groups_are_dropped_ends_at_its_least_learning_rate_resumed_or_not(tmp_path: Path) -> None:
    """A group that is not trained uses up data all the same."""
    optimizer = schema.Optimizer(lr=1e-3, min_lr=1e-4, warmup_steps=0, constant_steps=2)
    sections: dict[str, Any] = {"num_prompts": 48, "optimizer": optimizer, "training": ENDLESS}
    run, resumed = (make_replay_run(tmp_path, name=name, **sections) for name in ("run", "resumed"))
    entries = make_entries(run, range(48), equal=range(1, 48, 2))
    recording = make_recording(tmp_path / "recording", run, entries)

    assert run_replay(run, recording) == "finished"
    with armed(CrashAt("group.settled", nth=5)), pytest.raises(SimulatedCrash):  # after a checkpoint of step 3
        run_replay(resumed, recording)
    assert run_replay(resumed, recording) == "finished"

    rates = [line["train_optim/lr"] for line in lines(run.folder / "metrics.jsonl")]
    # The first batch begins with three equal ones dropped, and each further one four later.
    places = [min(1.0, (3 + 8 * step) / 4 / 10) for step in range(6)]
    assert rates == pytest.approx([1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * place)) for place in places])
    assert rates[-1] == pytest.approx(1e-4)
    assert same_bits(last_tensors(run), last_tensors(resumed))


def test_other_groups_give_other_weights(config: schema.Config, tmp_path: Path) -> None:
    other = make_replay_run(tmp_path, name="other")
    run_replay(config, make_recording(tmp_path / "one", config, make_entries(config, range(24))))
    run_replay(other, make_recording(tmp_path / "two", config, make_entries(config, range(24), seed=1)))

    assert not same_bits(last_tensors(config), last_tensors(other))


def test_a_replay_cut_short_and_resumed_equals_the_whole_one(config: schema.Config, tmp_path: Path) -> None:
    recording = make_recording(tmp_path / "recording", config, make_entries(config, range(24)))
    run_replay(config, recording)
    first_half = make_replay_run(tmp_path, name="halves", training=schema.Training(groups_per_step=4, max_steps=4))
    run_replay(first_half, recording)
    whole = make_replay_run(tmp_path, name="halves")
    run_replay(whole, recording)

    assert last_state(whole)["step"] == 6
    assert same_bits(last_tensors(config), last_tensors(whole))


def test_a_recording_with_holes_is_used_up_and_every_ticket_has_a_fate(tmp_path: Path) -> None:
    config = make_replay_run(tmp_path, training=ENDLESS)
    entries = make_entries(config, range(23))
    del entries[5:8]
    recording = make_recording(tmp_path / "recording", config, entries)

    assert run_replay(config, recording) == "finished"

    outcomes = last_state(config)["stream"]["ledger"]["outcomes"]
    assert outcomes == {"dropped/not_recorded": 3, "trained": 20}
    found = audit_folder(config.folder, redis_url=None, run=None)
    assert (found.lost, found.twice, found.unproven, found.trained) == (0, 0, 0, 20)


def test_groups_are_validated_as_in_a_live_run(tmp_path: Path) -> None:
    config = make_replay_run(tmp_path, training=ENDLESS)
    entries = make_entries(config, range(20))
    entries[2] = replace(entries[2], body=b"not what the header promises")
    entries[3] = replace(entries[3], run_uid="another")
    entries[4] = replace(entries[4], header=b"junk")
    entries.append(replace(entries[0], id="9000-0"))  # delivered twice
    entries.append(replace(entries[0], id="9001-0", number=1 << 60))  # forged

    assert run_replay(config, make_recording(tmp_path / "recording", config, entries)) == "finished"

    ledger = last_state(config)["stream"]["ledger"]
    assert ledger["outcomes"] == {"dropped/malformed": 2, "trained": 15}  # and two were too few for a step
    assert ledger["ignored"] == {"wrong_run": 1, "duplicate": 1, "malformed": 1}


def test_groups_too_old_for_the_lag_setting_are_dropped_as_in_a_live_run(tmp_path: Path) -> None:
    lag = schema.Lag(max_steps=2, stale="drop")
    config = make_replay_run(tmp_path, training=ENDLESS, lag=lag)
    entries = make_entries(config, range(24))
    late = replace(entries.pop(1), id="9000-0")  # made of the first weights, and delivered last
    recording = make_recording(tmp_path / "recording", config, [*entries, late])

    run_replay(config, recording)

    assert last_state(config)["stream"]["ledger"]["outcomes"]["dropped/stale"] == 1


def test_the_last_partial_batch_of_the_data_is_trained(tmp_path: Path) -> None:
    config = make_replay_run(tmp_path, training=ENDLESS, num_prompts=10)
    recording = make_recording(tmp_path / "recording", config, make_entries(config, range(10)))

    assert run_replay(config, recording) == "finished"

    assert last_state(config)["step"] == 3
    assert last_state(config)["stream"]["ledger"]["outcomes"] == {"trained": 10}


def test_the_last_partial_batch_is_trained_though_a_ticket_only_failed(tmp_path: Path) -> None:
    config = make_replay_run(tmp_path, training=ENDLESS, num_prompts=10)
    entries = make_entries(config, range(10))
    at = [entry.number for entry in entries].index(3)
    entries[at : at + 1] = [failure_of(entries[at], attempt) for attempt in range(config.worker.max_attempts)]

    assert run_replay(config, make_recording(tmp_path / "recording", config, entries)) == "finished"

    assert last_state(config)["step"] == 3
    assert last_state(config)["stream"]["ledger"]["outcomes"] == {"dropped/not_recorded": 1, "trained": 9}


def failure_of(answer: Entry, attempt: int) -> Entry:
    """What a worker would have delivered instead of this answer."""
    header = structs.replace(decode_header(answer.header), error="the engine said no", attempt=attempt)
    failed = Group(header=header, prompt_ids=np.array([1], dtype=np.int32))
    header_bytes, body = encode_group(failed)
    return replace(answer, id=f"{answer.id[:-1]}{attempt}", header=header_bytes, body=body)


def test_a_replay_that_trains_nothing_fails_and_says_why(tmp_path: Path) -> None:
    recorded = make_replay_run(tmp_path, name="recorded", training=ENDLESS)
    recording = make_recording(tmp_path / "recording", recorded, make_entries(recorded, range(8)))
    fewer = recorded.sampling.model_copy(update={"num_samples": recorded.sampling.num_samples - 1})
    config = make_replay_run(tmp_path, training=ENDLESS, sampling=fewer)

    with pytest.raises(TrainingError, match=r"no step was made: .* 8 dropped as malformed"):
        run_replay(config, recording)

    assert not (config.folder / "export").exists()
    told = json.loads((config.folder / "state.json").read_text())
    assert told["state"] == "failed"
    assert "8 dropped as malformed" in told["error"]


def test_a_damaged_recording_leaves_no_mark_and_may_be_repaired(config: schema.Config, tmp_path: Path) -> None:
    recording = make_recording(tmp_path / "recording", config, make_entries(config, range(8)))
    first, *_ = Recording.open(recording).places
    whole = first.path.read_bytes()
    first.path.write_bytes(whole[: first.offset] + b"\0" + whole[first.offset + 1 :])
    with pytest.raises(DataError, match="is damaged"):
        run_replay(config, recording)
    assert not (config.folder / "replay.json").exists()


def test_the_recording_of_another_tokenizer_is_refused(config: schema.Config, tmp_path: Path) -> None:
    recording = tmp_path / "recording"
    origin = Origin(run="live", run_uid="recorded", fingerprint="other", model="theirs")
    with RecordingWriter(recording, origin, file_bytes=20_000, max_bytes=1 << 30) as writer:
        writer.append(make_entries(config, range(4)))

    with pytest.raises(ConfigError, match="is not that of the recorded run, which used 'theirs'"):
        run_replay(config, recording)


def test_a_replay_goes_on_with_its_own_recording_only(config: schema.Config, tmp_path: Path) -> None:
    entries = make_entries(config, range(24))
    run_replay(config, make_recording(tmp_path / "one", config, entries[:8]))

    with pytest.raises(ConfigError, match=r"is a replay of another recording .* set another name"):
        run_replay(config, make_recording(tmp_path / "two", config, entries))
    assert json.loads((config.folder / "replay.json").read_text())["num_groups"] == 8


def test_a_replay_does_not_go_on_from_a_live_run(config: schema.Config, tmp_path: Path) -> None:
    """Not even from one that has no checkpoint yet."""
    recording = make_recording(tmp_path / "recording", config, make_entries(config, range(8)))
    claim_run(config.folder)

    with pytest.raises(ConfigError, match="holds a run that is not a replay"):
        run_replay(config, recording)


def test_a_run_that_goes_on_may_change_some_settings_and_is_refused_others(
    config: schema.Config, tmp_path: Path
) -> None:
    recording = make_recording(tmp_path / "recording", config, make_entries(config, range(24)))
    run_replay(make_replay_run(tmp_path, training=schema.Training(groups_per_step=4, max_steps=3)), recording)
    hotter = config.model_copy(update={"sampling": config.sampling.model_copy(update={"temperature": 0.5})})

    with pytest.raises(ConfigError, match=r"sampling.temperature: 1.0 -> 0.5: this run's groups were .*\n.*--fork"):
        run_replay(hotter, recording)
    assert len(list((config.folder / "terms").iterdir())) == 1  # who is refused leaves no trace
    slower = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"lr": 1e-5})})
    assert run_replay(slower, recording) == "finished"
    assert last_state(slower)["step"] == 6


def test_a_learner_leaves_how_it_ended_and_some_of_what_it_trained(config: schema.Config, tmp_path: Path) -> None:
    run_replay(config, make_recording(tmp_path / "recording", config, make_entries(config, range(24))))

    told = json.loads((config.folder / "state.json").read_text())
    assert (told["state"], told["term"]) == ("finished", 1)
    kept = KeptGroups(config.folder).latest(100)
    assert len(kept) == last_state(config)["step"] > 1
    assert all(sample["text"] for record in kept for sample in record["samples"])
