"""What a program requests from its launcher: a configuration with overrides, and reward functions.

A function is named by the location of its code, as in a configuration, if workers can find it there: in a module, or in
a file. Others (from a notebook, the program's own file, a lambda, a closure) are pickled by value and written into the
run's folder:

    near, of my_rewards.py in the working directory    my_rewards.py:near
    near, of an installed package                       package.module:near
    near, of a notebook                                 RUN_FOLDER/rewards/near.pkl:near

The name does not depend on the function's body, so a resumed run finds its rewards under the same names, wherever its
folder is by then (`config.changes`).
"""

from __future__ import annotations

import json
import sys
import sysconfig
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from streamrl.config.load import as_json, as_overrides
from streamrl.errors import ConfigError
from streamrl.recipe.own import PICKLED, pickled

Reward = Callable[..., Any] | str  # a function, or a value of `target`
Rewards = Mapping[str, Reward] | Sequence[Reward]
_LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    config: str | Mapping[str, Any]  # a file's name, or a map in place of a file
    overrides: tuple[str, ...]  # in command-line form
    functions: Mapping[str, bytes]  # by reward source: pickled functions
    takeover: bool

    def to_json(self) -> str:
        functions = {name: b64encode(code).decode() for name, code in self.functions.items()}
        fields = {"config": self.config, "overrides": self.overrides, "functions": functions, "takeover": self.takeover}
        return as_json(fields)

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = json.loads(text)
        functions = {name: b64decode(code) for name, code in fields["functions"].items()}
        return cls(
            config=fields["config"],
            overrides=tuple(fields["overrides"]),
            functions=functions,
            takeover=fields["takeover"],
        )

    def targets(self, folder: Path) -> list[str]:
        """Return the overrides that name the functions' places in the run's folder."""
        return as_overrides(
            {f"rewards.{name}.target": f"{pickle_path(name, folder)}:{name}" for name in self.functions}
        )


def pickle_path(name: str, folder: Path) -> Path:
    return folder / PICKLED / f"{name}.pkl"


def make_request(
    config: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None,
    rewards: Rewards | None,
    *,
    takeover: bool,
) -> Request:
    """Build a request. ConfigError if a reward cannot be sent to the workers, or an argument is invalid."""
    if not isinstance(overrides, Mapping | None):
        raise ConfigError(f"overrides = {overrides!r:.80}: must be a map, such as {{'optimizer.lr': 1e-4}}")
    functions: dict[str, bytes] = {}
    sources: dict[str, Any] = {}
    for name, reward in _named(rewards or {}).items():
        target = reward if isinstance(reward, str) else _locate(reward, name)
        if target is None:
            functions[name] = _pickle(reward, name)
        sources[f"rewards.{name}"] = {"type": "function", "target": target or f"{name}.pkl:{name}"}
    chosen = dict(overrides or {})
    if rewards is not None:  # they replace the configuration's, and nothing asks its reward server then
        unused = {} if _adds_service(chosen) else {"reward_server": None}
        sources = {"rewards": None} | unused | sources
    return Request(
        config=config if isinstance(config, Mapping) else str(config),
        overrides=tuple(as_overrides(sources | chosen)),
        functions=functions,
        takeover=takeover,
    )


def _adds_service(overrides: Mapping[str, Any]) -> bool:
    """Return whether one of these sources of rewards has `type: http`."""
    return any('"http"' in as_json(value) for key, value in overrides.items() if key.partition(".")[0] == "rewards")


def _named(rewards: Rewards) -> Mapping[str, Reward]:
    """Name the rewards. Functions in a list have their own names, or one by index, such as lambdas."""
    if isinstance(rewards, Mapping):
        return rewards
    if isinstance(rewards, str) or not isinstance(rewards, Sequence):
        raise ConfigError(f"rewards = {rewards!r:.80}: must be a list of functions, or a map of them by name")
    named: dict[str, Reward] = {}
    for index, reward in enumerate(rewards):
        name = reward.rpartition(":")[2] if isinstance(reward, str) else getattr(reward, "__name__", "")
        name = name if name.isidentifier() else f"reward_{index}"
        if name in named:
            raise ConfigError(f"rewards: two of them are called {name!r}; give them names: {{'a': ..., 'b': ...}}")
        named[name] = reward
    return named


def _locate(function: Callable[..., Any], name: str) -> str | None:
    """Return where a worker finds the function; None: nowhere."""
    if not name.isidentifier():
        raise ConfigError(f"rewards: {name!r} is not a valid name: use letters, digits and _, and start with no digit")
    if not callable(function):
        raise ConfigError(
            f"rewards.{name} = {function!r:.80}: must be a function, or its name, as in 'rewards.py:near'"
        )
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    qualname = getattr(function, "__qualname__", "")
    if module is None or module.__name__ == "__main__" or getattr(module, qualname, None) is not function:
        return None
    file = Path(getattr(module, "__file__", None) or "")
    if "." in module.__name__ or file.suffix != ".py" or any(file.is_relative_to(folder) for folder in _LIBRARIES):
        return f"{module.__name__}:{qualname}"
    file = file.resolve()
    path = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    return f"{path}:{qualname}"


def _pickle(function: Any, name: str) -> bytes:
    try:
        return pickled(function)
    except Exception as error:  # noqa: BLE001 - pickling what it refers to may raise anything
        raise ConfigError(
            f"rewards.{name}: cannot pickle the function and the objects that it uses, to send them to the workers: "
            f"{type(error).__name__}: {error}; create such objects inside the function, or move it to a file"
        ) from None
