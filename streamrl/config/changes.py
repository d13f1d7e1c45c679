"""Which settings may change when a run resumes from a checkpoint.

Groups waiting in the stream were sampled and scored under the old settings, the weights belong to one model, and ticket
numbers refer to prompts: settings that decide these are fixed for the life of a run. All others may change at each
start. A fork starts from weights alone, and may change everything that they fit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from streamrl.config.explain import show
from streamrl.config.schema import Config, Dataset
from streamrl.errors import ConfigError
from streamrl.recipe.own import PICKLED, canonical

_TICKETS = "it decides which prompts this run's ticket numbers refer to"
_WEIGHTS = "this run's weights and reference belong to that model"
_SAMPLED = "this run's groups were sampled with it, and their log-probs would mean something else"
_SCORED = "this run's groups were scored with it, and their rewards would not be comparable"
_TAUGHT = "this run's groups were made for it, and may hold its log-probs"
_SERVED = "running workers were started with it"

_FREE = ("redis", "optimizer", "training", "lag", "checkpoint", "validation", "metrics", "worker", "learner")
_OF_A_REQUEST = ("url", "replicas", "timeout_s", "attempts", "outage_s", "max_concurrency", "token_file")
_OF_A_JUDGE = ("url", "replicas", "token_file", "token_env")
# A limit of the answer's length decides which samples fail, as timeouts do, and no verdict.
_OF_JUDGES = ("max_requests_per_s", "token_budget", "cache_size", "max_tokens")
_LIMITS_OF_A_JUDGE = ("max_tokens", "max_completion_tokens")
_OF_A_PROCESS = ("processes", "memory_mb", "network", "environment")
# Limits of time decide which rollouts fail, as those of rewards decide which samples do, and none that is trained.
_OF_AN_ENVIRONMENT = ("urls", "token_file", "outage_s", "timeout_s", "rollout_timeout_s", "key_in_url")
_WEIGHTS_OF_DATA = ("data.train.weight", "data.train.*.weight")
_MODELS = ("model.path", "teacher.path", "reward_server.model")
_CODE = ("rewards.*.target", "environment.target")

# The first matching pattern decides (`_matches`); None: it may change. A test checks that every setting matches one.
RULES: tuple[tuple[str, str | None], ...] = (
    ("name", "it names the run's folder and its streams"),
    ("dir", None),
    ("seed", _TICKETS),
    ("model.path", _WEIGHTS),
    ("model.router", "a frozen router comes from model.path, a trained one from the checkpoint"),
    *((f"model.{name}", None) for name in ("router_balance", "router_z")),
    ("model.lora.dropout", None),
    ("model.lora.**", _WEIGHTS),
    *((f"model.{name}", None) for name in ("dtype", "attention", "gradient_checkpointing")),
    *((f"model.{name}", None) for name in ("activations", "compile", "reference", "masters")),
    *((f"data.{name}", _TICKETS) for name in ("shuffle", "date")),
    *((pattern, _TICKETS) for pattern in _WEIGHTS_OF_DATA),
    ("data.**", None),  # the files' contents are compared separately
    ("sampling.accept_mismatch", None),
    ("sampling.**", _SAMPLED),
    *((f"rewards.*.{name}", None) for name in (*_OF_A_REQUEST, *_OF_JUDGES, *_OF_A_PROCESS)),
    *((f"rewards.*.judges.*.{name}", None) for name in _OF_A_JUDGE),
    *((f"rewards.*.judges.*.options.{name}", None) for name in _LIMITS_OF_A_JUDGE),
    ("rewards.**", _SCORED),
    *((f"environment.{name}", None) for name in (*_OF_A_PROCESS, *_OF_AN_ENVIRONMENT)),
    ("environment.**", _SAMPLED),
    *((f"teacher.{name}", None) for name in ("urls", "weight", "place", *_OF_A_REQUEST)),
    ("teacher.**", _TAUGHT),
    *((f"reward_server.{name}", _SCORED) for name in ("model", "reward_*", "pool", "attribute_weights")),
    ("reward_server.**", None),
    ("algorithm.name", "the optimizer's state belongs to the other objective"),
    ("algorithm.**", None),
    *((f"weights.{name}", _SERVED) for name in ("store", "dtype")),
    ("weights.**", None),
    *((f"{section}.**", None) for section in _FREE),
)

# What workers read of a run, once each time they begin. A test compares it with their sources.
_READ_BY_WORKERS = (
    "seed",
    "model.path",
    "model.lora.**",
    *(f"data.{name}" for name in ("max_prompt_tokens", "date")),
    *(f"{section}.**" for section in ("sampling", "rewards", "environment", "teacher", "weights", "worker")),
    *(f"algorithm.{name}" for name in ("routing_replay", "advantages")),
    *(f"validation.{name}" for name in ("sampling.**", "pass_by")),
    "checkpoint.best_by",
)
_NOT_READ_BY_WORKERS = (  # of the sections above
    *(f"weights.{name}" for name in ("publish_every", "anchor_every", "anchor_share", "max_store_bytes")),
    *(f"teacher.{name}" for name in ("path", "weight", "place")),
    "worker.count",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    key: str
    before: Any
    after: Any
    refusal: str | None  # why the change is forbidden; None: allowed

    def __str__(self) -> str:
        return f"{self.key}: {show(self.before)} -> {show(self.after)}"


def changes(before: Config, after: Config, *, working_directory: str = "") -> list[Change]:
    """Return the differences setting by setting; a section that only one of them has differs in all its settings.
    `working_directory`: where the relative paths of `before` begin; where we work, if it is empty or was moved."""
    began_in = Path(working_directory if os.path.isdir(working_directory) else "")  # False also where we may not look
    folders = (began_in, *_moved_with_its_folder(before, after))
    old, new = (dict(_leaves(config.model_dump(mode="json"))) for config in (before, after))
    keys = [*new, *(key for key in old if key not in new)]
    found = []
    for key in keys:
        was, now = old.get(key, _default(key)), new.get(key, _default(key))
        if was != now:
            refusal = None if _is_same(key, was, now, folders, before, after) else refusal_of(key)
            found.append(Change(key=key, before=was, after=now, refusal=refusal))
    return found


def check_changes(found: list[Change], *, folder: str, has_checkpoint: bool = True) -> None:
    """ConfigError that names all forbidden changes, and what to do."""
    refused = [change for change in found if change.refusal]
    if refused:
        lines = [f"{change}: {change.refusal}" for change in refused]
        remedy = (
            f"A resumed run in {folder} must keep these: set them back, or start another run from its weights, with "
            f"`name=NEW --fork {folder}`, or from nothing, with `name=NEW`"
            if has_checkpoint
            else f"The run in {folder} has no checkpoint yet, but groups made with the former may wait in Redis: set "
            f"these back, start another run with `name=NEW`, or this one from nothing: remove {folder}, and from a "
            "Redis other than the embedded one also the run (`streamrl runs rm --redis URL --run NAME`)"
        )
        raise ConfigError("\n".join([*lines, remedy]))


def refusal_of(key: str) -> str | None:
    """Return why this setting must not change, or None. KeyError if no pattern matches it."""
    for pattern, refusal in RULES:
        if _matches(key, pattern):
            return refusal
    raise KeyError(key)


def is_read_by_workers(key: str) -> bool:
    return _matches_any(key, _READ_BY_WORKERS) and not _matches_any(key, _NOT_READ_BY_WORKERS)


def _matches_any(key: str, patterns: tuple[str, ...]) -> bool:
    return any(_matches(key, pattern) for pattern in patterns)


def _matches(key: str, pattern: str) -> bool:
    """`*` is one name, or part of one; `.**` at the end is all that a section holds, or the section if it is empty."""
    names, parts = key.split("."), pattern.removesuffix(".**").split(".")
    is_as_long = len(names) >= len(parts) if pattern.endswith(".**") else len(names) == len(parts)
    return is_as_long and all(map(fnmatchcase, names, parts))


def _is_same(key: str, was: Any, now: Any, folders: Sequence[Path], before: Config, after: Config) -> bool:
    """Whether two paths lead to the same model or code. A relative one of `before` begins in one of these folders."""
    if not (isinstance(was, str) and isinstance(now, str)):
        return False
    if _matches_any(key, _MODELS):
        return Path(now).exists() and any(
            (folder / was).exists() and (folder / was).samefile(now) for folder in folders
        )
    if _matches_any(key, _CODE):
        is_same = any(canonical(was, folder) == canonical(now) for folder in folders)
        return is_same or _is_same_pickle(was, now, before, after)
    return False


def _moved_with_its_folder(before: Config, after: Config) -> tuple[Path, ...]:
    """Return the working directory that a run has taken along: its own path was relative to it, and still ends so."""
    parts, folder = before.folder.parts, after.folder.resolve()
    return (folder.parents[len(parts) - 1],) if folder.parts[1:][-len(parts) :] == parts else ()


def _is_same_pickle(was: str, now: str, before: Config, after: Config) -> bool:
    """Whether it is the same of a run's pickled functions, which move with its folder. If both are there, their content
    decides."""
    (old, _, name), (new, _, new_name) = was.rpartition(":"), now.rpartition(":")
    files = [Path(old), Path(new)]
    homes = [(config.folder / PICKLED).resolve() for config in (before, after)]
    if [file.resolve().parent for file in files] != homes or (files[0].name, name) != (files[1].name, new_name):
        return False
    return not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes()


def _default(key: str) -> Any:
    """Return what counts where the setting is absent: a dataset's weight, since a path alone is a dataset too."""
    of_data = _matches_any(key, _WEIGHTS_OF_DATA)
    return Dataset.model_fields["weight"].default if of_data else None


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
