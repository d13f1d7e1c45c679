"""The data that a run trains and validates on: a configuration's section `data`. `config.schema` has all others."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date as calendar_date
from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from streamrl.data.dataset import SOURCES, Dataset
from streamrl.settings import Positive, Section

DATE = "2026-01-01"  # any day is as good: what counts is that it stays


def _form_of(value: object) -> str:
    """Choose the form, so that errors in a map refer to its entries and not to a path."""
    if isinstance(value, dict):
        is_one = any(name in value and not isinstance(value[name], dict) for name in SOURCES)
        return "a dataset" if is_one else "a map"
    return "a dataset" if isinstance(value, Dataset) else "a path"


Datasets = Annotated[
    Annotated[str, Tag("a path")]
    | Annotated[Dataset, Tag("a dataset")]
    | Annotated[dict[str, Dataset], Field(min_length=1), Tag("a map")],
    Discriminator(_form_of),
]


def _calendar_date(text: str) -> str:
    try:
        return calendar_date.fromisoformat(text).isoformat()
    except ValueError:
        raise PydanticCustomError("calendar_date", "must be a date such as 2026-01-01") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedDataset:
    """A dataset of the configuration, whatever form it was written in."""

    key: str  # the setting that names its source
    name: str = ""  # empty if there is only one
    dataset: Dataset


class Data(Section):
    # JSONL of prompts: {"text"|"prompt"|"messages": ..., other fields go to the rewards}; a dataset with other columns,
    # or of a hub; or several, by name
    train: Datasets
    validation: Datasets | None = None  # in the same forms; with several, metrics carry their names
    max_prompt_tokens: Positive = 1024
    # A prompt over max_prompt_tokens; truncate: its last tokens are the prompt, and their text is what rewards see
    overlong: Literal["error", "skip", "truncate"] = "error"
    malformed: Literal["error", "skip"] = "error"  # a line that is not a prompt; skipped ones are counted
    shuffle: bool = True
    curriculum: bool = False  # prompts whose samples all get the same reward are drawn less often (docs/data.md)
    # What chat templates that write today's date take for today: by the clock, prompts would change from day to day
    date: Annotated[str, AfterValidator(_calendar_date)] = DATE

    def train_sets(self) -> tuple[NamedDataset, ...]:
        if isinstance(self.train, dict):
            return tuple(_named(dataset, f"data.train.{name}", name) for name, dataset in self.train.items())
        return (_named(self.train, "data.train"),)

    def validation_sets(self) -> tuple[NamedDataset, ...]:
        if isinstance(self.validation, dict):
            return tuple(_named(dataset, f"data.validation.{name}", name) for name, dataset in self.validation.items())
        return () if self.validation is None else (_named(self.validation, "data.validation"),)

    def datasets(self) -> tuple[NamedDataset, ...]:
        """All datasets: first those for training, then those held out."""
        return (*self.train_sets(), *self.validation_sets())


def _named(source: str | Dataset, key: str, name: str = "") -> NamedDataset:
    if isinstance(source, str):
        return NamedDataset(key=key, name=name, dataset=Dataset(path=source))
    return NamedDataset(key=f"{key}.{source.source}", name=name, dataset=source)
