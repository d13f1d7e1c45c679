"""The files that a configuration names: there, readable, and what they should be. Looked at before a run starts
anything, so that a wrong path costs a second and not a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from streamrl.config.schema import Config, FunctionReward
from streamrl.data.prompts import read_prompts
from streamrl.errors import DataError

# One of these makes a folder a tokenizer's.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def check_files(config: Config) -> None:
    """Refuse paths that do not hold what they should; prompts are read to their end."""
    problems = [*_model("model.path", config.model.path)]
    for dataset in config.data.train_sets():
        problems += _prompts(dataset.key, dataset.path, config)
    if config.data.validation is not None:
        problems += _prompts("data.validation", config.data.validation, config)
    if config.reward_server is not None:
        problems += _model("reward_server.model", config.reward_server.model)
    for name, source in config.rewards.items():
        if isinstance(source, FunctionReward):
            file, colon, _ = source.target.rpartition(":")
            if colon and file.endswith(".py"):
                problems += _file(f"rewards.{name}.target", file)
        elif source.token_file is not None:
            problems += _file(f"rewards.{name}.token_file", source.token_file)
    if problems:
        raise DataError("\n".join(problems))


def _model(key: str, path: str) -> Iterator[str]:
    """A folder must hold a model and its tokenizer; the name of a model on a hub is left to the hub."""
    folder = Path(path)
    if not folder.exists() and _may_be_hub_name(path):
        return
    if not folder.is_dir():
        yield f"{key} = {path!r}: there is no such folder, and the name of a model on a hub is OWNER/NAME"
    elif not (folder / "config.json").is_file():
        yield f"{key} = {path!r}: the folder holds no model (config.json)"
    elif not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        yield f"{key} = {path!r}: the folder holds no tokenizer ({', '.join(_TOKENIZER_FILES[:3])}, ...)"


def _may_be_hub_name(path: str) -> bool:
    """OWNER/NAME, where no folder OWNER is here that would make it a path with a typing error."""
    owner, slash, name = path.partition("/")
    return bool(owner and slash and name) and "/" not in name and owner != "~" and not Path(owner).is_dir()


def _prompts(key: str, path: str, config: Config) -> Iterator[str]:
    try:
        read_prompts(path, malformed=config.data.malformed, key=key)
    except DataError as error:
        yield str(error)


def _file(key: str, path: str) -> Iterator[str]:
    if not Path(path).is_file():
        yield f"{key} = {path!r}: there is no such file"
