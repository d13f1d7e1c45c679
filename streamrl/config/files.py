"""Checks of the files that a configuration names: they must exist, be readable and have the right content. Done before
a run starts anything, so that a wrong path costs a second and not a minute.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from streamrl.config.explain import Problem
from streamrl.config.schema import (
    Config,
    Dataset,
    FunctionReward,
    HttpReward,
    JudgeReward,
    NamedDataset,
    Reward,
    Teacher,
)
from streamrl.data.dataset import MADE, SOURCES, has_odd_braces
from streamrl.data.prompts import read_prompts
from streamrl.errors import DataError
from streamrl.recipe.own import FILES

_IN_LATEX = re.compile(r"(\\[a-zA-Z]{2,})\{(\w+)\}")  # \boxed{answer} in a template over columns
_LFS_POINTER = b"version https://git-lfs"
# A folder with one of these has a tokenizer.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


# Settings that apply only to datasets of these kinds.
_OF_SOURCES = {
    **dict.fromkeys(("name", "split", "revision"), ("hub",)),
    **dict.fromkeys(("size", "seed", "options"), MADE),
    "level": ("reasoning_gym",),
}


def check_datasets(config: Config) -> Iterator[Problem]:
    """Check that each dataset has exactly one source, and no setting without effect there."""
    for named_dataset in config.data.datasets():
        dataset, key = named_dataset.dataset, named_dataset.key.removesuffix(f".{named_dataset.dataset.source}")
        named = [name for name in SOURCES if getattr(dataset, name) is not None]
        if not named:
            remedy = f"set it to a JSON Lines file, or set one of {', '.join(SOURCES[1:])} instead"
            yield Problem(key=f"{key}.path", remedy=remedy)
        for name in named[1:]:
            remedy = f"the dataset already has a source, {named[0]} = {getattr(dataset, named[0])!r}; set one to null"
            yield Problem(key=f"{key}.{name}", remedy=remedy)
        for name, sources in _OF_SOURCES.items():
            if dataset.source not in sources and getattr(dataset, name) != Dataset().model_dump()[name]:
                remedy = f"applies only to a dataset with {' or '.join(sources)}; this one has {dataset.source}"
                yield Problem(key=f"{key}.{name}", remedy=remedy)
        if dataset.prompt is not None and (paired := _remedy_for(dataset.prompt)) is not None:
            yield Problem(key=f"{key}.prompt", remedy=paired)
        column = (dataset.fields or {}).get("messages")
        if column not in (None, dataset.prompt or "messages"):
            remedy = f"a field of this name holds the prompt of a chat; pass `{column}` under another name"
            yield Problem(key=f"{key}.fields.messages", remedy=remedy)
    for held_out in config.data.validation_sets():
        if held_out.dataset.weight != 1:
            key = "data.validation.weight" if not held_out.name else f"data.validation.{held_out.name}.weight"
            yield Problem(key=key, remedy="validation uses each prompt once, whatever its weight; remove it")


def _remedy_for(template: str) -> str | None:
    """What to do about braces in a template over columns that may not be meant as they are read."""
    if found := _IN_LATEX.search(template):
        word, column = found[1], found[2]
        return (
            f"`{found[0]}` may be meant either way: write {word}{{{{{column}}}}} for these very characters, "
            f"{word}{{{{{{{column}}}}}}} for the column {column!r} in braces"
        )
    if has_odd_braces(template):
        return "{{ and }} are braces in a template over columns, and these are not in pairs: write each brace twice"
    return None


def check_files(config: Config, *, trains: bool = True) -> None:
    """Refuse paths with wrong content; prompts are read completely. Without training, training data is not needed."""
    problems = [*model_problems("model.path", config.model.path)]
    for named_dataset in config.data.datasets() if trains else config.data.validation_sets():
        problems += _prompts(named_dataset, config)
    if config.reward_server is not None:
        problems += model_problems("reward_server.model", config.reward_server.model)
    if config.teacher is not None:
        problems += _teacher(config.teacher)
    if config.environment is not None:
        problems += _code("environment.target", config.environment.target or "")
        problems += _file("environment.token_file", config.environment.token_file)
    for name, source in config.rewards.items():
        problems += _reward_files(f"rewards.{name}", source)
    if problems:
        raise DataError("\n".join(problems))


def _teacher(teacher: Teacher) -> Iterator[str]:
    if teacher.path is not None:
        yield from model_problems("teacher.path", teacher.path)
    if teacher.token_file is not None:
        yield from _file("teacher.token_file", teacher.token_file)


def _code(key: str, target: str) -> Iterator[str]:
    file, colon, _ = target.rpartition(":")
    if colon and file.endswith(FILES):
        yield from _file(key, file)


def model_problems(key: str, path: str) -> Iterator[str]:
    """Check that a folder holds a model and its tokenizer; a hub name is not checked."""
    folder = Path(path)
    if not folder.exists() and _may_be_hub_name(path) and not _owner_is_here(path):
        return
    if not folder.is_dir():
        yield f"{key} = {path!r}: there is no such folder, and {why_not_on_hub(path)}"
    elif not (folder / "config.json").is_file():
        yield f"{key} = {path!r}: the folder holds no model (config.json)"
    elif not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        yield f"{key} = {path!r}: the folder holds no tokenizer ({', '.join(_TOKENIZER_FILES[:3])}, ...)"
    else:
        yield from _weights(key, folder)


def _weights(key: str, folder: Path) -> Iterator[str]:
    files = [file for kind in ("*.safetensors", "*.bin") for file in sorted(folder.glob(kind))]
    if not files:
        yield f"{key} = {str(folder)!r}: the folder holds no weights (model.safetensors, ...)"
    elif pointers := [file.name for file in files if _is_pointer(file)]:
        yield f"{key} = {str(folder)!r}: {pointers[0]} is a Git LFS pointer; download the file with `git lfs pull`"


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(_LFS_POINTER)) == _LFS_POINTER


def why_not_on_hub(path: str) -> str:
    """Say why a name that is no folder is not looked up on a hub either. A folder OWNER makes a wrong path likelier."""
    if _may_be_hub_name(path) and _owner_is_here(path):
        owner = path.partition("/")[0]
        return (
            f"it is not taken for a model on a hub because the folder {owner}/ is here (if it is one, start elsewhere "
            "or rename that folder)"
        )
    return "it is not the name of a model on a hub (OWNER/NAME)"


def _may_be_hub_name(path: str) -> bool:
    owner, slash, name = path.partition("/")
    return bool(owner and slash and name) and "/" not in name and owner not in ("~", ".", "..")


def _owner_is_here(path: str) -> bool:
    return Path(path.partition("/")[0]).is_dir()


def _prompts(named: NamedDataset, config: Config) -> Iterator[str]:
    try:
        read_prompts(named.dataset, malformed=config.data.malformed, key=named.key)
    except DataError as error:
        yield str(error)


def _reward_files(key: str, source: Reward) -> Iterator[str]:
    if isinstance(source, FunctionReward):
        yield from _code(f"{key}.target", source.target)
    elif isinstance(source, HttpReward):
        yield from _file(f"{key}.token_file", source.token_file)
    elif isinstance(source, JudgeReward):
        for name, judge in source.judges.items():
            yield from _file(f"{key}.judges.{name}.token_file", judge.token_file)


def _file(key: str, path: str | None) -> Iterator[str]:
    if path is not None and not Path(path).is_file():
        yield f"{key} = {path!r}: there is no such file"
