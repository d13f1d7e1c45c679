"""Pydantic's findings in our words: one line a mistake, with its place, its key, its value and what would be right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import ValidationError

from streamrl.config.keys import nearest_key, required_keys, sections_in
from streamrl.config.schema import Reward
from streamrl.config.source import Node
from streamrl.transport.url import masked

_MAX_SHOWN = 60  # characters of a value in an error
_RIGHT = {  # what would be right, where pydantic's own words do not say it to a reader of YAML
    "model_type": "must be a map of settings",
    "dict_type": "must be a map",
    "tuple_type": "must be a list",
    "bool_type": "must be true or false",
    "string_type": "must be text (quote it if it is meant so)",
    "finite_number": "must be a finite number",
    "string_pattern_mismatch": "must be letters, digits, '.', '_' and '-', at most 64, a letter or digit first",
}
_SOURCE_TYPES = " or ".join(repr(get_args(s.model_fields["type"].annotation)[0]) for s in sections_in(Reward))


def explain(error: ValidationError, tree: Node) -> str:
    """All mistakes, a line each."""
    lines: dict[str, list[str]] = {}  # what is wrong -> what would be right (several for a union of types)
    for finding in error.errors(include_url=False, include_context=True):
        kind, loc = finding["type"], finding["loc"]
        if kind.startswith("union_tag"):
            loc = (*loc, "type")
        path, node = _locate(loc, tree, missing=kind in ("missing", "union_tag_not_found"))
        wrong, right = _describe(finding, path, node)
        lines.setdefault(f"{node.origin}: {wrong}", []).append(right)
    return "\n".join(wrong + right + "".join(_also(r) for r in rights) for wrong, (right, *rights) in lines.items())


def show(value: Any) -> str:
    """A value as an error shows it: short, and without the passwords of URLs."""
    text = "nothing" if value is None else "a map" if isinstance(value, dict) else masked(repr(value))
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"


def _locate(loc: Sequence[int | str], tree: Node, *, missing: bool) -> tuple[list[str], Node]:
    """The key that is meant and the nearest node that was written; pydantic's locations name union members too."""
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


def _describe(finding: Any, path: list[str], node: Node) -> tuple[str, str]:
    key, kind, message = ".".join(path), finding["type"], finding["msg"]
    if kind == "extra_forbidden":
        nearest = nearest_key(path)
        return f"unknown key {key!r}", f"; did you mean {nearest!r}?" if nearest else ""
    if kind == "missing":
        keys = required_keys(path)
        return f"{' and '.join(keys)} is not set", f"; set it in the file, or with the override {keys[0]}=VALUE"
    if kind.startswith("union_tag"):
        given = node.plain() if kind == "union_tag_invalid" else None
        return f"{key} = {show(given)}: ", f"must be {_SOURCE_TYPES}"
    right = _RIGHT.get(kind) or message.replace("Input should be", "must be")
    return (f"{key} = {show(node.plain())}: " if key else ""), right


def _also(right: str) -> str:
    return f" or {right.removeprefix('must be ')}"
