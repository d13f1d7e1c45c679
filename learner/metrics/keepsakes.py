"""What a run leaves in its folder for the time when its Redis has gone: how it ended, and some of its rollouts.

    state.json        running | finished | stopped | failed, of which term, since when; who runs it, and with what error
                      it failed. A learner that dies leaves "running" behind, and a process that is no more.
    rollouts.jsonl    a group a step, as text: prompt, samples, rewards by source, which versions made them

The rollouts are few and of the whole run: the latest ones, and before them some at even distances. Blocks on the disk,
without waiting for it: what a power cut takes of this is no loss. A disk that fails here never stops training.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import structlog

from streamrl.process import started_at
from streamrl.protocol.transport.types import RunState
from streamrl.protocol.wire.group import Group
from streamrl.protocol.wire.sample import Sample
from streamrl.protocol.wire.turns import told_of
from streamrl.versions import show

STATE, ROLLOUTS = "state.json", "rollouts.jsonl"
_MOST_ROLLOUTS = 128
_MOST_SAMPLES = 8  # of a group
_LONGEST_TEXT = 4000  # characters
_MOST_PARTS = 32  # of a sample: its turns, and what was given between them

log = structlog.get_logger(__name__)


class Decoder(Protocol):
    """What it needs of a tokenizer."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = ...) -> str | list[str]: ...


def note_state(folder: Path, state: RunState, *, term: int, error: str = "") -> None:
    """Rank 0, when it takes the run and when it leaves it."""
    told = {"state": state, "term": term, "at": time.time(), "error": error}
    told |= {"host": socket.gethostname(), "pid": os.getpid(), "process_began": started_at(os.getpid())}
    _replace(folder / STATE, json.dumps(told))


class RolloutKeeper:
    """`rollouts.jsonl`, goes on with what lies there."""

    def __init__(self, folder: Path, decoder: Decoder, *, term: int) -> None:
        self._path, self._decoder, self._term = folder / ROLLOUTS, decoder, term
        self._num_kept = self._path.read_bytes().count(b"\n") if self._path.exists() else 0

    def keep(self, step: int, groups: Sequence[Group]) -> None:
        """One of those that this step has trained."""
        if not groups:
            return
        record = self._record(step, groups[step % len(groups)])
        try:
            append_line(self._path, record)
            self._num_kept += 1
            if self._num_kept >= _MOST_ROLLOUTS:
                self._thin()
        except OSError as error:
            log.warning("rollout not kept", error=str(error))

    def _record(self, step: int, group: Group) -> Mapping[str, Any]:
        """In the form of `streamrl groups --json`, with the step and without token ids."""
        return {
            "id": f"{step}-{group.header.ticket}",
            "at": time.time(),
            "step": step,
            "term": self._term,
            **group.header.facts(),
            "prompt": self._text(group.prompt_ids),
            "samples": [self._sample(sample) for sample in group.samples[:_MOST_SAMPLES]],
        }

    def _sample(self, sample: Sample) -> Mapping[str, Any]:
        return {
            "reward": float(sample.reward),
            "rewards": dict(sample.rewards),
            "finish_reason": sample.finish_reason,
            "spans": [{**span._asdict(), "version": show(span.version)} for span in sample.spans],
            "text": self._text(sample.token_ids),
            "turns": [{**part, "text": _cut(part["text"])} for part in told_of(sample, self._decode)[:_MOST_PARTS]],
        }

    def _text(self, token_ids: Any) -> str:
        return _cut(self._decode(token_ids))

    def _decode(self, token_ids: Any) -> str:
        return str(self._decoder.decode(token_ids, skip_special_tokens=False))

    def _thin(self) -> None:
        lines = [line for line in self._path.read_text(encoding="utf-8").splitlines(keepends=True) if _is_whole(line)]
        half = len(lines) // 2
        kept = [*_evenly(lines[:half], half // 2), *lines[half:]]
        _replace(self._path, "".join(kept))
        self._num_kept = len(kept)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"


def _is_whole(line: str) -> bool:
    """A learner that was killed may have left half of one."""
    try:
        return "step" in json.loads(line)
    except ValueError:
        return False


def _evenly(lines: Sequence[str], count: int) -> list[str]:
    """At most so many, with the first: those nearest to steps that lie evenly."""
    steps = [json.loads(line)["step"] for line in lines]
    wanted = (steps[0] + (steps[-1] - steps[0]) * place / (count - 1) for place in range(count))
    chosen = {min(range(len(steps)), key=lambda at: abs(steps[at] - step)) for step in wanted}
    return [lines[at] for at in sorted(chosen)]


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """As JSON, whole or not at all. OSError when the disk does not take it."""
    line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
    with path.open("ab", buffering=0) as file:
        begin = file.seek(0, os.SEEK_END)
        if file.write(line) < len(line):  # the disk is full from here on: half a line would spoil the next, too
            file.truncate(begin)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _replace(path: Path, text: str) -> None:
    """A reader sees the old contents or the new ones."""
    aside = path.with_name(f".tmp-{path.name}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.rename(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        log.warning("not written", file=path.name, error=str(error))
