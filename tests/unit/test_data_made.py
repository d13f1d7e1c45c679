"""Prompts that a library makes, here a stand-in of reasoning-gym with one task. The real one: tests/integration."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.data.dataset import Dataset
from streamrl.data.prompts import PromptRow, read_prompts
from streamrl.errors import DataError, ResourceError

LIBRARY = """
import dataclasses, os, random, sys

@dataclasses.dataclass
class Settings:
    size: int
    seed: int
    words: int = 3
    def validate(self): assert self.words > 0, "words must be above 0"

class Task:
    def __init__(self, settings):
        settings.validate()
        self.settings = settings
    def __getitem__(self, place):
        print("a library prints what it likes")
        drawn = random.Random(self.settings.seed + place).sample(range(10**6), self.settings.words)
        first = next(iter({str(number) for number in drawn}))  # by the order of a set
        return {"question": f"{drawn}?", "answer": first, "metadata": {"source_dataset": "draw"}}

class Curriculum:
    attributes = {"words": type("Attribute", (), {"levels": [1, 2, 4]})}
    def set_global_level(self, level): self.level = level
    def generate_configuration(self, defaults): return Settings(**defaults, words=[1, 2, 4][self.level])

DATASETS = {"draw": (Task, Settings), "dry": (Task, Settings)}
CURRICULA = {"draw": Curriculum}
"""


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "libraries" / "reasoning_gym"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "factory.py").write_text(LIBRARY)
    (folder / "utils.py").write_text("SYSTEM_PROMPTS = {'default': 'Think.'}\n")
    about = folder.parent / "reasoning_gym-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: reasoning-gym\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setenv("PYTHONPATH", f"{folder.parent}:{Path(__file__).parents[2]}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def read(**settings: object) -> tuple[PromptRow, ...]:
    dataset = Dataset(**{"reasoning_gym": "draw", "size": 4, **settings})
    return read_prompts(dataset, malformed="error", key="data.train.reasoning_gym").rows


def test_a_row_asks_as_its_users_do_and_holds_what_its_judgement_needs() -> None:
    (row,) = read(size=1, level=1, options={"words": 5})

    assert row.messages is not None
    assert [message["role"] for message in row.messages] == ["system", "user"]
    assert row.messages[1]["content"] == row.fields["question"]
    assert row.fields["metadata"] == {"source_dataset": "draw"}
    assert row.fields["reasoning_gym"] == {"task": "draw", "level": 1, "options": {"words": 5}}


def test_a_prompt_of_ones_own_is_a_text_or_what_a_user_says() -> None:
    (text,) = read(size=1, prompt="{question} In tags.")
    (said,) = read(size=1, prompt="question", chat=True)

    assert (text.text or "").endswith("? In tags.")
    assert "messages" not in text.fields
    assert said.messages is not None
    assert [message["role"] for message in said.messages] == ["user"]


def test_the_same_settings_make_the_same_rows_whatever_order_sets_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / seed))
        made.append(read(size=20))

    assert made[0] == made[1]


def test_seeds_side_by_side_share_no_item() -> None:
    first, second = ({row.fields["question"] for row in read(size=50, seed=seed)} for seed in (1, 2))

    assert len(first) == len(second) == 50
    assert not first & second


def test_what_was_made_is_read_again_until_a_setting_or_the_library_changes(library: Path) -> None:
    first = read()
    (library / "factory.py").write_text(LIBRARY.replace("}?", "} now?"))

    assert read() == first
    assert read(size=5) != first
    about = next(library.parent.glob("*.dist-info")) / "METADATA"
    about.write_text(about.read_text().replace("1.0", "1.1"))
    assert read()[0].fields["question"].endswith("now?")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"reasoning_gym": "drew"},
            "reasoning_gym = 'drew': reasoning-gym has no such task; did you mean 'draw'",
        ),
        ({"options": {"word": 1}}, "the task has no option 'word'; it has words"),
        ({"options": {"words": 0}}, "words must be above 0"),
        ({"level": 3}, "level 3 is beyond the curriculum's last level, 2"),
        ({"reasoning_gym": "dry", "level": 0}, "the task has no curriculum"),
    ],
)
def test_what_the_library_has_not_or_refuses_is_told_in_its_words(settings: dict[str, object], words: str) -> None:
    with pytest.raises(DataError) as raised:
        read(**settings)

    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_library_that_is_not_there_or_not_whole_names_the_extra(library: Path) -> None:
    (library / "factory.py").write_text("import no_such_package")
    with pytest.raises(DataError, match=r"No module named 'no_such_package'.*\[reasoning-gym\]"):
        read()
    with pytest.raises(ResourceError, match=r"needs textarena, not installed here.*\[textarena\]"):
        read(reasoning_gym=None, textarena="Hangman-v0")
