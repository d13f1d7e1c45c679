"""The bearer token that reward servers and clients share: in a file, never in a configuration, an argument or a log."""

from __future__ import annotations

from pathlib import Path

from streamrl.errors import ConfigError

_MAX_TOKEN_BYTES = 4096


def read_token(path: str, *, key: str) -> str:
    """The file's one line. Strict, since the path may come from Redis: it must not send just any file away."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{key}: cannot read the token file {path!r}: {error.strerror}") from None
    token = content.strip().decode("ascii", errors="replace")
    if not token or len(content) > _MAX_TOKEN_BYTES or not all("!" <= character <= "~" for character in token):
        raise ConfigError(f"{key}: {path!r} must hold one token of visible ASCII characters and nothing else")
    return token
