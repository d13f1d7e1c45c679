"""A dataset as a configuration names it: where its rows lie, and which of their columns is what.

train.jsonl                                              a file whose lines are prompts already
{path: train.jsonl, prompt: question}                    a file with names of its own
{hub: openai/gsm8k, name: main, prompt: question}        whatever the library `datasets` loads (hub.py)
{reasoning_gym: chain_sum, size: 10000}                  tasks that a library makes (made.py), each with its question
{textarena: GuessTheNumber-v0, size: 1000}               games, each with its rules
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, JsonValue

from streamrl.settings import NonNegative, Section

Weight = Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]

# Item i of a library's dataset is made from its seed + i: with seeds side by side the items would be the same, moved by
# one, and what is held out would be trained.
BETWEEN_SEEDS = 1_000_003
_MAX_SEED = 2**32 // BETWEEN_SEEDS - 1  # no more bits than every generator takes
MADE = ("reasoning_gym", "textarena")  # the settings that name what a library makes
SOURCES = ("path", "hub", *MADE)

_COLUMN = re.compile(r"\{(\w+)\}")


class Dataset(Section):
    path: str | None = None  # a file of JSON Lines; this, or one of the next three
    hub: str | None = None  # OWNER/NAME on a hub, or a folder of JSON Lines, CSV or Parquet
    reasoning_gym: str | None = None  # one of its tasks: chain_sum
    textarena: str | None = None  # one of its games for a single player: GuessTheNumber-v0
    name: str | None = None  # of the hub's dataset: which of its configurations
    split: str = "train"  # likewise; train[:1000] is a part of it
    revision: str | None = None  # likewise: a commit, branch or tag, by default the newest
    size: Annotated[int, Field(ge=1, le=BETWEEN_SEEDS)] = 1000  # of what a library makes: so many items
    seed: Annotated[int, Field(ge=0, le=_MAX_SEED)] = 0  # likewise: other seeds make other items
    level: NonNegative | None = None  # of a task's curriculum; null: its own settings
    options: dict[str, JsonValue] = Field(default_factory=dict)  # of the task or game, by its own names
    # The column that is the prompt, a text or a list of messages, or a text with {columns} in it; null: the column
    # text, prompt or messages; of what a library makes: a chat that asks as its users do
    prompt: str | None = None
    chat: bool = False  # a prompt that is a text is what a user says, to be put into the chat template
    # What rewards get: a column by each name; null: all further columns by their own names
    fields: dict[str, str] | None = None
    # A pass over the data asks for weight x its rows: 2 for each row twice, 0.5 for half of them, in turn.
    weight: Weight = 1.0

    @property
    def source(self) -> str:
        """The setting that names where its rows come from."""
        return next((name for name in SOURCES if getattr(self, name) is not None), "path")

    @property
    def place(self) -> str:
        """How errors name it."""
        if self.source in MADE:
            return f"{self.source}/{getattr(self, self.source)}"
        if self.hub is None:
            return str(self.path)
        return "/".join(part for part in (self.hub.rstrip("/"), self.name, self.split) if part)

    @property
    def columns(self) -> list[str] | None:
        """Those that are asked for by name; None: all there are."""
        if self.fields is None:
            return None
        of_prompt = ["text", "prompt", "messages"] if self.prompt is None else named_in(self.prompt)
        return list(dict.fromkeys([*of_prompt, *self.fields.values()]))


def named_in(prompt: str) -> list[str]:
    """The columns of `Dataset.prompt`."""
    return _COLUMN.findall(prompt) or [prompt]


def written(prompt: str, row: Mapping[str, Any]) -> Any:
    """What `Dataset.prompt` amounts to in a row that has its columns."""
    if not _COLUMN.search(prompt):
        return row[prompt]
    return _COLUMN.sub(lambda found: str(row[found[1]]), prompt)
