"""A dataset as a configuration names it: where its rows lie, and which of their columns is what.

train.jsonl                                              a file whose lines are prompts already
{path: train.jsonl, prompt: question}                    a file with names of its own
{hub: openai/gsm8k, name: main, prompt: question}        whatever the library `datasets` loads (hub.py)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from streamrl.settings import Section

Weight = Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]

_COLUMN = re.compile(r"\{(\w+)\}")


class Dataset(Section):
    path: str | None = None  # a file of JSON Lines; this or `hub`
    hub: str | None = None  # OWNER/NAME on a hub, or a folder of JSON Lines, CSV or Parquet
    name: str | None = None  # of the hub's dataset: which of its configurations
    split: str = "train"  # likewise; train[:1000] is a part of it
    revision: str | None = None  # likewise: a commit, branch or tag, by default the newest
    # The column that is the prompt, a text or a list of messages, or a text with {columns} in it; null: the column
    # text, prompt or messages
    prompt: str | None = None
    chat: bool = False  # a prompt that is a text is what a user says, to be put into the chat template
    # What rewards get: a column by each name; null: all further columns by their own names
    fields: dict[str, str] | None = None
    # A pass over the data asks for weight x its rows: 2 for each row twice, 0.5 for half of them, in turn.
    weight: Weight = 1.0

    @property
    def place(self) -> str:
        """How errors name it."""
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
