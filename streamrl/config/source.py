"""Parses YAML text into values that record where they were written.

The dialect is a strict YAML 1.2: `1e-6` is a number, `no` and `1:30` are text, only `true` and `false` are booleans.
Duplicate keys, tags, anchors and aliases are refused: a configuration is data to be read top to bottom, and `extends`
shares common settings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from streamrl.errors import ConfigError

Scalar = str | int | float | bool | None
Place = Callable[[Any], str]  # returns the origin of a mark in the text


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A value and the place where it was written: `conf/x.yaml:12`, or `override 'a.b=c'`."""

    value: Scalar | list[Node] | dict[str, Node]
    origin: str

    def plain(self) -> Any:
        """The value without its places."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def find(self, *path: str) -> Node | None:
        """The node at a path of map keys."""
        node: Node | None = self
        for key in path:
            node = node.value.get(key) if node is not None and isinstance(node.value, dict) else None
        return node


_STR, _NULL, _BOOL, _INT, _FLOAT = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "null", "bool", "int", "float"))
_TAGS = {_STR, _NULL, _BOOL, _INT, _FLOAT, "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


def _read_float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


_NULLS = r"(?:~|null|Null|NULL|)\Z"
_SCALARS: Sequence[tuple[str, str, Callable[[str], Scalar]]] = (  # the first match decides; anything else is text
    (_NULL, _NULLS, lambda _: None),
    (_BOOL, r"(?:true|True|TRUE|false|False|FALSE)\Z", lambda text: text.lower() == "true"),
    (_INT, r"[-+]?[0-9]{1,1000}\Z", int),  # Python reads at most 4300 digits; a float takes any number
    (_FLOAT, r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z", _read_float),
    (_FLOAT, r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z", _read_float),
)
_READ = {tag: read for tag, _, read in _SCALARS}


class _Loader(yaml.SafeLoader):
    """PyYAML's parser with the scalars of YAML 1.2; PyYAML itself follows 1.1."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.yaml_implicit_resolvers = {None: [(tag, re.compile(pattern)) for tag, pattern, _ in _SCALARS]}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise yaml.MarkedYAMLError(
                problem="anchors and aliases are not supported; share settings with `extends`",
                problem_mark=event.start_mark,
            )
        return super().compose_node(parent, index)


def parse(text: str, *, name: str, numbered: bool) -> Node:
    """Parse a YAML text. Origins, also in errors, are `name:line` if numbered, else just `name`."""

    def place(mark: Any) -> str:
        return f"{name}:{mark.line + 1}" if numbered and mark is not None else name

    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        why = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{place(error.problem_mark or error.context_mark)}: not valid YAML: {why}") from error
    except RecursionError:
        raise ConfigError(f"{name}: not a configuration: lists or maps are nested too deeply") from None
    except yaml.YAMLError as error:  # a forbidden character
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from error
    return _node(root, place) if root is not None else Node(value=None, origin=name)


_MARKS = ("-", "?")  # by themselves a list and a map of nothing, which no setting is
_QUOTES = "if it is meant as text, it needs quotes inside those of the shell: KEY='\"...\"'"


def parse_argument(text: str, *, name: str) -> Node:
    """Parse a value of a command line. It has no comments: what YAML would cut, such as `#### 7` or `---`, is text as
    it was written, and so is all text without quotes. Text that YAML takes for something else needs quotes: the error
    says so."""
    written = text.strip()
    if written in _MARKS:
        return Node(value=written, origin=name)
    try:
        node = parse(text, name=name, numbered=False)
    except ConfigError as error:
        raise ConfigError(f"{error}; {_QUOTES}") from None
    if isinstance(node.value, dict) and node.value and ":" not in written:
        raise ConfigError(f"{name}: {written} is a map without values; {_QUOTES}")
    is_cut = json.dumps(node.plain()).count("#") < written.count("#")
    is_lost = node.value is None and not re.match(_NULLS, written)
    is_bare = isinstance(node.value, str) and written[0] not in "'\""
    return Node(value=written, origin=name) if is_cut or is_lost or is_bare else node


def _node(node: yaml.Node, place: Place) -> Node:
    origin = place(node.start_mark)
    if node.tag not in _TAGS:
        raise ConfigError(f"{origin}: the tag {node.tag!r} is not supported; write a plain value")
    if isinstance(node, yaml.MappingNode):
        return Node(value=_map(node, place), origin=origin)
    if isinstance(node, yaml.SequenceNode):
        return Node(value=[_node(item, place) for item in node.value], origin=origin)
    return Node(value=_READ.get(node.tag, str)(_whole(node.value, origin)), origin=origin)


def _whole(text: str, origin: str) -> str:
    """Join surrogate pairs, the form in which JSON escapes some characters; PyYAML leaves them apart."""
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise ConfigError(f"{origin}: {text!r:.80} is not text: it contains half of a surrogate pair") from None


def _map(node: yaml.MappingNode, place: Place) -> dict[str, Node]:
    entries: dict[str, Node] = {}
    for key_node, value_node in node.value:
        where = place(key_node.start_mark)
        if key_node.tag != _STR:
            shown = repr(key_node.value) if isinstance(key_node.value, str) else "a list or map"
            raise ConfigError(f"{where}: a key must be a name, not {shown}; quote it if it is meant as text")
        key = _whole(key_node.value, where)
        if key in entries:
            raise ConfigError(f"{where}: duplicate key {key!r} (first at {entries[key].origin})")
        value = _node(value_node, place)
        entries[key] = Node(value=value.value, origin=where)  # the origin of a value is its key's line
    return entries
