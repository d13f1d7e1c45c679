"""`--option NAME=VALUE` of commands that call users' code: its keyword arguments."""

from __future__ import annotations

from typing import Any

from streamrl.config.source import parse_argument
from streamrl.errors import ConfigError


def as_option(text: str) -> tuple[str, Any]:
    """Return the name and the value."""
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise ConfigError(f"--option {text!r}: write NAME=VALUE, such as scale=5")
    parsed = parse_argument(value, name=f"--option {name}").plain()
    if not isinstance(parsed, str | int | float):
        rule = "must be a string, a number, true or false; quote a string that YAML would read otherwise"
        raise ConfigError(f"--option {text!r}: {rule}: '{name}=\"7\"'")
    return name, parsed
