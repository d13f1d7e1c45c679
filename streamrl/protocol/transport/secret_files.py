"""Files that hold secrets, read for each connection, so that their contents can change during a run.

For asyncio, the library reads a certificate authority once for all connections; it never reads passwords from files. If
a password file cannot be read, for example while it is written, the last password stays in use. Blocks on reading a
small file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import redis.asyncio
from redis.credentials import CredentialProvider

from streamrl.errors import ConfigError


def read_passwords(file: Path, *, key: str) -> list[str]:
    """Read passwords, one per line: clients use the first, servers accept all, so that it can be rotated."""
    try:
        lines = [line.strip() for line in file.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: cannot read the password: {error}") from None
    if not any(lines):
        raise ConfigError(f"{key}: the file is empty; it must hold the password and nothing else")
    return [line for line in lines if line]


class PasswordFile(CredentialProvider):
    def __init__(self, user: str | None, file: Path, *, key: str) -> None:
        self._user, self._file, self._key = user, file, key
        self._password = read_passwords(file, key=key)[0]

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        with contextlib.suppress(ConfigError):
            self._password = read_passwords(self._file, key=self._key)[0]
        return (self._password,) if self._user is None else (self._user, self._password)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


class RereadsAuthority:
    """Makes an asyncio TLS connection read its certificate authority again."""

    ssl_context: Any

    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context.context = None
        arguments: Mapping[str, Any] = super()._connection_arguments()  # type: ignore[misc]
        return arguments


class AsyncSslConnection(RereadsAuthority, redis.asyncio.SSLConnection):
    pass
