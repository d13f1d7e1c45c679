"""The names of all settings, read from the schema: to find the one that was meant, and to prove examples complete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from streamrl.config.schema import Config

ANY_NAME = "NAME"  # stands for a name that the user chooses: `rewards.NAME.url`


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a value of this annotation may be; through Annotated, unions and maps."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_in(part)]


def known_keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every key, dotted, sections before what is in them; a key of a union may come more than once."""
    for name, field in section.model_fields.items():
        key = prefix + name
        yield key
        inner = key + "." + (f"{ANY_NAME}." if _has_names(field.annotation) else "")
        for part in sections_in(field.annotation):
            yield from known_keys(part, inner)


def _has_names(annotation: Any) -> bool:
    """Whether it is a map from names that the user chooses, or may be one."""
    return get_origin(annotation) is dict or any(_has_names(part) for part in get_args(annotation))


def required_keys(path: Sequence[str]) -> list[str]:
    """What has to be set when nothing stands at this path: the key itself, or what its section cannot do without."""
    key = ".".join(path)
    field = Config.model_fields.get(key)
    if field is None or get_origin(field.annotation) is dict:
        return [key]
    sections = sections_in(field.annotation)
    needed = [f"{key}.{name}" for section in sections for name, f in section.model_fields.items() if f.is_required()]
    return needed or [key]


def nearest_key(path: Sequence[str]) -> str | None:
    """The known key that an unknown one most likely means: a close name beside it, else the same name elsewhere."""
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


def _same_place(parents: Sequence[str], known: Sequence[str]) -> bool:
    return len(parents) == len(known) and all(b in (a, ANY_NAME) for a, b in zip(parents, known, strict=True))
