"""Datasets of a hub, read by the library `datasets` from folders that are laid out as on a hub."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from streamrl.config import schema
from streamrl.config.check import check_config
from streamrl.config.load import Loaded, load_config
from streamrl.data.dataset import Dataset
from streamrl.data.prompts import read_prompts
from streamrl.errors import DataError
from streamrl.learner.groups.prompts import PromptSet
from streamrl.recipe.rewards import numeric_match, regex_format
from tests.hub_world import gsm8k_rows, write_gsm8k, write_gsm8k_files
from tests.tiny_models import make_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    return write_gsm8k(tmp_path / "gsm8k")


def read(folder: Path, **settings: Any) -> Any:
    return read_prompts(Dataset(hub=str(folder), **settings), malformed="error", key="data.train.hub").rows


def write_parquet(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    return folder


def test_columns_become_the_prompt_and_the_fields_of_rewards(gsm8k: Path) -> None:
    rows = read(gsm8k, name="main", prompt="question")

    assert [row.text for row in rows] == [row["question"] for row in gsm8k_rows(6)]
    assert [dict(row.fields) for row in rows] == [{"answer": row["answer"]} for row in gsm8k_rows(6)]
    assert [row.line for row in rows] == [1, 2, 3, 4, 5, 6]


def test_the_prompts_column_may_be_a_field_too(gsm8k: Path) -> None:
    (row, *_) = read(gsm8k, name="main", prompt="question", fields={"asked": "question"})

    assert (row.text, row.fields) == (gsm8k_rows(1)[0]["question"], {"asked": gsm8k_rows(1)[0]["question"]})


def test_a_split_or_a_part_of_it_is_read_alone(gsm8k: Path) -> None:
    assert len(read(gsm8k, name="main", split="test", prompt="question")) == 3
    assert len(read(gsm8k, name="main", split="train[:4]", prompt="question")) == 4
    assert len(read(gsm8k, name="socratic", prompt="question")) == 1


def test_a_prompt_may_be_a_text_with_columns_in_it_and_what_a_user_says(gsm8k: Path) -> None:
    (row, *_) = read(gsm8k, name="main", prompt="{question}\nEnd with ####.", chat=True, fields={"right": "answer"})

    said = gsm8k_rows(1)[0]
    messages = [{"role": "user", "content": f"{said['question']}\nEnd with ####."}]
    assert row.messages == tuple(messages)
    assert row.fields == {"right": said["answer"], "messages": messages}


def test_a_column_of_messages_is_a_chat_whatever_its_name(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief.", "name": None}, {"role": "user", "content": "hi", "name": "me"}]
    folder = write_parquet(tmp_path / "chats", [{"prompt": chat, "level": 3}])

    (row,) = read(folder)

    assert row.messages == ({"role": "system", "content": "Be brief."}, chat[1])
    assert row.fields["level"] == 3


@pytest.mark.parametrize("kind", ["parquet", "lines of JSON"])
def test_messages_whose_calls_have_other_arguments_are_read_as_they_were_written(tmp_path: Path, kind: str) -> None:
    """From Parquet with all keys in all maps; lines of JSON are kept by `datasets` as text where their keys differ."""

    def calling(name: str, **arguments: Any) -> dict[str, Any]:
        call = {"function": {"name": name, "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    chat = [
        calling("add", a=1, b=[{"c": 2}, {"d": 3}]),
        calling("find", text="x"),
        {"role": "user", "content": "go on"},
    ]
    folder = tmp_path / "calls"
    if kind == "parquet":
        write_parquet(folder, [{"prompt": chat}])
    else:
        folder.mkdir()
        (folder / "train.jsonl").write_text(json.dumps({"prompt": chat}) + "\n")

    (row,) = read(folder)

    assert row.messages == tuple(chat)


def test_lines_of_json_in_a_folder_keep_their_order(tmp_path: Path) -> None:
    lines = [{"prompt": f"say {i}", "answer": i} for i in range(2500)]
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    assert [row.fields["answer"] for row in read(tmp_path / "own")] == list(range(2500))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "main", "split": "validation", "prompt": "question"}, ("validation", "train", "test")),
        ({"name": "hard", "prompt": "question"}, ("hard", "main", "socratic")),
        ({"prompt": "question"}, ("main", "socratic")),
        ({"name": "main", "prompt": "text"}, ("gsm8k/main/train has no column 'text'", "question, answer")),
        ({"name": "main", "prompt": "{question} {hint}"}, ("no column 'hint'", "question, answer")),
        ({"name": "main", "prompt": "question", "fields": {"a": "target"}}, ("no column 'target'", "question, answer")),
        ({"name": "main"}, ("'text', 'prompt' and 'messages'", "question, answer")),
    ],
)
def test_what_is_not_there_is_told_with_what_is(gsm8k: Path, settings: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(DataError) as caught:
        read(gsm8k, **settings)

    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


def test_a_column_that_is_no_json_is_named_and_may_be_left_out(tmp_path: Path) -> None:
    folder = write_parquet(tmp_path / "seen", [{"question": "What?", "picture": b"\x89PNG", "answer": "this"}])

    with pytest.raises(DataError, match=r"column 'picture' of .*/seen/train holds a bytes, which is not JSON"):
        read(folder, prompt="question")
    assert read(folder, prompt="question", fields={"answer": "answer"})[0].fields == {"answer": "this"}


def test_no_such_folder_is_one_line_and_so_is_no_network(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "{model: {path: a/b}, data: {train: {hub: nobody/nothing, prompt: q}}, validation: {every_steps: 0}, "
        "rewards: {r: {type: function, target: exact_match}}}"
    )
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    checked = subprocess.run(
        [sys.executable, "-m", "streamrl.ops.cli.main", "config", "check", "run.yaml"],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert checked.returncode == 2
    (line,) = checked.stderr.splitlines()
    assert line.startswith("error: data.train.hub = 'nobody/nothing' cannot be fetched: ")
    assert "HF_HOME" in line


def test_without_the_library_its_extra_is_named(gsm8k: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.extras.importlib.util.find_spec", lambda name: None)

    with pytest.raises(Exception, match=r"data\.train\.hub = '.*gsm8k' needs datasets, .*\[hub\]"):
        read(gsm8k, name="main", prompt="question")


def prompts(loaded: Loaded) -> PromptSet:
    check_config(loaded.config, loaded.origin)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    return PromptSet.load(tokenizer=tokenizer, data=loaded.config.data, seed=loaded.config.seed)


def from_page(folder: Path) -> Path:
    """The configuration of docs/data.md that reads GSM8K from its files."""
    (text,) = re.findall(r"```yaml\n(extends:.*?)```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL)
    (folder / "files.yaml").write_text(text)
    return folder / "files.yaml"


def test_gsm8k_means_the_same_from_a_hub_and_from_its_files(
    gsm8k: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_gsm8k_files(tmp_path)
    hub = load_config("conf/gsm8k.yaml", [f"data.train.hub={gsm8k}", f"data.validation.hub={gsm8k}"])
    files = load_config(from_page(tmp_path))

    ours, theirs = prompts(hub), prompts(files)

    assert len(ours.rows) == 6
    assert ours.fingerprint() == theirs.fingerprint()
    assert hub.config.rewards == files.config.rewards
    assert "#### and the number" in ours.rows[0].text


def test_the_reward_of_gsm8k_is_the_number_after_its_mark(gsm8k: Path) -> None:
    rewards = load_config("conf/gsm8k.yaml").config.rewards
    right, form = rewards["right"], rewards["form"]
    assert isinstance(right, schema.FunctionReward)
    assert isinstance(form, schema.FunctionReward)
    (_, row, *_) = read(gsm8k, name="main", prompt="question")

    def scores(completion: str) -> list[float]:
        given = ("", completion, [], row.fields)
        return [numeric_match(*given, **right.options), regex_format(*given, **form.options)]  # type: ignore[arg-type]

    assert scores(row.fields["answer"]) == [1.0, 1.0]
    assert scores("It is 1,500.\n#### 1500") == [1.0, 1.0]
    assert scores("It is 1,500.") == [0.0, 0.0]
    assert scores("#### 7") == [0.0, 1.0]


def test_a_dataset_that_has_changed_is_another(gsm8k: Path) -> None:
    overrides = [f"data.train.hub={gsm8k}", f"data.validation.hub={gsm8k}"]
    before = prompts(load_config("conf/gsm8k.yaml", overrides)).fingerprint()
    assert prompts(load_config("conf/gsm8k.yaml", overrides)).fingerprint() == before

    write_gsm8k(gsm8k, num_train=5)

    assert prompts(load_config("conf/gsm8k.yaml", overrides)).fingerprint() != before
