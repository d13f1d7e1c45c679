"""Reads the prompts as the learner does, within a time limit: their lengths, tokens and number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from streamrl.config import schema
from streamrl.errors import DataError
from streamrl.finding import Finding, ok, warning

if TYPE_CHECKING:
    from streamrl.learner.loading.tokenizer import TokenizerInfo

_READ_S = 10.0  # time limit for tokenising a dataset's prompts; the learner reads the rest


def check_prompts(config: schema.Config, info: TokenizerInfo, *, at_most_s: float = _READ_S) -> Iterator[Finding]:
    from streamrl.learner.groups.prompts import PromptSet, ReadLimit, num_shared, tokenise

    data, training, limit = config.data, config.training, ReadLimit(at_most_s=at_most_s)
    prompts = PromptSet.load(tokenizer=info.tokenizer, data=data, seed=config.seed, limit=limit)
    is_number_known = limit.num_read == limit.num_rows
    held_out = [row for named in data.validation_sets() for row in tokenise(named, info.tokenizer, data, limit=limit)]
    rows = [*prompts.rows, *held_out]
    longest = max(rows, key=lambda row: len(row.token_ids))
    highest = max(int(row.token_ids.max()) for row in rows)
    if highest >= info.vocabulary:
        problem = f"a prompt has token id {highest}, but the model has {info.vocabulary} outputs"
        raise DataError(f"model.path = {config.model.path!r}: {problem}: model and tokenizer do not match")
    told = f"{len(rows)} tokenised"
    if limit.num_read < limit.num_rows:
        told = f"{limit.num_read} of {limit.num_rows} tokenised ({at_most_s:g} s per dataset; the learner reads all)"
    yield ok("prompts", f"{told}, {len(longest.token_ids)} tokens at most")
    if shared := num_shared(held_out, prompts.rows):
        problem = f"{shared} of {len(held_out)} prompts of data.validation are in data.train, too"
        yield warning("held-out prompts", problem, "validate on rows of their own: another file, or another `split`")
    num_places, wanted = prompts.num_places(training.max_epochs), training.groups_per_step
    if is_number_known and num_places < wanted:
        problem = f"data.train gives {num_places} prompts in training.max_epochs = {training.max_epochs}"
        problem += f", fewer than training.groups_per_step = {wanted}: the run is a single, smaller step"
        yield warning("number of prompts", problem, "lower training.groups_per_step, or raise training.max_epochs")
