"""Which settings a run may change when it goes on: every one is decided, and refusals say what to do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import schema
from streamrl.config.changes import changes, check_changes, refusal_of
from streamrl.config.explain import known_keys
from streamrl.errors import ConfigError, DataError
from streamrl.learner.admission.claim import claim_folder
from streamrl.learner.checkpoints.resume import REPLAY, changed_since_checkpoint, find_checkpoint, fork
from tests.feed_world import make_prompts
from tests.made_checkpoint import make_checkpoint


def make_config(**sections: Any) -> schema.Config:
    fields: dict[str, Any] = {
        "model": {"path": "models/sft"},
        "data": {"train": "train.jsonl"},
        "rewards": {"exact": {"type": "function", "target": "exact_match"}},
    }
    return schema.Config.model_validate({**fields, **sections})


def refused(**sections: Any) -> list[str]:
    return [change.key for change in changes(make_config(), make_config(**sections)) if change.refusal]


def test_it_is_decided_of_every_setting_whether_it_may_change() -> None:
    for key in known_keys():
        if not any(other.startswith(f"{key}.") for other in known_keys()):
            refusal_of(key)  # raises KeyError for one that nobody has thought of


def test_equal_configurations_have_no_changes() -> None:
    assert changes(make_config(), make_config()) == []


def test_what_changed_is_shown_from_and_to() -> None:
    [change] = changes(make_config(), make_config(optimizer={"lr": 1e-4}))
    assert (str(change), change.refusal) == ("optimizer.lr: 9e-07 -> 0.0001", None)


@pytest.mark.parametrize(
    ("sections", "keys"),
    [
        ({"sampling": {"temperature": 0.7}}, ["sampling.temperature"]),
        ({"model": {"path": "models/other"}}, ["model.path"]),
        ({"model": {"path": "models/sft", "lora": {}}}, ["model.lora.rank", "model.lora.alpha", "model.lora.targets"]),
        ({"seed": 5}, ["seed"]),
        ({"data": {"train": "elsewhere.jsonl"}}, []),
        ({"data": {"train": {"path": "train.jsonl"}}}, []),
        ({"data": {"train": {"a": {"path": "train.jsonl"}}}}, []),
        ({"data": {"train": {"path": "train.jsonl", "weight": 2.0}}}, ["data.train.weight"]),
        ({"data": {"train": {"a": {"path": "train.jsonl", "weight": 2.0}}}}, ["data.train.a.weight"]),
        (
            {"rewards": {"exact": {"type": "function", "target": "exact_match", "weight": 2.0}}},
            ["rewards.exact.weight"],
        ),
        ({"algorithm": {"name": "rejection_sampling"}}, ["algorithm.name"]),
        ({"optimizer": {"lr": 1.0}, "lag": {"max_steps": 9}, "checkpoint": {"every_steps": 3}}, []),
        ({"rewards": {"exact": {"type": "function", "target": "exact_match", "timeout_s": 99.0}}}, []),
        ({"rewards": {"exact": {"type": "function", "target": "exact_match", "memory_mb": 9000}}}, []),
        ({"redis": {"url": "redis://elsewhere:6379"}, "dir": "/elsewhere"}, []),
    ],
)
def test_what_decided_the_groups_under_way_may_not_change(sections: dict[str, Any], keys: list[str]) -> None:
    assert refused(**sections) == keys


@pytest.mark.parametrize(
    ("source", "server", "keys"),
    [
        ({"replicas": ["http://b:1"], "outage_s": 5.0, "timeout_s": 1.0, "attempts": 2}, {}, []),
        ({"url": "http://b:1", "max_concurrency": 2, "token_file": "token"}, {}, []),
        ({"form": "openrlhf", "max_abs": 5.0}, {}, ["rewards.model.form", "rewards.model.max_abs"]),
        ({}, {"host": "0.0.0.0", "port": 5555, "max_delay_ms": 9.0, "max_batch_tokens": 9}, []),
        ({}, {"model": "other", "reward_std": 2.0}, ["reward_server.model", "reward_server.reward_std"]),
        (
            {},
            {"pool": "average", "attribute_weights": [1.0, 2.0]},
            ["reward_server.pool", "reward_server.attribute_weights"],
        ),
    ],
)
def test_what_changes_a_score_is_refused_and_what_only_brings_it_is_not(
    source: dict[str, Any], server: dict[str, Any], keys: list[str]
) -> None:
    def scored(source: dict[str, Any], server: dict[str, Any]) -> schema.Config:
        service = {"type": "http", "url": "local", **source}
        return make_config(rewards={"model": service}, reward_server={"model": "rm", **server})

    found = changes(scored({}, {}), scored(source, server))
    assert [change.key for change in found if change.refusal] == keys
    assert found


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ({"urls": ["http://b:1", "http://c:1"], "token_file": "token", "outage_s": 5.0}, []),
        ({"timeout_s": 1.0, "rollout_timeout_s": 30.0, "key_in_url": True}, []),
        (
            {"urls": [], "target": "game.py:Game", "max_turns": 3},
            ["environment.target", "environment.max_turns"],
        ),
    ],
)
def test_how_an_environment_is_reached_may_change_and_what_it_is_may_not(
    settings: dict[str, Any], keys: list[str]
) -> None:
    def played(**settings: Any) -> schema.Config:
        return make_config(environment={"urls": ["http://a:1"], **settings})

    found = changes(played(), played(**settings))
    assert [change.key for change in found if change.refusal] == keys
    assert found


def judged(**judge: Any) -> dict[str, Any]:
    return {"type": "judge", "rubric": "r", "judges": {"a": {"model": "m", **judge}}}


@pytest.mark.parametrize(
    ("before", "after", "keys"),
    [
        (
            {"type": "code", "processes": 2, "tests": {"memory_mb": 512}},
            {"type": "code", "processes": 4, "tests": {"memory_mb": 64}},
            ["rewards.source.tests.memory_mb"],
        ),
        (
            {"type": "function", "target": "own.py:f", "options": {"timeout_s": 1, "memory_mb": 1}},
            {"type": "function", "target": "own.py:f", "options": {"timeout_s": 2, "memory_mb": 2}},
            ["rewards.source.options.timeout_s", "rewards.source.options.memory_mb"],
        ),
        (judged(url="http://a:1/v1"), judged(url="http://b:1/v1", token_file="token"), []),
        (judged(url="http://a:1/v1", token_file="token"), judged(url="http://a:1/v1", token_env="KEY"), []),
        (
            judged(url="http://a:1/v1", options={"url": 0}),
            judged(url="http://a:1/v1", options={"url": 1}),
            ["rewards.source.judges.a.options.url"],
        ),
    ],
)
def test_what_a_setting_means_depends_on_its_place(
    before: dict[str, Any], after: dict[str, Any], keys: list[str]
) -> None:
    found = changes(make_config(rewards={"source": before}), make_config(rewards={"source": after}))

    assert [change.key for change in found if change.refusal] == keys
    assert found


def test_a_datasets_options_may_be_called_like_its_settings() -> None:
    def made(weight: int) -> schema.Config:
        return make_config(data={"train": {"a": {"reasoning_gym": "gcd", "options": {"weight": weight}}}})

    assert [change.refusal for change in changes(made(1), made(2))] == [None]


def test_a_reward_that_came_or_went_is_refused() -> None:
    more = {"exact": {"type": "function", "target": "exact_match"}, "more": {"type": "function", "target": "length"}}
    before, after = make_config(), make_config(rewards=more)
    assert any(change.refusal for change in changes(before, after))
    assert any(change.refusal for change in changes(after, before))


def scored_by(target: str, **sections: Any) -> schema.Config:
    return make_config(rewards={"near": {"type": "function", "target": target}}, **sections)


def refusals(before: schema.Config, after: schema.Config) -> list[str]:
    return [change.key for change in changes(before, after) if change.refusal]


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        ("a.py:near", "./a.py:near", True),
        ("a.py:near", "{here}/a.py:near", True),
        ("{here}/a.py:near", "nested/../a.py:near", True),
        ("a.py:near", "a.py:far", False),
        ("a.py:near", "nested/a.py:near", False),
        ("a.py:near", "{here}/nested/a.py:near", False),
        ("package.near:f", "package.far:f", False),
    ],
)
def test_code_may_be_named_in_another_way_but_not_be_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, is_same: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nested").mkdir()
    one, other = (target.format(here=tmp_path) for target in (before, after))

    assert refusals(scored_by(one), scored_by(other)) == ([] if is_same else ["rewards.near.target"])
    played = [make_config(environment={"target": target}) for target in (one, other)]
    assert refusals(*played) == ([] if is_same else ["environment.target"])


def test_paths_of_a_run_that_is_continued_from_another_working_directory_are_those_of_its_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("sft", "nested/sft", "runs/run"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "nested")
    begun = scored_by("a.py:near", model={"path": "sft"})

    def continued(target: str, model: str) -> list[str]:
        return refusals(begun, scored_by(target, model={"path": model}, dir="../runs"))

    assert continued(f"{tmp_path}/a.py:near", "../sft") == []
    assert continued(f"{tmp_path}/b.py:near", "../runs") == ["model.path", "rewards.near.target"]


def test_relative_paths_of_a_run_in_an_absolute_folder_begin_where_it_worked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("first/sft", "second/sft"):
        (tmp_path / folder).mkdir(parents=True)
    runs = {"dir": str(tmp_path / "runs")}
    monkeypatch.chdir(tmp_path / "first")
    begun = scored_by("a.py:near", model={"path": "sft"}, **runs)
    make_checkpoint(begun)
    monkeypatch.chdir(tmp_path / "second")

    def keys_refused(target: str, model: str) -> list[str]:
        try:
            changed_since_checkpoint(scored_by(target, model={"path": model}, **runs))
        except ConfigError as error:
            return [line.partition(":")[0] for line in str(error).splitlines()[:-1]]
        return []

    assert keys_refused("../first/a.py:near", "../first/sft") == []
    assert keys_refused("./a.py:near", "./sft") == ["model.path", "rewards.near.target"]
    (tmp_path / "first").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    assert keys_refused(f"{tmp_path}/moved/a.py:near", f"{tmp_path}/moved/sft") == []


def test_a_run_without_a_checkpoint_of_its_own_keeps_the_settings_of_its_groups(tmp_path: Path) -> None:
    """They may still be in Redis; and it is told how it begins from nothing."""
    begun = make_config(dir=str(tmp_path))
    hotter = make_config(dir=str(tmp_path), sampling={"temperature": 0.5})
    claim_folder(begun, make_prompts(4))
    with pytest.raises(
        ConfigError, match=r"temperature: 1.0 -> 0.5.*\n.* no checkpoint yet, .* remove .*`streamrl runs rm"
    ):
        changed_since_checkpoint(hotter)
    assert changed_since_checkpoint(make_config(dir=str(tmp_path), optimizer={"lr": 1.0})) == []
    with pytest.raises(ConfigError):
        claim_folder(hotter, make_prompts(4))
    assert len(list((begun.folder / "terms").iterdir())) == 1
    shutil.rmtree(begun.folder)
    claim_folder(hotter, make_prompts(4))


def test_a_replay_without_a_checkpoint_may_change_everything(tmp_path: Path) -> None:
    """Its groups are the recording's."""
    begun = make_config(dir=str(tmp_path))
    claim_folder(begun, make_prompts(4))
    (begun.folder / REPLAY).touch()
    assert changed_since_checkpoint(make_config(dir=str(tmp_path), sampling={"temperature": 0.5})) == []


def test_prompts_of_another_order_are_refused_before_the_run_is_claimed(tmp_path: Path) -> None:
    """Otherwise the refused settings would be those that a fork has to keep."""
    old = make_config(dir=str(tmp_path), name="old")
    prompts = make_prompts(4)
    make_checkpoint(old, data_fingerprint=prompts.fingerprint())
    fork(find_checkpoint(str(old.folder)), tmp_path / "new", new_data=False)
    new = make_config(dir=str(tmp_path), name="new")
    with pytest.raises(DataError, match="made with other prompts, seed or order"):
        claim_folder(new, make_prompts(4, seed=2))
    claim_folder(new, prompts)
    assert len(list((new.folder / "terms").iterdir())) == 2


def test_a_fork_may_change_everything_until_a_learner_has_taken_it(tmp_path: Path) -> None:
    old = make_config(dir=str(tmp_path), name="old")
    make_checkpoint(old)
    fork(find_checkpoint(str(old.folder)), tmp_path / "new", new_data=True)
    new = make_config(dir=str(tmp_path), name="new", sampling={"temperature": 0.5})
    assert changed_since_checkpoint(new) == []
    claim_folder(new, make_prompts(4))
    assert changed_since_checkpoint(new) == []
    with pytest.raises(ConfigError, match=r"temperature: 0.5 -> 0.7.*\n.*--fork"):
        changed_since_checkpoint(make_config(dir=str(tmp_path), name="new", sampling={"temperature": 0.7}))


def test_a_notebooks_functions_move_with_their_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = scored_by("runs/run/rewards/near.pkl:near")
    elsewhere = {"dir": str(tmp_path / "data")}
    moved = scored_by(f"{tmp_path}/data/run/rewards/near.pkl:near", **elsewhere)
    for folder, code in (("data/run", b"near"), ("data/other", b"far")):
        (tmp_path / folder / "rewards").mkdir(parents=True)
        (tmp_path / folder / "rewards" / "near.pkl").write_bytes(code)

    assert refusals(before, moved) == []
    for other in ("data/run/rewards/far.pkl:far", "data/other/rewards/near.pkl:near", "near.pkl:near"):
        assert refusals(before, scored_by(other, **elsewhere)) == ["rewards.near.target"]


@pytest.mark.parametrize(("code", "keys"), [(b"near", []), (b"far", ["rewards.near.target"])])
def test_functions_of_two_runs_that_are_both_there_are_the_same_if_their_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: bytes, keys: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, content in (("runs", b"near"), ("copies", code)):
        (tmp_path / folder / "run" / "rewards").mkdir(parents=True)
        (tmp_path / folder / "run" / "rewards" / "near.pkl").write_bytes(content)

    found = [scored_by(f"{folder}/run/rewards/near.pkl:near", dir=folder) for folder in ("runs", "copies")]

    assert refusals(*found) == keys


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        ("./sft", "sft", True),
        ("sft", "{here}/sft", True),
        ("sft", "link", True),
        ("sft", "other", False),
        ("sft", "{here}/gone", False),
        ("owner/name", "owner/other", False),
    ],
)
def test_a_model_may_be_named_in_another_way_but_not_be_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, is_same: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("sft", "other"):
        Path(folder).mkdir()
    Path("link").symlink_to("sft")
    one, other = (make_config(model={"path": path.format(here=tmp_path)}) for path in (before, after))

    assert refusals(one, other) == ([] if is_same else ["model.path"])


def test_a_refusal_names_every_setting_and_the_way_out() -> None:
    found = changes(make_config(), make_config(seed=5, sampling={"temperature": 0.7}))
    with pytest.raises(ConfigError) as caught:
        check_changes(found, folder="runs/run")
    told = str(caught.value)
    assert "seed: 1234 -> 5: it decides which prompts this run's ticket numbers refer to" in told
    assert "sampling.temperature: 1.0 -> 0.7: this run's groups were sampled with it" in told
    assert "--fork runs/run" in told


@pytest.mark.parametrize(
    ("settings", "of_judge", "keys"),
    [
        ({"max_tokens": 2000, "attempts": 9, "token_budget": 5}, {}, []),
        ({}, {"options": {"max_tokens": None, "max_completion_tokens": 9}}, []),
        ({"temperature": 1.0}, {}, ["rewards.j.temperature"]),
        (
            {},
            {"options": {"max_tokens": None, "max_completion_tokens": 5, "seed": 1}},
            ["rewards.j.judges.a.options.seed"],
        ),
    ],
)
def test_what_limits_a_judge_may_change_and_what_decides_its_verdict_may_not(
    settings: dict[str, Any], of_judge: dict[str, Any], keys: list[str]
) -> None:
    def judged(settings: dict[str, Any], of_judge: dict[str, Any]) -> schema.Config:
        options = {"max_tokens": None, "max_completion_tokens": 5}
        judge = {"url": "http://j:1", "model": "m", "options": options, **of_judge}
        return make_config(rewards={"j": {"type": "judge", "judges": {"a": judge}, "rubric": "good", **settings}})

    found = changes(judged({}, {}), judged(settings, of_judge))
    assert [change.key for change in found if change.refusal] == keys
    assert found
