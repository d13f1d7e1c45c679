"""A resolved configuration as text: YAML for people and for the run's folder, JSON for the stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml
from pydantic import ValidationError

from streamrl.config.schema import Config
from streamrl.errors import ConfigError

Where = Callable[[str], str | None]  # the place where a key was set, None for a default (`Loaded.origin`)


def dump_config(config: Config, where: Where | None = None) -> str:
    """The whole configuration as YAML that loads to the same; with `where`, what is not a default says its origin."""
    return "".join(line + "\n" for line in _lines(config.model_dump(mode="json"), "", where))


def config_to_json(config: Config) -> str:
    return config.model_dump_json()


def config_from_json(text: str) -> Config:
    """The inverse of `config_to_json`; what comes from the stream is data and is validated as strictly as a file."""
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
    """A scalar or list on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    text = text.removesuffix("\n").removesuffix("\n...")  # PyYAML ends a lone scalar with a document mark
    return text if "\n" not in text else json.dumps(value, ensure_ascii=False)  # JSON is YAML, and escapes line breaks
