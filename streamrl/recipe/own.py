"""Loads a function named in a configuration: a built-in, or the user's own code.

name                        one of the built-ins
package.module:function     an importable module: an installed one, or one in the working directory
path/to/file.py:function    a file, which may import its neighbours
path/to/file.pkl:function   a function that no module has, such as a notebook's, pickled by `streamrl.start`
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import io
import linecache
import os
import pickle
import platform
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from streamrl.errors import ConfigError

FORMS = "`package.module:function` or `path/to/file.py:function`"
FILES = (".py", ".pkl")  # suffixes of files that hold code
PICKLED = "rewards"  # folder of the pickled functions, in a run's folder

_MAX_ERROR_CHARS, _MAX_LINE_CHARS = 500, 100
_OURS = (f"{Path(__file__).parents[1]}/", "<frozen ")
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))


# The place of the code that is being loaded, to refuse a run that it starts: a script without a main guard would start
# itself again in each process that loads a function of it.
_loading: ContextVar[str] = ContextVar("place of the code being loaded", default="")


def is_own(target: str) -> bool:
    """Return whether the target has the form of user code."""
    place, _, function = target.rpartition(":")
    return bool(place) and function.isidentifier()


def canonical(target: str, folder: Path | None = None) -> str:
    """Return the target with its file as an absolute path; a relative one begins in `folder`, or where we work."""
    place, _, function = target.rpartition(":")
    return f"{((folder or Path()) / place).resolve()}:{function}" if place.endswith(FILES) else target


def load_function(target: str, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return the target's function; any exception says why there is none."""
    place, _, name = target.rpartition(":")
    if not place:
        return known[name]
    with _noting(place):
        if place.endswith(".pkl"):
            return _load_pickled(Path(place))
        module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    function = getattr(module, name, None)
    if function is None:  # getattr's own error would show our internal module name
        nearest = get_close_matches(name, vars(module), n=1, cutoff=0.75)
        raise AttributeError(f"{place} has no {name!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else ""))
    if not callable(function):
        raise TypeError(f"{target} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


@contextmanager
def _noting(place: str) -> Iterator[None]:
    token = _loading.set(place)
    try:
        yield
    finally:
        _loading.reset(token)


def refuse_while_loading() -> None:
    """ConfigError if the caller, who starts a run, is code that is being loaded."""
    if place := _loading.get():
        raise ConfigError(
            f"{place} starts a run while it is loaded for a target; put that under `if __name__ == '__main__':`"
        )


def bind(function: Callable[..., Any], arguments: Mapping[str, Any], *given: str) -> partial[Any]:
    """Return the function with its keyword arguments set; TypeError if it cannot be called like this."""
    name = getattr(function, "__name__", "it")
    try:
        inspect.signature(function).bind(*given, **arguments)
    except TypeError as error:
        raise TypeError(f"{name}({', '.join(given)}, **options) cannot be called: {error}") from None
    return partial(function, **arguments)


def describe(error: BaseException) -> str:
    """Describe what user code raised, with the last line of theirs rather than of a library or of ours."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OURS)]
    users = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
    place = ""
    if users:
        line = f": {users[-1].line[:_MAX_LINE_CHARS]}" if users[-1].line else ""
        place = f" ({Path(users[-1].filename).name}:{users[-1].lineno}{line})"
    return f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS] + place


def pickled(function: Callable[..., Any], *, by_value: ModuleType | None = None) -> bytes:
    """Pickle the function with everything it needs from where it was defined, and from this module or package; any
    exception says why not."""
    import cloudpickle  # lazy: only needed for such functions

    files: dict[str, list[str]] = {}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        """Keeps the file name of code objects, which cloudpickle replaces since 3.1.3."""

        def reducer_override(self, value: Any) -> Any:
            if not isinstance(value, CodeType):
                return super().reducer_override(value)
            file = value.co_filename
            # A notebook's cell has no file, but errors should show its lines all the same.
            if not os.path.exists(file):
                files[file] = linecache.getlines(file)
            return _code_of, (file, *self.dispatch_table[CodeType](value))

    buffer = io.BytesIO()
    with _pickled_by_value(by_value):
        Pickler(buffer).dump(function)
    return platform.python_version().encode() + b"\n" + pickle.dumps((files, buffer.getvalue()))


@contextmanager
def _pickled_by_value(module: ModuleType | None) -> Iterator[None]:
    import cloudpickle

    if module is None or module.__name__ in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _code_of(file: str, make: Callable[..., CodeType], arguments: tuple[Any, ...]) -> CodeType:
    return make(*arguments).replace(co_filename=file)


def _load_pickled(path: Path) -> Callable[..., Any]:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    version, _, data = path.read_bytes().partition(b"\n")
    pickled_by, running = version.decode(), platform.python_version()
    if pickled_by.split(".")[:2] != running.split(".")[:2]:  # code objects are specific to a minor version
        raise RuntimeError(
            f"{path} was pickled by Python {pickled_by}, but this is {running}: call streamrl.start again"
        )
    files, function = pickle.loads(data)  # noqa: S301 - it is code, like a Python file, and needs the same permission
    for file, lines in files.items():
        linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
    return pickle.loads(function)  # type: ignore[no-any-return]  # noqa: S301 - as above


def _load_module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:  # it is only there in programs started with `python -m`
        sys.path.append(os.getcwd())
    return importlib.import_module(name)


def _load_file(path: Path) -> ModuleType:
    # A unique module name, whatever the file is called: `json.py` must not replace json.
    name = f"streamrl_own_{str(path.resolve()).encode().hex()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    sys.path.insert(0, str(path.resolve().parent))  # as for a script, so that the file may import its neighbours
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses, for example, look there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
