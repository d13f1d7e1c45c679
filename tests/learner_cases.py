"""Shared by the learner's tests: groups as a worker would deliver them, and the configuration of a tiny run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.config import schema
from streamrl.protocol.wire.branches import Branch
from streamrl.protocol.wire.group import Group, GroupHeader, decode_body, decode_header, encode_group
from streamrl.protocol.wire.sample import Sample, Span
from streamrl.versions import make_version


def group_of(
    *,
    rewards: Sequence[float],
    finished: Sequence[bool] | None = None,
    responses: Sequence[Sequence[int]] | None = None,
    logprobs: Sequence[Sequence[float]] | None = None,
    prompt: Sequence[int] = (5, 6, 7),
    ticket: int = 0,
    run_uid: str = "run",
    fingerprint: str = "",
    version: int = make_version(1, 0),
    step: int = 0,
) -> Group:
    """Make a group with one sample per reward; responses have three tokens by default."""
    finished = finished if finished is not None else [True] * len(rewards)
    responses = responses if responses is not None else [[8, 9, 1]] * len(rewards)
    logprobs = logprobs if logprobs is not None else [[-1.0] * len(response) for response in responses]
    samples = tuple(
        Sample(
            token_ids=np.array(tokens, dtype=np.int32),
            logprobs=np.array(behaviour_logprobs, dtype=np.float32),
            mask_runs=(len(tokens),),
            spans=(Span(version=version, step=step, start=0, end=len(tokens)),) if len(tokens) else (),
            finish_reason="stop" if ended else "length",
            rewards={"made_up": float(reward)},
            reward=float(reward),
        )
        for reward, ended, tokens, behaviour_logprobs in zip(rewards, finished, responses, logprobs, strict=True)
    )
    header = GroupHeader(
        ticket=ticket,
        identity=f"{ticket:016x}",
        run_uid=run_uid,
        purpose="train",
        attempt=0,
        worker="made-up",
        fingerprint=fingerprint,
        num_prompt_tokens=len(prompt),
        sample_lengths=(),
        sample_rewards=(),
        sample_finished=(),
        min_version=0,
        max_version=0,
    )
    encoded, body = encode_group(Group(header=header, prompt_ids=np.array(prompt, dtype=np.int32), samples=samples))
    return decode_body(decode_header(encoded), body)


def learner_config(model_folder: Path, /, **sections: Any) -> schema.Config:
    """A complete configuration for a tiny fp32 run; `sections` replace what a test is about."""
    fields: dict[str, Any] = {
        "model": schema.Model(path=str(model_folder), dtype="float32"),
        "data": schema.Data(train="unused.jsonl"),
        "rewards": {"made_up": schema.FunctionReward(type="function", target="unused")},
        "weights": schema.Weights(dtype="float32"),
    }
    return schema.Config(**{**fields, **sections})


def random_groups(num_groups: int, *, num_samples: int = 4, vocabulary: int = 40, seed: int = 0) -> list[Group]:
    """Groups of various lengths, some samples unfinished, with made-up behaviour logprobs."""
    rng = np.random.default_rng(seed)
    groups: list[Group] = []
    for ticket in range(num_groups):
        lengths = rng.integers(1, 12, num_samples)
        groups.append(
            group_of(
                ticket=ticket,
                prompt=rng.integers(3, vocabulary, rng.integers(1, 8)).tolist(),
                rewards=rng.normal(size=num_samples).tolist(),
                finished=(rng.random(num_samples) > 0.2).tolist(),
                responses=[rng.integers(3, vocabulary, n).tolist() for n in lengths],
                logprobs=[(-rng.exponential(2.0, n)).tolist() for n in lengths],
            )
        )
    return groups


def branched(groups: Sequence[Group]) -> list[Group]:
    """Spread the same tokens over several rows: each but the first branches from an earlier one at some point."""
    rng = np.random.default_rng(7)
    found = []
    for group in groups:
        samples = []
        for sample in group.samples:
            length = len(sample.token_ids)
            starts = sorted(rng.choice(np.arange(1, length), size=min(3, length - 1), replace=False).tolist())
            lengths, branches = [len(group.prompt_ids) + (starts[0] if starts else length)], []
            for start, end in pairwise([*starts, length] if starts else []):
                row = int(rng.integers(len(lengths)))
                branches.append(Branch(start=start, row=row, keep=int(rng.integers(1, lengths[row] + 1))))
                lengths.append(branches[-1].keep + end - start)
            spans = [sample.spans[0]._replace(start=a, end=b) for a, b in pairwise([0, *starts, length])]
            samples.append(sample._replace(branches=tuple(branches), spans=tuple(spans)))
        found.append(replace(group, samples=tuple(samples)))
    return found
