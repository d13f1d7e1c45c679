"""Files of JSON Lines, optionally in `.gz`: their lines, and the value on each. Blocks on the disk."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

UNREADABLE = (OSError, EOFError, zlib.error)  # what `read_lines` raises; the last two: a damaged gzip file
_GZIP = b"\x1f\x8b"


class Malformed(Exception):
    """A line is not what it should be; the message says why."""


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (its number, from 1; the line without space around it) of each line that is not empty."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, data in enumerate(file, start=1):
            stripped = (data.removeprefix(codecs.BOM_UTF8) if number == 1 else data).strip()
            if stripped:
                yield number, stripped


def why_not_lines(first: bytes) -> str | None:
    """Return what is wrong with a file that begins with this line, if it is one array, or an object goes over several
    lines, and what to do."""
    if first.startswith(b"["):
        return "a JSON array; write one object per line: `jq -c '.[]' FILE`"
    if first == b"{":
        return "a JSON object over several lines; write one object per line: `jq -c . FILE`"
    return None


def parse_line(data: bytes, **hooks: Any) -> Any:
    """Return the value on a line. `hooks`: of `json.loads`; a ValueError of theirs makes the line malformed too."""
    try:
        value = json.loads(data.decode(), **hooks)
        # JSON can escape lone surrogates, which neither the wire nor a tokenizer accepts.
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise Malformed(why_not_text(data)) from None
    except UnicodeEncodeError as error:
        raise Malformed(f"not text: \\u{ord(error.object[error.start]):x} is half of a surrogate pair") from None
    except (ValueError, RecursionError) as error:
        where = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise Malformed(f"not JSON: {where}") from None
    return value


def why_not_text(data: bytes) -> str:
    """Return why a line that is not UTF-8 cannot be read, and what to do."""
    if data.startswith(_GZIP):
        return "compressed by gzip, which is read from a file whose name ends in .gz: rename it, or unpack it (gunzip)"
    return "not UTF-8; save the file in that encoding (`iconv -t UTF-8`)"
