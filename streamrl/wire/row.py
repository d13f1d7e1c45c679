"""The further fields of a prompt's row, as a ticket carries them to the rewards.

JSON inside msgpack: rows may nest, and the wire's limits on containers stay small.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from streamrl.errors import WireError
from streamrl.wire.limits import MAX_TEXT_CHARS


def encode_row(fields: Mapping[str, Any]) -> str:
    """WireError when no ticket can carry it."""
    text = json.dumps(dict(fields), ensure_ascii=False, separators=(",", ":"))
    if len(text) > MAX_TEXT_CHARS:
        raise WireError(f"the further fields are {len(text)} characters of JSON; a ticket carries {MAX_TEXT_CHARS}")
    return text


def decode_row(text: str) -> dict[str, Any]:
    """The inverse; any text gives fields or one WireError."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"field 'fields' is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise WireError("field 'fields' must be a JSON object")
    return row
