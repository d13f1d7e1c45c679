"""Loads a validated configuration from files and overrides, and writes it back: YAML for people and for the run's
folder, JSON for the stream.

    base.yaml  <-  extends: base.yaml  <-  extends=recipes/grpo.yaml  <-  key.sub=value  ->  strict schema  ->  Loaded

Maps merge key by key; lists and scalars replace what they meet; `null` over a map removes it, so that its default
applies again. `extends` names one file or a list of files, each merged over the previous ones; as an override it merges
files over everything before it. Nothing is coerced: a number in quotes is text. Relative paths *in* a configuration
(data, models, run folder) are relative to the working directory of the command; those in `extends` to the file that
contains it; a recipe's own code is looked up in the working directory, then beside the file. A name without such a file
may refer to a configuration that streamrl ships.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import reduce
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from streamrl.config.explain import explain, show
from streamrl.config.precision import resolve_dtypes
from streamrl.config.schema import Config
from streamrl.config.shipped import find_shipped, hint_at_shipped
from streamrl.config.source import Node, parse, parse_argument
from streamrl.errors import ConfigError
from streamrl.protocol.transport.address import masked

EXTENDS = "extends"
Where = Callable[[str], str | None]  # returns the place where a key was set, None for a default (`Loaded.origin`)
_GIVEN = "configuration"  # the name of a map that is passed instead of a file
_OWN_CODE = ("loss", "advantages")  # keys of `algorithm`
_NO_TEXT = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")  # what YAML does not hold, or takes for line ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    config: Config
    tree: Node  # the merged text, without defaults

    def origin(self, key: str) -> str | None:
        """Return where a setting was written: `conf/x.yaml:12`, `override '...'`, or None for a default."""
        node = self.tree.find(*key.split("."))
        return node.origin if node is not None else None


def load_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Loaded:
    """Load a file, or a map in place of a file in the working directory, with what it extends and the overrides.
    ConfigError names every mistake and its place."""
    if isinstance(source, Mapping):
        tree = _extended(parse(as_json(source), name=_GIVEN, numbered=False), Path(_GIVEN), chain=())
    else:
        path = Path(source)
        tree = _read(path if path.exists() else find_shipped(path) or path, chain=())
    for text in overrides:
        tree = merge(tree, _extended(_override(text), Path(_GIVEN), chain=()))
    tree = resolve_dtypes(tree)
    return Loaded(config=_validate(tree), tree=tree)


def as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Convert to the form of a command line; keys may be dotted, and values maps."""
    return [f"{key}={as_json(value)}" for key, value in settings.items()]


def as_json(value: Any) -> str:
    """Serialise, in ASCII: YAML takes some other characters for line breaks. Paths become text, as in a file."""
    try:
        return json.dumps(value, default=os.fspath)
    except (TypeError, ValueError) as error:  # ValueError: it contains itself
        raise ConfigError(f"{value!r:.80} is not a value for a setting: {error}") from None


def merge(base: Node, over: Node) -> Node:
    """Merge `over` over `base`."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    entries = dict(base.value)
    for key, node in over.value.items():
        below = entries.get(key)
        if below is not None and isinstance(below.value, dict) and node.value is None:
            del entries[key]
        else:
            entries[key] = merge(below, node) if below is not None else node
    return Node(value=entries, origin=base.origin)


def _read(path: Path, chain: tuple[Path, ...]) -> Node:
    """Return the tree of one file merged over what it extends; `chain` is the files that led here."""
    return _extended(parse(_text(path), name=str(path), numbered=True), path, chain)


def _extended(tree: Node, path: Path, chain: tuple[Path, ...]) -> Node:
    if not isinstance(tree.value, dict):
        found = "it is empty" if tree.value is None else f"it holds {show(tree.plain())}"
        raise ConfigError(f"{path}: a configuration must be a map of settings; {found}")
    entries = dict(tree.value)
    extends = entries.pop(EXTENDS, None)
    tree = Node(value=entries, origin=str(path))  # the file as a whole, not the line of its first key
    for key in _OWN_CODE:
        tree = _code_beside(tree, key, path.parent)
    if extends is None:
        return tree
    names = extends.value if isinstance(extends.value, list) and extends.value else [extends]
    layers = [_read(_base(name, path, chain), chain=(*chain, path)) for name in names]
    return Node(value=reduce(merge, [*layers, tree]).value, origin=str(path))


def _base(name: Node, path: Path, chain: tuple[Path, ...]) -> Path:
    """Return the file that `path` extends by this name."""
    if not isinstance(name.value, str):
        raise ConfigError(
            f"{name.origin}: extends = {show(name.plain())}: must be a file name, or a list of file names"
        )
    base = Path(os.path.normpath(path.parent / name.value))
    seen = [*chain, path]
    if base.resolve() in [file.resolve() for file in seen]:
        raise ConfigError(f"{name.origin}: extends in a circle: {' -> '.join(map(str, [*seen, base]))}")
    if base.is_file():
        return base
    shipped = find_shipped(name.value)
    if shipped is None:
        hint = _hint(base, written=name.value, but=seen)
        raise ConfigError(f"{name.origin}: extends = {name.value!r}: there is no file {base}; {hint}")
    return shipped


def _code_beside(tree: Node, key: str, folder: Path) -> Node:
    """Complete `file.py:function` with the configuration's folder, if the file is there."""
    node = tree.find("algorithm", key)
    if node is None or not isinstance(node.value, str):
        return tree
    place, _, function = node.value.rpartition(":")
    if not place.endswith(".py") or Path(place).exists() or not (folder / place).exists():
        return tree
    found = Node(value=f"{folder / place}:{function}", origin=node.origin)
    return merge(tree, Node(value={"algorithm": Node(value={key: found}, origin=node.origin)}, origin=tree.origin))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}; {_hint(path, written=path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error


def _hint(missing: Path, *, written: str | Path, but: Sequence[Path] = ()) -> str:
    """Return the file beside the missing one that it probably means, except for some, or else a shipped one."""
    folder = missing.parent
    names = [file.name for file in folder.glob("*.yaml") if file not in but] if folder.is_dir() else []
    near = get_close_matches(missing.name, names, n=1)
    return f"did you mean {folder / near[0]}?" if near else hint_at_shipped(written)


def _override(text: str) -> Node:
    """Parse `a.b=c` into the map {a: {b: c}}."""
    origin = f"override {masked(text)!r}"
    key, equals, value = text.partition("=")
    names = key.strip().split(".")
    if not (equals and all(names)):
        raise ConfigError(f"{origin}: write KEY.SUB=VALUE, such as optimizer.lr=1e-4")
    node = parse_argument(value, name=origin)
    for name in reversed(names):
        node = Node(value={name: node}, origin=origin)
    return node


def _validate(tree: Node) -> Config:
    # Through JSON: in strict mode it accepts a list for a tuple and text for a path, and still coerces nothing.
    try:
        return Config.model_validate_json(json.dumps(tree.plain()), strict=True)
    except ValidationError as error:
        raise ConfigError(explain(error, tree)) from error


def dump_config(config: Config, where: Where | None = None) -> str:
    """Write the whole configuration as YAML that loads to the same; `where` adds the origin of non-default values."""
    return "".join(line + "\n" for line in _lines(config.model_dump(mode="json"), "", where))


def config_from_json(text: str) -> Config:
    """Parse the output of `model_dump_json`; data from the stream is validated as strictly as a file."""
    try:
        return Config.model_validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"the run's configuration does not fit this version of streamrl: {key or 'JSON'}: {first['msg']}"
        ) from error


def _lines(section: Mapping[str, Any], prefix: str, where: Where | None) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield f"{indent}{_flow(name)}:"
            yield from _lines(value, f"{key}.", where)
        else:
            origin = where(key) if where else None
            yield f"{indent}{_flow(name)}: {_flow(value)}" + (f"  # {origin}" if origin else "")


def _flow(value: Any) -> str:
    """Format a scalar or list on one line; as JSON, which is YAML too, where YAML would not be read as the same."""
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    text = text.removesuffix("\n").removesuffix("\n...")  # PyYAML ends a lone scalar with a document end marker
    # Not all that is not ASCII: to other readers of YAML, JSON's pair for an emoji is no character.
    in_json = _NO_TEXT.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
    # PyYAML quotes what YAML 1.1 would misread; we read 1.2, where 08 and 1e5 are numbers. A key has one line.
    has_one_line = len(text.splitlines()) == 1
    is_same = has_one_line and json.dumps(parse(text, name="", numbered=False).plain()) == json.dumps(value)
    return text if is_same else in_json
