"""Leaves in the run's folder what should outlast its Redis: how the run ended, and some of its rollouts.

    state.json        running | finished | stopped | failed, with term, time, process and the error of a failure. A
                      learner that dies leaves "running" behind, with a process that no longer exists.
    rollouts.jsonl    one group per step, as text: prompt, samples, rewards by source, which versions made them

Rollouts are few and cover the whole run: the latest ones, and before them some at even distances. Blocks on the disk,
without syncing: losing some of this in a power cut does no harm. A disk that fails here never stops training.
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
_MOST_SAMPLES = 8  # per group
_LONGEST_TEXT = 4000  # characters
_MOST_PARTS = 32  # per sample: its turns, and the context between them

log = structlog.get_logger(__name__)


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = ...) -> str | list[str]: ...


def note_state(folder: Path, state: RunState, *, term: int, error: str = "") -> None:
    """Record the run's state; rank 0 does so when it takes the run and when it leaves it."""
    record = {"state": state, "term": term, "at": time.time(), "error": error}
    record |= {"host": socket.gethostname(), "pid": os.getpid(), "process_began": started_at(os.getpid())}
    _replace(folder / STATE, json.dumps(record))


class RolloutKeeper:
    """Appends to `rollouts.jsonl`, and thins it out."""

    def __init__(self, folder: Path, decoder: Decoder, *, term: int) -> None:
        self._path, self._decoder, self._term = folder / ROLLOUTS, decoder, term
        self._num_kept = self._path.read_bytes().count(b"\n") if self._path.exists() else 0

    def keep(self, step: int, groups: Sequence[Group]) -> None:
        """Keep one of the groups that this step has trained."""
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
        """The group in the form of `streamrl groups --json`, with the step and without token ids."""
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
        parts = told_of(sample, self._decode, most_parts=_MOST_PARTS)
        return {
            "reward": float(sample.reward),
            "rewards": dict(sample.rewards),
            "finish_reason": sample.finish_reason,
            "spans": [{**span._asdict(), "version": show(span.version)} for span in sample.spans],
            "text": self._text(sample.token_ids),
            "turns": [{**part, "text": cut(part["text"])} for part in parts],
        }

    def _text(self, token_ids: Any) -> str:
        return cut(self._decode(token_ids))

    def _decode(self, token_ids: Any) -> str:
        return str(self._decoder.decode(token_ids, skip_special_tokens=False))

    def _thin(self) -> None:
        text = self._path.read_text(encoding="utf-8", errors="replace")  # a part may end inside a character
        lines = [f"{line}\n" for line in text.split("\n") if _is_whole(line)]
        half = len(lines) // 2
        kept = [*_evenly(lines[:half], half // 2), *lines[half:]]
        _replace(self._path, "".join(kept))
        self._num_kept = len(kept)


def cut(text: str, longest: int = _LONGEST_TEXT) -> str:
    return text if len(text) <= longest else f"{text[:longest]}…"


def cut_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Cut long values, as text or JSON, if all together are longer than a text may be; short ones stay as they are."""
    if len(_to_json(fields)) <= _LONGEST_TEXT:
        return dict(fields)
    share = _LONGEST_TEXT // len(fields)
    texts = {name: value if isinstance(value, str) else _to_json(value) for name, value in fields.items()}
    return {name: cut(texts[name], share) if len(texts[name]) > share else value for name, value in fields.items()}


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _is_whole(line: str) -> bool:
    """Whether the line is complete: a killed learner may have left a part."""
    try:
        return "step" in json.loads(line)
    except ValueError:
        return False


def _evenly(lines: Sequence[str], count: int) -> list[str]:
    """At most `count` lines, the first included: those nearest to evenly spaced steps."""
    steps = [json.loads(line)["step"] for line in lines]
    wanted = (steps[0] + (steps[-1] - steps[0]) * place / (count - 1) for place in range(count))
    chosen = {min(range(len(steps)), key=lambda at: abs(steps[at] - step)) for step in wanted}
    return [lines[at] for at in sorted(chosen)]


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append a JSON line, whole or not at all, after whatever a killed learner left. OSError if the disk refuses it."""
    line = (_to_json(record) + "\n").encode()
    with path.open("a+b", buffering=0) as file:
        begin = file.seek(0, os.SEEK_END)
        file.seek(max(0, begin - 1))
        if file.read(1) not in (b"", b"\n"):
            line = b"\n" + line
        if file.write(line) < len(line):  # disk full: a partial line would corrupt the next one too
            file.truncate(begin)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _replace(path: Path, text: str) -> None:
    """Replace the file, so that readers see the old or the new contents."""
    aside = path.with_name(f".tmp-{path.name}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.rename(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        log.warning("not written", file=path.name, error=str(error))
