"""What a program requests from its launcher: a configuration with overrides, and reward functions.

A function is named by the location of its code, as in a configuration, if workers can find it there: in a module, or in
a file. Others (from a notebook, the program's own file, a package beside it, a lambda, a closure) are pickled by value
and written into the run's folder:

    near, of my_rewards.py in the working directory    my_rewards.py:near
    near, of an installed package                       package.module:near
    near, of a notebook                                 RUN_FOLDER/rewards/near.pkl:near

The name does not depend on the function's body, so a resumed run finds its rewards under the same names, wherever its
folder is by then (`config.changes`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from streamrl.config.load import as_json, as_overrides
from streamrl.errors import ConfigError
from streamrl.recipe.own import PICKLED, pickled

Reward = Callable[..., Any] | str  # a function, or a value of `target`
Rewards = Mapping[str, Reward] | Sequence[Reward]
_LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
# Prints the folders of a package, or a module's file, without importing it; nothing if there is none.
_FIND = """
import json, sys
from importlib.util import find_spec
spec = find_spec(sys.argv[1])
print(json.dumps(spec and (list(spec.submodule_search_locations or []) or [spec.origin])))
"""
_FIND_S = 60.0


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
    sources: list[str] = []
    for name, reward in _named(rewards or {}).items():
        target = reward if isinstance(reward, str) else _locate(reward, name)
        if target is None:
            functions[name] = _pickle(reward, name)
        source = {"type": "function", "target": target or f"{name}.pkl:{name}"}
        sources += as_overrides({f"rewards.{name}": source})
    chosen = dict(overrides or {})
    if rewards is not None:  # they replace the configuration's, and nothing asks its reward server then
        unused = {} if _adds_service(chosen) else {"reward_server": None}
        sources = [*as_overrides({"rewards": None} | unused), *as_overrides({"rewards": {}}), *sources]
    return Request(
        config=config if isinstance(config, Mapping) else str(config),
        overrides=(*sources, *as_overrides(chosen)),
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
    if "." in module.__name__ or file.suffix != ".py" or _is_in_library(file):
        return f"{module.__name__}:{qualname}" if _is_found_by_workers(module) else None
    file = file.resolve()
    path = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    return f"{path}:{qualname}"


def _is_in_library(file: Path) -> bool:
    return any(file.is_relative_to(folder) for folder in _LIBRARIES)


def _is_found_by_workers(module: ModuleType) -> bool:
    """Ask a Python as new as theirs, since this one may find modules also beside its program, or by a changed
    `sys.path`."""
    if _is_in_library(Path(getattr(module, "__file__", None) or "")):
        return True
    package = _package_of(module)
    words = [sys.executable, "-c", _FIND, package.__name__]
    try:
        told = subprocess.run(words, check=True, stdout=subprocess.PIPE, timeout=_FIND_S).stdout
        found = json.loads(told.splitlines()[-1])  # after whatever a sitecustomize prints
    except (subprocess.SubprocessError, ValueError, IndexError):
        return False
    here = list(getattr(package, "__path__", [])) or [getattr(package, "__file__", None)]
    return found is not None and _resolved(found) == _resolved(here)


def _package_of(module: ModuleType) -> ModuleType:
    return sys.modules[module.__name__.partition(".")[0]]


def _resolved(places: Sequence[str | None]) -> set[Path | None]:
    """Without a place, it is a built-in module."""
    return {Path(place).resolve() if place not in (None, "built-in", "frozen") else None for place in places}


def _pickle(function: Any, name: str) -> bytes:
    """Pickle by value also what workers cannot import of the function's own package."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    has_own = module is not None and module.__name__ != "__main__" and not _is_found_by_workers(module)
    try:
        return pickled(function, by_value=_package_of(module) if module is not None and has_own else None)
    except Exception as error:  # noqa: BLE001 - pickling what it refers to may raise anything
        raise ConfigError(
            f"rewards.{name}: cannot pickle the function and the objects that it uses, to send them to the workers: "
            f"{type(error).__name__}: {error}; create such objects inside the function, or move it to a file"
        ) from None
