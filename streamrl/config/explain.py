"""Error messages for configurations.

Collects all setting names from the schema, to find the one that was meant and to check that examples are complete.

Turns pydantic's errors into one line per mistake: its place, key and value, and what would be right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import reduce
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from streamrl.config.precision import AUTO, MAY_BE_AUTO
from streamrl.config.schema import Config, Reward
from streamrl.config.shipped import find_shipped
from streamrl.config.source import Node
from streamrl.protocol.transport.address import masked


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    key: str
    remedy: str  # what is wrong with it and what would be right
    value: Any = None  # shown instead of the setting's own value


ANY_NAME = "NAME"  # placeholder for a name that the user chooses: `rewards.NAME.url`


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that a value of this annotation may be; through Annotated, unions and maps."""
    return [section for _, section in _inner("", annotation)]


def known_keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key, sections before their contents; a key of a union may come more than once."""
    for name, field in section.model_fields.items():
        key = prefix + name
        yield key
        for inner, part in _inner(f"{key}.", field.annotation):
            yield from known_keys(part, inner)


def _inner(prefix: str, annotation: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the possible sections, each with the prefix of its keys; in a map, a name that the user chooses."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield prefix, annotation
    named = f"{prefix}{ANY_NAME}." if get_origin(annotation) is dict else prefix
    for part in get_args(annotation):
        yield from _inner(named, part)


def required_keys(path: Sequence[str]) -> list[str]:
    """Return what must be set if nothing is given at this path: the key itself, or its section's required keys."""
    key = ".".join(path)
    field = Config.model_fields.get(key)
    if field is None or get_origin(field.annotation) is dict:
        return [key]
    sections = sections_in(field.annotation)
    needed = [f"{key}.{name}" for section in sections for name, f in section.model_fields.items() if f.is_required()]
    return needed or [key]


def nearest_key(path: Sequence[str]) -> str | None:
    """Return the known key that an unknown one probably means: a close name beside it, or the same name elsewhere."""
    *parents, leaf = path
    beside: dict[str, str] = {}
    elsewhere: dict[str, str] = {}
    for key in known_keys():
        *known_parents, name = key.split(".")
        if _same_place(parents, known_parents):
            beside[name] = ".".join([*parents, name])
        else:
            elsewhere.setdefault(name, key)
    for candidates, cutoff in ((beside, 0.7), (elsewhere, 0.85)):
        for match in get_close_matches(leaf, candidates, n=1, cutoff=cutoff):
            return candidates[match]
    return None


def _keys_beside(path: Sequence[str]) -> list[str]:
    """Return the names allowed where this key is."""
    split = (key.split(".") for key in known_keys())
    return list(dict.fromkeys(name for *parents, name in split if _same_place(path[:-1], parents)))


def _same_place(parents: Sequence[str], known: Sequence[str]) -> bool:
    return len(parents) == len(known) and all(b in (a, ANY_NAME) for a, b in zip(parents, known, strict=True))


_MAX_SHOWN = 60  # characters of a value in an error
_RIGHT = {  # replaces pydantic's wording where it does not help a reader of YAML
    "model_type": "must be a map of settings",
    "dict_type": "must be a map",
    "tuple_type": "must be a list",
    "bool_type": "must be true or false",
    "string_type": "must be text (quote it if it is meant as text)",
    "finite_number": "must be a finite number",
    "string_pattern_mismatch": "must be at most 64 letters, digits, '.', '_' and '-', starting with a letter or digit",
}
DURATION = "must be a duration DD:HH:MM:SS, such as 00:03:50:00"
_DATASETS = "must be a file, {path: FILE}, or several by name: {one: {path: FILE}, other: {path: FILE}}"
# By setting, whatever is wrong with it.
_RIGHT_OF = {"training.max_time": DURATION, **dict.fromkeys(("data.train", "data.validation"), _DATASETS)}
_SOURCE_TYPES = " or ".join(repr(get_args(s.model_fields["type"].annotation)[0]) for s in sections_in(Reward))


def explain(error: ValidationError, tree: Node) -> str:
    """Describe all mistakes, a line each."""
    lines: dict[str, list[str]] = {}  # what is wrong -> what would be right (several for a union of types)
    for finding in error.errors(include_url=False, include_context=True):
        kind, loc = finding["type"], finding["loc"]
        if kind.startswith("union_tag"):
            loc = (*loc, "type")
        is_key = isinstance(loc[-1], str)  # else a place in a list that is too short
        path, node = _locate(loc, tree, missing=is_key and kind in ("missing", "union_tag_not_found"))
        wrong, right = _describe(finding, path, node)
        rights = lines.setdefault(f"{node.origin}: {wrong}", [])
        rights += [right] if right not in rights else []
    return "\n".join(wrong + right + "".join(_also(r) for r in rights) for wrong, (right, *rights) in lines.items())


def show(value: Any) -> str:
    """Format a value for an error: short, and without the passwords of URLs."""
    text = "nothing" if value is None else "a map" if isinstance(value, dict) else masked(repr(value))
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"


def _locate(loc: Sequence[int | str], tree: Node, *, missing: bool) -> tuple[list[str], Node]:
    """Return the intended key and the nearest node in the text; pydantic's locations also name union members."""
    path: list[str] = []
    node, tag_passed = tree, False
    for part in loc[:-1] if missing else loc:
        inner = node.value
        if isinstance(inner, dict) and not tag_passed and "type" in inner and inner["type"].value == part:
            tag_passed = True
        elif isinstance(inner, dict) and part in inner:
            node, tag_passed = inner[str(part)], False
            path.append(str(part))
        elif isinstance(inner, list) and isinstance(part, int) and part < len(inner):
            node, tag_passed = inner[part], False
            path[-1] += f"[{part}]"
    return ([*path, str(loc[-1])] if missing else path), node


_MAX_KEYS = 24  # per place; a reward has more, depending on its type


def _list_keys(path: Sequence[str]) -> str:
    keys = _keys_beside(path)
    if not keys or len(keys) > _MAX_KEYS:
        return "; `streamrl config show conf/reinforce.yaml` prints all keys"
    return f"; {'.'.join(path[:-1]) or 'a configuration'} has {', '.join(keys)}"


def _instead(path: list[str]) -> str:
    """Return what to write instead of an unknown key."""
    *parents, written = path
    names = written.split(".")
    whole = [*parents, *names]
    if len(names) > 1 and any(_same_place(whole, known.split(".")) for known in known_keys()):
        nested = reduce(lambda inner, name: f"{{{name}: {inner}}}", reversed(names), "...")
        return f"; dots are for command lines: write {nested[1:-1]}"
    nearest = nearest_key(path)
    return f"; did you mean {nearest!r}?" if nearest else _list_keys(path)


def _describe(finding: Any, path: list[str], node: Node) -> tuple[str, str]:
    key, kind, message = ".".join(path), finding["type"], finding["msg"]
    if kind == "extra_forbidden":
        return f"unknown key {key!r}", _instead(path)
    if kind == "missing" and isinstance(node.value, list):
        return f"{key} = {show(node.plain())}: ", "must be a longer list; conf/reinforce.yaml shows it"
    if kind == "missing":
        keys = required_keys(path)
        return f"{' and '.join(keys)} is not set", f"; set it in the file, or with the override {keys[0]}=VALUE"
    if kind.startswith("union_tag"):
        given = node.plain() if kind == "union_tag_invalid" else None
        return f"{key} = {show(given)}: ", f"must be {_SOURCE_TYPES}"
    right = _RIGHT_OF.get(key) or _RIGHT.get(kind) or message.replace("Input should be", "must be")
    if key in MAY_BE_AUTO:  # `auto` is resolved before validation
        right = right.replace("must be ", f"must be {AUTO!r}, ")
    if kind.startswith("int_") and path[-1].endswith("_bytes"):
        right = "must be a number of bytes, such as 4000000000"
    if key == "algorithm.name" and find_shipped(recipe := f"recipes/{node.plain()}.yaml".lower()):
        right += f"; the recipe of this name is extends={recipe}"
    return (f"{key} = {show(node.plain())}: " if key else ""), right


def _also(right: str) -> str:
    return f" or {right.removeprefix('must be ')}"
