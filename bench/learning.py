"""A learner without a model: real stream, feed and checkpoints; "training" only counts.

Learning.step:  plan (issue tickets, read and check headers) ─► fetch bodies, verify, decode ─► settle ─► next version
                and every few steps: commit (the stream is trimmed)
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import redis

from bench.answering import MODEL, VOCABULARY, Shape
from bench.waiting import TimedStream
from streamrl.config import schema
from streamrl.errors import TrainingError
from streamrl.learner.checkpoints.checkpoint import CheckpointRoot, CheckpointState
from streamrl.learner.checkpoints.terms import CheckpointName, ancestry, claim_run
from streamrl.learner.groups.fetch import fetch_groups
from streamrl.learner.groups.open_feed import open_feed
from streamrl.learner.groups.plan import GroupCheck, Kind
from streamrl.learner.groups.prompts import Prompt, PromptSet
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.wire.group import Group
from streamrl.versions import make_version

_NUM_PROMPTS = 1024
_PROMPT_TOKENS = 40
_PATIENCE_S = 30.0


class Learning:
    """One run, from its first ticket. With a folder, each commit writes a checkpoint; else it only updates Redis."""

    def __init__(
        self,
        client: redis.Redis,
        run: str,
        *,
        shape: Shape,
        groups_per_step: int,
        commit_every: int,  # steps
        folder: Path | None = None,
        observe: Callable[[int, Sequence[Group]], None] = lambda step, groups: None,  # sees each step's groups
    ) -> None:
        self.keys = Keys(run)
        self.num_trained = 0
        self.plan_cpu_s = 0.0  # done by rank 0 only
        self.fetch_cpu_s = 0.0  # shared by all ranks
        self._observe = observe
        self._commit_every = commit_every
        self._step = 0
        self._root = None if folder is None else CheckpointRoot(folder)
        self._uid = "bench" if folder is None else claim_run(folder)
        term = 1 if self._root is None else self._root.claim_term(self._uid).number
        self.stream = TimedStream(client, self.keys, run_uid=self._uid, term=term, holder="bench", lease_s=600.0)
        self.stream.claim(config_json="{}", fingerprint=MODEL, wait_s=0.0)
        self._feed = open_feed(
            stream=self.stream,
            prompts=_make_prompts(),
            config=_make_config(shape, groups_per_step),
            run_uid=self._uid,
            fingerprint=MODEL,
            drop_reason=lambda header: None,
        )
        self._feed.note_version(make_version(1, 0), 0)
        gc.collect()
        gc.freeze()  # as in learner.rank

    def step(self, train: Callable[[Sequence[Group]], None] | None = None) -> int:
        """Run one step; return the number of its groups. Without `train` they are only counted."""
        deadline = time.monotonic() + _PATIENCE_S
        cpu_s = time.process_time()
        while True:
            plan = self._feed.plan(step=self._step, world_size=1, timeout_s=1.0)
            if plan is not None and plan.kind is Kind.STEP:
                break
            if plan is not None and plan.kind is Kind.COMMIT:
                self.commit()
            elif time.monotonic() > deadline:
                raise TrainingError(f"no batch came within {_PATIENCE_S:g} s: have the workers ended?")
        planned_cpu_s = time.process_time()
        fetched = fetch_groups(self.stream, plan, rank=0, vocabulary=VOCABULARY)
        assert len(fetched.groups) == len(plan.entries), "what the workers here send is sound"
        if train is not None:
            train(fetched.groups)
        fetched_cpu_s = time.process_time()
        self._observe(self._step, fetched.groups)
        observed_cpu_s = time.process_time()
        self._feed.settle(plan, [GroupCheck(int(verdict)) for verdict in fetched.verdicts], trained=True)
        self._step += 1
        self.num_trained += len(plan.entries)
        self._feed.note_version(make_version(1, self._step), self._step)
        if self._step % self._commit_every == 0:
            self.commit()
        self.fetch_cpu_s += fetched_cpu_s - planned_cpu_s
        self.plan_cpu_s += time.process_time() - observed_cpu_s + planned_cpu_s - cpu_s
        return len(plan.entries)

    def commit(self) -> None:
        state = self._feed.state()
        if self._root is None:
            self._feed.committed(state.committed("nowhere"), step=self._step)
            return
        name = CheckpointName(1, self._step)
        (self._root.new_folder(name) / "weights").write_bytes(b"none")
        checkpoint = self._root.commit(
            name,
            CheckpointState(
                run_uid=self._uid,
                step=self._step,
                stream=state,
                data_fingerprint="bench",
            ),
        )
        self._feed.committed(checkpoint.state.stream, step=self._step)
        self._root.prune(ancestry(self._root.root), term=1, keep_last=2, keep_best=0)


def groups_per_second(step: Callable[[], int], *, warm_up: int, for_s: float) -> float:
    """Return groups per second, after `warm_up` steps have filled all queues."""
    for _ in range(warm_up):
        step()
    began = time.perf_counter()
    num_groups = 0
    while (elapsed := time.perf_counter() - began) < for_s:
        num_groups += step()
    return num_groups / elapsed


def _make_prompts() -> PromptSet:
    rows = [
        Prompt(
            line=number + 1,
            text=f"prompt {number}",
            token_ids=np.arange(_PROMPT_TOKENS, dtype=np.int32),
            fields={"answer": str(number)},
        )
        for number in range(_NUM_PROMPTS)
    ]
    return PromptSet(rows, seed=1, shuffle=True)


def _make_config(shape: Shape, groups_per_step: int) -> schema.Config:
    """Return the defaults, as far as they matter here."""
    return schema.Config.model_validate(
        {
            "model": {"path": "none"},
            "data": {"train": "none"},
            "rewards": {"exact": {"type": "function", "target": "exact_match"}},
            "sampling": {"num_samples": shape.num_samples, "max_tokens": shape.num_tokens},
            "training": {"groups_per_step": groups_per_step, "max_epochs": 1_000_000},
        }
    )
