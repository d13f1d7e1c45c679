"""Adapts TRL's reward functions, unchanged: called with one sample at a time, or with all samples of a prompt if the
source says `of_group`.

    def reward(prompts, completions, **kwargs) -> list[float | None]

A function has this form if one of its parameters is called `prompts`, `completions` or `completion_ids`; all others
have ours. It is called by keyword, with lists of one entry per sample: a single one, since a sample is scored as soon
as it is made, or all samples of a prompt:

    prompts          texts; for rows with `messages`, their lists of messages
    completions      texts; if prompts are messages, lists of one assistant message
    completion_ids   lists of token ids; TRL's guide also calls them `completions_ids`, which is accepted
    answer, ...      lists of the row's other fields; all of them if the function has `**kwargs`
    finish_reason, truncated, rewards   lists, if it has such parameters: "stop" or "length", whether it was truncated,
                     and the rewards of the single-sample sources, by source

None in the returned list means that the function does not apply to that sample: only the other sources' rewards count.
What only a trainer has (`trainer_state`, `log_extra`, ...) is not passed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamrl.terminal import plural

_GIVEN = ("prompts", "completions", "completion_ids", "completions_ids")
# Facts about a sample, passed to functions that have a parameter of that name, in our form too.
SAMPLE_FACTS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "finish_reason": lambda sample: sample["finish_reason"],
    "truncated": lambda sample: sample["finish_reason"] == "length",
}
_LISTED_FACTS = {**SAMPLE_FACTS, "rewards": lambda sample: sample["rewards"]}
_TRAINER_ONLY = ("trainer_state", "log_extra", "log_metric", "environments")


def is_of_trl(function: Callable[..., Any]) -> bool:
    return not inspect.signature(function).parameters.keys().isdisjoint(_GIVEN)


def bind_of_trl(function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a callable that takes a prompt, its row's fields, and samples. TypeError if the function needs an argument
    that does not exist here."""
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    name = getattr(function, "__name__", "it")
    for key in options:
        if key not in parameters and not takes_any:
            raise TypeError(f"{name} cannot be called: got an unexpected keyword argument {key!r}")
    columns = [
        key
        for key, parameter in parameters.items()
        if _is_needed(parameter) and key not in (*_GIVEN, *_LISTED_FACTS, *options)
    ]
    for key in _TRAINER_ONLY:
        if key in columns:
            raise TypeError(f"{name} cannot be called: only TRL's trainer has {key!r}; give it a default, {key}=None")

    def call(prompt: str, fields: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> Any:
        for column in columns:
            if column not in fields:
                present = ", ".join(sorted(fields)) or "none"
                raise ValueError(f"{name} takes {column!r}, which the prompt's row lacks; it has: {present}")
        available = {key: [value] * len(samples) for key, value in fields.items() if key != "messages"}
        available |= {name: list(map(fact, samples)) for name, fact in _LISTED_FACTS.items() if name in parameters}
        available |= _texts(prompt, samples, fields.get("messages"))
        taken = {key: value for key, value in available.items() if takes_any or key in parameters}
        return function(**(taken | dict(options)))

    return call


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_KEYWORD,
        parameter.VAR_POSITIONAL,
    )


def _texts(
    prompt: str, samples: Sequence[Mapping[str, Any]], messages: list[dict[str, Any]] | None
) -> dict[str, list[Any]]:
    token_ids = [sample["token_ids"] for sample in samples]
    completions = [sample["completion"] for sample in samples]
    ids = {"completion_ids": token_ids, "completions_ids": token_ids}
    if messages is None:
        return {"prompts": [prompt] * len(samples), "completions": completions, **ids}
    answers = [[{"role": "assistant", "content": completion}] for completion in completions]
    return {"prompts": [messages] * len(samples), "completions": answers, **ids}


def rewards_in(returned: Any, count: int) -> list[Any]:
    """Return the function's value for each sample."""
    if isinstance(returned, str | bytes | Mapping) or not hasattr(returned, "__iter__"):
        raise TypeError(f"the function returned {returned!r:.80}, not a list with a reward for each completion")
    rewards = list(returned)
    if len(rewards) != count:
        raise ValueError(f"the function returned {len(rewards)} rewards for {plural(count, 'completion')}")
    return rewards
