"""Checks a multi-turn rollout by exhaustive search, independently of the code that builds it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamrl.protocol.wire.sample import Sample
from streamrl.workers.engines.base import Generated


def check_by_brute_force(prompt: list[int], sample: Sample, said: Sequence[tuple[list[int], Generated]]) -> None:
    """Check without the code of trace and player: each turn follows exactly its own context, in some row, with its
    logprobs and versions; no two share a place; and nothing else has a loss, a version or a logprob."""
    whole = [*prompt, *sample.token_ids.tolist()]
    ends = [*(branch.start for branch in sample.branches), len(sample.token_ids)]
    rows = [list(range(len(prompt) + ends[0]))]
    for branch, end in zip(sample.branches, ends[1:], strict=True):
        rows.append(rows[branch.row][: branch.keep] + list(range(len(prompt) + branch.start, len(prompt) + end)))
    version_of: dict[int, int] = {}
    for span in sample.spans:
        version_of |= dict.fromkeys(range(span.start, span.end), span.version)
    mask, found = sample.loss_mask(), set[int]()
    for context, generated in said:
        if len(generated.token_ids) == 0:
            continue
        tokens, size = generated.token_ids.tolist(), len(context)
        places = [row[size : size + len(tokens)] for row in rows if [whole[at] for at in row[:size]] == context]
        own = [[at - len(prompt) for at in each] for each in places if [whole[at] for at in each] == tokens]
        likely = [each for each in own if sample.logprobs[each].tolist() == generated.logprobs.tolist()]
        free = [each for each in likely if found.isdisjoint(each)]
        assert free, "the turn is in no row, or its tokens stand for another one's, too"
        made = [span.version for span in generated.spans for _ in range(span.start, span.end)]
        assert [version_of[at] for at in free[0]] == made
        found |= set(free[0])
    assert set(np.flatnonzero(mask).tolist()) == found == set(version_of)
    assert not sample.logprobs[~mask].any()
