"""Tasks of reasoning-gym, by name: the rows that ask them, and the reward that judges answers as the library does.

    {"messages": [...], "question", "answer", "metadata", "reasoning_gym": {"task", "level", "options"}}

A row holds what the library needs to judge an answer, so a worker need not generate the item again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields as fields_of
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from typing import Any

# Their boards are tuples of tuples and are compared as such; JSON turns them into lists.
_OF_TUPLES = ("arc_agi", "rearc")


def task_rows(
    *, name: str, size: int, seed: int, level: int | None, options: Mapping[str, Any], asks: bool
) -> Iterator[dict[str, Any]]:
    """Yield rows; with `asks` each is a chat that says how to answer. ValueError for what the library lacks."""
    task = _task(name, size=size, seed=seed, level=level, options=options)
    from reasoning_gym.utils import SYSTEM_PROMPTS

    made_by = {"task": name, "level": level, "options": dict(options)}
    for place in range(size):
        item = task[place]
        chat = [{"role": "system", "content": SYSTEM_PROMPTS["default"]}, {"role": "user", "content": item["question"]}]
        yield {**({"messages": chat} if asks else {}), **item, "reasoning_gym": made_by}


def load() -> None:
    """Import the library now: with its hundred tasks this takes seconds, which no sample should wait for."""
    try:
        import reasoning_gym  # noqa: F401
    except ImportError as error:
        raise ValueError(f"the reward reasoning_gym needs its package ({error}): `pip install reasoning-gym`") from None


def score_answer(
    prompt: str, completion: str, token_ids: Sequence[int], fields: Mapping[str, Any], *, tag: str = "answer"
) -> float:
    """Return reasoning-gym's own score of the completion's last <answer> tag; for rows of `reasoning_gym`.

    If the library fails on what the model has written, the score is 0."""
    lacking = [name for name in ("reasoning_gym", "answer", "metadata") if name not in fields]
    if lacking:
        raise ValueError(f"the prompt's row has no field {lacking[0]!r}: its dataset is not from reasoning_gym")
    made_by = fields["reasoning_gym"]
    task = _judge(made_by["task"], made_by["level"], json.dumps(made_by["options"]))
    from reasoning_gym.utils import extract_answer

    metadata = _tuples(fields["metadata"]) if made_by["task"] in _OF_TUPLES else fields["metadata"]
    item = {"answer": fields["answer"], "metadata": metadata}
    try:
        return float(task.score_answer(extract_answer(completion, tag), item))
    except Exception:  # noqa: BLE001 - some tasks parse answers unguarded, and raise anything
        return 0.0


@cache
def _judge(name: str, level: int | None, options: str) -> Any:
    return _task(name, size=1, seed=0, level=level, options=json.loads(options))


def _task(name: str, *, size: int, seed: int, level: int | None, options: Mapping[str, Any]) -> Any:
    """Build the task. ValueError if there is no such task, level or option."""
    from reasoning_gym.factory import CURRICULA, DATASETS

    if name not in DATASETS:
        raise ValueError(f"reasoning-gym has no such task{_nearest(name, DATASETS)}")
    make, settings = DATASETS[name]
    known = [one.name for one in fields_of(settings) if one.name not in ("size", "seed")]
    for option in options:
        if option not in known:
            raise ValueError(f"the task has no option {option!r}; it has {', '.join(known)}")
    if level is None:
        return make(settings(size=size, seed=seed, **options))
    if name not in CURRICULA:
        raise ValueError("the task has no curriculum, so `level` has no effect; remove it")
    curriculum = CURRICULA[name]()
    highest = max(len(one.levels) for one in curriculum.attributes.values()) - 1
    if level > highest:
        raise ValueError(f"level {level} is beyond the curriculum's last level, {highest}")
    curriculum.set_global_level(level)
    return make(replace(curriculum.generate_configuration({"size": size, "seed": seed}), **options))


def _nearest(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    near = get_close_matches(name, known, n=3)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tuples(one) for name, one in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
