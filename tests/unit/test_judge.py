"""The judge finds what is wrong with a run, each kind by its name, and nothing with a sound one."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest

from streamrl.protocol.wire.group import encode_group
from streamrl.protocol.wire.ticket import encode_ticket
from tests.faults.judge.books import Prompts, Verdict, judge
from tests.faults.judge.compare import disagreements
from tests.faults.judge.history import BrokenError, Ended, newest_checkpoint, read_history
from tests.faults.judge.layout import UnreadableError, name_of, read_group, read_ticket
from tests.faults.judge.weights import WeightsLooks, anchors_of, file_store, missing_tensors, read_masters, served_bytes
from tests.helpers import make_group, make_sample, make_ticket
from tests.judge_cases import (
    NUM_STEPS,
    NUM_TICKETS,
    Answer,
    MadeUpRun,
    figures_of,
    sound_run,
    version_of,
)


def verdict_on(run: MadeUpRun) -> Verdict:
    return judge(run.history(), run.record(), run.rules())


def kinds(run: MadeUpRun) -> list[tuple[str, int | None]]:
    return [(one.kind, one.ticket) for one in verdict_on(run).violations]


def test_a_sound_run_is_found_sound_with_every_step_looked_at() -> None:
    verdict = verdict_on(sound_run())
    assert verdict.violations == ()
    assert (verdict.trained, verdict.steps_checked, verdict.outstanding) == (NUM_TICKETS, NUM_STEPS, 0)
    assert verdict.tokens_checked == NUM_TICKETS * 7


def test_a_ticket_of_which_nobody_knows_is_lost() -> None:
    run = sound_run()
    del run.ended[7]
    assert kinds(run)[0] == ("lost", 7)


def test_an_open_ticket_is_lost_where_the_streams_have_it_no_more() -> None:
    run = sound_run()
    run.issued += 2
    run.present = frozenset({NUM_TICKETS})
    assert kinds(run) == [("lost", NUM_TICKETS + 1)]


def test_a_ticket_that_was_trained_twice_is_found() -> None:
    run = sound_run()
    run.ended.append(Ended(0, "trained", 1, 4))
    assert ("twice", 0) in kinds(run)


def test_a_ticket_that_ended_in_two_ways_is_found() -> None:
    run = sound_run()
    run.ended.append(Ended(0, "dropped/stale", 1, 4))
    assert kinds(run) == [("contradictory", 0)]


def test_a_forged_group_that_was_trained_in_the_place_of_the_sound_one_is_found() -> None:
    run = sound_run()
    forged = Answer(ticket=2, prompt=2, step=1, version=version_of(1), rewards=(9.0, 9.0))
    run.forged.append(forged)
    assert kinds(run) == [], "it was only seen"
    run.figures[1, 2] = figures_of([forged, run.answers[3]])
    assert kinds(run) == [("forged", 2)]


def test_a_group_whose_body_is_not_what_its_header_says_is_found_where_it_was_trained() -> None:
    run = sound_run()
    forged = replace(run.answers[2], rewards=(9.0, 9.0))
    run.forged.append(forged)
    record = run.record()
    (seen,) = [one for one in record.seen.values() if one.name == name_of(forged.fields())]
    seen.fields = {**seen.fields, b"b": b"anything"}
    run.figures[1, 2] = figures_of([forged, run.answers[3]])
    for forgers, kind in ((run.rules(), "forged"), (replace(run.rules(), forged=()), "malformed")):
        found = judge(run.history(), record, forgers)
        assert [(one.kind, one.ticket) for one in found.violations] == [(kind, 2)]


def test_a_group_of_another_prompt_is_found() -> None:
    run = sound_run()
    run.change(5, prompt=4)
    assert kinds(run) == [("prompt", 5)]


def test_a_number_that_meant_another_prompt_in_a_branch_that_was_given_up_is_found() -> None:
    """Two rollbacks: in the branch that survives ticket 5 repeats dead ticket 1, and what was trained answers row 0."""
    run = sound_run()
    run.retries = {5: 1}
    assert kinds(run) == [("prompt", 5), ("prompt", 6), ("prompt", 7)]
    run = sound_run()
    run.retries = {7: 2}
    assert kinds(run) == []


def test_which_of_two_groups_was_trained_is_told_by_the_figures_of_the_step() -> None:
    run = sound_run()
    other = Answer(ticket=5, prompt=4, step=2, version=version_of(2), rewards=(0.25, 0.75))
    run.answers.append(other)
    assert kinds(run) == []
    run.figures[1, 3] = figures_of([run.answers[4], other])
    assert kinds(run) == [("prompt", 5)]


def test_a_wrong_sum_of_rewards_is_found() -> None:
    run = sound_run()
    run.figures[1, 2]["train_rollouts/rewards"] += 0.01
    found = verdict_on(run)
    assert [(one.kind, one.step) for one in found.violations] == [("figures", 2)]
    assert found.steps_checked == NUM_STEPS - 1


def test_a_step_without_figures_is_not_counted_as_looked_at() -> None:
    run = sound_run()
    del run.figures[1, 4]
    verdict = verdict_on(run)
    assert (verdict.violations, verdict.steps_checked) == ((), NUM_STEPS - 1)


@pytest.mark.parametrize("changes", [{"version": version_of(99)}, {"step": 1, "version": version_of(0)}])
def test_a_version_that_was_never_announced_or_not_of_this_step_is_found(changes: dict[str, int]) -> None:
    run = sound_run()
    run.change(4, **changes)
    assert set(kinds(run)) == {("version", 4)}


def test_tokens_older_than_the_bound_are_found() -> None:
    run = sound_run()
    run.change(7, step=0, version=version_of(0))
    assert set(kinds(run)) == {("lag", 7)}


def test_a_group_that_nobody_saw_and_a_ticket_that_was_never_issued_are_found() -> None:
    run = sound_run()
    del run.answers[3]
    run.issued = 7
    assert set(kinds(run)) == {("unrecorded", 3), ("unasked", 7)}


def test_a_ticket_that_came_and_went_while_nobody_looked_is_no_fault() -> None:
    run = sound_run()
    del run.asked[4]  # the only one of its prompt
    assert kinds(run) == []
    run.change(4, prompt=3)
    assert kinds(run) == [("prompt", 4)]


def test_a_group_of_another_run_is_found() -> None:
    run = sound_run()
    run.change(1, run_uid="another")
    assert kinds(run) == [("other run", 1)]


def test_the_audit_must_say_the_same() -> None:
    verdict = verdict_on(sound_run())
    audit = {"issued": 8, "trained": 8, "dropped": {}, "dead": 0, "outstanding": 0, "lost": 0, "twice": 0}
    audit |= {"contradictory": 0, "clean": True}
    assert disagreements(verdict, audit) == []
    assert disagreements(verdict, {**audit, "twice": 1, "clean": False}) == [
        "twice: the judge 0, the audit 1",
        "clean: the judge True, the audit False",
    ]


def test_prompts_go_on_behind_a_retry_and_a_shuffled_pass_has_an_order_of_its_own() -> None:
    prompts = Prompts(texts=["a", "b", "c"])
    assert [prompts.text_of(n, {2: 0}) for n in range(5)] == ["a", "b", "a", "c", "a"]
    shuffled = Prompts(texts=[str(n) for n in range(20)], seed=3, shuffle=True)
    passes = [[shuffled.text_of(20 * each + n, {}) for n in range(20)] for each in range(2)]
    assert sorted(passes[0]) == sorted(passes[1])
    assert passes[0] != passes[1]


@pytest.mark.parametrize("routes", [None, np.zeros((4, 2, 2), np.uint8)], ids=["plain", "with routes"])
def test_what_the_product_writes_is_read_as_it_was_meant(routes: np.ndarray | None) -> None:
    ticket = make_ticket(5, run_uid="uid")
    asked = read_ticket({b"n": b"5", b"u": b"uid", b"b": encode_ticket(ticket)})
    assert (asked.number, asked.prompt, asked.token_ids) == (5, ticket.prompt, tuple(ticket.token_ids.tolist()))
    samples = tuple(
        make_sample(num_tokens=4, version=version_of(1), reward=reward, routes=routes) for reward in (0.5, 2.0)
    )
    header, body = encode_group(make_group(ticket, samples=samples))
    group = read_group({b"n": b"5", b"u": b"uid", b"h": header, b"b": body})
    assert (group.number, group.rewards, group.lengths) == (5, (0.5, 2.0), (4, 4))
    assert group.prompt_ids == asked.token_ids
    assert [(span.version, span.num_tokens) for span in group.spans] == [(version_of(1), 4)] * 2


@pytest.mark.parametrize("damage", [{b"n": b"6"}, {b"u": b"x"}, {b"b": b"short"}, {b"h": b"\x80" * 9}, {b"h": b""}])
def test_an_entry_that_is_no_group_is_unreadable(damage: dict[bytes, bytes]) -> None:
    with pytest.raises(UnreadableError):
        read_group({**Answer(ticket=1, prompt=1).fields(), **damage})


def test_a_bomb_is_unreadable() -> None:
    with pytest.raises(UnreadableError):
        read_group({b"n": b"1", b"u": b"u", b"h": msgpack.packb([{}] * 5000), b"b": b""})


def write_run(folder: Path) -> None:
    """Two terms; the first one's second checkpoint is of no descent."""
    for name in ("terms", "journal", "checkpoints"):
        (folder / name).mkdir()
    (folder / "run.json").write_text(json.dumps({"run_uid": "uid"}))
    for term, parent in ((1, None), (2, "e000001-s00000002")):
        (folder / "terms" / f"{term:06d}").write_text(json.dumps({"parent": parent}))
    after = None
    for name, tickets in (("e000001-s00000002", [0, 4]), ("e000001-s00000004", [4, 8]), ("e000002-s00000003", [4, 6])):
        lines = [
            {"after": after},
            {"step": 2, "outcome": "trained", "tickets": [tickets]},
            {"num_tickets": tickets[1] - tickets[0]},
        ]
        (folder / "journal" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        ledger = {"issued": 9, "watermark": tickets[1], "exceptions": [], "retries": {"5": 1}}
        stream = {"journal": name, "cursor": "5-0", "carry": ["4-0"], "ledger": ledger}
        (folder / "checkpoints" / name).mkdir()
        content = {"state": {"step": int(name[-1]), "stream": stream}}
        (folder / "checkpoints" / name / "manifest.json").write_text(json.dumps({"content": content}))
        after = after or name
    rows = [
        {"term": 1, "step": 1, "train_rollouts/rollout_size": 8.0},
        {"term": 1, "step": 1, "val_rollouts/rewards": 1},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"term": 1, "st')


def test_history_is_what_the_newest_term_descends_from(tmp_path: Path) -> None:
    write_run(tmp_path)
    history = read_history(tmp_path)
    assert newest_checkpoint(tmp_path) == (2, 3)
    assert (history.step, history.issued, history.retries, history.cursor) == (3, 9, {5: 1}, "5-0")
    assert [ended.ticket for ended in history.ended] == [4, 5, 0, 1, 2, 3]
    assert {ended.term for ended in history.ended} == {1, 2}
    assert list(history.figures) == [(1, 1)]
    assert (history.has_resolved(5), history.has_resolved(6)) == (True, False)


def test_a_journal_that_is_cut_off_is_no_history(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = tmp_path / "journal" / "e000001-s00000002.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))
    with pytest.raises(BrokenError, match="e000001-s00000002"):
        read_history(tmp_path)


def safetensors(path: Path, tensors: dict[str, np.ndarray], starts: dict[str, int]) -> None:  # type: ignore[type-arg]
    head: dict[str, object] = {"__metadata__": {"starts": json.dumps(starts)}}
    at, data = 0, b""
    for name, values in tensors.items():
        data += values.tobytes()
        head[f"master/{name}"] = {"dtype": "F32", "shape": [len(values)], "data_offsets": [at, len(data)]}
        at = len(data)
    packed = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(packed)) + packed + data)


def test_published_weights_are_held_against_the_checkpoint_whoever_held_which_part(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    whole = {name: rng.normal(size=size).astype(np.float32) for name, size in (("a", 30), ("b", 9))}
    for rank, cut in ((0, slice(0, 20)), (1, slice(20, 30))):
        parts = {"a": whole["a"][cut], **({"b": whole["b"]} if rank == 0 else {})}
        safetensors(
            tmp_path / f"train-{rank:05d}-of-00002.safetensors",
            parts,
            {"a": cut.start, **dict.fromkeys(set(parts) - {"a"}, 0)},
        )
    masters = read_masters(tmp_path)
    assert all(np.array_equal(masters[name], whole[name]) for name in whole)
    beginning = tmp_path / "store" / "uid" / "000001"
    beginning.mkdir(parents=True)
    (beginning / "3-0-aa").write_bytes(whole["a"][:14].tobytes())
    (beginning / "3-1-bb").write_bytes(whole["a"][14:].tobytes() + whole["b"].tobytes())
    (beginning / "3-1-cc").write_bytes(b"a delta")
    (beginning / "30-0-dd").write_bytes(b"another version")
    blobs = file_store(tmp_path / "store", "uid")((1 << 32) + 3)
    assert len(blobs) == 3

    looks = WeightsLooks()
    assert looks.compare(version_of(3), 3, masters, blobs, dtype="float32")
    assert looks.violations == []
    spoilt = {**masters, "b": masters["b"] + 1}
    assert looks.compare(version_of(3), 3, spoilt, blobs, dtype="float32")
    assert [one.kind for one in looks.violations] == ["weights"]
    assert anchors_of({name: data for name, data in blobs.items() if "3-0" in name}, 156) is None


def test_masters_are_rounded_as_they_are_served() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -2.5], np.float32)  # the second and third are ties
    rounded = np.frombuffer(served_bytes(values, "bfloat16"), "<u2")
    assert rounded.tolist() == [0x3F80, 0x3F80, 0x3F82, 0xC020]
    assert missing_tensors({"a": rounded.tobytes()}, [b"..." + rounded.tobytes()]) == []
